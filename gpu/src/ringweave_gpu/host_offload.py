"""Compute attention of queries on a device to keys and values on the host, which are copied in pieces of whole tiles.

A piece is the next few key tiles that any query attends; other tiles are never copied. It is computed for the rows that
attend it, with its part of the plan, so every pattern can be cut and positions do not change. Forward merges pieces by
their log-sum-exp. Backward uses the lse of the whole: it copies each piece once more, sums dQ on the device, and copies
dK and dV of each piece back once.

Two slots of memory alternate: while one piece is computed, the next piece arrives and the gradients of the previous one
return. ``Copies`` contains all use of CUDA's streams and events; tests replace it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from ringweave.backends.backend import Upstream, delta_in_chunks, readable
from ringweave.cache import derived_values
from ringweave.call import Operands
from ringweave.errors import UnsupportedError, warn_once
from ringweave.merge import merge_into
from ringweave.plan import BlockPlan, Branch, branches
from ringweave.plan.cuda_sync import capturing
from ringweave.plan.subplan import CutBranch, subplan
from ringweave.program import BranchSlice, Program, Returned, choose_backend, named_backend
from ringweave.relation.arrays import Int64
from ringweave.types import acc_dtype

#: Bytes of keys and values in a piece; memory holds two pieces, and in backward the gradients of two.
PIECE = 2**26
# alignment in bytes of tensors in a slot
_ALIGN = 256


def copies_of(inputs: Operands) -> Copies:
    """Create the streams that copy these operands."""
    return Copies(inputs.q.device)


class Piece(NamedTuple):
    """A piece of a branch: some key tiles, and the rows from the first to the last that attend one of them."""

    runs: tuple[slice, ...]  # contiguous keys of the view
    rows: slice  # queries of the view
    branch: Branch  # the branch of these rows and keys


def pieces(branch: Branch, tiles: int) -> list[Piece]:
    """Cut the attended keys of a branch into pieces of at most ``tiles`` tiles."""
    if branch.dense_kind != "sparse":
        # full and causal branches have no plan, and are cut into full and causal pieces for dense kernels
        side = tiles * branch.tile[1]
        return [_dense_piece(branch, key, min(key + side, branch.nk)) for key in range(0, _attended(branch), side)]
    plan = branch.plan("cpu")
    known, key = derived_values(plan), ("pieces", tiles)
    if key not in known:
        row, col = plan.tile_rows().numpy(), plan.col.numpy()
        columns = np.unique(col).astype(np.int64)
        parts = [columns[first : first + tiles] for first in range(0, len(columns), tiles)]
        number = np.searchsorted(columns, col) // tiles
        first, last = np.full(len(parts), plan.q_tiles), np.zeros(len(parts), np.int64)
        np.minimum.at(first, number, row)
        np.maximum.at(last, number, row)
        known[key] = [_planned_piece(branch, plan, *each) for each in zip(parts, first, last + 1, strict=True)]
    made: list[Piece] = known[key]
    return made


def _attended(branch: Branch) -> int:
    return branch.nk if branch.dense_kind == "full" else min(branch.nq, branch.nk)


def _dense_piece(branch: Branch, start: int, stop: int) -> Piece:
    # the rows from a piece's first key on see that piece causally again
    first = 0 if branch.dense_kind == "full" else start
    part = replace(branch, rate=1, q_first=0, k_first=0, nq=branch.nq - first, nk=stop - start)
    return Piece((slice(start, stop),), slice(first, branch.nq), part)


def _planned_piece(branch: Branch, plan: BlockPlan, columns: Int64, first: np.int64, last: np.int64) -> Piece:
    runs = tuple(
        slice(int(run[0]) * plan.kv_tile, min((int(run[-1]) + 1) * plan.kv_tile, plan.nk))
        for run in np.split(columns, np.flatnonzero(np.diff(columns) > 1) + 1)
    )
    part, begin = subplan(plan, np.arange(first, last), columns), int(first) * plan.q_tile
    # heads are counted within the view, because views of other heads may share the plan
    cut = CutBranch.of(branch, part, heads=(0, branch.head_count, 1))
    return Piece(runs, slice(begin, begin + part.nq), cut)


class _Work(NamedTuple):
    """A piece of a branch, and the view of the branch."""

    view: BranchSlice
    piece: Piece

    def of_host(self, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield (indices in the piece, view of the keys in x) for each run of keys; x is (B, Hkv, Nk, ...)."""
        tokens, end = x[:, :, self.view.keys], 0
        for run in self.piece.runs:
            begin, end = end, end + run.stop - run.start
            yield slice(begin, end), tokens[:, :, run]

    def shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of the piece's keys, with each distinct key head once."""
        return x.shape[0], self.view.heads.count, self.piece.branch.nk, *x.shape[3:]

    def rows(self, x: Tensor) -> Tensor:
        """Return the piece's rows of (B, Hq, Nq, ...)."""
        return self.view.of_q(x)[:, :, self.piece.rows]

    def inputs(self, inputs: Operands, keys: Iterator[Tensor]) -> Operands:
        """Return the kernel's operands for the piece; ``keys`` yields its tensors on the device."""
        terms, view = inputs.terms, self.view
        if terms is not None:
            columns = terms.columns[view.keys]
            terms = terms._replace(
                heads=terms.heads[view.heads.queries],
                rows=terms.rows[view.queries][self.piece.rows],
                columns=torch.cat([columns[run] for run in self.piece.runs]),
            )
        mine = inputs._replace(q=self.rows(inputs.q), terms=terms)
        return mine.of_keys(lambda _: view.heads.for_kernel(next(keys)))


