"""The base of score terms, and terms as text and tensors.

A term is a small frozen record. Like a pattern it crosses the operators as text and tensors. It defines its formula and
gradient once, for arrays of scores of any shape. Kernels that have the formula built in read only the record.
"""

from __future__ import annotations

import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..axes import Axes
from ..checks import number
from ..errors import ShapeError, UnsupportedError, shown


class Pairs(NamedTuple):
    """Indices of an array of scores: int64 tensors that broadcast to its shape.

    Attributes:
        batch: Batch element.
        head: Query head of the call.
        row: Index of the query in the call's q.
        column: Index of the key in the call's k.
        query: Position of the query.
        key: Position of the key.
    """

    batch: Tensor
    head: Tensor
    row: Tensor
    column: Tensor
    query: Tensor
    key: Tensor


#: A function of (score, b, h, q, k), 0-dim tensors: a scaled score, indices of its batch element and query head, and
#: positions of its query and key. It returns the score after it.
ScoreMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Axis(NamedTuple):
    """An axis of a term's table.

    Attributes:
        along: Meaning of its entries: "batch", "heads", "queries" and "keys" have the call's sizes; "distance" has
            2 R + 1 entries, for any R.
        shared: Whether a size of 1 is allowed too, with one entry for all.
        optional: Whether a table may lack the axis, with one entry for all. Only last axes may be optional.
    """

    along: str
    shared: bool = False
    optional: bool = False

    def __str__(self) -> str:
        """Return the axis as :class:`Axes` reads it."""
        return _LETTERS.get(self.along, self.along) + "|1" * self.shared + "?" * self.optional


_LETTERS = {"batch": "B", "heads": "Hq", "queries": "Nq", "keys": "Nk"}

#: The declared kinds by name: every subclass of :class:`Term`. Import it from ``kinds``, which declares the library's.
KINDS: dict[str, type[Term]] = {}

# Kernels hold numbers, and their inverses, in float32.
_SMALLEST, LARGEST = 1e-37, 1e37
# numbers that differ by more than this share of the larger one are different in float32 too
_STEP = 2.0**-23


