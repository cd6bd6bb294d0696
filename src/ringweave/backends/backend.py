"""The interface of a backend: its functions, and the record that describes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..call import Call, Operands
from ..chunks import chunks
from ..plan import BlockPlan, Branch
from ..precision import Scales
from ..terms.function import FUNCTION
from ..types import Pages


class Forward(Protocol):
    """A function that computes (out, lse) of one branch from its view of the inputs."""

    def __call__(self, operands: Operands, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (out, lse): out in ``dtype``, lse in float32 or wider."""
        ...


class Upstream(NamedTuple):
    """The inputs of a backward pass besides the operands. They belong to the *whole* attention, not to the branch.

    Attributes:
        dout: Gradient of out, (B, Hq, Nq, Dv).
        lse: Log-sum-exp of the rows, (B, Hq, Nq).
        delta: Result of the backend's ``delta``, (B, Hq, Nq); empty, if ``out`` is given, for a backend with
            ``own_delta``.
        out: Output, (B, Hq, Nq, Dv), if ``delta`` equals rowsum(dout * out), so that a kernel may compute delta
            itself; else None.
        dlse: Gradient of lse, (B, Hq, Nq), or None; for a branch that is the whole call.
    """

    dout: Tensor
    lse: Tensor
    delta: Tensor
    out: Tensor | None = None
    dlse: Tensor | None = None

    @property
    def of_whole_rows(self) -> bool:
        """Whether the branch is the whole call, so that its rows are whole."""
        return self.out is not None or self.dlse is not None


class Backward(Protocol):
    """A function that computes the gradients of one branch's view.

    It uses the lse of the whole attention, so the gradients of all branches add up to those of the whole.
    """

    def __call__(
        self, upstream: Upstream, operands: Operands, branch: Branch, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) in ``dtype``."""
        ...


class Delta(Protocol):
    """A function that computes rowsum(dout * out) - dlse in lse's dtype.

    The result is 0 where lse is -inf: a row that attends nothing has zero gradients, whatever its query and its
    upstream gradient contain.
    """

    def __call__(self, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
        """Return delta, (B, Hq, Nq)."""
        ...


class Part(NamedTuple):
    """A branch of a small call, for which a backend prepares its kernel's arguments, and its plan."""

    branch: Branch
    plan: BlockPlan


class Prepared(Protocol):
    """Everything about a small call except its tensors: kernel arguments, plans and shapes of the results."""

    @property
    def plans(self) -> tuple[BlockPlan, ...]:
        """The plans of the parts."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, with_lse: bool) -> tuple[Tensor, Any] | None:
        """Compute (out, lse), with lse None if not ``with_lse``; return None if the call needs the general path."""
        ...

    def backward(
        self, plan: Callable[[], BlockPlan | None], saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Compute (dq, dk, dv) from ``saved`` = (q, k, v, out, lse); return None if the call needs the general path.

        ``plan`` returns the plan for backward, or None if this path has no plan.
        """
        ...


class PreparedStep(Prepared, Protocol):
    """Everything about decoding steps of one kind, which differ in their tensors and in their number of keys."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        with_lse: bool,
        pages: Pages | None = None,
        keys: int = 0,
        scales: Scales | None = None,
        lists: Tensor | None = None,
    ) -> tuple[Tensor, Any] | None:
        """Compute (out, lse) as :meth:`Prepared.forward` does, also over pages.

        With ``pages`` no sequence has more than ``keys`` tokens; ``scales`` are those of a pool of 8 bits, contiguous.
        ``lists`` is the table of a pattern with lists of keys, contiguous.
        """
        ...


class Prepare(Protocol):
    """A function that prepares kernel arguments for calls like the given one, and merges their parts."""

    def __call__(self, operands: Operands, parts: Sequence[Part]) -> Prepared:
        """Return the prepared call; ``operands`` are tensors of the call's shapes, dtypes and scale."""
        ...


class Outcome(Protocol):
    """The outcome of a backend in a trial."""

    @property
    def reason(self) -> str | None:
        """Why the backend cannot be used; None if it was right."""
        ...


class Verdict(Protocol):
    """The outcomes of a trial of backends on a kind of call; its text is one line."""

    @property
    def best(self) -> str | None:
        """Name of the backend to use; None if no backend was right."""
        ...

    @property
    def outcomes(self) -> Mapping[str, Outcome]:
        """Outcomes by the names of the backends."""
        ...


