"""What a backend is: how it is called, and what it says of itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..call import Call, Operands
from ..plan import Branch
from ..terms import KINDS

#: Old names of backends, which go on for one release.
RENAMED = {"gather": "dense_batched"}


class Forward(Protocol):
    """The inputs of a branch's view to (out, lse); out in ``dtype``, lse at least float32."""

    def __call__(self, operands: Operands, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
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
        self, upstream: Upstream, operands: Operands, branch: Branch, dtype: torch.dtype
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


def with_sign(operands: Operands) -> tuple[Operands, int]:
    """Move the scale's sign, or 0, to q, and leave a scale above 0; the sign, which dq takes too, comes along.

    For kernels that find a row's largest score before they scale it, or scale what they have masked with -inf.
    """
    sign = (operands.scale > 0) - (operands.scale < 0)
    if sign > 0:
        return operands, sign
    return operands._replace(q=operands.q * sign, scale=abs(operands.scale) or 1.0), sign


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


def no_terms(device: str) -> Iterable[str]:
    """Name no kind of score terms."""
    return ()


def by_formula(device: str) -> Iterable[str]:
    """Name every kind: what computes with PyTorch computes any by the formula of its class."""
    return KINDS


@dataclass(frozen=True, eq=False)
class Backend:
    """One way to compute a branch.

    Attributes:
        name: What users pass as ``backend=``.
        forward: Computes a branch.
        backward: Its gradients; None for a forward-only backend.
        unsupported_reason: Why it cannot run a branch of a case; None where it can.
        scratch: Bytes that it allocates beyond inputs and outputs, at most and about.
        branched: Whether it takes compiled branches; the reference takes the pattern as it is.
        planned: Whether it computes a plan's tiles; dense kernels need none.
        delta: Computes what backward takes as ``delta``.
        checked: Whether auto takes it only after a check on the GPU that is there (see gpu_check.py).
        compiled: Whether that check is in a process of its own, once a machine: its kernels are compiled there, and may
            crash.
        terms: Names the kinds of score terms that it computes on a device of a type.
        dropout: Whether it drops weights.
        paged: Whether it reads keys and values that are stored in pages, through their table.
        kv_dtypes: Types of 8 bits, with scales, in which it reads keys and values.
        experimental: Whether it runs only when named: neither auto nor ``ringweave tune`` tries it.
        tiled: Whether its tiles have the sides that a branch asks for; others have sides of their own, or no tiles.
    """

    name: str
    forward: Forward
    backward: Backward | None
    unsupported_reason: Callable[[Call, Branch], str | None]
    scratch: Callable[[Call, Branch], int]
    branched: bool = True
    planned: bool = True
    delta: Delta = delta_in_chunks
    checked: bool = False
    compiled: bool = False
    tiled: bool = False
    terms: Callable[[str], Iterable[str]] = no_terms
    dropout: bool = False
    paged: bool = False
    kv_dtypes: tuple[torch.dtype, ...] = ()
    experimental: bool = False

    def lacks(self, asked: frozenset[str], device: str) -> frozenset[str]:
        """Which of some terms, and "dropout", it does not compute on a device of a type."""
        return asked.difference(self.terms(device), ["dropout"] if self.dropout else []) if asked else asked


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
