"""The lightning indexer: score keys for each query with narrow heads, and choose the best keys that a pattern allows.

A plan of the pattern says which tiles of keys a query tile may choose from. Scores exist for one chunk of queries at a
time, and become integers of the same order before the choice, so that pairs that may not be chosen have a value of
their own and -0.0 equals 0.0. The native CPU kernel does the same where it can (``csrc/indexer.h``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..axes import Axes
from ..backends import BACKENDS
from ..checks import whole
from ..chunks import at_once, chunks
from ..errors import PatternError, ShapeError, UnsupportedError
from ..patterns import Causal, LongNet, Pattern, check_extents
from ..patterns.alignment import first_query
from ..patterns.fitting import refuse
from ..patterns.shifted import with_offsets
from ..plan import BlockPlan, pattern_of, plan, unpack_masks
from ..torch_compat import mapped
from ..torch_ops import differentiate, operators, refuse_forward_mode
from ..types import acc_dtype
from ..validate import checked_scale
from .ranking import Scored, best, rows_at_once

_INPUTS = Axes("q: float[B Nq H D]; k: q[B Nk D]; weights: q[B Nq H]")
_INDICES = Axes("indices: index[B Nq n]")
# sides of a tile; with very many keys a tile has fewer queries, so that a chunk of one tile stays bounded
_TILE, _LEAST_TILE = 128, 16
_MOST_PAIRS = 2**24


def lightning_indexer(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    top_k: int,
    pattern: Pattern = Causal(),  # noqa: B008  (immutable)
    *,
    scale: float | None = None,
    q_offset: int | Tensor | str = 0,
) -> Tensor:
    """Choose the ``top_k`` best keys of each query, among those that a pattern allows; no gradient.

    ``score[i, j] = sum_h weights[i, h] * relu(scale * <q[i, h], k[j]>)``

    The choice is exact for scores in float32 (float64 for float64 inputs), also of 16-bit inputs. Among equal scores
    the earlier key is chosen. A score of NaN is never chosen; one of -inf is chosen last. Tiles of keys that no query
    of a tile may attend are not computed, and memory holds the scores of one chunk of queries.

    Args:
        q: Queries of the index heads, (B, Nq, H, D).
        k: Keys, (B, Nk, D), which all index heads share; same dtype as q.
        weights: Weights of the index heads, (B, Nq, H); same dtype as q.
        top_k: Number of keys to choose for each query.
        pattern: A relation that is the same for all heads.
        scale: Factor of the products, inside the relu; 1 / sqrt(D) by default.
        q_offset: Position of the first query; an int, an integer tensor () or (B,), or ``"end"``, as in
            :func:`ringweave.attention`.
    Returns:
        Indices of keys, (B, Nq, top_k) int32, ascending; -1 fills the end of a row with fewer keys.
    Raises:
        ShapeError: Shapes, dtypes or devices do not fit, or ``top_k`` is below 1.
        PatternError: The pattern does not fit the call, differs between heads, or is a LongNet.
        UnsupportedError: It is called inside torch.vmap.
    Example:
        >>> index_q, index_k, weights = torch.randn(1, 256, 4, 16), torch.randn(1, 256, 16), torch.randn(1, 256, 4)
        >>> indices = rw.adaptive.lightning_indexer(index_q, index_k, weights, top_k=8)
        >>> indices.shape, indices[0, 2].tolist()
        (torch.Size([1, 256, 8]), [0, 1, 2, -1, -1, -1, -1, -1])

    References:
        DeepSeek-AI (2025), DeepSeek-V3.2, section 2.1: "lightning indexer".
    """
    _INPUTS.fit(q=q, k=k, weights=weights)
    top_k = whole("top_k", top_k, 1, error=ShapeError)
    scale = checked_scale(scale, q.shape[3])
    pattern, first = _relation(pattern, q, k, q_offset)
    given = q.detach(), k.detach(), weights.detach()
    if torch.compiler.is_compiling():
        index: Tensor = _index_op(*given, list(pattern.tables), pattern.spec, scale, first, top_k)
        return index
    check_extents(pattern, len(q), 1)
    if any(mapped(x) for x in (q, k, weights)):
        wanted, remedy = "ordinary tensors", "Fold the mapped dimension into the batch."
        raise UnsupportedError("lightning_indexer", "tensors inside of torch.vmap", wanted, remedy)
    return _chosen(*given, pattern, scale, first, top_k)


def _relation(pattern: object, q: Tensor, k: Tensor, q_offset: int | Tensor | str) -> tuple[Pattern, int]:
    """Return the pattern with tensor offsets applied, and the position of the first query."""
    if not isinstance(pattern, Pattern):
        refuse(pattern)
    if isinstance(pattern, LongNet):
        raise PatternError("pattern", repr(pattern), "a relation", "Choose keys for one branch's relation.")
    heads = pattern.extents()[1]
    if heads not in (None, 1):
        wanted = "one relation for all heads, since index heads choose together"
        raise PatternError("pattern", f"one for {heads} heads", wanted, "Call once for each head's pattern.")
    pattern = pattern.bound(1, 1)._for_call()
    batch, nq, nk = len(q), q.shape[1], k.shape[1]
    first = first_query(pattern, q_offset, 0, batch=batch, nq=nq, nk=nk)
    return with_offsets(pattern, first, 0, batch)


def lightning_indexer_of_text(
    q: Tensor, k: Tensor, weights: Tensor, tensors: Sequence[Tensor], pattern: str, scale: float, q_offset: int,
    top_k: int,
) -> Tensor:  # fmt: skip
    """Choose keys by a pattern that is given as text and tensors."""
    relation = pattern_of(pattern, tensors)
    check_extents(relation, len(q), 1)
    return _chosen(q, k, weights, relation, scale, q_offset, top_k)


@torch.no_grad()
def _chosen(q: Tensor, k: Tensor, weights: Tensor, pattern: Pattern, scale: float, q_offset: int, top_k: int) -> Tensor:
    batch, nq, nk = len(q), q.shape[1], k.shape[1]
    choose = BACKENDS["cpu"].choose
    native = choose is not None and choose(q, k, weights)
    side = _MOST_PAIRS // nk
    if native:
        # every thread holds the scores of a tile, and takes several tiles
        threads = torch.get_num_threads()
        side = min(side // threads, batch * nq // (4 * threads))
    side = max(_LEAST_TILE, min(_TILE, side // _LEAST_TILE * _LEAST_TILE))
    planned = plan(pattern, nq, nk, batch=batch, q_offset=q_offset, tile=(side, _TILE))
    index = torch.full((batch, nq, top_k), -1, dtype=torch.int32, device=q.device)
    if native:
        native(scale, planned, index)
        return index
    with torch.autocast(q.device.type, enabled=False):
        for chunk in _chunks(planned, q.device):
            scored = Scored(_scores(q, k, weights, scale, chunk), chunk.allowed(), columns=chunk.tokens())
            index[chunk.members, chunk.queries] = best(scored, top_k)
    return index


@dataclass(frozen=True)
class _Chunk:
    """The query tiles of some batch elements with equal plans, and the key tiles that any of these queries may choose.

    Attributes:
        plan: The plan, in main memory.
        members: Batch elements, (M,).
        rows: Range of query tiles.
        columns: Key tiles, ascending, (U,).
        code: The plan's ``mask_id`` of each tile, (rows, U); -2 for an empty tile.
        device: Device of the inputs.
    """

    plan: BlockPlan
    members: Tensor
    rows: range
    columns: Tensor
    code: Tensor
    device: torch.device

    @property
    def queries(self) -> slice:
        """The queries of the chunk."""
        return slice(self.rows.start * self.plan.q_tile, min(self.rows.stop * self.plan.q_tile, self.plan.nq))

    def runs(self, most: int) -> Iterator[tuple[int, range]]:
        """Yield (place of the first column, range of keys) of runs of at most ``most`` adjacent key tiles."""
        columns, side = self.columns.tolist(), self.plan.kv_tile
        begin = 0
        for end in range(1, len(columns) + 1):
            if end == len(columns) or columns[end] != columns[end - 1] + 1 or end - begin == most:
                keys = range(columns[begin] * side, min((columns[end - 1] + 1) * side, self.plan.nk))
                yield begin * side, keys
                begin = end

    def tokens(self) -> Tensor:
        """Return the key of each place of the chunk, (U * kv_tile,) int32."""
        side = self.plan.kv_tile
        tokens = self.columns[:, None] * side + torch.arange(side, device="cpu")
        return tokens.flatten().int().to(self.device)

    def allowed(self) -> Tensor:
        """Return the pairs that the pattern allows, bool (queries, U * kv_tile)."""
        side, number = self.plan.kv_tile, self.queries.stop - self.queries.start
        pairs = (self.code != -2).to(self.device).repeat_interleave(self.plan.q_tile, 0)[:number, :, None]
        allowed = pairs.repeat(1, 1, side)
        for i in (self.code >= 0).any(1).nonzero()[:, 0].tolist():
            line = allowed[i * self.plan.q_tile : (i + 1) * self.plan.q_tile]
            partial = (self.code[i] >= 0).nonzero()[:, 0]
            masks = unpack_masks(self.plan.mask_words[self.code[i, partial].long()], side).to(self.device)
            line[:, partial.to(self.device)] = masks[:, : len(line)].transpose(0, 1)
        allowed = allowed.flatten(1)
        if int(self.columns[-1]) == self.plan.kv_tiles - 1 and self.plan.nk % side:
            allowed[:, self.plan.nk % side - side :] = False
        return allowed


def _chunks(planned: BlockPlan, device: torch.device) -> Iterator[_Chunk]:
    """Cut the plan into chunks with bounded scores; query tiles without keys are left out."""
    one = planned.q_tile * planned.kv_tile
    for g in range(planned.row_ptr.shape[0]):
        every = (planned.row_set[:, 0] == g).nonzero()[:, 0]
        offsets = planned.row_ptr[g].tolist()
        # a wide chunk computes the tiles of all its rows, so it is no taller than an eighth of the tiles
        step = max(1, min(rows_at_once(one * planned.kv_tiles, device), planned.q_tiles // 8))
        for begin in range(0, planned.q_tiles, step):
            rows = range(begin, min(begin + step, planned.q_tiles))
            entries = slice(offsets[rows.start], offsets[rows.stop])
            columns, place = planned.col[entries].unique(return_inverse=True)
            if not len(columns):
                continue
            counts = planned.row_ptr[g, rows.start : rows.stop + 1].diff()
            row = torch.arange(len(rows), device="cpu").repeat_interleave(counts)
            code = torch.full((len(rows), len(columns)), -2, dtype=torch.int32, device="cpu")
            code[row, place] = planned.mask_id[entries]
            for members in every.split(rows_at_once(one * code.numel(), device)):
                yield _Chunk(planned, members, rows, columns, code, device)


def _scores(q: Tensor, k: Tensor, weights: Tensor, scale: float, chunk: _Chunk) -> Tensor:
    """Compute the scores of a chunk, (M, queries, U * kv_tile); places past the last key are arbitrary."""
    acc, heads = acc_dtype(q.dtype), q.shape[2]
    # a slice of the batch, unless its elements are apart
    low, high = int(chunk.members[0]), int(chunk.members[-1]) + 1
    members = slice(low, high) if high - low == len(chunk.members) else chunk.members.to(chunk.device)
    # the scale's size is a factor of the weights, and its sign one of the queries, to scale fewer numbers
    queries = q[members, chunk.queries].to(acc) * math.copysign(1.0, scale)
    weight = weights[members, chunk.queries].to(acc) * abs(scale)
    number, rows = queries.shape[:2]
    scores = queries.new_empty(number, rows, chunk.columns.numel() * chunk.plan.kv_tile)
    side = chunk.plan.kv_tile
    for place, keys in chunk.runs(at_once(acc.itemsize * number * rows * heads * side, chunk.device)):
        part = k[members, keys.start : keys.stop].to(acc)
        product = queries.flatten(1, 2) @ part.mT
        product = product.relu_().unflatten(1, (rows, heads))
        scores[..., place : place + len(keys)] = (weight[..., None, :] @ product)[..., 0, :]
    return scores


def lightning_scores(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, *, scale: float | None = None) -> Tensor:
    """Compute the scores of chosen pairs, with gradients to q, k and weights: what the loss of an indexer needs.

    ``score[i, c] = sum_h weights[i, h] * relu(scale * <q[i, h], k[indices[i, c]]>)``

    Queries are processed in chunks, which backward computes again, so memory holds the chosen keys of one chunk.

    Args:
        q: Queries of the index heads, (B, Nq, H, D).
        k: Keys, (B, Nk, D); same dtype as q.
        weights: Weights of the index heads, (B, Nq, H); same dtype as q.
        indices: Keys of each query, (B, Nq, n) int32 or int64, such as :func:`lightning_indexer` returns; -1 stands for
            no key.
        scale: Factor of the products, inside the relu; 1 / sqrt(D) by default.
    Returns:
        Scores, (B, Nq, n) float32 (float64 for float64 inputs); -inf where an index is -1.
    Raises:
        ShapeError: Shapes, dtypes or devices do not fit, or an index is not a key. On a GPU, indices are not read.
    Example:
        >>> index_q, index_k, weights = torch.randn(1, 256, 4, 16), torch.randn(1, 256, 16), torch.randn(1, 256, 4)
        >>> index_q.requires_grad = True
        >>> indices = rw.adaptive.lightning_indexer(index_q, index_k, weights, top_k=8)
        >>> scores = rw.adaptive.lightning_scores(index_q, index_k, weights, indices)
        >>> shares = torch.rand(1, 256, 8).masked_fill(indices < 0, 0)  # the attention mass of the chosen keys
        >>> loss = -(shares * scores.log_softmax(-1).masked_fill(indices < 0, 0)).sum(-1).mean()
        >>> loss.backward()
        >>> index_q.grad.shape
        torch.Size([1, 256, 4, 16])

    References:
        DeepSeek-AI (2025), DeepSeek-V3.2, section 2.1: the indexer learns the attention mass of the chosen keys.
    """
    _INPUTS.fit(q=q, k=k, weights=weights)
    _check_indices(indices, q, k)
    refuse_forward_mode()
    scores: Tensor = _scores_op(q, k, weights, indices, checked_scale(scale, q.shape[3]))
    return scores


def _check_indices(indices: Tensor, q: Tensor, k: Tensor) -> None:
    remedy = "Pass the keys of each query, padded with -1."
    _INDICES.fit(indices=indices, B=q.shape[0], Nq=q.shape[1], device=q.device, remedy=remedy)
    if indices.device.type == "cpu" and not torch.compiler.is_compiling():
        least, most = (int(x) for x in indices.aminmax())
        if least < -1 or most >= k.shape[1]:
            wanted = f"-1 to {k.shape[1] - 1}"
            raise ShapeError("indices", least if least < -1 else most, wanted, "Pass keys of k, and -1 for no key.")


class _Pairs:
    """The chosen pairs of some queries of a batch element, and the relu of their products without the scale's size."""

    def __init__(self, tensors: Sequence[Tensor], scale: float, b: int, queries: slice):
        q, k, weights, indices = tensors
        acc = acc_dtype(q.dtype)
        index = indices[b, queries]
        self.pad = index < 0
        # pads refer to a row after the keys, and their keys are 0, since 0 * NaN is NaN
        self.place = torch.where(self.pad, k.shape[1], index).flatten()
        self.k = k[b].index_select(0, index.clamp(min=0).flatten()).to(acc).unflatten(0, index.shape)
        if self.k.device.type != "cpu" or bool(self.pad.any()):
            self.k = self.k.masked_fill(self.pad[..., None], 0)
        self.q, self.weights = q[b, queries].to(acc), weights[b, queries].to(acc)
        self.sign, self.size = math.copysign(1.0, scale), abs(scale)
        self.products = ((self.q * self.sign) @ self.k.mT).relu_()  # (queries, H, n)

    def scores(self) -> Tensor:
        """Return the scores, (queries, n)."""
        scores: Tensor = ((self.weights * self.size)[:, None] @ self.products)[:, 0]
        return scores.masked_fill_(self.pad, -torch.inf)

    def gradients(self, dscores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the queries, of their weights, and of the chosen keys, (queries, n, D)."""
        dscores = dscores.masked_fill(self.pad, 0)
        dweights = (self.products @ dscores[..., None])[..., 0] * self.size
        # the gradient of the products before the weights and the scale, which are factors of small tensors
        dproducts = self.products.sign_().mul_(dscores[:, None])
        factor = (self.weights * (self.sign * self.size))[..., None]
        return (dproducts @ self.k) * factor, dweights, dproducts.mT @ (self.q * factor)


def lightning_scores_of_pairs(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, scale: float) -> Tensor:
    """Compute the scores of chosen pairs in chunks of queries."""
    scores = torch.empty(indices.shape, dtype=acc_dtype(q.dtype), device=q.device)
    for b, queries in _cut(q, indices):
        scores[b, queries] = _Pairs((q, k, weights, indices), scale, b, queries).scores()
    return scores


def lightning_scores_backward(
    dscores: Tensor, q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (dq, dk, dweights) in the same chunks; the products are computed again."""
    dq, dweights = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, weights))
    dk = torch.zeros(len(k), k.shape[1] + 1, k.shape[2], dtype=acc_dtype(k.dtype), device=k.device)
    for b, queries in _cut(q, indices):
        pairs = _Pairs((q, k, weights, indices), scale, b, queries)
        dq[b, queries], dweights[b, queries], dkeys = pairs.gradients(dscores[b, queries])
        dk[b].index_add_(0, pairs.place, dkeys.flatten(0, 1))
    return dq, dk[:, :-1].to(k.dtype, copy=True), dweights


