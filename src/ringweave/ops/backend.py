"""What a backend is, and the case that it is asked about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..plan import Branch
from ..precision import Scales, widened
from ..terms import NAMES, Dropout, Pairs, Term
from ..types import acc_dtype

#: Everything beyond scale and mask.
EXTRAS = frozenset({*NAMES, "dropout"})


class Scoring(NamedTuple):
    """What is done to scores and weights besides scale and mask, and where a view's queries and keys stand in the call.

    Attributes:
        terms: In their order.
        dropout: None: no weight is dropped.
        heads: (Hq,) int64, the call's heads that are the view's.
        rows: (Nq,) int64, places in the call's q.
        columns: (Nk,) int64, places in the call's k.
        offsets: (B, 2) int64, the positions of each batch element's first query and first key.
        totals: Per term what its table's gradient is added to; None: nothing.
    """

    terms: tuple[Term, ...]
    dropout: Dropout | None
    heads: Tensor
    rows: Tensor
    columns: Tensor
    offsets: Tensor
    totals: tuple[Tensor | None, ...]

    def seeded(self, seed: int) -> Scoring:
        """Change the seed of the dropout, and nothing else."""
        return self if self.dropout is None else self._replace(dropout=self.dropout._replace(seed=seed))

    @property
    def names(self) -> frozenset[str]:
        """What a backend has to be able to do."""
        dropped = {"dropout"} if self.dropout is not None else set()
        return frozenset(type(term).__name__ for term in self.terms) | dropped

    def pairs(self, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Pairs:
        """Where pairs of the view stand; what lies past its end, in a last tile, goes on by ones."""

        def place(index: Tensor, places: Tensor) -> Tensor:
            inside = index.clamp(max=places.numel() - 1)
            return places[inside] + (index - inside)

        row, column = place(row, self.rows), place(column, self.columns)
        first = self.offsets[batch]
        return Pairs(batch, self.heads[head], row, column, row + first[..., 0], column + first[..., 1])

    def apply(self, t: Tensor, at: Pairs, held: torch.dtype | None = None) -> list[Tensor]:
        """The scores after each term. One that is not finite before stays so, whatever a term would make of it.

        ``held``: the type of scores where t is wider; one that it cannot hold is infinite.
        """
        states = []
        state = t
        for term in self.terms:
            state = term.apply(state, at)
            if held is not None:
                narrow = state.to(held)
                state = torch.where(narrow.isinf(), narrow.to(t.dtype), state)
            states.append(state)
        if states:
            states[-1] = torch.where(t.isfinite(), state, t)
        return states

    def gradient(self, states: list[Tensor], grad: Tensor, at: Pairs) -> Tensor:
        """The gradient of scaled scores, of that of what the terms made of them."""
        for term, state, total in zip(reversed(self.terms), reversed(states), reversed(self.totals), strict=True):
            grad = term.gradient(state, grad, at, total)
        return grad


class Pages(NamedTuple):
    """Where keys and values lie that are stored in pages: token t in page ``table[b, t // size]``, at ``t % size``.

    Attributes:
        table: Page numbers, (B, n) int32; those behind an element's last token mean nothing and are not used.
        lengths: Tokens of each batch element, (B,) int32.
        size: Tokens of a page: 16, 32, 64, 128 or 256.
    """

    table: Tensor
    lengths: Tensor
    size: int

    @property
    def capacity(self) -> int:
        """Tokens for which a row of the table has room."""
        return self.table.shape[1] * self.size

    def gathered(self, x: Tensor, b: int, h: int) -> Tensor:
        """Copy one head of one batch element out of its pages, (capacity, D); what lies behind its end is not its own.

        For the definition, and for rare second looks: kernels read through the table.
        """
        return x[self.table[b].long().clamp(0, len(x) - 1), h].flatten(0, 1)


class Inputs(NamedTuple):
    """What attention is computed of, from the operators down to a backend's view of a branch.

    Attributes:
        q: Queries, (B, Hq, Nq, D).
        k: Keys, (B, Hkv, Nk, D); with pages (pages, Hkv, size, D).
        v: Values, (B, Hkv, Nk, Dv), or alike.
        scale: Factor of the scores.
        scoring: Terms and dropout, if any.
        pages: Where keys and values lie, if they are stored in pages.
        scales: Of keys and values that are stored in 8 bits; k and v are then codes, and those of q have its dtype.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    scoring: Scoring | None = None
    pages: Pages | None = None
    scales: Scales | None = None

    @property
    def nk(self) -> int:
        """Keys, or the most that a row of the table has room for."""
        return self.k.shape[2] if self.pages is None else self.pages.capacity

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """Change each tensor alike."""
        return self._replace(q=change(self.q), k=change(self.k), v=change(self.v))

    def of_keys(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """Change keys and values alike, and their scales: something about batch elements, heads and tokens."""
        scales = None if self.scales is None else Scales(*map(change, self.scales))
        return self._replace(k=change(self.k), v=change(self.v), scales=scales)

    def widened(self) -> Inputs:
        """Give keys and values as numbers, in the type that is summed in, if they are stored in 8 bits."""
        if self.scales is None:
            return self
        k, v = (widened(x, scale, acc_dtype(self.q.dtype)) for x, scale in zip(self[1:3], self.scales, strict=True))
        return self._replace(k=k, v=v, scales=None)


@dataclass(frozen=True)
class Case:
    """The sizes and types of one call: what a backend needs to know to say whether it can run it."""

    batch: int
    heads: int
    kv_heads: int
    nq: int
    nk: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: str
    needs_grad: bool = False
    #: terms of the scores by name, and "dropout"
    extras: frozenset[str] = frozenset()
    #: elements of the terms' tables that get gradients
    learned: int = 0
    #: whether keys and values are stored in pages
    paged: bool = False
    #: what keys and values are stored in, where that is 8 bits and scales
    stored: torch.dtype | None = None

    @staticmethod
    def of(inputs: Inputs, needs_grad: bool = False) -> Case:
        """Describe a call's inputs."""
        q, k, v = inputs[:3]
        batch, heads, nq, head_dim = q.shape
        sizes = batch, heads, k.shape[1], nq, inputs.nk, head_dim, v.shape[3]
        paged = inputs.pages is not None
        stored = None if inputs.scales is None else k.dtype
        if inputs.scoring is None:
            return Case(*sizes, q.dtype, q.device.type, needs_grad, paged=paged, stored=stored)
        learned = sum(total.numel() for total in inputs.scoring.totals if total is not None)
        return Case(*sizes, q.dtype, q.device.type, needs_grad, inputs.scoring.names, learned, paged, stored)


class Forward(Protocol):
    """The inputs of a branch's view to (out, lse); out in ``dtype``, lse at least float32."""

    def __call__(self, inputs: Inputs, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        ...


class Upstream(NamedTuple):
    """What a branch's gradients are made of besides its inputs: of the *whole* attention, not of the branch.

    Attributes:
        dout: Gradient of out, (B, Hq, Nq, Dv).
        lse: (B, Hq, Nq).
        delta: What the backend's own ``delta`` made of it, (B, Hq, Nq).
        out: Given where ``delta`` is rowsum(dout * out) alone: a kernel that computes it itself may.
    """

    dout: Tensor
    lse: Tensor
    delta: Tensor
    out: Tensor | None = None


class Backward(Protocol):
    """Gradients of a branch's view, in ``dtype``; made with the whole's lse, those of the branches add up."""

    def __call__(
        self, upstream: Upstream, inputs: Inputs, branch: Branch, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv)."""
        ...


class Delta(Protocol):
    """(dout, out, lse, dlse) to rowsum(dout * out) - dlse, of lse's dtype.

    0 where lse is -inf: a row that attends nothing gives nothing, whatever its queries and gradients hold.
    """

    def __call__(self, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
        """(B, Hq, Nq)."""
        ...


def readable(x: Tensor) -> Tensor:
    """Make a tensor one that kernels read: neighbouring channels side by side, other strides of any kind; detached."""
    x = x.detach()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """Repeat key heads for kernels that know no grouped queries."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def per_key_head(x: Tensor, kv_heads: int) -> Tensor:
    """Sum gradients over the query heads of each key head."""
    if x.shape[1] == kv_heads:
        return x
    grouped: Tensor = x.unflatten(1, (kv_heads, -1))
    return grouped.sum(2)


def tiled(x: Tensor, tile: int) -> Tensor:
    """Cut (..., N, C) into (..., tiles, tile, C), padded with zeros."""
    missing = -x.shape[-2] % tile
    whole: Tensor = (torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x).unflatten(-2, (-1, tile))
    return whole


def with_sign(inputs: Inputs) -> tuple[Inputs, int]:
    """Move the scale's sign, or 0, to q, and leave a scale above 0; the sign, which dq takes too, comes along.

    For kernels that find a row's largest score before they scale it, or scale what they have masked with -inf.
    """
    sign = (inputs.scale > 0) - (inputs.scale < 0)
    if sign > 0:
        return inputs, sign
    return inputs._replace(q=inputs.q * sign, scale=abs(inputs.scale) or 1.0), sign


_CHUNK = 2**20


def delta_in_chunks(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """Compute delta by PyTorch, some rows at a time: a whole widened product would be larger than the gradients."""
    delta = torch.empty_like(lse)
    rows = max(1, _CHUNK // (out[:, :, 0].numel()))
    for first in range(0, out.shape[2], rows):
        part = slice(first, first + rows)
        delta[:, :, part] = (dout[:, :, part].to(lse.dtype) * out[:, :, part].to(lse.dtype)).sum(-1)
    if dlse is not None:
        delta.sub_(dlse)
    return delta.masked_fill_(torch.isneginf(lse), 0.0)


#: Channels that :func:`delta_as_channels` adds; kernels of 16-bit types want multiples of 8.
DELTA_CHANNELS = 8


def delta_as_channels(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Add channels to (dout, q, k, v, out), for a dense kernel that computes rowsum(dout * out) itself.

    That leaves no way in for the gradient of lse. The channels give it: they are zero in q, k and v, one in dout, and
    in out, otherwise zero, they hold the pieces of delta: three, which is enough for a 16-bit type.
    """
    dout, q, k, v = (torch.nn.functional.pad(x, (0, DELTA_CHANNELS)) for x in (dout, q, k, v))
    dout[..., -3:] = 1.0
    out, rest = torch.zeros_like(dout), delta
    for channel in (-3, -2, -1):
        out[..., channel] = rest.to(out.dtype)
        rest = rest - out[..., channel].to(rest.dtype)
    return dout, q, k, v, out


@dataclass(frozen=True, eq=False)
class Backend:
    """One way to compute a branch.

    Attributes:
        name: What users pass as ``backend=``.
        forward: Computes a branch.
        backward: Its gradients; None for a forward-only backend.
        refusal: Why it cannot run a branch of a case; None where it can.
        scratch: Bytes that it allocates beyond inputs and outputs, at most and about.
        branched: Whether it takes compiled branches; the reference takes the pattern as it is.
        planned: Whether it computes a plan's tiles; dense kernels need none.
        delta: Computes what backward takes as ``delta``.
        checked: Whether auto takes it only after a check on the GPU that is there (see gpu_check.py).
        compiled: Whether that check is in a process of its own, once a machine: its kernels are compiled there, and may
            crash.
        extras: Terms of the scores that it computes, by name, and "dropout".
        paged: Whether it reads keys and values that are stored in pages, through their table.
        stored: Whether it takes keys and values of 8 bits with scales.
        experimental: Whether it runs only when named: neither auto nor ``ringweave tune`` tries it.
        tiled: Whether its tiles have the sides that a branch asks for; others have sides of their own, or no tiles.
    """

    name: str
    forward: Forward
    backward: Backward | None
    refusal: Callable[[Case, Branch], str | None]
    scratch: Callable[[Case, Branch], int]
    branched: bool = True
    planned: bool = True
    delta: Delta = delta_in_chunks
    checked: bool = False
    compiled: bool = False
    tiled: bool = False
    extras: frozenset[str] = frozenset()
    paged: bool = False
    stored: bool = False
    experimental: bool = False


class Heads:
    """The query heads of a branch, and the key heads that they share.

    Attributes:
        queries: The branch's query heads.
        keys: Its distinct key heads: a slice, so a view, where they are evenly spaced.
        count: How many these are.
        repeat: For each query head its place among ``keys``, where key heads serve unequally many; else None.
    """

    def __init__(self, branch: Branch, ratio: int, remote: bool = False):
        # remote queries come without the other heads
        self.queries = slice(None) if remote else slice(*branch.heads)
        of_query = [head // ratio for head in range(*branch.heads)]
        distinct = sorted(set(of_query))
        step = distinct[1] - distinct[0] if len(distinct) > 1 else 1
        even = distinct == list(range(distinct[0], distinct[-1] + 1, step))
        self.keys: slice | list[int] = slice(distinct[0], distinct[-1] + 1, step) if even else distinct
        self.count = len(distinct)
        share = len(of_query) // self.count
        grouped = of_query == [head for head in distinct for _ in range(share)]
        self.repeat = None if grouped else torch.tensor([distinct.index(head) for head in of_query], device="cpu")

    def of_keys(self, x: Tensor) -> Tensor:
        """Take the distinct key heads of (B, Hkv, ...)."""
        return x[:, self.keys]

    def update(self, x: Tensor, change: Callable[[Tensor, Tensor], object], values: Tensor) -> None:
        """Let ``change(heads, values)`` write to the distinct key heads of (B, Hkv, ...)."""
        some = self.of_keys(x)
        change(some, values)
        if not isinstance(self.keys, slice):
            x[:, self.keys] = some

    def for_kernel(self, x: Tensor) -> Tensor:
        """Repeat distinct key heads as a kernel takes them: once per query head where they do not group."""
        return x if self.repeat is None else x.index_select(1, self.repeat.to(x.device))

    def from_kernel(self, x: Tensor) -> Tensor:
        """Undo ``for_kernel`` for gradients: they are summed over the query heads of each key head."""
        if self.repeat is None:
            return x
        total = x.new_zeros(x.shape[0], self.count, *x.shape[2:])
        return total.index_add_(1, self.repeat.to(x.device), x)
