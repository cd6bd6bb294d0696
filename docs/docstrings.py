"""A griffe extension that adapts the library's docstrings to mkdocstrings.

The library writes sections without blank lines between them, "Example" in the singular, and Sphinx roles. The roles
become links to the API pages.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

import ringweave as rw
from ringweave.patterns.declared import DECLARED

_SECTION = re.compile(r"(?<=\n)(Args|Attributes|Returns|Raises|Example|References):\n")
_ROLE = re.compile(r":(?:func|class|meth|mod|attr):`([\w.]+)`")


def _link(match: re.Match[str]) -> str:
    name = match[1].removeprefix("ringweave.")
    public = {*rw.__all__, *rw._UNLISTED}
    thing = getattr(rw, name) if name in public else getattr(rw.patterns, name, None) if name in DECLARED else None
    return f"`{match[1]}`" if thing is None else f"[`{name}`][{thing.__module__}.{thing.__qualname__}]"


class Docstrings(griffe.Extension):
    """An extension that rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if isinstance(obj, griffe.Function) and "unknown" in obj.parameters:
            # **unknown only catches wrong keywords, and is hidden from inspect.signature too
            del obj.parameters["unknown"]
        if obj.docstring is None:
            return
        text = _SECTION.sub(lambda found: f"\n{found[1].replace('Example', 'Examples')}:\n", obj.docstring.value)
        obj.docstring.value = _ROLE.sub(_link, text).replace("``", "`")
