"""Launches of the kernels: strides, padding, block sizes and queues."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from ringweave.backends.backend import Upstream
from ringweave.cache import derived_values, process_cache
from ringweave.call import Operands
from ringweave.errors import UnsupportedError
from ringweave.plan import BlockPlan, Branch
from ringweave.plan.cuda_sync import capturing, wait_for_stream
from ringweave.precision import Scales
from ringweave.types import Pages

from . import arguments, interpreted, kernels, queues
from .launch_config import Device, LaunchConfig, Packing, Traits, goes_past_masks, launch_config_for, padded
from .pairing import Rows, paired, single

_LOG2_E = math.log2(math.e)
# "tf32" would multiply float32 faster, but with less than float32 precision
_PRECISION = "ieee"
# set explicitly, because a future default of Triton rounds products before they are added
_OPTIONS = {"enable_fp_fusion": True}
# up to this many queries count as a decoding step, which only uses the most general form of the kernel
_FEW = 16
#: Partial results of a row that are loaded side by side: one after the other, each waits for memory
SHARES = 16
# lists with this many keys on average are long
_LONG = 4096


def forward(operands: Operands, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) with one kernel, and a second one that joins split lists."""
    q, k, v, scale, terms, pages, scales = operands
    plan, device = branch.plan(q.device), _device(q.device)
    if k.dtype == torch.float8_e4m3fn and device.generation == "ampere":
        # the compiler does not support this type on ampere, so the kernel converts bytes
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    batch, heads, nq, _ = q.shape
    dim = v.shape[3]
    out = torch.empty(batch, heads, nq, dim, dtype=dtype, device=q.device)
    lse = torch.empty(batch, heads, nq, dtype=torch.float32, device=q.device)
    term_args = arguments.of(terms, q.device)
    known = ForwardLayout.of(operands._replace(k=k, v=v), plan, device)
    packing, queue, rows = known.packing, known.queue, plan if known.pairs is None else known.pairs.plan
    keys, values = (arguments.described(x, known.block) if known.described else x for x in (k, v))
    held = known.held * packing.parts
    sums, tops = _partial(queue, held, dim, out), _partial(queue, held, 1, lse)
    given = (
        q, keys, values, out, lse, sums, tops, queue.records, rows.col, rows.mask_id, rows.mask_words,
        known.live, *known.numbers, scale * _LOG2_E if term_args.terms is None else scale,
    )  # fmt: skip
    folded = scale > 0 and term_args.terms is None
    # the function, which tests replace, and everything that the layout leaves out and the kernel is compiled for
    kind = kernels.forward, folded, dtype, q.data_ptr() % 16 == 0
    bound = known.bound.get(kind)
    with torch.cuda.device_of(q):
        if bound is not None:
            bound.launch(*given, *bound.rest)
        else:
            named = {**known.constants, **term_args.arguments, **_paged(pages), **_scaled(scales), "FOLDED": folded}
            kernel = kernels.forward[known.grid](*given, **named)
            if terms is None and pages is None and scales is None and device.generation != "cdna":
                known.bind(kind, kernel, named, len(given))
        _join(queue, sums, out, (tops, lse), heads // k.shape[1], known.span, packing)
    return out, lse


class BoundKernel(NamedTuple):
    """A compiled kernel with its grid, and the values of its last parameters."""

    launch: Callable[..., None]
    rest: tuple[Any, ...]


class ForwardLayout(NamedTuple):
    """Everything about a forward launch except its tensors, cached with the plan.

    Attributes:
        pairs: Paired rows; None if the rows are the plan's. A reference to the plan would keep it alive forever.
        live: Bits of the keys that some query of a mask attends.
        packing: The rows of a program.
        queue: The work items.
        held: Number of queries in a block.
        block: Number of keys in a block.
        span: Number of queries in a row of tiles.
        described: Whether keys and values are loaded by descriptors.
        grid: Number of programs.
        numbers: Strides, divided by their common divisor; H, query heads per key head, Nq and Nk.
        constants: The constants that the kernel is compiled for, except those of the scale, terms and pages.
        made: Objects with tensors that may have been made on another stream.
        bound: Compiled kernels by the rest of the properties that they are compiled for.
    """

    pairs: Rows | None
    live: Tensor
    packing: Packing
    queue: queues.Queue
    held: int
    block: int
    span: int
    described: bool
    grid: tuple[int]
    numbers: tuple[int, ...]
    constants: dict[str, Any]
    made: tuple[object, ...]
    bound: dict[tuple[object, ...], BoundKernel]

    def bind(self, kind: tuple[object, ...], kernel: Any, named: dict[str, Any], positional: int) -> None:
        """Keep a compiled kernel, so that further launches skip the look-up by its 60 arguments.

        Its launch takes the values of all parameters by position. The interpreter returns no kernel.
        """
        if kernel is not None:
            rest = tuple(named[name] for name in kernels.forward.arg_names[positional:])
            self.bound[kind] = BoundKernel(kernel[(*self.grid, 1, 1)], rest)

    @staticmethod
    def of(operands: Operands, plan: BlockPlan, device: Device) -> ForwardLayout:
        """Return the layout of a call, made at the first call with these sizes, strides and alignments."""
        q, k, v, _, terms, pages, scales = operands
        tensors = q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype
        # each pointer's alignment is compiled for
        aligned = k.data_ptr() % 16 == 0, v.data_ptr() % 16 == 0
        about = operands.nk, aligned, terms is None, pages is None, scales is None
        # with the function and the limit that choose the blocks, which tests replace
        key = "forward", tensors, about, device, launch_config_for, queues.LEAST
        known = derived_values(plan)
        layout: ForwardLayout | None = known.get(key)
        if layout is not None:
            for thing in layout.made:
                wait_for_stream(thing, plan.device)
            return layout
        layout = ForwardLayout._made(operands, plan, device)
        # masks and queues that a captured graph makes are not cached either
        if not capturing(plan.device):
            known[key] = layout
        return layout

    @staticmethod
    def _made(operands: Operands, plan: BlockPlan, device: Device) -> ForwardLayout:
        q, k, v, _, terms, pages, scales = operands
        heads, nq, nk = q.shape[1], q.shape[2], operands.nk
        few = nq <= _FEW
        as_they_are = pages is None and scales is None
        describable = not few and as_they_are and arguments.describable(k, v)
        lists, config, packing, queue = by_rows = cut("forward", q, k, v, plan, terms is not None, describable)
        described, masks = config.described and describable, queues.masks(plan)
        rows, channels = lists.plan, max(padded(q.shape[3]), padded(v.shape[3]))
        step, steps = arguments.strides(q, k, v)
        sizes = _sizes(q, v, rows, config, queue, few)
        constants = {
            **sizes, **_of_rows(packing), "TILES": lists.tiles, "BLOCK_N": config.n,
            "WIDE": arguments.wide(rows, q, k, v), "STEP": step, "DESCRIBED": described,
            "RAGGED": sizes["MASKED"] or pages is not None or nk % rows.kv_tile > 0,
            "BRANCHED": goes_past_masks("forward", config, channels, device, described),
            "DEAD": described and masks.dead_keys,
        }  # fmt: skip
        pairs = None if rows is plan else lists
        return ForwardLayout(
            pairs, lists.live, packing, queue, config.m, config.n, by_rows.span, described,
            (queue.items * packing.parts,), (*steps, heads, heads // k.shape[1], nq, nk), constants,
            (masks, queue) if pairs is None else (masks, queue, pairs, rows), {},
        )  # fmt: skip


def delta(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """Compute rowsum(dout * out) - dlse, which is 0 where lse is -inf, in one launch."""
    batch, heads, nq, dim = out.shape
    result = torch.empty(batch, heads, nq, dtype=torch.float32, device=out.device)
    lines = max(16, min(128, 8192 // padded(dim)))
    row_dlse = result if dlse is None else dlse
    step, steps = arguments.strides(dout, out)
    with torch.cuda.device_of(out):
        kernels.delta[(batch * heads * triton.cdiv(nq, lines),)](
            dout, out, lse, row_dlse, result, *steps, *lse.stride(), *row_dlse.stride(), heads, nq,
            DV=dim, PAD_DV=padded(dim), BLOCK_M=lines, STEP=step, SLOPED=dlse is not None, num_warps=4,
            **_OPTIONS,
        )  # fmt: skip
    return result


def backward(
    upstream: Upstream, operands: Operands, branch: Branch, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dQ with a kernel by rows, then dK and dV with a kernel by columns; further kernels join split lists."""
    given = BackwardArguments.of(upstream, operands, branch)
    return launch_dq(given, dtype), *launch_dkv(given, dtype)


class BackwardArguments(NamedTuple):
    """The arguments that both backward kernels take.

    Attributes:
        unit: Common divisor of the strides.
        strides: Strides of q, k, v and dout over batch, heads and tokens, divided by ``unit``; then those of lse and
            delta.
        numbers: H, query heads per key head, Nq, Nk and the scale.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor
    plan: BlockPlan
    terms: arguments.TermArguments
    unit: int
    strides: list[int]
    numbers: tuple[int, int, int, int, float]

    @staticmethod
    def of(upstream: Upstream, operands: Operands, branch: Branch) -> BackwardArguments:
        """Return the arguments of a call."""
        q, k, v, scale, terms = operands[:5]
        dout, lse, delta = upstream.dout.to(q.dtype), upstream.lse, upstream.delta
        unit, strides = arguments.strides(q, k, v, dout)
        return BackwardArguments(
            q, k, v, dout, lse, delta, branch.plan(q.device), arguments.of(terms, q.device), unit,
            [*strides, *lse.stride(), *delta.stride()],
            (q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2], scale),
        )  # fmt: skip

    @property
    def masked(self) -> bool:
        """Whether some tiles are partial."""
        return self.plan.mask_words.shape[0] > 0

    @property
    def channels(self) -> int:
        """The larger of D and Dv, padded."""
        return max(padded(self.q.shape[3]), padded(self.v.shape[3]))

    @property
    def constants(self) -> dict[str, Any]:
        """The constants that both kernels are compiled for."""
        wide = arguments.wide(self.plan, self.q, self.k, self.v, self.dout)
        return {"HOLES": self.terms.holes, "WIDE": wide, "STEP": self.unit}


def launch_dq(given: BackwardArguments, dtype: torch.dtype) -> Tensor:
    """Compute dQ with a kernel by rows."""
    q, k, v, dout, lse, delta, plan, term_args = given[:8]
    dq = torch.empty(q.shape, dtype=dtype, device=q.device)
    describable = arguments.describable(k, v)
    with_terms = term_args.places is not None
    lists, config, packing, queue = by_rows = cut("backward_q", q, k, v, plan, with_terms, describable)
    rows, described = lists.plan, config.described and describable
    keys, values = (arguments.described(x, config.n) if described else x for x in (k, v))
    sums = _partial(queue, config.m * packing.parts, q.shape[3], dq)
    with torch.cuda.device_of(q):
        kernels.backward_q[(queue.items * packing.parts,)](
            q, keys, values, dout, lse, delta, dq, sums, queue.records, rows.col, rows.mask_id, rows.mask_words,
            lists.live, *given.strides, *given.numbers,
            **_sizes(q, v, rows, config, queue), **_of_rows(packing), **given.constants, TILES=lists.tiles,
            **term_args.arguments,
            BLOCK_N=config.n,
            RAGGED=rows.mask_words.shape[0] > 0 or k.shape[2] % plan.kv_tile > 0, DESCRIBED=described,
            BRANCHED=goes_past_masks("backward_q", config, given.channels, _device(q.device), described),
            DEAD=described and queues.masks(plan).dead_keys,
        )  # fmt: skip
        _join(queue, sums, dq, None, given.numbers[1], by_rows.span, packing)
    return dq


def launch_dkv(given: BackwardArguments, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute dK and dV with a kernel by columns."""
    q, k, v, dout, lse, delta, plan, term_args = given[:8]
    dk, dv = (torch.empty(x.shape, dtype=dtype, device=q.device) for x in (k, v))
    ratio, device, sides = given.numbers[1], _device(q.device), queues.masks(plan)
    whole = q.shape[2] % plan.q_tile == 0
    describable = not sides.dead_queries and arguments.describable(q, dout)
    traits = Traits(describable and not given.masked and whole, term_args.places is not None, describable)
    sizes = q.shape[3], v.shape[3], q.element_size()
    config = launch_config_for("backward_kv", *sizes, (plan.q_tile, plan.kv_tile), device, traits)
    packing = Packing.of(config.n, plan.kv_tile, 1)
    queue = queues.column_queue(plan, ratio, arguments.head_bytes(q, dout) * ratio, device.units)
    described = config.described and describable
    queries, row_dout = (arguments.described(x, config.m) if described else x for x in (q, dout))
    shared = ratio > queue.records.shape[1]
    key_sums, value_sums = (_partial(queue, plan.kv_tile, x.shape[3], x) for x in (dk, dv))
    with torch.cuda.device_of(q):
        kernels.backward_kv[(queue.items * packing.parts,)](
            queries, k, v, row_dout, lse, delta, dk, dv, key_sums, value_sums, queue.records,
            plan.row, plan.mask_id_t, sides.transposed, sides.live_queries, *given.strides, *given.numbers,
            **_sizes(q, v, plan, config, queue), **term_args.arguments, **given.constants,
            BLOCK_M=config.m, BLOCK_N=config.n, SHARED=shared, RAGGED=given.masked or not whole, DESCRIBED=described,
            BRANCHED=goes_past_masks("backward_kv", config, given.channels, device, described, shared),
        )  # fmt: skip
        for part, result in ((key_sums, dk), (value_sums, dv)):
            _join(queue, part, result, None, 1, plan.kv_tile, packing)
    return dk, dv


@contextlib.contextmanager
def as_unsupported() -> Iterator[None]:
    """Convert Triton's errors, which are not RuntimeErrors, to UnsupportedError: the case cannot run on this GPU."""
    try:
        yield
    except TritonError as error:
        said = " ".join(str(error).split())[-300:]
        raise UnsupportedError(
            "backend", f"'triton' ({type(error).__name__}: {said})", "a kernel for this GPU", "Name another."
        ) from error


class Cut(NamedTuple):
    """The division of a kernel by rows into programs."""

    lists: Rows
    config: LaunchConfig
    packing: Packing
    queue: queues.Queue

    @property
    def span(self) -> int:
        """Number of queries in a row of tiles."""
        return self.lists.plan.q_tile * self.lists.tiles


def cut(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, terms: bool = False, describable: bool = True
) -> Cut:
    """Return the lists, configuration, packing and queue of a kernel by rows.

    If a tile has fewer rows than a block, query heads that share keys and lists fill the block, or else the
    neighbouring tile does.
    """
    device = _device(q.device)
    ratio = q.shape[1] // k.shape[1]
    members = _power(ratio) if queues.shared(plan, ratio) else 1
    height = min(plan.q_tile, _power(q.shape[2]))
    of = functools.partial(launch_config_for, kernel, q.shape[3], v.shape[3], q.element_size())
    masked = plan.counted and plan.mask_words.shape[0] > 0
    long = masked and plan.nnz * plan.kv_tile >= _LONG * plan.q_tiles * plan.row_ptr.shape[0]
    traits = Traits(False, terms, describable, long)
    config, lists = of((max(16, height * members), plan.kv_tile), device, traits), single(plan)
    double = of((2 * plan.q_tile, plan.kv_tile), device, traits)
    if members == 1 and config.m == plan.q_tile == 64 and double.m == 128 and plan.q_tiles > 1:
        pairs = paired(plan)
        if pairs is not None:
            lists, config, height = pairs, double, 128
    packing = Packing.of(config.m, height, members)
    queue = queues.row_queue(lists.plan, ratio, packing.heads, arguments.head_bytes(k, v), device.units)
    return Cut(lists, config, packing, queue)


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _partial(queue: queues.Queue, rows: int, dim: int, like: Tensor) -> Tensor:
    """Allocate partial results, float32 (slots * rows, dim); without slots, return ``like`` as an unused argument."""
    return like.new_empty(queue.slots * rows, dim, dtype=torch.float32) if queue.slots else like


def _join(
    queue: queues.Queue,
    sums: Tensor,
    result: Tensor,
    tops: tuple[Tensor, Tensor] | None,
    ratio: int,
    span: int,
    packing: Packing,
) -> None:
    """Join partial results; with ``tops`` = (partial lse, lse), they are weighted by their lse."""
    if queue.splits is None:
        return
    tokens, dim = result.shape[2:]
    rows = packing.parts * packing.heads * packing.rows
    part_tops, lse = tops or (sums, sums)
    kernels.join[(queue.splits.shape[0] * rows,)](
        sums, part_tops, result, lse, queue.splits, result.shape[1], ratio, tokens,
        DIM=dim, PADDED=padded(dim), SPAN=span, SHARES=SHARES, WEIGHTED=tops is not None, **_of_rows(packing),
        **_OPTIONS,
    )  # fmt: skip


def _sizes(
    q: Tensor, v: Tensor, plan: BlockPlan, config: LaunchConfig, queue: queues.Queue, few: bool = False
) -> dict[str, Any]:
    return {
        "D": q.shape[3],
        "DV": v.shape[3],
        "PAD_D": padded(q.shape[3]),
        "PAD_DV": padded(v.shape[3]),
        "Q_TILE": plan.q_tile,
        "KV_TILE": plan.kv_tile,
        # in decoding, a window occasionally ends at a tile's end and needs no mask; that must not trigger compilation
        "MASKED": few or plan.mask_words.shape[0] > 0,
        "SPLIT": queue.splits is not None,
        "STAGES": config.stages,
        "PRECISION": _PRECISION,
        "num_warps": config.warps,
        "num_stages": config.stages,
        # other compilers than CUDA's do not know this option
        **({"maxnreg": config.registers} if config.registers else {}),
        **_OPTIONS,
    }


def _paged(pages: Pages | None) -> dict[str, Any]:
    """Return the forward kernel's arguments for paged keys; with None, the kernel is compiled without paging."""
    if pages is None:
        return {"table": None, "lengths": None, "columns": None, "PAGE": 0}
    return {
        "table": pages.table, "lengths": pages.lengths, "columns": pages.table.shape[1], "PAGE": pages.size,
    }  # fmt: skip


def _scaled(scales: Scales | None) -> dict[str, Any]:
    """Return the forward kernel's arguments for the scales of 8-bit keys and values; with None, none are compiled."""
    k, v = (None, None) if scales is None else (x.contiguous() for x in scales)
    return {"k_scale": k, "v_scale": v}


def _of_rows(packing: Packing) -> dict[str, int]:
    return {"HEADS": packing.heads, "ROWS": packing.rows, "PARTS": packing.parts}


@process_cache
def _device(device: torch.device) -> Device:
    if interpreted():
        # the interpreter runs the configuration of any device
        return Device("ampere", 99 * 1024, units=8)
    # tensors on other devices have no data: they serve to compile kernels for the driver's current device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        return _of_driver()


def _of_driver() -> Device:
    """Return the current device's description from Triton's driver, since Triton applies these limits to kernels."""
    active = triton.runtime.driver.active
    target = active.get_current_target()
    facts = active.utils.get_device_properties(active.get_current_device())
    shared, units = facts["max_shared_mem"], facts["multiprocessor_count"]
    if target.backend == "hip":
        return Device("cdna", shared, units)
    return Device.of_cuda(target.arch // 10, shared, units)