def _cut(q: Tensor, indices: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield batch elements and ranges of queries; the chosen keys and products of a range fit the budget."""
    # as many gradients in backward
    one = 8 * indices.shape[2] * (q.shape[2] + q.shape[3])
    for b in range(len(q)):
        for queries in chunks(q.shape[1], one, q.device):
            yield b, queries


def _fake_index(q: Tensor, k: Tensor, weights: Tensor, tensors: object, pattern: str, *rest: Any) -> Tensor:
    return q.new_empty(*q.shape[:2], rest[-1], dtype=torch.int32)


def _fake_scores(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, scale: float) -> Tensor:
    return q.new_empty(indices.shape, dtype=acc_dtype(q.dtype))


def _fake_backward(dscores: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in rest[:3])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dscores: Tensor) -> tuple[Any, ...]:
    return *_backward_op(dscores, *ctx.saved_tensors, ctx.scale), None, None


def _refuse_twice(ctx: Any, *_: Any) -> NoReturn:
    remedy = "Call the formula on small dense tensors for one."
    raise UnsupportedError("lightning_scores", "a second derivative", "derivatives of first order", remedy)


_index_op, _scores_op, _backward_op = operators(
    (lightning_indexer_of_text, _fake_index),
    (lightning_scores_of_pairs, _fake_scores),
    (lightning_scores_backward, _fake_backward),
)
differentiate(_scores_op, _setup, _backward)
differentiate(_backward_op, None, _refuse_twice)
