"""Attention of queries on a device to keys and values that stay on the host: these come in pieces of whole tiles.

A piece is the next few key tiles that any query attends; the others never move. It is computed against the rows that
attend it, under its own part of the plan, so every pattern can be cut and positions are those of the whole. Forward
merges pieces by their log-sum-exp. Backward has the whole's: pieces come once more, dQ is summed on the device, and dK
and dV of a piece go back, each once.

Two slots of memory take turns: while a piece is computed the next one comes, and gradients of the one before return.
``Copies`` holds everything about CUDA's streams and events; a test puts another in its place.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from .backends import BACKENDS
from .backends.backend import Upstream, delta_in_chunks, readable
from .cache import beside
from .call import Call, Operands
from .errors import UnsupportedError, message
from .merge import merge_into
from .patterns.tiles import Int64
from .plan import BlockPlan, Branch, branches
from .plan.cuda_sync import capturing
from .plan.subplan import CutBranch, subplan
from .program import BranchSlice, Program, Returned, choose
from .types import acc_dtype

_log = logging.getLogger("ringweave")

#: Bytes of keys and values that are copied at a time; there are two such pieces, and of gradients as many.
PIECE = 2**26
# where a tensor may begin in a slot
_ALIGN = 256


def copies_of(inputs: Operands) -> Copies:
    """Begin to copy them."""
    return Copies(inputs.q.device)


class Stretch(NamedTuple):
    """Some key tiles of a branch.

    Attributes:
        runs: Which keys of the view.
        rows: The queries of the view that attend one of them, and what lies between.
        branch: These rows and keys.
    """

    runs: tuple[slice, ...]
    rows: slice
    branch: Branch


def stretches(branch: Branch, tiles: int) -> list[Stretch]:
    """Cut the keys of a branch that queries attend, so many tiles at a time."""
    if branch.structure != "sparse":
        # what dense kernels know, of which nobody makes a plan, is cut into what they know
        side = tiles * branch.tile[1]
        return [_dense(branch, key, min(key + side, branch.nk)) for key in range(0, _attended(branch), side)]
    plan = branch.plan("cpu")
    known, key = beside(plan), ("stretches", tiles)
    if key not in known:
        row, col = plan.tile_rows().numpy(), plan.col.numpy()
        columns = np.unique(col).astype(np.int64)
        parts = [columns[first : first + tiles] for first in range(0, len(columns), tiles)]
        number = np.searchsorted(columns, col) // tiles
        first, last = np.full(len(parts), plan.q_tiles), np.zeros(len(parts), np.int64)
        np.minimum.at(first, number, row)
        np.maximum.at(last, number, row)
        known[key] = [_stretch(branch, plan, *each) for each in zip(parts, first, last + 1, strict=True)]
    made: list[Stretch] = known[key]
    return made


def _attended(branch: Branch) -> int:
    return branch.nk if branch.structure == "full" else min(branch.nq, branch.nk)


def _dense(branch: Branch, start: int, stop: int) -> Stretch:
    # causal from the first key on is causal again
    first = 0 if branch.structure == "full" else start
    part = replace(branch, rate=1, q_first=0, k_first=0, nq=branch.nq - first, nk=stop - start)
    return Stretch((slice(start, stop),), slice(first, branch.nq), part)


def _stretch(branch: Branch, plan: BlockPlan, columns: Int64, first: np.int64, last: np.int64) -> Stretch:
    runs = tuple(
        slice(int(run[0]) * plan.kv_tile, min((int(run[-1]) + 1) * plan.kv_tile, plan.nk))
        for run in np.split(columns, np.flatnonzero(np.diff(columns) > 1) + 1)
    )
    part, begin = subplan(plan, np.arange(first, last), columns), int(first) * plan.q_tile
    # of the view's heads: views of others may share the plan
    heads = (0, branch.head_count, 1)
    cut = CutBranch(branch.pattern, heads, 1, 0, 0, part.nq, part.nk, 0, branch.batch, part)
    return Stretch(runs, slice(begin, begin + part.nq), cut)


class _Work(NamedTuple):
    """A piece of a branch, and the branch's view."""

    view: BranchSlice
    stretch: Stretch

    def of_host(self, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The piece's keys in (B, Hkv, Nk, ...) where they lie, run by run, and their places in the piece."""
        tokens, end = x[:, :, self.view.keys], 0
        for run in self.stretch.runs:
            begin, end = end, end + run.stop - run.start
            yield slice(begin, end), tokens[:, :, run]

    def shape(self, x: Tensor) -> tuple[int, ...]:
        """Of the piece's keys: distinct heads, each once."""
        return x.shape[0], self.view.heads.count, self.stretch.branch.nk, *x.shape[3:]

    def rows(self, x: Tensor) -> Tensor:
        """The piece's rows of (B, Hq, Nq, ...)."""
        return self.view.of_q(x)[:, :, self.stretch.rows]

    def inputs(self, inputs: Operands, keys: Iterator[Tensor]) -> Operands:
        """What the kernel gets, of keys on the device."""
        asked, view = inputs.terms, self.view
        if asked is not None:
            columns = asked.columns[view.keys]
            asked = asked._replace(
                heads=asked.heads[view.heads.queries],
                rows=asked.rows[view.queries][self.stretch.rows],
                columns=torch.cat([columns[run] for run in self.stretch.runs]),
            )
        mine = inputs._replace(q=self.rows(inputs.q), terms=asked)
        return mine.of_keys(lambda _: view.heads.for_kernel(next(keys)))


class _Slot:
    """Memory of one piece on both sides, and the events that say whose it is."""

    def __init__(self, copies: Copies, nbytes: int, returned: int = 0):
        self.copies = copies
        self.host, self.device = copies.on_host(nbytes), copies.on_device(nbytes)
        # what had this memory may still be computed with
        self.read = copies.computed()
        self.sent: Any = None
        self.back = copies.on_host(returned) if returned else None
        #: A piece's gradients on their way to the host: the event of their arrival, and themselves.
        self.returning: tuple[Any, _Work, list[Tensor]] | None = None

    def send(self, work: _Work, tensors: Sequence[Tensor]) -> None:
        """Begin to copy a piece of the host's tensors."""
        if self.sent is not None:
            self.copies.wait(self.sent)
        shapes = [(work.shape(x), x.dtype) for x in tensors]
        for x, staged in zip(tensors, _carved(self.host, shapes), strict=True):
            for place, some in work.of_host(x):
                staged[:, :, place] = work.view.heads.of_keys(some)
        self.copies.copy_after(self.read)
        used = _used(shapes)
        self.sent = self.copies.copy(self.device[:used], self.host[:used])

    def keys(self, work: _Work, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """The piece on the device, once it is there."""
        self.copies.compute_after(self.sent)
        return _carved(self.device, [(work.shape(x), x.dtype) for x in tensors])

    def give_back(self, work: _Work, grads: Sequence[Tensor]) -> None:
        """Begin to copy gradients of a piece to the host."""
        assert self.back is not None
        held = [grad.contiguous() for grad in grads]
        self.copies.copy_after(self.copies.computed())
        event, begin = None, 0
        for grad in held:
            event = self.copies.copy(self.back[begin : begin + grad.nbytes], grad.view(-1).view(torch.uint8))
            begin = _aligned(begin + grad.nbytes)
        # until they have arrived their memory is theirs
        self.returning = event, work, held

    def settle(self, totals: Sequence[Tensor]) -> None:
        """Add what was given back to the host's gradients, once it is there."""
        if self.returning is None:
            return
        assert self.back is not None
        event, work, held = self.returning
        self.copies.wait(event)
        arrived = _carved(self.back, [(tuple(grad.shape), grad.dtype) for grad in held])
        for total, grad in zip(totals, arrived, strict=True):
            for place, some in work.of_host(total):
                work.view.heads.update(some, Tensor.add_, grad[:, :, place])
        self.returning = None


def hosted(q: Tensor, k: Tensor) -> bool:
    """Tell whether keys and values are on another device than queries."""
    return k.device != q.device


def program_of(call: Call, q: Tensor, k: Tensor) -> Program:
    """Give the program of a call on these tensors; one with keys and values on the host reads them piece by piece."""
    return HostProgram(call) if hosted(q, k) else Program(call)


class HostProgram(Program):
    """A call whose keys and values are on the host: they are read piece by piece, and dk and dv are made there."""

    def forward(self, operands: Operands) -> tuple[Tensor, Tensor]:
        """Compute (out, lse) on the queries' device."""
        _tell("forward", operands)
        operands, works = self._works(operands)
        q, v = operands.q, operands.v
        acc, backend = acc_dtype(q.dtype), self.call.backend
        out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=acc)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=acc)
        with copies_of(operands) as copies:
            for work, _, mine in _arriving(copies, _slots(copies, operands, works), works, operands):
                branch = work.stretch.branch
                part, part_lse = choose(backend, mine.call(), branch).forward(mine, branch, acc)
                merge_into(work.rows(out), work.rows(lse), part, part_lse)
        return out.to(q.dtype), lse

    def backward(
        self, operands: Operands, returned: Returned, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute (dq, dk, dv); dk and dv on the host."""
        _tell("backward", operands)
        operands, works = self._works(operands)
        dout, dlse, out, lse = returned.detached()
        backend, call = self.call.backend, operands.call(needs_grad=True)
        delta_of = choose(backend, call, works[0].stretch.branch).delta if works else delta_in_chunks
        delta = delta_of(dout, out, lse, dlse)
        dtype = dtype or call.dtype
        # a key may be in several branches
        sums = dtype if len({id(work.view) for work in works}) < 2 else lse.dtype
        dq = torch.zeros(operands.q.shape, dtype=lse.dtype, device=operands.q.device)
        totals = [torch.zeros(x.shape, dtype=sums, device=x.device) for x in (operands.k, operands.v)]
        with copies_of(operands) as copies:
            slots = _slots(copies, operands, works, sums)
            for work, slot, mine in _arriving(copies, slots, works, operands):
                branch = work.stretch.branch
                chosen = choose(backend, mine.call(needs_grad=True), branch)
                assert chosen.backward is not None
                upstream = Upstream(work.rows(dout), work.rows(lse), work.rows(delta))
                of_q, *of_keys = chosen.backward(upstream, mine, branch, lse.dtype)
                work.rows(dq).add_(of_q)
                slot.give_back(work, [work.view.heads.from_kernel(x).to(sums) for x in of_keys])
                # while this piece is computed
                for other in slots:
                    if other is not slot:
                        other.settle(totals)
            for slot in slots:
                slot.settle(totals)
        dk, dv = (total.to(dtype) for total in totals)
        return dq.to(dtype), dk, dv

    def _works(self, operands: Operands) -> tuple[Operands, list[_Work]]:
        """What is computed, in order; strides of keys and values are the staging's matter."""
        name = self.call.backend
        if name in BACKENDS and not BACKENDS[name].branched:
            # it would take a part's weights for those of the whole
            wanted = "a backend that computes parts of a call"
            raise UnsupportedError(message("backend", repr(name), wanted, "Use backend='auto' or 'dense_batched'."))
        operands = operands._replace(q=readable(operands.q)).of_keys(Tensor.detach)
        call, works = self.call, []
        sizes = {"heads": call.heads, "batch": call.batch, "q_offset": call.q_offset}
        for branch in branches(call.pattern, call.nq, call.nk, **sizes):
            view, side = BranchSlice(branch, call), branch.tile[1]
            tensors = _tensors(operands)
            token = sum(len(x) * view.heads.count * math.prod(x.shape[3:]) * x.itemsize for x in tensors)
            works += [_Work(view, each) for each in stretches(branch, max(1, PIECE // (token * side)))]
        return operands, works


# what was told of the host
_told: set[str] = set()


def _tell(direction: str, operands: Operands) -> None:
    """Log that keys and values come from the host, once."""
    cost = "each key that a query attends is copied once"
    if direction == "backward":
        cost += " more, and its gradients back"
    what = f"{direction} in pieces of {PIECE // 2**20} MiB of them on {operands.q.device.type}"
    if what not in _told:
        _told.add(what)
        why = "keys and values are on the host: attention computes"
        _log.warning("%s, %s (the same result; cost: %s)", why, what, cost)


def _tensors(inputs: Operands) -> list[Tensor]:
    """What is on the host, in the order in which ``Operands.of_keys`` asks for it."""
    return [*(inputs.scales or ()), inputs.k, inputs.v]


def _slots(copies: Copies, inputs: Operands, works: Sequence[_Work], sums: torch.dtype | None = None) -> list[_Slot]:
    """Memory for the largest piece, twice if there are two; with gradients of a type, for these too."""

    def most(dtype: torch.dtype | None) -> int:
        return max(_used([(work.shape(x), dtype or x.dtype) for x in _tensors(inputs)]) for work in works)

    return [_Slot(copies, most(None), most(sums) if sums is not None else 0) for _ in works[:2]]


def _arriving(
    copies: Copies, slots: Sequence[_Slot], works: Sequence[_Work], inputs: Operands
) -> Iterator[tuple[_Work, _Slot, Operands]]:
    """Give each piece once it is on the device; the next one is on its way then."""
    tensors, turns = _tensors(inputs), list(zip(works, itertools.cycle(slots), strict=False))
    for work, slot in turns[:1]:
        slot.send(work, tensors)
    for number, (work, slot) in enumerate(turns):
        for later, other in turns[number + 1 : number + 2]:
            other.send(later, tensors)
        yield work, slot, work.inputs(inputs, slot.keys(work, tensors))
        slot.read = copies.computed()


def _carved(memory: Tensor, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Iterator[Tensor]:
    """Tensors that lie one after the other in bytes."""
    begin = 0
    for shape, dtype in shapes:
        nbytes = math.prod(shape) * dtype.itemsize
        yield memory[begin : begin + nbytes].view(dtype).view(shape)
        begin = _aligned(begin + nbytes)


def _used(shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> int:
    return sum(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in shapes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


class Copies:
    """Memory on both sides, and the order of work, by the streams and events of CUDA or ROCm.

    Args:
        device: Where to, and back from.
    Raises:
        UnsupportedError: While a CUDA graph is captured: the host is no part of it.
    """

    def __init__(self, device: torch.device):
        if capturing(device):
            wanted = f"tensors on {device} while a CUDA graph is captured"
            raise UnsupportedError(message("k, v", "tensors on the host", wanted, "Make this call outside of graphs."))
        self.device = device
        self._computing: Any = torch.cuda.current_stream(device)
        self._copying: Any = torch.cuda.Stream(device)

    def on_host(self, nbytes: int) -> Tensor:
        """Take page-locked bytes."""
        # loaded when it is needed
        from .memory.workspace import scratch

        return scratch.take((nbytes,), torch.uint8, pinned=True)

    def on_device(self, nbytes: int) -> Tensor:
        """Take bytes of the device; what was computed before may still use them."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def copy(self, to: Tensor, of: Tensor) -> Any:
        """Copy bytes, after the copies before; the event of its end."""
        with torch.cuda.stream(self._copying):
            to.copy_(of, non_blocking=True)
            return self._copying.record_event()

    def computed(self) -> Any:
        """Give the event of the end of what is to be computed so far."""
        return self._computing.record_event()

    def copy_after(self, event: Any) -> None:
        """Let copies from now on wait."""
        self._copying.wait_event(event)

    def compute_after(self, event: Any) -> None:
        """Let what is computed from now on wait."""
        self._computing.wait_event(event)

    def wait(self, event: Any) -> None:
        """Let the host wait."""
        event.synchronize()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # what copies read and write may go then
        self._copying.synchronize()
