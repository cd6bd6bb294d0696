"""Attention over tiles, in a few PyTorch operations: the softmax, its gradients, and the rules about broken numbers.

Batches of tiles say which rows there are (``tile_batches.py``), and a :class:`Scorer` makes scores of their products.

The rules, where a number is NaN or infinite, beside those of ``overflow``:

- A masked pair gets its score by selection, so a NaN in a masked key or query is lost.
- A row that attends nothing has no output and no gradient, whatever it contains.
- A value, or a gradient of the output, that is not finite reaches only the rows and keys that attend it. A weight of 0
  times it would be NaN, so products are computed again with :func:`~ringweave.backends.attended.attended_product`.
- A row with an lse that is not finite gives NaN to the keys that it attends, and nothing to others.
- A row that attends an infinite or NaN key has gradients of NaN, or of 0 at a score of -inf, already. The key must not
  make the gradients of other rows NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ..merge import merge_into
from ..terms import Pairs
from ..terms.operands import TermOperands
from .attended import attended_product, broken, spread
from .backend import Upstream
from .chunk_threads import in_order
from .tile_batches import AnyBatch, Tiles

Result = TypeVar("Result")


# ---- scores ----------------------------------------------------------------------------------------------------------


class Slopes(Protocol):
    """The derivative of the scores of a batch."""

    def __call__(self, grad: Tensor, attended: Tensor | None) -> Tensor | None:
        """Return the gradient of the products, once; None if the scores do not depend on them.

        Args:
            grad: Gradient of the scores, 0 where not attended.
            attended: Whether each pair is attended; None if all numbers are finite.
        """

    def add(self) -> None:
        """Add the gradients of other tensors to their sums."""


class Scores(NamedTuple):
    """The scores of a batch.

    Attributes:
        values: The scores; any number where a pair is not allowed.
        kept: Dropout's factor of each weight, or None.
        slopes: Derivative of the scores, in backward; None where they are the products.
    """

    values: Tensor
    kept: Tensor | None = None
    slopes: Slopes | None = None


class Scorer:
    """The scores of a call: its scaled products, with its terms and its dropout.

    Attributes:
        chooses: Whether scores of -inf mask pairs that the pattern allows. Backward then asks which pairs are attended.
        threads: Whether threads compute the batches. Each thread computes alone.
        pair: Bytes of a pair's values; 0 if they are those of its score.
        sums_rows: Whether backward divides the weights of a whole row by their sum, since lse is rounded as a large
            number is, and computes the mean of their gradients from them.
    """

    chooses = False
    threads = False
    pair = 0
    sums_rows = False

    def __init__(self, terms: TermOperands | None = None):
        self.terms = terms

    def scores(self, tiles: Tiles[AnyBatch], batch: AnyBatch, products: Tensor, backward: bool) -> Scores:
        """Return the scores of a batch from its scaled products, which may be overwritten."""
        terms = self.terms
        if terms is None:
            return Scores(products)
        at = terms.pairs(*tiles.indices(batch))
        kept = None if terms.dropout is None else terms.dropout.kept(at).to(tiles.acc).mul_(terms.dropout.factor)
        if not terms.terms:
            return Scores(products, kept)
        states = terms.apply(products, at)
        if backward:
            for state in states:
                tiles.masked(state, batch, 0.0)
        return Scores(states[-1], kept, _SlopesOfTerms(terms, states, at))

    def attended(self, tiles: Tiles[AnyBatch], batch: AnyBatch, x: Tensor, nothing: float) -> Tensor:
        """Return whether each pair is attended; ``x`` has masked scores or weights, ``nothing`` where not allowed."""
        return tiles.masked(torch.ones_like(x, dtype=torch.bool), batch, False)


class _SlopesOfTerms(NamedTuple):
    """The derivative of terms: the scores before them and after each, 0 where not allowed, and their pairs."""

    terms: TermOperands
    states: list[Tensor]
    at: Pairs

    def __call__(self, grad: Tensor, attended: Tensor | None) -> Tensor:
        return self.terms.gradient(self.states, grad, self.at)

    def add(self) -> None:
        """Do nothing, since terms add to the sums of their tables as they are differentiated."""


# ---- attention -------------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """The results of attention.

    Attributes:
        out: Output, (B, Hq, Nq, Dv).
        lse: Log-sum-exp of each row's scores, (B, Hq, Nq).
        largest: Largest score of each row, (B, Hq, Nq).
    """

    out: Tensor
    lse: Tensor
    largest: Tensor


def forward(tiles: Tiles[AnyBatch], scorer: Scorer, dtype: torch.dtype) -> Found:
    """Compute attention, with the output in ``dtype``, or in the dtype of sums where parts of rows are merged."""
    found = _forward(tiles, scorer, dtype, False)
    if (scorer.chooses or not tiles.shared) and spread(found.out, found.lse):
        found = _forward(tiles, scorer, dtype, True)
    return found


def _forward(tiles: Tiles[AnyBatch], scorer: Scorer, dtype: torch.dtype, selects: bool) -> Found:
    """Compute attention, a batch of equally long rows at a time; ``selects``: values reach only attending rows."""
    queries = tiles.by_query(tiles.q)
    out = tiles.blank(tiles.channels, 0.0, dtype)
    lse, largest = (tiles.blank(1, -torch.inf, tiles.acc) for _ in range(2))

    def computed(batch: AnyBatch) -> tuple[Tensor, Tensor, Tensor]:
        scores, kept = _scores(tiles, scorer, queries, batch)
        attended = scorer.attended(tiles, batch, scores, -torch.inf).to(scores.dtype) if selects else None
        weights, total, shift, top = _exponentials(scores)
        if kept is not None:
            weights.mul_(kept)
        values = tiles.gathered(tiles.v_tiles, batch, True)
        if attended is None:
            part = tiles.product(weights, values)
        else:
            # a row with scores of -inf only attends nothing
            part = attended_product(weights, attended, values).masked_fill_(total == 0, 0.0)
        part.div_(total.masked_fill(total == 0, 1.0))
        return part, torch.where(torch.isposinf(shift), shift, shift + total.log()), top

    for batch, (part, part_lse, top) in _each(computed, tiles, scorer):
        if tiles.pieced:
            whole, whole_lse = tiles.taken(out, batch), tiles.taken(lse, batch)
            merge_into(whole, whole_lse[..., 0], part, part_lse[..., 0])
            part, part_lse, top = whole, whole_lse, torch.maximum(tiles.taken(largest, batch), top)
        tiles.put(out, batch, part)
        tiles.put(lse, batch, part_lse)
        tiles.put(largest, batch, top)
    return Found(tiles.whole(out), tiles.whole(lse)[..., 0], tiles.whole(largest)[..., 0])


def weights(tiles: Tiles[AnyBatch], scorer: Scorer, lse: Tensor | None = None) -> Iterator[tuple[AnyBatch, Tensor]]:
    """Yield each batch and its weights, (R, q_tile, n * kv_tile), 0 where not allowed.

    They are ``exp(scores - lse)``, or those of whole rows, divided by their sums, if no lse is given. Autograd records
    the latter where the tiles have no scratch memory.
    """
    queries = tiles.by_query(tiles.q)
    rows = None
    if lse is not None:
        # a row that attends nothing has zero weights, whatever it contains
        rows = tiles.by_query(lse.masked_fill(torch.isneginf(lse), torch.inf)[..., None], torch.inf)
    for batch in tiles.batches():
        scores, _ = _scores(tiles, scorer, queries, batch)
        if rows is not None:
            yield batch, scores.sub_(tiles.taken(rows, batch)).exp_()
        else:
            exponentials, total, *_ = _exponentials(scores)
            shares = exponentials / total.masked_fill(total == 0, 1.0)
            # a row of NaN has them only where it attends
            yield batch, tiles.masked(shares, batch, 0.0)


def _scores(tiles: Tiles[AnyBatch], scorer: Scorer, queries: Tensor, batch: AnyBatch) -> tuple[Tensor, Tensor | None]:
    """Return the scores of a batch, -inf where not allowed, and dropout's factors."""
    products = tiles.products(tiles.taken(queries, batch), tiles.gathered(tiles.k_tiles, batch, False))
    scores, kept, _ = scorer.scores(tiles, batch, products, False)
    return tiles.masked(scores, batch, -torch.inf), kept


