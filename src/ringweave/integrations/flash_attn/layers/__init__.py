"""Layers of flash-attn: its rotary embeddings."""

from ....names import only
from . import rotary

__all__ = ["rotary"]
__dir__ = only(__all__)
