"""The functions of flash-attn 2 on any device, with gradients.

>>> from ringweave.integrations.flash_attn import flash_attn_func
"""

from ...names import only
from . import bert_padding, flash_attn_interface, layers
from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from .installation import install

#: Version of flash-attn that the functions follow.
__version__ = "2.8.4"

__all__ = [
    "__version__",
    "bert_padding",
    "flash_attn_func",
    "flash_attn_interface",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "layers",
]
__dir__ = only(__all__)