class Trials(Protocol):
    """Trials that compare backends on the user's device, and their stored verdicts."""

    def begin(self, call: Call, branch: Branch, names: Callable[[Call, Branch], Sequence[str]]) -> None:
        """Hold a trial beside the first call of a kind, if the user asked for that; ``names`` lists its backends."""
        ...

    def known(self, call: Call, branch: Branch) -> Verdict | None:
        """Return the verdict on a kind of call, or None without one."""
        ...

    def reason(self, backend: Backend, call: Call, branch: Branch) -> str | None:
        """Return why auto should not use a checked backend for a branch on the current device, or None if it may."""
        ...

    def report(self) -> dict[str, str]:
        """Describe all verdicts that apply here, by the kind of call."""
        ...

    def variables(self) -> dict[str, str]:
        """Return the environment variables that trials read, each with the effect of its absence."""
        ...


def readable(x: Tensor) -> Tensor:
    """Return a detached tensor with adjacent channels, copied only if needed; other strides may have any value."""
    x = x.detach()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """Repeat key heads for kernels that do not support grouped queries."""
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
    """Multiply q by the scale's sign, so that the scale is positive; return the sign, by which dq is multiplied too.

    A scale of 0 becomes a sign of 0 and a scale of 1. Kernels need this that find a row's largest score before they
    scale it, or that scale scores already masked with -inf.
    """
    sign = (operands.scale > 0) - (operands.scale < 0)
    if sign > 0:
        return operands, sign
    return operands._replace(q=operands.q * sign, scale=abs(operands.scale) or 1.0), sign


