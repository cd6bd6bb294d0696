"""ringweave inside transformers: importing this registers ``attn_implementation="ringweave"``.

    >>> import ringweave.integrations.transformers

Needs transformers (the extra ``hf``), which is imported here and nowhere else.
"""

from ...names import only
from .interface import NAME, attend, patch, register, set_pattern
from .masks import PatternMask, pattern_mask
from .model_cache import ModelCache
from .model_context import ModelContext, context_parallel

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
