"""The implementations of attention that benchmarks compare, called peers.

Every peer names the function that it computes as a pattern. A dense peer computes all pairs even for a sparse pattern,
so its time is the cost of dense attention, and it is checked against the oracle of dense attention.
"""

from __future__ import annotations

import functools
import math
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import ringweave as rw
from ringweave.backends import BACKENDS
from ringweave.errors import RingweaveError, UnsupportedError
from ringweave.patterns import BlockTable, Documents, LongNet, Pattern
from ringweave.patterns.algebra import And
from ringweave.patterns.located import located
from ringweave.plan import BlockPlan, branches, unpack_masks
from ringweave.program import PREFERENCE, compiled, describe
from ringweave.relation.node import Origin
from ringweave_gpu import register

from ..tune.problem import FORWARD, Problem, Sample
from ..tune.session import Built, Peer

_MASK_TOKENS = 16384
_REFERENCE_TOKENS = 4096
_SCORE_BYTES = 4 * 2**30


def peers(*names: str) -> list[Peer]:
    """Return peers by name.

    Raises:
        UnsupportedError: A name is unknown.
    Example:
        >>> [peer.name for peer in peers("ringweave", "sdpa")]
        ['ringweave', 'sdpa']
    """
    known = PEERS | VENDORS
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UnsupportedError("peer", repr(unknown[0]), f"one of {', '.join(PEERS)}", "Name one of them.")
    return [known[name] for name in names]


def taking_part(problem: Problem, names: Sequence[str | Peer], direction: str) -> list[Peer]:
    """Return the peers of some names, without duplicates.

    ``ringweave:*`` means the backends that compute plans and can run the problem. If ``ringweave`` is among the names,
    the backend that it chooses is left out.
    """
    chosen = chosen_backend(problem, backward=direction != FORWARD) if "ringweave" in names else None
    found: list[Peer] = []
    for name in names:
        if isinstance(name, Peer):
            found.append(name)
        elif name == "ringweave:*":
            planned = [each for each in PREFERENCE if BACKENDS[each].planned and each != chosen]
            others = peers(*(f"ringweave:{each}" for each in planned))
            found += [each for each in others if each.supports(problem, True) is None]
        elif name != f"ringweave:{chosen}":
            found += peers(name)
    return found


def chosen_backend(problem: Problem, *, backward: bool, name: str = "auto") -> str:
    """Name the backends that run a problem, such as ``dense_batched`` or ``2 x dense_batched + 1 x sdpa``.

    Raises:
        UnsupportedError: The named backend cannot run it.
    """
    counts = describe(compiled(replace(problem.case(backward), backend=name)))
    return counts[0][1] if len(counts) == 1 else " + ".join(f"{number} x {backend}" for number, backend in counts)


def _ringweave(backend: str) -> Peer:
    def supports(problem: Problem, backward: bool) -> str | None:
        if backend == "reference" and problem.tokens > _REFERENCE_TOKENS:
            return f"it computes N x N in float64: at most {_REFERENCE_TOKENS} tokens here"
        try:
            chosen_backend(problem, backward=backward, name=backend)
        except RingweaveError as error:
            return str(error)
        return None

    def how(problem: Problem, backward: bool) -> str:
        return chosen_backend(problem, backward=backward, name=backend)

    def build(problem: Problem, inputs: Sample) -> Built:
        pattern = problem.pattern

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return rw.attention(q, k, v, pattern, backend=backend)

        start = time.perf_counter()
        sizes = {"heads": problem.heads, "batch": problem.batch}
        for branch in branches(problem.pattern, problem.tokens, problem.tokens, **sizes):
            branch.plan(problem.device)
        return Built(attend, pattern, how(problem, False), time.perf_counter() - start)

    name = "ringweave" if backend == "auto" else f"ringweave:{backend}"
    what = "the backend that auto chooses" if backend == "auto" else f"the {backend} backend"
    return Peer(name, f"ringweave.attention, {what}", supports, build, how)


def _dense(problem: Problem, inputs: Sample) -> Built:
    function = problem.dense_pattern
    causal = function == rw.Causal()
    grouped = problem.key_heads != problem.heads

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return Built(attend, function, "torch SDPA, is_causal=True" if causal else "torch SDPA, no mask")


def _masked(problem: Problem, inputs: Sample) -> Built:
    start = time.perf_counter()
    grouped = problem.key_heads != problem.heads
    batch, heads = problem.pattern.extents()
    mask = problem.pattern.to_dense(problem.tokens, heads=heads or 1, batch=batch or 1).to(problem.device)
    seconds = time.perf_counter() - start

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)

    return Built(attend, problem.pattern, f"torch SDPA, bool mask of {mask.numel() / 2**20:.0f} MiB", seconds)


def _masked_refusal(problem: Problem, backward: bool) -> str | None:
    if isinstance(problem.pattern, LongNet):
        return "a LongNet is a mixture of branches, not a mask"
    if problem.tokens > _MASK_TOKENS:
        return f"a dense mask is N x N: at most {_MASK_TOKENS} tokens here"
    return None


