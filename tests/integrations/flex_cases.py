"""Masks and score functions of FlexAttention for the tests of ringweave's, and the results by definition."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from ringweave.call import Arguments, Call
from ringweave.integrations.flex_attention import flex_attention
from ringweave.patterns import Pattern
from ringweave.score_functions.agreement import disagreement
from ringweave.score_functions.scored_program import ScoredProgram
from ringweave.terms.term import ScoreMod
from ringweave.torch_compat import before_compiling
from ringweave.trace.graph import UntraceableError
from ringweave.trace.symbols import trace
from ringweave.types import Place, acc_dtype
from ringweave.validate import checked

from ..oracle import Inputs, attention, check_errors, errors, results
from ..trace.scores import by_pair

SIDE = 32


class Attended(NamedTuple):
    """The results of attention."""

    out: Tensor
    lse: Tensor
    max_scores: Tensor


MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q - k).abs() <= 20 + 7 * h


def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q // 50 + b == k // 50 + b) & (q % (b + 3) >= 0)


def sparse(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Rows of the first 40 queries are empty."""
    return (q >= 40) & ((q + 2 * k + b) % 5 == 0)


def attend(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, score_mod: ScoreMod, *, scale: float) -> Attended:
    """Compute attention in tiles, by the graph of a function if it has one that agrees with it, as flex_attention does."""
    place, dtype = Place(*q.shape[:3], k.shape[2]), acc_dtype(q.dtype)
    with torch.autocast("cpu", enabled=False):
        try:
            graph = trace(before_compiling(score_mod), dtype, transforms=True)
            agrees = 0 in place[:4] or not disagreement(before_compiling(score_mod), graph.typed(), place, dtype)
        except UntraceableError:
            agrees = False
    if 0 in place[:4]:
        call = Call.of(q, k, v, pattern, scale=scale)
    else:
        call = checked(Arguments(q, k, v, pattern, scale)).call
    program = ScoredProgram.of(call, score_mod, graph if agrees else None, q, k)
    return Attended(*program.attend(q, k, v), program.largest(q, k))


def created(mask_mod: MaskMod, side: Any = SIDE) -> Callable[..., BlockMask]:
    def make(batch: int, heads: int, nq: int, nk: int) -> BlockMask:
        return create_block_mask(mask_mod, batch, heads, nq, nk, device="cpu", BLOCK_SIZE=side)

    return make