class _Slot:
    """Memory of one piece on host and device, and the events that tell when it may be reused."""

    def __init__(self, copies: Copies, nbytes: int, returned: int = 0):
        self.copies = copies
        self.host, self.device = copies.on_host(nbytes), copies.on_device(nbytes)
        # earlier work may still use this memory
        self.read = copies.computed()
        self.sent: Any = None
        self.back = copies.on_host(returned) if returned else None
        #: Gradients on their way to the host: the event of their arrival, their piece, and the tensors.
        self.returning: tuple[Any, _Work, list[Tensor]] | None = None

    def send(self, work: _Work, tensors: Sequence[Tensor]) -> None:
        """Start to copy a piece of the host's tensors to the device."""
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
        """Return the piece's tensors on the device; computation waits until they have arrived."""
        self.copies.compute_after(self.sent)
        return _carved(self.device, [(work.shape(x), x.dtype) for x in tensors])

    def give_back(self, work: _Work, grads: Sequence[Tensor]) -> None:
        """Start to copy the gradients of a piece to the host."""
        assert self.back is not None
        sources = [grad.contiguous() for grad in grads]
        self.copies.copy_after(self.copies.computed())
        event, begin = None, 0
        for grad in sources:
            event = self.copies.copy(self.back[begin : begin + grad.nbytes], grad.view(-1).view(torch.uint8))
            begin = _aligned(begin + grad.nbytes)
        # keep the tensors, so that their memory is not reused before the copies end
        self.returning = event, work, sources

    def settle(self, totals: Sequence[Tensor]) -> None:
        """Wait for returning gradients, if any, and add them to those on the host."""
        if self.returning is None:
            return
        assert self.back is not None
        event, work, sources = self.returning
        self.copies.wait(event)
        arrived = _carved(self.back, [(tuple(grad.shape), grad.dtype) for grad in sources])
        for total, grad in zip(totals, arrived, strict=True):
            for place, some in work.of_host(total):
                work.view.heads.update(some, Tensor.add_, grad[:, :, place])
        self.returning = None


