"""Documents packed side by side in one sequence."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..checks import INTEGERS, LONGEST, integers, whole
from ..errors import PatternError, shown
from ..relation.arrays import Int64, combine_ids, listed, number_rows
from ..relation.node import ELEMENT, Node
from ..relation.opaque import Opaque
from ..relation.shapes import MOST_ZONES
from ..relation.zones import Zones
from ..torch_compat import require
from .base import Pattern
from .batch_axis import Packing, Spans, rows_of
from .declared import declare
from .fitting import made_again, made_by

_IN_PIECES = "documents: got one in several pieces; wanted documents of consecutive tokens"
_LISTS = ("lengths", "cu_seqlens", "ids", "cu_seqlens_q", "cu_seqlens_k")


class _Packed(NamedTuple):
    """The contents of the tensors: spans of documents, None if a document is in several pieces, and ids by token."""

    spans: Spans | None
    ids: Int64 | None


@declare("Documents([160, 480, 96, 288])", "By position", hostile="Documents([1] * n)")
class Documents(Packing):
    """Packed variable-length documents: a query attends the keys of its document.

    Pass ``lengths``, ``cu_seqlens`` or ``ids``; or pass ``cu_seqlens_q`` with ``cu_seqlens_k`` if queries and keys are
    packed with different lengths, which may be 0. The arguments are copied. Tensors are read only when a plan is made,
    so the pattern can be built inside ``torch.compile``.

    Args:
        lengths: Tokens of each document, in order; their sum is the sequence length.
        cu_seqlens: Cumulative bounds (0, ..., N) of the documents, as varlen kernels take them.
        ids: The document of each token, an integer tensor (N,), or (B, N) if batch elements are packed differently.
            A token with a negative id attends no key, and no query attends it.
        cu_seqlens_q: Cumulative bounds of the documents' queries.
        cu_seqlens_k: Cumulative bounds of the documents' keys.
    Raises:
        PatternError: A length is below 1, bounds do not start at 0 or do not increase, or the sum is not N; checked at
            use for tensors.
    Example:
        >>> rw.Documents([1, 2]).to_dense(3)[0, 0].int()
        tensor([[1, 0, 0],
                [0, 1, 1],
                [0, 1, 1]], dtype=torch.int32)
        >>> rw.Documents(ids=torch.tensor([5, 7, 7, -1])).to_dense(4)[0, 0].int()
        tensor([[1, 0, 0, 0],
                [0, 1, 1, 0],
                [0, 1, 1, 0],
                [0, 0, 0, 0]], dtype=torch.int32)
    """

    private: ClassVar[bool] = True

    def __init__(
        self,
        lengths: Sequence[int] | Tensor | None = None,
        *,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        ids: Sequence[int] | Tensor | None = None,
        cu_seqlens_q: Sequence[int] | Tensor | None = None,
        cu_seqlens_k: Sequence[int] | Tensor | None = None,
    ):
        given = {
            name: value
            for name, value in zip(_LISTS, (lengths, cu_seqlens, ids, cu_seqlens_q, cu_seqlens_k), strict=True)
            if value is not None
        }
        if tuple(given) not in (*((name,) for name in _LISTS[:3]), _LISTS[3:]):
            raise PatternError(
                "lengths, cu_seqlens",
                " and ".join(given) or "neither",
                "exactly one of the two, or of ids and the pair cu_seqlens_q, cu_seqlens_k",
                "Pass lengths=[...].",
            )
        if ids is not None:
            self._tables = {"ids": _ids(ids)}
        elif lengths is not None:
            self._tables = {"cu_seqlens": _summed(lengths)}
        else:
            self._tables = {name: _bounds(name, value, len(given) == 1) for name, value in given.items()}
        self.__post_init__()

    @classmethod
    def own(cls, **tables: Tensor) -> Documents:
        """Build the pattern around tensors without copying them; they must not be written to."""
        pattern = cls.__new__(cls)
        pattern._tables = tables
        pattern.__post_init__()
        return pattern

    def _text(self) -> str:
        return f"Documents({', '.join(f'{name}=_' for name in self._tables)})"

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return tuple(self._tables.values())

    def __repr__(self) -> str:
        bounds = self._tables.get("cu_seqlens")
        if bounds is None:
            sides = (f"{name}=<{' x '.join(map(str, table.shape))}>" for name, table in self._tables.items())
            return f"Documents({', '.join(sides)})"
        if bounds.device.type != "cpu":
            return f"Documents(<{len(bounds) - 1} documents>)"
        sizes = bounds.diff().tolist()
        if len(sizes) <= 8:
            return f"Documents({sizes})"
        return f"Documents(<{len(sizes)} documents, {min(sizes)}-{max(sizes)} tokens>)"

    @property
    def _packed_apart(self) -> bool:
        return "cu_seqlens_q" in self._tables

    def _among_keys(self, place: Tensor) -> Tensor:
        if not self._packed_apart:
            return place
        of_q, of_k = (table.to(place.device) for table in self.tables)
        return place + (of_k - of_q)[_number(place, of_q) + 1]

    def extents(self) -> tuple[int | None, int | None]:
        ids = self._tables.get("ids")
        return (ids.shape[0] if ids is not None and ids.ndim == 2 and len(ids) > 1 else None), None

    def select(self, b: int, h: int) -> Pattern:
        return self if self.extents()[0] is None else Documents.own(ids=self._tables["ids"][b])

    def _make(self) -> _Packed:
        if "ids" in self._tables:
            return _of_ids(rows_of(self._tables["ids"], 2))
        return _Packed(_of_bounds({name: rows_of(table, 1) for name, table in self._tables.items()}), None)

    def bound_ids(self) -> tuple[Int64, ...]:
        return (number_rows(self._now.ids),)

    def fits(self, nq: int, nk: int, q_offset: int) -> None:
        packed: _Packed = self._now
        if packed.ids is not None:
            queries = keys = packed.ids.shape[1]
        else:
            assert packed.spans is not None
            queries, keys = int(packed.spans.q_stop[-1]), int(packed.spans.k_stop[-1])
        if keys == nk and q_offset + nq <= queries:
            return
        apart = f" and {queries} queries" if queries != keys else ""
        raise PatternError(
            "Documents",
            f"documents of {keys} tokens in all{apart}{made_by(self)} for {nk} keys and queries up to position "
            f"{q_offset + nq}",
            "lengths that sum to the number of keys, and every query inside",
            made_again(self, nk) or "Add the padding as a last document, or correct the lengths.",
        )

    def spans(self) -> Spans:
        spans: Spans | None = self._now.spans
        if spans is None:
            raise PatternError(
                "documents", "one in several pieces", "documents of consecutive tokens", "Sort the tokens."
            )
        return spans

    def inside(self, node: Node) -> Node:
        return self.spans().inside(node)

    def sizes(self) -> tuple[Int64, Int64]:
        return self.spans().lengths()

    def zones(self, n: int | None) -> Node:
        packed: _Packed = self._now
        if packed.spans is not None:
            return packed.spans.documents().zones
        assert packed.ids is not None
        return _in_pieces(packed.ids)


def keys_of(documents: Documents, queries: int) -> tuple[Tensor, Tensor]:
    """Return the first key of each query's document, and one past its last, (queries,) or (B, N) for ids (B, N)."""
    if "ids" in documents._tables:
        ids = documents._tables["ids"]
        place, edge = torch.arange(ids.shape[-1], device=ids.device), ids[..., 1:] != ids[..., :-1]
        begins, ends = (torch.nn.functional.pad(edge, side, value=True) for side in ((1, 0), (0, 1)))
        label = torch.where(begins & (ids >= 0), ids, -1).sort(-1).values
        require(~((label[..., 1:] == label[..., :-1]) & (label[..., 1:] >= 0)).any(), _IN_PIECES)
        first = torch.where(begins, place, 0).cummax(-1).values
        return first, torch.where(ends, place + 1, len(place)).flip(-1).cummin(-1).values.flip(-1)
    of_q, of_k = next(iter(documents._tables.values())), list(documents._tables.values())[-1]
    document = _number(torch.arange(queries, device=of_q.device), of_q)
    return of_k[document], of_k[document + 1]


