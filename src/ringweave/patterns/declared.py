"""The list of public patterns; each is declared once, beside its definition.

The parser, the gallery and the explorer read this list; tests compare the other pages and the fuzzer with it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..errors import PatternError, shown

Make = TypeVar("Make", bound=Callable[..., Any])
#: Sections of the gallery, in order.
SECTIONS = (
    "By position", "By chosen tokens", "By residue", "On a grid", "By table, function or head", "Presets",
)  # fmt: skip


class Declared(NamedTuple):
    """A public pattern.

    Attributes:
        make: The class, or the function that returns a pattern.
        example: An expression that builds one.
        section: Section of the gallery; None if a method returns the pattern, which is then described there.
        tokens: Number of queries and keys in the gallery's picture.
        heads: Number of query heads in the picture.
        text: Whether :func:`ringweave.patterns.parse` reads it; tensors and functions have no text.
        hostile: An expression in ``n``, the number of tokens, with a long period or a large parameter; None if the
            pattern has no numbers. Tests plan it and the example, and bound the tiles that the planner looks at.
    """

    make: Callable[..., Any]
    example: str
    section: str | None
    tokens: int
    heads: int
    text: bool
    hostile: str | None


class Declarations(Mapping[str, Declared]):
    """The public patterns by name; a list of them, or an unknown name, imports every module of this package."""

    def __init__(self) -> None:
        self._known: dict[str, Declared] = {}

    def add(self, name: str, declared: Declared) -> None:
        """Add a pattern, or replace the declaration of a reloaded module."""
        self._known[name] = declared

    def known(self, name: str) -> Declared | None:
        """Return the declaration of a pattern in a module that is imported; else None."""
        return self._known.get(name)

    def __getitem__(self, name: str) -> Declared:
        return (self._known if name in self._known else self._every())[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._every())

    def __len__(self) -> int:
        return len(self._every())

    def _every(self) -> dict[str, Declared]:
        for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
            importlib.import_module(f"{__package__}.{module.name}")
        return self._known


#: The public patterns by name.
DECLARED = Declarations()


def declare(
    example: str,
    section: str | None,
    *,
    tokens: int = 1024,
    heads: int = 1,
    text: bool = True,
    hostile: str | None = None,
) -> Callable[[Make], Make]:
    """Declare a pattern, or a function that returns one, as public; see :class:`Declared`.

    Raises:
        PatternError: An example does not call the pattern, the section is unknown, or the name is declared already.
    """

    def note(make: Make) -> Make:
        name = make.__name__
        for what, text_of in (("example", example), ("hostile", hostile)):
            if text_of is not None and not text_of.startswith(f"{name}("):
                raise PatternError(what, shown(text_of), f"an expression {name}(...)", "Call the pattern.")
        if section is not None and section not in SECTIONS:
            wanted = f"one of {', '.join(map(repr, SECTIONS))}"
            raise PatternError(f"the section of {name}", shown(section), wanted, "Choose a section.")
        known = DECLARED.known(name)
        # a reloaded module declares its patterns again, which is allowed
        if known is not None and known.make.__module__ != make.__module__:
            got = f"{name} of {make.__module__} and of {known.make.__module__}"
            raise PatternError("pattern", got, "one pattern per name", "Rename one of them.")
        DECLARED.add(name, Declared(make, example, section, tokens, heads, text, hostile))
        return make

    return note