class HostProgram(Program):
    """The program of a call with keys and values on the host: it copies them piece by piece, and dk and dv back."""

    def forward(self, operands: Operands) -> tuple[Tensor, Tensor]:
        """Compute (out, lse) on the queries' device."""
        _log_once("forward", operands)
        operands, works = self._works(operands)
        q, v = operands.q, operands.v
        acc, backend = acc_dtype(q.dtype), self.call.backend
        out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=acc)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=acc)
        with copies_of(operands) as copies:
            for work, _, mine in _arriving(copies, _slots(copies, operands, works), works, operands):
                branch = work.piece.branch
                part, part_lse = choose_backend(backend, mine.call(), branch).forward(mine, branch, acc)
                merge_into(work.rows(out), work.rows(lse), part, part_lse)
        return out.to(q.dtype), lse

    def backward(
        self, operands: Operands, returned: Returned, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute (dq, dk, dv); dk and dv on the host."""
        _log_once("backward", operands)
        operands, works = self._works(operands)
        dout, dlse, out, lse = returned.detached()
        backend, call = self.call.backend, operands.call(needs_grad=True)
        delta_of = choose_backend(backend, call, works[0].piece.branch).delta if works else delta_in_chunks
        delta = delta_of(dout, out, lse, dlse)
        dtype = dtype or call.dtype
        # a key in several branches gets several gradients, which are summed in float32
        sums = dtype if len({id(work.view) for work in works}) < 2 else lse.dtype
        dq = torch.zeros(operands.q.shape, dtype=lse.dtype, device=operands.q.device)
        totals = [torch.zeros(x.shape, dtype=sums, device=x.device) for x in (operands.k, operands.v)]
        with copies_of(operands) as copies:
            slots = _slots(copies, operands, works, sums)
            for work, slot, mine in _arriving(copies, slots, works, operands):
                branch = work.piece.branch
                chosen = choose_backend(backend, mine.call(needs_grad=True), branch)
                assert chosen.backward is not None
                upstream = Upstream(work.rows(dout), work.rows(lse), work.rows(delta))
                of_q, *of_keys = chosen.backward(upstream, mine, branch, lse.dtype)
                work.rows(dq).add_(of_q)
                slot.give_back(work, [work.view.heads.from_kernel(x).to(sums) for x in of_keys])
                # the host adds the previous piece's gradients while this piece is computed
                for other in slots:
                    if other is not slot:
                        other.settle(totals)
            for slot in slots:
                slot.settle(totals)
        dk, dv = (total.to(dtype) for total in totals)
        return dq.to(dtype), dk, dv

    def _works(self, operands: Operands) -> tuple[Operands, list[_Work]]:
        """Return detached operands and their pieces in order; keys and values may have any strides."""
        name = self.call.backend
        if name != "auto" and not named_backend(name).branched:
            # the reference would normalise a piece as if it were the whole
            wanted = "a backend that computes parts of a call"
            raise UnsupportedError("backend", repr(name), wanted, "Use backend='auto' or 'dense_batched'.")
        operands = operands._replace(q=readable(operands.q)).of_keys(Tensor.detach)
        call, works = self.call, []
        sizes = {"heads": call.heads, "batch": call.batch, "q_offset": call.q_offset}
        for branch in branches(call.pattern, call.nq, call.nk, **sizes):
            view, side = BranchSlice(branch, call), branch.tile[1]
            tensors = _tensors(operands)
            token = sum(len(x) * view.heads.count * math.prod(x.shape[3:]) * x.itemsize for x in tensors)
            works += [_Work(view, each) for each in pieces(branch, max(1, PIECE // (token * side)))]
        return operands, works


def _log_once(direction: str, operands: Operands) -> None:
    """Log that keys and values come from the host, once per process and message."""
    cost = "each key that a query attends is copied once"
    if direction == "backward":
        cost += " more, and its gradients back"
    what = f"{direction} in pieces of {PIECE // 2**20} MiB to {operands.q.device.type}"
    why = "keys and values are on the host: attention copies them"
    warn_once(what, f"{why}, {what} (the same result; cost: {cost})")


def _tensors(inputs: Operands) -> list[Tensor]:
    """Return the tensors on the host, in the order in which ``Operands.of_keys`` uses them."""
    return [*(inputs.scales or ()), inputs.k, inputs.v]


def _slots(copies: Copies, inputs: Operands, works: Sequence[_Work], sums: torch.dtype | None = None) -> list[_Slot]:
    """Make one or two slots for the largest piece; with ``sums``, also for its gradients of this dtype."""

    def most(dtype: torch.dtype | None) -> int:
        return max(_used([(work.shape(x), dtype or x.dtype) for x in _tensors(inputs)]) for work in works)

    return [_Slot(copies, most(None), most(sums) if sums is not None else 0) for _ in works[:2]]


def _arriving(
    copies: Copies, slots: Sequence[_Slot], works: Sequence[_Work], inputs: Operands
) -> Iterator[tuple[_Work, _Slot, Operands]]:
    """Yield each piece with its slot and operands on the device, while the next piece is being copied."""
    tensors, turns = _tensors(inputs), list(zip(works, itertools.cycle(slots), strict=False))
    for work, slot in turns[:1]:
        slot.send(work, tensors)
    for number, (work, slot) in enumerate(turns):
        for later, other in turns[number + 1 : number + 2]:
            other.send(later, tensors)
        yield work, slot, work.inputs(inputs, slot.keys(work, tensors))
        slot.read = copies.computed()


def _carved(memory: Tensor, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Iterator[Tensor]:
    """Yield tensors of these shapes and dtypes, one after the other in a tensor of bytes."""
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
    """Memory on host and device, and the order of copies and computation, by streams and events of CUDA or ROCm.

    A CUDA graph cannot include work on the host, so its capture raises UnsupportedError.
    """

    def __init__(self, device: torch.device):
        if capturing(device):
            wanted = f"tensors on {device} while a CUDA graph is captured"
            raise UnsupportedError("k, v", "tensors on the host", wanted, "Make this call outside of graphs.")
        self.device = device
        self._computing: Any = torch.cuda.current_stream(device)
        self._copying: Any = torch.cuda.Stream(device)

    def on_host(self, nbytes: int) -> Tensor:
        """Allocate page-locked bytes on the host."""
        # imported only when needed
        from ringweave.memory.workspace import scratch

        return scratch.take((nbytes,), torch.uint8, pinned=True)

    def on_device(self, nbytes: int) -> Tensor:
        """Allocate bytes on the device; earlier computation may still use them."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def copy(self, to: Tensor, of: Tensor) -> Any:
        """Copy bytes after earlier copies, and return the event of the copy's end."""
        with torch.cuda.stream(self._copying):
            to.copy_(of, non_blocking=True)
            return self._copying.record_event()

    def computed(self) -> Any:
        """Return the event of the end of all computation queued so far."""
        return self._computing.record_event()

    def copy_after(self, event: Any) -> None:
        """Let later copies wait for an event."""
        self._copying.wait_event(event)

    def compute_after(self, event: Any) -> None:
        """Let later computation wait for an event."""
        self._computing.wait_event(event)

    def wait(self, event: Any) -> None:
        """Let the host wait for an event."""
        event.synchronize()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # after this the memory that copies use may be freed
        self._copying.synchronize()