class Term(ABC):
    """A function applied to scaled scores; base of the kinds of terms in this module.

    A kind is a frozen dataclass with number fields, then one tensor field for each of its ``axes``. Checks, operators,
    backends and ranks know nothing about a kind beyond the attributes and methods declared here.

    Attributes:
        kernel: Name of the kind in kernels. A kernel without this name does not support the kind.
        axes: Axes of each table, by the name of its field and in the order of the fields.
        learns: Names of the tables that gradients reach. The entries of the others are constants, which may be on the
            CPU.
        distances: Whether the formula needs the positions of queries and keys.
        places: Whether the formula needs the indices of queries and keys in q and k.
    """

    kernel: ClassVar[str]
    axes: ClassVar[Mapping[str, tuple[Axis, ...]]] = {}
    learns: ClassVar[tuple[str, ...]] = ()
    distances: ClassVar[bool] = False
    places: ClassVar[bool] = False

    _numbers: ClassVar[tuple[str, ...]]
    _tables: ClassVar[Mapping[str, Axes]]  # the axes of each table with the sizes of a call
    _remedy: ClassVar[str] = "Pass such a tensor."  # for a table of another shape
    _constant: ClassVar[str] = "Detach it: this kind of term has no gradient for it."
    _spec: str

    def __init_subclass__(cls) -> None:
        fields = {name: kind for name, kind in cls.__annotations__.items() if not kind.startswith("ClassVar")}
        cls._numbers = tuple(name for name, kind in fields.items() if kind == "float")
        cls._tables = {name: Axes(f"{name}: floating[{' '.join(map(str, axes))}]") for name, axes in cls.axes.items()}
        wanted = dict.fromkeys(cls._numbers, "float") | dict.fromkeys(cls.axes, "Tensor")
        if list(fields.items()) != list(wanted.items()):
            raise TypeError(
                f"{cls.__name__} has fields {fields}; a term has floats, then a Tensor for each of its axes"
            )
        for name, axes in cls.axes.items():
            if any(axis.optional and not after.optional for axis, after in itertools.pairwise(axes)):
                raise TypeError(f"{cls.__name__}.{name} has an optional axis before another one")
        if not {*cls.learns} <= {*cls.axes}:
            raise TypeError(f"{cls.__name__} learns {cls.learns}, and its tables are {', '.join(cls.axes)}")
        needed = ["kernel", *["slope"] * (not cls.axes), *["entry"] * bool(cls.learns)]
        if unsaid := [name for name in needed if name not in vars(cls)]:
            raise TypeError(f"{cls.__name__} does not define {' and '.join(unsaid)}")
        if cls.__name__ in KINDS or cls.kernel in {kind.kernel for kind in KINDS.values()}:
            raise TypeError(f"{cls.__name__}, or {cls.kernel!r} in kernels, is declared already")
        KINDS[cls.__name__] = cls

    def __post_init__(self) -> None:
        values = [_float32(name, getattr(self, name)) for name in self._numbers]
        _check_distinct(self._numbers, values)
        for name, value in zip(self._numbers, values, strict=True):
            object.__setattr__(self, name, value)
        text = [repr(value) for value in values]
        for name, axes in self.axes.items():
            table = getattr(self, name)
            self._tables[name].fit(**{name: table}, remedy=self._remedy)
            # the table may lack the last axes
            for axis, size in zip(axes, table.shape, strict=False):
                if axis.along == "distance" and size % 2 == 0:
                    raise ShapeError(name, f"{size} distances", "2 R + 1 of them, an odd number", "Add an entry.")
            if table.requires_grad:
                self._check_learns(name)
            text.append("_")
        # written once, like a pattern's text, because a trace may turn a number into a symbol
        object.__setattr__(self, "_spec", f"{type(self).__name__}({', '.join(text)})")

    @property
    def numbers(self) -> tuple[float, ...]:
        """Values of the number fields, in order."""
        return tuple([getattr(self, name) for name in self._numbers])

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """Values of the tensor fields, in order."""
        return tuple([getattr(self, name) for name in self.axes])

    @property
    def learned(self) -> tuple[Tensor, ...]:
        """The tables that gradients reach."""
        return tuple([getattr(self, name) for name in self.learns])

    @property
    def spec(self) -> str:
        """Text that :func:`terms_of` reads, with the numbers, and ``_`` for each tensor."""
        return self._spec

    def over(self, *tables: Tensor) -> Term:
        """Return the same term with other tables."""
        return type(self)(*self.numbers, *tables)

    def total(self, name: str, acc: torch.dtype) -> Tensor:
        """Return zeros to which backward adds the gradient of a table.

        Raises:
            ShapeError: The table has no gradient.
        """
        self._check_learns(name)
        # float64, since every pair of a head is added to one of few entries
        dtype = acc if {"queries", "keys"} <= {axis.along for axis in self.axes[name]} else torch.float64
        return torch.zeros_like(getattr(self, name), dtype=dtype, memory_format=torch.contiguous_format)

    def check(self, batch: int, heads: int, nq: int, nk: int, device: torch.device) -> None:
        """Raise ShapeError unless its tables fit a call."""
        for name, axes in self._tables.items():
            table = getattr(self, name)
            # constants are few numbers, so those on the CPU are copied to any device
            here = device if name in self.learns or table.device.type != "cpu" else table.device
            axes.fit(**{name: table}, B=batch, Hq=heads, Nq=nq, Nk=nk, device=here, remedy="Make it for the call.")
            # the owner may have called requires_grad_() since the term was made
            if table.requires_grad and torch.is_grad_enabled():
                self._check_learns(name)

    def _check_learns(self, name: str) -> None:
        if name not in self.learns:
            raise ShapeError(name, "a tensor that requires gradients", "constants", self._constant)

    @classmethod
    @abstractmethod
    def example(cls, batch: int, heads: int, nq: int, nk: int, generator: torch.Generator) -> Term:
        """Return a random term of this kind that fits a call, on the generator's device."""

    @abstractmethod
    def apply(self, t: Tensor, at: Pairs) -> Tensor:
        """Return the scores after the term."""

    def slope(self, before: Tensor, after: Tensor, at: Pairs) -> Tensor | None:
        """Return the derivative of the scores after the term by those before it, or None if it is 1.

        A kind without a table must define it.
        """
        return None

    def entry(self, name: str, at: Pairs) -> Tensor:
        """Return each pair's index into a flattened table, int64. A kind that learns must define it."""
        raise NotImplementedError

    def share(self, name: str, before: Tensor, at: Pairs) -> Tensor | float:
        """Return the derivative of the scores after the term by each pair's entry of a table."""
        return 1.0

    def gradient(
        self, before: Tensor, after: Tensor, grad: Tensor, at: Pairs, totals: Sequence[Tensor | None]
    ) -> Tensor:
        """Return the gradient of the scores before the term, and add the gradients of the tables to ``totals``.

        Args:
            before: Scores before the term.
            after: Scores after the term.
            grad: Gradient of the scores after the term.
            at: Indices of the scores.
            totals: Gradient of each table so far; None if it is not needed.
        """
        for name, total in zip(self.axes, totals, strict=True):
            if total is not None:
                share = self.share(name, before, at)
                of_entry = grad if isinstance(share, float) and share == 1.0 else grad * share
                places, grads = torch.broadcast_tensors(self.entry(name, at), of_entry)
                total.view(-1).scatter_add_(0, places.reshape(-1), grads.reshape(-1).to(total.dtype))
        slope = self.slope(before, after, at)
        return grad if slope is None else grad * slope