def listed(batch: int, heads: int, nq: int, nk: int) -> BlockMask:
    """Return a mask with blocks of its own: of each row one full and two partial blocks, in falling order."""
    rows, columns = -(-nq // SIDE), -(-nk // SIDE)
    row = torch.arange(rows)[:, None]
    partial = (torch.tensor([[2, 0]]) + row) % columns
    # entries after the first that count are undefined
    indices = torch.cat([partial, torch.full((rows, columns), 7)], 1)[:, :columns].int()
    counts = torch.full((rows,), 2, dtype=torch.int32)
    full = ((row + 1) % columns).expand(rows, columns).int()
    return BlockMask.from_kv_blocks(
        counts[None, None],
        indices[None, None],
        torch.ones(1, 1, rows, dtype=torch.int32),
        full[None, None].contiguous(),
        BLOCK_SIZE=SIDE,
        mask_mod=lambda b, h, q, k: (q + k + h) % 3 > 0,
        seq_lengths=(nq, nk),
        compute_q_blocks=False,
    )


def cropped(batch: int, heads: int, nq: int, nk: int) -> BlockMask:
    """Return a mask of more queries, cropped."""
    return create_block_mask(causal, 1, 1, nq + 70, nk, device="cpu", BLOCK_SIZE=SIDE)._adjust(nq, nk)


MASKS: dict[str, Callable[..., BlockMask | None]] = {
    "none": lambda *sizes: None,
    "causal": lambda batch, heads, nq, nk: created(causal)(1, 1, nq, nk),
    "window": lambda batch, heads, nq, nk: created(window, (64, SIDE))(1, heads, nq, nk),
    "documents": lambda batch, heads, nq, nk: created(documents)(batch, 1, nq, nk),
    "sparse": created(sparse),
    "listed": listed,
    "cropped": cropped,
    "broadcast": lambda batch, heads, nq, nk: created(lambda b, h, q, k: q >= k + 5 * b - h)(None, None, nq, nk),
}


def allowed(mask: BlockMask | None, batch: int, heads: int, nq: int, nk: int) -> Tensor:
    """Return the pairs of full blocks, and of partial blocks where the mask function holds."""
    if mask is None:
        return torch.ones(batch, heads, nq, nk, dtype=torch.bool)
    side_q, side_k = mask.BLOCK_SIZE

    def held(counts: Tensor, indices: Tensor) -> Tensor:
        dense = torch.zeros(*counts.shape[:2], nq, nk, dtype=torch.bool)
        for b, h, row in torch.cartesian_prod(*map(torch.arange, counts.shape)).tolist():
            for column in indices[b, h, row, : counts[b, h, row]].tolist():
                dense[b, h, row * side_q :, column * side_k : (column + 1) * side_k][:side_q] = True
        return dense.expand(batch, heads, nq, nk)

    pairs = held(mask.kv_num_blocks, mask.kv_indices)
    pairs = pairs & create_mask(lambda b, h, q, k: mask.mask_mod(b, h, q, k), batch, heads, nq, nk, device="cpu")
    if mask.full_kv_num_blocks is not None:
        pairs = pairs | held(mask.full_kv_num_blocks, mask.full_kv_indices)  # type: ignore[arg-type]
    return pairs


def scored(score_mod: Callable[..., Tensor], t: Tensor) -> Tensor:
    """Apply a score function to all scores, pair by pair."""
    return by_pair(score_mod, t).to(t.dtype)


def compare(
    x: Inputs, mask: BlockMask | None, score: Callable[..., Callable[..., Tensor]] | None, tables: dict[str, Tensor],
    **options: Any,
) -> None:  # fmt: skip
    """Compare out, lse and all gradients with the definition in float64, at twice the error of the definition in float32.

    ``score`` makes the score function of tables, which keep their dtype in the second.
    """
    (batch, heads, nq, _), nk = x.q.shape, x.k.shape[2]
    pairs = allowed(mask, batch, heads, nq, nk)

    def defined(dtype: torch.dtype, exact: bool) -> dict[str, Tensor]:
        leaves = x.leaves(dtype)
        learned = {name: table.detach().clone().requires_grad_() for name, table in tables.items()}
        if exact:
            learned = {name: table.detach().double().requires_grad_() for name, table in tables.items()}
        apply = None if score is None else score(**learned)
        given = {} if apply is None else {"scored": functools.partial(scored, apply)}
        return results(*attention(*leaves, pairs.to(dtype), options.get("scale"), **given), x, leaves, **learned)

    leaves = x.leaves()
    learned = {name: table.detach().clone().requires_grad_() for name, table in tables.items()}
    score_mod = None if score is None else score(**learned)
    grouped = x.q.shape[1] != x.k.shape[1]
    out, lse = flex_attention(*leaves, score_mod, mask, enable_gqa=grouped, return_lse=True, **options)
    assert out.dtype == x.q.dtype
    assert lse.dtype == (torch.float64 if x.q.dtype == torch.float64 else torch.float32)
    got = results(out, lse, x, leaves, **learned)
    assert all(got[name].dtype == table.dtype for name, table in tables.items())
    want = defined(torch.float64, exact=True)
    theirs = errors(defined(torch.promote_types(x.q.dtype, torch.float32), exact=False), want)
    # gradients of tables are sums over all pairs, in which terms cancel
    units = {name: 64 if result.dtype == torch.float64 else 16 if name in tables else 4 for name, result in got.items()}
    check_errors(got, want, [theirs], {name: units[name] * torch.finfo(got[name].dtype).eps for name in got})