def _number(place: Tensor, bounds: Tensor) -> Tensor:
    """Return the number of the document of each place, by cumulative bounds."""
    return torch.searchsorted(bounds[1:].contiguous(), place, right=True).clamp(max=len(bounds) - 2)


def _pieces(ids: Int64) -> tuple[Int64, Int64, Int64]:
    """Return runs of tokens with one id: first and end on the axis of all elements, and the number of the document.

    Args:
        ids: (B, N); tokens with a negative id are in no run.
    """
    rows, n = ids.shape
    edge = np.ones(ids.shape, np.bool_)
    np.not_equal(ids[:, 1:], ids[:, :-1], out=edge[:, 1:])
    place = np.flatnonzero(edge)
    end, label = np.append(place[1:], rows * n), ids.reshape(-1)[place]
    real = label >= 0
    place, end, label = place[real], end[real], label[real]
    row = place // n
    base = row * (ELEMENT - n)
    return place + base, end + base, combine_ids(row, label)


def _of_ids(ids: Int64) -> _Packed:
    first, stop, number = _pieces(ids)
    if len(np.unique(number)) < len(number):
        return _Packed(None, ids)
    return _Packed(Spans(first, stop, first, first, stop, len(ids) == 1), ids)


def _in_pieces(ids: Int64) -> Node:
    """Return the relation of documents with pieces at several places, by the ids of tokens (B, N)."""
    rows, n = ids.shape
    first, stop, number = _pieces(ids)
    # pieces of one document are adjacent in this order, and ascend
    order = np.argsort(number, kind="stable")
    document = np.cumsum(np.append(True, np.diff(number[order]) != 0)) - 1
    counts = np.bincount(document)
    if (counts**2).sum() > MOST_ZONES:
        flat = torch.from_numpy(ids).reshape(-1)

        def same(q: Tensor, k: Tensor, element: Tensor) -> Tensor:
            start, of = element * n if rows > 1 else 0, flat.to(q.device)
            mine = of[q + start]
            return (mine == of[k + start]) & (mine >= 0)

        return Opaque(same)
    of = np.empty(len(order), np.int64)
    of[order] = document
    begin = np.cumsum(counts) - counts
    _, piece = listed(begin[of], counts[of])
    k = first[order[piece]], stop[order[piece]]
    return Zones((first, stop), k, ptr=np.append(0, np.cumsum(counts[of])), each=rows > 1)


