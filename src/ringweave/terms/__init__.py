"""Score terms: functions that a model applies to scaled scores before the softmax.

t = scale * <q, k>;  t = term(t) for each term, in order;  weights = softmax of t over the allowed keys
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..names import on_demand, only, suggest
from .term import Axis as Axis
from .term import Pairs as Pairs
from .term import Term as Term

if TYPE_CHECKING:
    from .kinds import KINDS as KINDS
    from .kinds import ALiBi as ALiBi
    from .kinds import Bias as Bias
    from .kinds import DistanceBias as DistanceBias
    from .kinds import Softcap as Softcap

# imported when first used
_KINDS = (
    "ALiBi",
    "Bias",
    "DistanceBias",
    "Softcap",
)
__all__ = [*_KINDS, "Axis", "Pairs", "Term"]
__dir__ = only(__all__)
if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, dict.fromkeys([*_KINDS, "KINDS"], "kinds"), suggest(__name__, __all__))