def _float32(name: str, value: object) -> float:
    """Check a number that float32 can represent, and return it."""
    value = number(name, value, error=ShapeError)
    if value != 0 and not _SMALLEST <= abs(value) <= LARGEST:
        wanted = f"0, or a number from {_SMALLEST:g} to {LARGEST:g} of either sign"
        raise ShapeError(name, shown(value), wanted, "Kernels compute in float32; pass such a number.")
    return value


def _check_distinct(names: Sequence[str], values: Sequence[float]) -> None:
    """Raise ShapeError if two numbers differ and may be equal in float32."""
    for i, one in enumerate(values):
        for j, other in enumerate(values[:i]):
            if one != other and abs(one - other) <= _STEP * max(abs(one), abs(other)):
                wanted = f"{names[j]}, {shown(other)}, or a number that differs from it in float32"
                raise ShapeError(names[i], shown(one), wanted, "Kernels compute in float32.")


_WRITTEN = re.compile(r"(\w+)\(([^)]*)\)")


def is_function(term: object) -> bool:
    """Whether a member of ``terms=`` is a score function and not a term."""
    return not isinstance(term, (Term, type)) and callable(term)


def has_functions(terms: object) -> bool:
    """Whether ``terms=`` is, or has among its members, a score function."""
    return any(map(is_function, terms)) if isinstance(terms, (list, tuple)) else is_function(terms)


def as_listed(terms: object) -> tuple[Term | ScoreMod, ...]:
    """Return a tuple of terms and functions from one of these, a list or tuple, or None (an empty tuple).

    Raises:
        UnsupportedError: The argument, or a member of it, is neither.
    """
    members = tuple(terms) if isinstance(terms, (list, tuple)) else () if terms is None else (terms,)
    for term in members:
        if not (isinstance(term, Term) or is_function(term)):
            wanted = f"{_kinds()}, or a function of (score, b, h, q, k)"
            raise UnsupportedError("terms", shown(term), wanted, "Pass one, or a sequence of them.")
    return members


def as_terms(terms: object) -> tuple[Term, ...]:
    """Return a tuple of terms from one term, a list or tuple, or None (an empty tuple).

    Raises:
        UnsupportedError: The argument, or a member of it, is not a term.
    """
    members = as_listed(terms)
    for term in members:
        if not isinstance(term, Term):
            remedy = (
                "Pass the terms that it is, which rw.explain(terms=function) names, or call attention() on keys and "
                "values without pages."
            )
            raise UnsupportedError("terms", f"the function {_name(term)}", _kinds(), remedy)
    return members  # type: ignore[return-value]


def _name(function: ScoreMod) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _kinds() -> str:
    # the list of names needs the declarations
    from .kinds import KINDS

    *names, last = KINDS
    return f"{', '.join(names)} or {last}"


def rounded(term: Term, dtype: torch.dtype) -> Term:
    """Return a term with its learned tables, if any, converted to a dtype; gradients reach the original tables."""
    if not term.learns:
        return term
    named = zip(term.axes, term.tables, strict=True)
    return term.over(*(table.to(dtype) if name in term.learns else table for name, table in named))


def written(terms: Sequence[Term]) -> tuple[str, list[Tensor]]:
    """Return the (text, tensors) of terms, which an operator takes."""
    return ", ".join(term.spec for term in terms), [table for term in terms for table in term.tables]


def tables_in(spec: str) -> int:
    """Count the tensors that belong to a text of :func:`written`."""
    return sum(arguments.split(", ").count("_") for _, arguments in _WRITTEN.findall(spec))


def terms_of(spec: str, tables: Sequence[Tensor]) -> tuple[Term, ...]:
    """Rebuild the terms from the (text, tensors) of :func:`written`.

    Raises:
        UnsupportedError: The text names a kind that is not declared, so another version wrote it.
    """
    # imported with the first term
    from .kinds import KINDS

    rest, terms = iter(tables), []
    for name, arguments in _WRITTEN.findall(spec):
        if name not in KINDS:
            remedy = "Trace or export the call again with this version of ringweave."
            raise UnsupportedError("terms", shown(name), f"one of {', '.join(KINDS)}", remedy)
        values = [next(rest).detach() if each == "_" else float(each) for each in arguments.split(", ")]
        terms.append(KINDS[name](*values))
    return tuple(terms)