def delta_in_chunks(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """Compute delta with PyTorch, a chunk of rows at a time.

    The widened product of all rows would need more memory than the gradients.
    """
    delta = torch.empty_like(lse)
    # a widened factor and the product
    for part in chunks(out.shape[2], 8 * out[:, :, 0].numel(), out.device):
        delta[:, :, part] = (dout[:, :, part].to(lse.dtype) * out[:, :, part].to(lse.dtype)).sum(-1)
    if dlse is not None:
        delta.sub_(dlse)
    return delta.masked_fill_(torch.isneginf(lse), 0.0)


#: Number of channels that :func:`delta_as_channels` adds; kernels for 16-bit types need multiples of 8.
DELTA_CHANNELS = 8


def delta_as_channels(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Encode delta as extra channels of (dout, q, k, v, out), for a dense kernel that computes rowsum(dout * out).

    Such a kernel has no argument for the gradient of lse. The extra channels are zero in q, k and v. ``out`` is
    replaced by zeros, except for its last three channels, which hold delta split into three parts of out's dtype;
    dout is one there. Three parts represent delta precisely enough for 16-bit types.
    """
    dout, q, k, v = (torch.nn.functional.pad(x, (0, DELTA_CHANNELS)) for x in (dout, q, k, v))
    dout[..., -3:] = 1.0
    out, rest = torch.zeros_like(dout), delta
    for channel in (-3, -2, -1):
        out[..., channel] = rest.to(out.dtype)
        rest = rest - out[..., channel].to(rest.dtype)
    return dout, q, k, v, out


def no_terms(device: str) -> Iterable[str]:
    """Return no kinds of score terms."""
    return ()


def by_formula(device: str) -> Iterable[str]:
    """Return all kinds of score terms, for backends that evaluate the formula of a term's class with PyTorch."""
    from ..terms import KINDS

    return KINDS


class Mass(Protocol):
    """A function that sums the weights in each tile of a plan."""

    def __call__(self, operands: Operands, lse: Tensor, plan: BlockPlan, per_row: bool) -> Tensor:
        """Return the sums, (T,), or (T, q_tile) for each row; ``lse`` normalises the rows."""
        ...


class Choose(Protocol):
    """A function that chooses keys by a lightning indexer's queries, keys and weights."""

    def __call__(self, q: Tensor, k: Tensor, weights: Tensor) -> Callable[[float, BlockPlan, Tensor], None] | None:
        """Return a function of scale, plan and index that writes the best keys; None for inputs that it does not take.

        Arguments are those of :func:`ringweave.adaptive.lightning_indexer`.
        """
        ...


@dataclass(frozen=True, eq=False)
class Backend:
    """A way to compute a branch.

    Attributes:
        name: Name that users pass as ``backend=``.
        forward: Function that computes a branch.
        backward: Function that computes its gradients; None for a forward-only backend.
        unsupported_reason: Function that says why the backend cannot run a branch of a call; None if it can.
        scratch: Function that estimates an upper bound of the bytes allocated beyond inputs and outputs.
        branched: Whether it takes compiled branches. The reference takes the pattern itself.
        planned: Whether it computes a plan's tiles. Dense kernels need no plan.
        delta: Function that computes ``Upstream.delta`` for ``backward``.
        own_delta: Whether ``backward`` does not read ``Upstream.delta`` if ``Upstream.out`` is given.
        checked: Whether auto chooses it only after a check on the current GPU: see ``device_check`` and ``Trials``.
        before: Name of the backend before which auto considers it on a device that is not a CPU; None if auto has a
            place for it already, or does not use it without a measurement.
        trials: Function that returns the trials which decide where auto uses it; None if it has none.
        untried: Function that says why auto does not use it for a branch without a trial; None if auto does.
        least_queries: Smallest number of queries of calls that auto gives it.
        terms: Function from a device type to the kinds of score terms that it computes there.
        dropout: Whether it supports dropout of weights.
        functions: Whether it evaluates a score function.
        paged: Whether it reads paged keys and values through their page table.
        kv_dtypes: 8-bit types, with scales, in which it reads keys and values.
        experimental: Whether it runs only when named; neither auto nor ``ringweave tune`` tries it.
        tiled: Whether it uses the tile sizes that a branch requests. Other backends have fixed tile sizes or no tiles.
        prepare: Function that prepares the kernel arguments of a small call; None if the backend has none. A backend
            with this function calls no operators of PyTorch that a mode or a profiler would have to see.
        step: Function that prepares the decoding steps of a call's kind, or returns None if it cannot; None if the
            backend prepares no steps.
        by_query: Function that returns the plan of a branch that forward computes query by query, or None for other
            branches; None if the backend has no such way.
        mass: Function that sums the weights in each tile; None if the backend has none.
        choose: Function that chooses keys for each query; None if the backend has none.
    """

    name: str
    forward: Forward
    backward: Backward | None
    unsupported_reason: Callable[[Call, Branch], str | None]
    scratch: Callable[[Call, Branch], int]
    branched: bool = True
    planned: bool = True
    delta: Delta = delta_in_chunks
    own_delta: bool = False
    checked: bool = False
    before: str | None = None
    trials: Callable[[], Trials] | None = None
    untried: Callable[[Call, Branch], str | None] | None = None
    least_queries: int = 1
    tiled: bool = False
    terms: Callable[[str], Iterable[str]] = no_terms
    dropout: bool = False
    functions: bool = False
    paged: bool = False
    kv_dtypes: tuple[torch.dtype, ...] = ()
    experimental: bool = False
    prepare: Prepare | None = None
    step: Callable[[Call, Operands], PreparedStep | None] | None = None
    by_query: Callable[[Call, Branch], BlockPlan | None] | None = None
    mass: Mass | None = None
    choose: Choose | None = None

    def lacks(self, asked: frozenset[str], device: str) -> frozenset[str]:
        """Return the features in ``asked`` that it does not compute on a device type: see ``Call.features``."""
        if not asked:
            return asked
        others = [name for name, has in (("dropout", self.dropout), (FUNCTION, self.functions)) if has]
        return asked.difference(self.terms(device), others)


class Heads:
    """The query heads of a branch, and the key heads that they share.

    Attributes:
        queries: The branch's query heads.
        keys: Its distinct key heads: a slice if they are evenly spaced, so that indexing gives a view, else a list.
        count: Number of distinct key heads.
        repeat: Index into ``keys`` for each query head, if the key heads serve different numbers of query heads;
            else None.
    """

    def __init__(self, branch: Branch, ratio: int, remote: bool = False):
        # queries from another rank contain only the branch's heads
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
        """Select the distinct key heads of (B, Hkv, ...)."""
        return x[:, self.keys]

    def update(self, x: Tensor, change: Callable[[Tensor, Tensor], object], values: Tensor) -> None:
        """Call ``change(heads, values)`` to write to the distinct key heads of (B, Hkv, ...)."""
        some = self.of_keys(x)
        change(some, values)
        if not isinstance(self.keys, slice):
            x[:, self.keys] = some

    def for_kernel(self, x: Tensor) -> Tensor:
        """Return key heads in a kernel's layout: one per query head if they serve different numbers, else unchanged."""
        return x if self.repeat is None else x.index_select(1, self.repeat.to(x.device))

    def from_kernel(self, x: Tensor) -> Tensor:
        """Undo ``for_kernel`` for gradients by summing over the query heads of each key head."""
        if self.repeat is None:
            return x
        total = x.new_zeros(x.shape[0], self.count, *x.shape[2:])
        return total.index_add_(1, self.repeat.to(x.device), x)