def _mask_mod(pattern: Pattern, device: str | torch.device) -> Callable[..., Tensor]:
    """Return a pattern of all heads as a function that FlexAttention's compiler inlines."""
    if isinstance(pattern, BlockTable):
        # the mask is indexed, while zones would be searched
        mask, (high, wide) = pattern.mask.flatten(0, -2).to(device), pattern.block_size

        def indexed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return mask[q // high, k // wide]

        return indexed
    if isinstance(pattern, And):
        parts = [_mask_mod(part, device) for part in pattern.parts]

        def every(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return functools.reduce(operator.and_, [part(b, h, q, k) for part in parts])

        return every
    if isinstance(pattern, Documents):
        # FlexAttention's usual form of packed documents: its compiler has no search within a mask
        stops = torch.as_tensor(pattern.spans().k_stop, device=device)
        document = torch.searchsorted(stops, torch.arange(int(stops[-1]), device=device), right=True).int()

        def packed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return document[q] == document[k]

        return packed
    # made here, since the compiler cannot trace how
    node, origin = located(pattern, None).node, Origin()

    def evaluated(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return node.contains(q, k, origin)

    return evaluated


def _flex(problem: Problem, inputs: Sample, **options: bool) -> Built:
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    start = time.perf_counter()
    pattern = problem.pattern
    plan = pattern.plan(problem.tokens, heads=problem.heads, batch=problem.batch, device=problem.device)
    block_mask = plan.to_block_mask()
    batch, heads = pattern.extents()
    if batch is None and heads is None:
        # FlexAttention's usual form: the compiler inlines the relation, and all heads share one list of blocks
        mask_mod = _mask_mod(pattern, problem.device)

        def shared(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[:1, :1].contiguous()

        block_mask = BlockMask.from_kv_blocks(
            block_mask.kv_num_blocks[:1, :1].contiguous(),
            block_mask.kv_indices[:1, :1].contiguous(),
            shared(block_mask.full_kv_num_blocks),
            shared(block_mask.full_kv_indices),
            BLOCK_SIZE=(plan.q_tile, plan.kv_tile),
            mask_mod=mask_mod,
            seq_lengths=(problem.tokens, problem.tokens),
        )
    # graphs of other problems would count towards the compiler's limit of variants
    torch.compiler.reset()
    # in one graph: where the compiler gives up, FlexAttention computes all pairs, which is no measure of it
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    # its backward is timed again and again over one graph
    torch._functorch.config.donated_buffer = False
    grouped = problem.key_heads != problem.heads
    # FlexAttention's own blocks of 128 do not fit smaller tiles
    blocks = {name: side for name, side in (("BLOCK_M", plan.q_tile), ("BLOCK_N", plan.kv_tile)) if side < 128}
    kernel_options: Any = options | blocks or None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = compiled(q, k, v, block_mask=block_mask, enable_gqa=grouped, kernel_options=kernel_options)
        assert isinstance(out, Tensor)
        return out

    said = "".join(f", {name}" for name in options)
    built = Built(attend, pattern, f"FlexAttention, torch.compile{said}")
    try:
        built.forward(inputs)()
        if torch.device(problem.device).type == "cuda":
            built.forward_backward(inputs)()
    except RuntimeError as error:  # dynamo's and inductor's errors derive from it
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise UnsupportedError(
            "peer", "'flex'", "a compiler that works", f"{type(error).__name__}: {first[:160]}"
        ) from error
    return Built(attend, pattern, built.how, time.perf_counter() - start)


def _flex_refusal(problem: Problem, backward: bool) -> str | None:
    if isinstance(problem.pattern, LongNet):
        return "a LongNet is a mixture of branches, not a mask"
    if backward and torch.device(problem.device).type == "cpu":
        return "FlexAttention has no backward on a CPU"
    return None


def gather_scatter(q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan) -> Tensor:
    """Compute attention over a plan's tiles, differentiable by autograd.

    ``out[i] = sum_t exp(s[i, t] - max_i) v[t] / sum_t exp(s[i, t] - max_i)`` over the tiles t of row i.

    Args:
        q: Queries, (B, H, Nq, D).
        k: Keys, (B, Hkv, Nk, D); repeated for the query heads that share them.
        v: Values, (B, Hkv, Nk, Dv).
        plan: The tiles.
    Returns:
        Output, (B, H, Nq, Dv), dtype of q; rows that attend nothing give 0.
    """
    batch, heads, nq, dim = q.shape
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    row, col, bits = _pairs(plan)
    q_tiles, k_tiles, v_tiles = (
        _cut(x.float(), tiles, side)
        for x, tiles, side in (
            (q, plan.q_tiles, plan.q_tile),
            (k, plan.kv_tiles, plan.kv_tile),
            (v, plan.kv_tiles, plan.kv_tile),
        )
    )
    scores = torch.bmm(q_tiles[row], k_tiles[col].mT) / math.sqrt(dim)
    scores = _without_masked(scores, plan, col, bits)
    top = torch.full(q_tiles.shape[:2], -torch.inf, device=q.device)
    index = row[:, None].expand(-1, plan.q_tile)
    top = top.scatter_reduce(0, index, scores.detach().amax(-1), "amax")
    top = top.masked_fill(torch.isneginf(top), 0.0)
    weights = torch.exp(scores - top[row][..., None])
    total = torch.zeros_like(top).index_add(0, row, weights.sum(-1))
    parts = torch.bmm(weights, v_tiles[col])
    out = torch.zeros(*q_tiles.shape[:2], v.shape[3], device=q.device).index_add(0, row, parts)
    out = out / total.masked_fill(total == 0, 1.0)[..., None]
    return out.view(batch, heads, -1, v.shape[3])[:, :, :nq].to(q.dtype)


def _pairs(plan: BlockPlan) -> tuple[Tensor, Tensor, Tensor]:
    """Return the query tile, the key tile (of all batches and heads) and the mask of each pair to compute."""
    rows = plan.tile_rows()
    found = []
    for number, group in enumerate(plan.row_set.reshape(-1).tolist()):
        tiles = slice(int(plan.row_ptr[group, 0]), int(plan.row_ptr[group, -1]))
        found.append(
            (number * plan.q_tiles + rows[tiles], number * plan.kv_tiles + plan.col[tiles].long(), plan.mask_id[tiles])
        )
    row, col, bits = (torch.cat(parts) for parts in zip(*found, strict=True))
    return row, col, bits.long()


def _without_masked(scores: Tensor, plan: BlockPlan, col: Tensor, bits: Tensor) -> Tensor:
    partial = (bits >= 0).nonzero()[:, 0]
    if len(partial):
        refused = ~unpack_masks(plan.mask_words, plan.kv_tile)[bits[partial]]
        scores = scores.index_copy(0, partial, scores[partial].masked_fill(refused, -torch.inf))
    if plan.nk % plan.kv_tile:
        key = torch.arange(plan.kv_tile, device=scores.device)
        outside = (col % plan.kv_tiles)[:, None] * plan.kv_tile + key >= plan.nk
        scores = scores.masked_fill(outside[:, None, :], -torch.inf)
    return scores


def _cut(x: Tensor, tiles: int, side: int) -> Tensor:
    x = torch.nn.functional.pad(x, (0, 0, 0, tiles * side - x.shape[2]))
    return x.reshape(-1, side, x.shape[3])


def _gather_scatter(problem: Problem, inputs: Sample) -> Built:
    start = time.perf_counter()
    plan = problem.pattern.plan(problem.tokens, heads=problem.heads, batch=problem.batch, device=problem.device)
    seconds = time.perf_counter() - start

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gather_scatter(q, k, v, plan)

    return Built(attend, problem.pattern, "gathered tile pairs, scatter_reduce", seconds)


def _gather_scatter_refusal(problem: Problem, backward: bool) -> str | None:
    if isinstance(problem.pattern, LongNet):
        return "a LongNet is a mixture of branches, not one list of tiles"
    plan = problem.pattern.plan(problem.tokens, heads=problem.heads, batch=problem.batch)
    needed = plan.tiles * plan.q_tile * plan.kv_tile * 4 * (3 if backward else 2)
    if needed > _SCORE_BYTES:
        return f"it holds all scores at once: {needed / 2**30:.0f} GiB"
    return None


def _vendor(name: str, kernel: SDPBackend) -> Peer:
    def build(problem: Problem, inputs: Sample) -> Built:
        dense = _dense(problem, inputs)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(kernel):
                return dense.attend(q, k, v)

        return Built(attend, dense.function, f"{dense.how}, {kernel.name}")

    return Peer(name, f"torch's dense attention, {kernel.name}", lambda problem, backward: None, build)


# without an installation no entry point names the backends of ringweave-gpu
register()

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        _ringweave("auto"),
        *(_ringweave(name) for name in BACKENDS),
        Peer("sdpa", "torch's dense attention, no mask: what dense costs", lambda problem, backward: None, _dense),
        Peer("sdpa+mask", "torch's attention with a dense bool mask", _masked_refusal, _masked),
        Peer("flex", "FlexAttention, compiled, on the same tiles", _flex_refusal, _flex),
        Peer(
            "gather_scatter",
            "all tile pairs gathered, softmax by scatter_reduce",
            _gather_scatter_refusal,
            _gather_scatter,
        ),
    )
}
#: Dense attention by single GPU kernels, and FlexAttention with descriptors, for cases that name them.
VENDORS: dict[str, Peer] = {
    name: _vendor(name, kernel)
    for name, kernel in (("sdpa:cudnn", SDPBackend.CUDNN_ATTENTION), ("sdpa:flash", SDPBackend.FLASH_ATTENTION))
} | {"flex:tma": Peer("flex:tma", "FlexAttention with USE_TMA", _flex_refusal, functools.partial(_flex, USE_TMA=True))}
