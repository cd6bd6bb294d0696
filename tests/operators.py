"""Compute a call through the registered operators: the path of calls under a mode, transform or compiler."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ringweave.call import Arguments
from ringweave.patterns import Pattern
from ringweave.torch_ops import attend
from ringweave.validate import checked


def by_operators(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, **options: Any) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of a call without looking for its program."""
    return attend(*checked(Arguments(q, k, v, pattern, **options))[:5])


class Watching(TorchDispatchMode):
    """A mode that sees each operator and changes nothing."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return op(*args, **(kwargs or {}))


def is_direct(out: Tensor) -> bool:
    """Return whether a result was computed without operators."""
    return bool(getattr(getattr(out.grad_fn, "program", None), "constant", False))