def _exponentials(scores: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the exponentials of scores less a shift, in place, their sums, the shift, and the largest scores.

    The shift is the largest score, or 0 for a row that attends nothing.
    """
    # detached, since weights do not depend on the shift
    top = scores.detach().amax(-1, keepdim=True)
    shift = top.masked_fill(torch.isneginf(top), 0.0)
    exponentials = scores.sub_(shift).exp_()
    return exponentials, exponentials.sum(-1, keepdim=True), shift, top


def _each(
    compute: Callable[[AnyBatch], Result], tiles: Tiles[AnyBatch], scorer: Scorer
) -> Iterable[tuple[AnyBatch, Result]]:
    """Yield each batch and its result, in order."""
    if scorer.threads:
        return in_order(compute, tiles.batches(), tiles.device)
    return ((batch, compute(batch)) for batch in tiles.batches())


class Shares(NamedTuple):
    """A batch's shares of the gradients; without dq and dk where the scores do not depend on the products."""

    slopes: Slopes | None
    dv: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None


def backward(
    tiles: Tiles[AnyBatch], scorer: Scorer, upstream: Upstream, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (dq, dk, dv) in ``dtype``: scores are recomputed, and dK and dV are summed for each tile of keys."""
    shares_of = _Backward(tiles, scorer, upstream).shares
    dq = tiles.blank(tiles.q.shape[3], 0.0, dtype)
    dk, dv = (torch.zeros(x.shape, dtype=tiles.acc, device=x.device) for x in (tiles.k_tiles, tiles.v_tiles))
    for batch, shares in _each(shares_of, tiles, scorer):
        if shares.slopes is not None:
            shares.slopes.add()
        tiles.summed(dv, batch, shares.dv)
        if shares.dq is not None and shares.dk is not None:
            tiles.put(dq, batch, shares.dq, add=True)
            tiles.summed(dk, batch, shares.dk)
        del shares
    return tiles.whole(dq).to(dtype), tiles.by_key(dk.mul_(tiles.scale), dtype), tiles.by_key(dv, dtype)


class _Backward(Generic[AnyBatch]):
    """The gradients of batches; arguments as in :func:`backward`."""

    def __init__(self, tiles: Tiles[AnyBatch], scorer: Scorer, upstream: Upstream):
        self.tiles, self.scorer = tiles, scorer
        self.whole_rows = scorer.sums_rows and upstream.of_whole_rows and not tiles.pieced
        dout, lse, delta, _, dlse = upstream
        if self.whole_rows:
            delta = torch.zeros_like(lse) if dlse is None else -dlse.masked_fill(torch.isneginf(lse), 0.0)
        # lists on a GPU: nothing is read back
        blind = tiles.shared and tiles.elsewhere
        # a row that attends nothing has no weights
        lse = torch.where(torch.isneginf(lse), torch.inf, torch.where(lse.isfinite(), lse, torch.nan))
        self.some_unfit = blind or not _finite(lse)
        self.selects = blind or broken(delta)
        if self.whole_rows and not self.selects:
            self.selects = bool(lse.isnan().any()) or not _finite(dout, tiles.v_tiles)
        self.finite_keys = not blind and _finite(tiles.k_tiles)
        # rows of padding have no weights either, however large a term makes their scores
        self.rows = [tiles.by_query(x) for x in (tiles.q, dout, delta[..., None])]
        self.rows.append(tiles.by_query(lse[..., None], torch.inf))
        # unless a function makes them infinite
        self.some_unfit |= scorer.chooses and self.rows[-1].numel() > lse.numel()

    def shares(self, batch: AnyBatch) -> Shares:
        """Compute a batch's shares of the gradients."""
        tiles = self.tiles
        queries, dout, delta, lse = (tiles.taken(x, batch) for x in self.rows)
        if self.some_unfit:
            unfit = ~lse.isfinite()
            queries, dout = queries.masked_fill(unfit, 0.0), dout.masked_fill(unfit, 0.0)
        keys, values = (tiles.gathered(x, batch, True) for x in (tiles.k_tiles, tiles.v_tiles))
        scores, kept, slopes = self.scorer.scores(tiles, batch, tiles.products(queries, keys), True)
        weights = self._weights(batch, scores, lse, slopes is None)
        del scores
        attended = None
        if self.selects or self.scorer.chooses:
            attended = self.scorer.attended(tiles, batch, weights, 0.0)
        dropped = weights if kept is None else weights * kept
        dv = self._of_keys(dropped, dout, batch, attended)
        grad = tiles.product(dout, values.mT)
        if kept is not None:
            grad.mul_(kept)
        self._select(grad, attended)
        if self.whole_rows:
            delta = delta + (grad * weights).sum(-1, keepdim=True)
        self._select(grad.sub_(delta).mul_(weights), attended)
        if self.some_unfit:
            # 0 times an infinite value
            grad.masked_fill_(torch.isposinf(lse), 0.0)
        of_products = grad if slopes is None else slopes(grad, attended)
        if of_products is None:
            return Shares(slopes, dv)
        if not self.finite_keys:
            keys = keys.nan_to_num(0.0, 0.0, 0.0)
        dq = tiles.product(of_products, keys).mul_(tiles.scale)
        return Shares(slopes, dv, dq, tiles.product(of_products.mT, queries))

    def _weights(self, batch: AnyBatch, scores: Tensor, lse: Tensor, owned: bool) -> Tensor:
        """Return the weights of a batch, in place of the scores if they are not needed again."""
        tiles = self.tiles
        if owned:
            weights = scores.sub_(lse)
        else:
            # memory that is reused, where the allocator would return it to the system after each batch
            space = None if tiles.space is None else tiles.space.take(scores.shape, scores.dtype)
            weights = torch.sub(scores, lse, out=space)
        tiles.masked(weights.exp_(), batch, 0.0)
        if self.some_unfit:
            # the query of an empty row is 0 here, and 0 times an infinite key makes its score NaN
            weights.masked_fill_(torch.isposinf(lse), 0.0)
        if self.whole_rows:
            total = weights.sum(-1, keepdim=True)
            weights.div_(total.masked_fill_(~(total > 0), 1.0))
        return weights

    def _of_keys(self, weights: Tensor, dout: Tensor, batch: AnyBatch, attended: Tensor | None) -> Tensor:
        """Return the gradients of values; a query that is not finite reaches only the keys that it attends."""
        if not self.selects or attended is None:
            return self.tiles.product(weights.mT, dout)
        if self.tiles.shared and not self.scorer.chooses:
            return self.tiles.without_dead(self.tiles.product(weights.mT, dout), batch)
        return attended_product(weights.mT, attended.mT.to(weights.dtype), dout)

    def _select(self, grad: Tensor, attended: Tensor | None) -> None:
        """Fill in 0 where pairs are not attended, if a gradient there may not be finite."""
        if self.selects and attended is not None:
            grad.masked_fill_(~attended, 0.0)


def _finite(*tensors: Tensor) -> bool:
    return all(bool(x.isfinite().all()) for x in tensors)
