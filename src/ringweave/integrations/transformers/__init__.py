"""The integration with transformers; importing it registers ``attn_implementation="ringweave"``.

    >>> import ringweave.integrations.transformers

It needs transformers (the extra ``hf``), which no other part of ringweave imports.
"""

from ...names import only
from ...plugins import require_package

require_package("transformers", 5, "hf")

from .interface import attend, patch, register, set_pattern
from .masks import PatternMask, pattern_mask
from .model_cache import ModelCache
from .model_context import ModelContext, context_parallel
from .saved_patterns import NAME

register()

__all__ = [
    "NAME",
    "ModelCache",
    "ModelContext",
    "PatternMask",
    "attend",
    "context_parallel",
    "patch",
    "pattern_mask",
    "register",
    "set_pattern",
]
__dir__ = only(__all__)
