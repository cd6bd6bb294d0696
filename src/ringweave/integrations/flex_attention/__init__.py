"""FlexAttention's function for processors, with gradients; importing it installs nothing.

    >>> from ringweave.integrations.flex_attention import flex_attention

:func:`install` sends torch's own function here for tensors on the CPU.
"""

from ...names import only
from .attention import explain, flex_attention
from .installed import install

__all__ = ["explain", "flex_attention", "install"]
__dir__ = only(__all__)
