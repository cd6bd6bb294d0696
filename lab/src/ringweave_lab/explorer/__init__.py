"""``ringweave explore``: a local page on which users compose a pattern and see its picture and cost."""

from __future__ import annotations

from .server import explore

__all__ = ["explore"]