def _of_bounds(bounds: dict[str, Int64]) -> Spans:
    for name, each in bounds.items():
        _check_rising(name, each, len(bounds) == 1)
    q, k = next(iter(bounds.values())), list(bounds.values())[-1]
    if len(q) != len(k):
        got = f"{len(q) - 1} documents of queries and {len(k) - 1} of keys"
        raise PatternError("cu_seqlens_q, cu_seqlens_k", got, "the same number of both", "Pass bounds of one batch.")
    # the last query of a document is at its last key
    return Spans(q[:-1], q[1:], q[1:] - np.diff(k), k[:-1], k[1:], True)


def _check_rising(name: str, bounds: Int64, filled: bool) -> None:
    # sums beyond 64 bits wrap around, so differences alone do not show them
    outside = (bounds < 0) | (bounds > LONGEST)
    if len(bounds) < 2 or bounds[0] != 0 or (np.diff(bounds) < filled).any() or outside.any():
        remedy = "Begin with 0, and let no bound be less than the one before."
        if filled and len(bounds) and bounds[0] != 0:
            remedy = "Begin with 0; pass the lengths of documents as Documents(lengths)."
        elif filled:
            remedy = "Drop empty documents."
            if _cumulative(np.diff(bounds).tolist()):
                # perhaps the cumulative sums of a tensor of bounds, given as lengths
                remedy += " If bounds were given as lengths, name them: Documents(cu_seqlens=cu)."
        raise PatternError(name, shown(bounds.tolist()), "bounds that increase from 0", remedy)
    whole(name, bounds[-1], 1, LONGEST)


def _cumulative(listed: list[int]) -> bool:
    """Return whether numbers start at 0 and increase, as the cumulative bounds of documents do."""
    return len(listed) > 1 and listed[0] == 0 and all(a < b for a, b in itertools.pairwise(listed))


def _deferred(value: object) -> bool:
    """Return whether a list of numbers is a tensor, which is read only when a plan is made."""
    return isinstance(value, Tensor) and value.ndim == 1 and value.dtype in INTEGERS and value.device.type != "meta"


def _bounds(name: str, value: Sequence[int] | Tensor, filled: bool) -> Tensor:
    if isinstance(value, Tensor) and _deferred(value):
        return value.detach().to(torch.int64, copy=True)
    listed = integers(name, value)
    if torch.compiler.is_compiling():
        # the compiler does not know the values of an array; the operator checks the bounds
        return torch.tensor(listed, dtype=torch.int64, device="cpu")
    bounds = np.array(listed, np.int64)
    _check_rising(name, bounds, filled)
    return torch.from_numpy(bounds)


def _summed(lengths: Sequence[int] | Tensor) -> Tensor:
    if isinstance(lengths, Tensor) and _deferred(lengths):
        return torch.nn.functional.pad(lengths.detach().long().cumsum(0), (1, 0))
    listed = integers("lengths", lengths)
    if torch.compiler.is_compiling():
        return torch.tensor([0, *itertools.accumulate(listed)], dtype=torch.int64, device="cpu")
    if _cumulative(listed):
        got, remedy = f"{shown(listed)}, which are cumulative bounds", "Name them: Documents(cu_seqlens=cu)."
        raise PatternError("lengths", got, "the tokens of each document", remedy)
    sizes = np.array(listed, np.int64)
    if not len(sizes) or (sizes < 1).any():
        got = shown(sizes.tolist())
        raise PatternError("lengths", got, "documents of at least one token", "Drop empty documents.")
    bounds = np.concatenate([np.zeros(1, np.int64), sizes.cumsum()])
    whole("the sum of lengths", bounds[-1], 1, LONGEST)
    return torch.from_numpy(bounds)


def _ids(value: Sequence[int] | Tensor) -> Tensor:
    if not isinstance(value, Tensor):
        value = torch.tensor(integers("ids", value), dtype=torch.int64, device="cpu")
    fits = value.ndim in (1, 2) and value.dtype in INTEGERS and value.layout == torch.strided
    if not fits or not value.numel():
        wanted = "an integer tensor (N,) or (B, N)"
        raise PatternError("ids", shown(value), wanted, "Number the document of each token.")
    return value.detach().to(torch.int64, copy=True)
