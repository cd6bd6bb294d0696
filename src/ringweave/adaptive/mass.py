"""The exact attention mass of every tile of a plan, in one pass over the tiles and memory linear in their number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..axes import Axes
from ..backends import BACKENDS
from ..backends.backend import readable
from ..call import Arguments, Operands, term_operands
from ..checks import one_of
from ..errors import PatternError, UnsupportedError
from ..patterns import LongNet, Pattern
from ..plan import BlockPlan, Branch, plan
from ..terms import Term
from ..torch_compat import mapped, wrapped
from ..types import acc_dtype
from ..validate import autocast, checked
from ..weights import in_places, places

_LSE = Axes("lse: acc[B Hq Nq]")
_PER = ("tile", "row")
_BACKENDS = ("auto", "cpu", "dense_batched")


@dataclass(frozen=True, eq=False)
class TileMass:
    """The attention mass of a plan's tiles.

    Attributes:
        plan: Plan with the tiles.
        values: Masses, (T,) per tile or (T, q_tile) per row, float32 (float64 for float64). They are ordered by batch
            element, then head, then the plan's row order; rows past the last query hold 0.
        first: (B, Hq) int64, index in ``values`` of the first tile of each batch element and head.
    Example:
        >>> lse = rw.attention_with_lse(q, k, v, rw.Causal()).lse
        >>> mass = rw.adaptive.tile_mass(q, k, lse, rw.Causal())
        >>> pair, row, column = mass.tiles()
        >>> per_row = torch.zeros(4, mass.plan.q_tiles).index_put((pair, row), mass.values, accumulate=True)
        >>> torch.testing.assert_close(per_row, torch.full((4, 2), 128.0))
    """

    plan: BlockPlan
    values: Tensor
    first: Tensor

    def tiles(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return b * Hq + h, query tile and key tile of each entry of ``values``; int64 (T,) each."""
        return places(self.plan, self.first)

    def by_tile(self) -> Tensor:
        """Return the mass of each tile, (T,): sums per-row values over the queries of the tile."""
        return self.values if self.values.ndim == 1 else self.values.sum(1)

    def to_dense(self) -> Tensor:
        """Return a dense tensor (B, Hq, query tiles, key tiles), or (B, Hq, Nq, key tiles) per row; for small sizes."""
        dense = in_places(self.values, self.plan, self.first)
        return dense if dense.ndim == 4 else dense.transpose(3, 4).flatten(2, 3)[:, :, : self.plan.nq]


def tile_mass(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    pattern: Pattern,
    *,
    per: str = "tile",
    scale: float | None = None,
    q_offset: int | Tensor = 0,
    k_offset: int | Tensor = 0,
    terms: Term | Sequence[Term] | None = (),
    tile: int | tuple[int, int] | None = None,
    backend: str = "auto",
) -> TileMass:
    """Sum the attention weights in each non-empty tile of a pattern; no gradient.

    ``mass[t] = sum_(i, j in t) exp(scale * <q[i], k[j]> - lse[i])`` over the allowed pairs. With the lse of the same
    pattern, the masses of a query sum to 1. With the lse of a denser attention, they sum to the share of it that the
    pattern keeps, its recall. The cost is one product per pair; values are not read. Memory is one number per tile, or
    one per row of each tile. Under autocast, queries and keys are rounded as in attention.

    Args:
        q: Queries, (B, Hq, Nq, D).
        k: Keys, (B, Hkv, Nk, D).
        lse: Log-sum-exp, (B, Hq, Nq), from :func:`ringweave.attention_with_lse`; a row of -inf holds 0.
        pattern: A relation, not a LongNet.
        per: ``"tile"`` for one mass per tile, ``"row"`` for one per query of each tile.
        scale: Factor of the scores; 1 / sqrt(D) by default.
        q_offset: Position of the first query; an int, or an integer tensor () or (B,).
        k_offset: Position of the first key, in the same forms.
        terms: Score terms that lse was computed with.
        tile: Side of a tile, or (queries, keys); multiples of 16. None: the tile of :func:`ringweave.plan`.
        backend: ``"cpu"`` (the native kernel: CPU tensors of up to 32 bits, no terms), ``"dense_batched"``, or
            ``"auto"``, the first of these that can run the case.
    Returns:
        The masses and their plan.
    Raises:
        ShapeError: Shapes, dtypes or devices do not fit.
        PatternError: The pattern does not fit the call, or is a LongNet.
        UnsupportedError: The named backend cannot run the case, or tile_mass is called inside torch.vmap.
    Example:
        >>> out, lse = rw.attention_with_lse(q, k, v, rw.Causal())
        >>> kept = rw.adaptive.tile_mass(q, k, lse, rw.SlidingWindow(63) & rw.Causal(), per="row")
        >>> recall = kept.to_dense().sum(-1)
        >>> recall.shape, bool((recall[:, :, :64] > 0.999).all())
        (torch.Size([1, 4, 256]), True)
    """
    one_of("per", per, _PER)
    one_of("backend", backend, _BACKENDS)
    # as attention, which lse comes from
    q, k = autocast(q, k)
    given = checked(Arguments(q, k, k, pattern, scale, q_offset, "dense_batched", k_offset, terms=terms))
    call, terms = given.call, given.terms
    pattern, q_offset = call.pattern, call.q_offset
    if isinstance(pattern, LongNet):
        got = repr(pattern)
        raise PatternError("pattern", got, "a relation", "Ask for the mass of one branch's relation.")
    acc = acc_dtype(q.dtype)
    batch, heads, nq, _ = q.shape
    remedy = "Pass the lse of attention_with_lse."
    _LSE.fit(lse=lse, acc=acc, B=batch, Hq=heads, Nq=nq, device=q.device, remedy=remedy)
    if any(mapped(x) for x in (q, k, lse)):
        wanted = "ordinary tensors"
        raise UnsupportedError("tile_mass", "tensors inside of torch.vmap", wanted, "Call it without vmap.")
    p = plan(pattern, nq, k.shape[2], heads=heads, batch=batch, q_offset=q_offset, tile=tile, device=q.device)
    of_terms = term_operands(call, (nq, k.shape[2]), q.device, call.by_field(given.tensors))
    inputs = Operands(readable(q), readable(k), readable(k), call.scale, of_terms)
    cpu, dense_batched = BACKENDS["cpu"], BACKENDS["dense_batched"]
    reason = cpu.unsupported_reason(
        inputs.call(), Branch.whole(pattern, nq, k.shape[2], heads=heads, batch=batch, q_offset=q_offset)
    )
    if reason is None and terms:
        reason = "it computes no masses of scores with terms"
    if reason is None and any(wrapped(x) for x in (q, k, lse)):
        reason = "it cannot read tensors of a torch.func transform"
    if backend == "cpu" and reason is not None:
        wanted = f"a case that it can run, but {reason}"
        raise UnsupportedError("backend", "'cpu'", wanted, "Use backend='auto' or 'dense_batched'.")
    chosen = dense_batched if reason is not None or backend == "dense_batched" else cpu
    assert chosen.mass is not None
    with torch.autocast(q.device.type, enabled=False):
        return TileMass(p, chosen.mass(inputs, lse.detach(), p, per == "row"), p.first_tiles())
