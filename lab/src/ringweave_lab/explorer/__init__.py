"""``ringweave explore``: one local page on which a pattern is composed, drawn, counted and modelled."""

from __future__ import annotations

from .server import explore

__all__ = ["explore"]
