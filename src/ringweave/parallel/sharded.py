"""Attention of DTensors sharded by heads or batch: each rank computes its part, without communication.

Attention treats heads and batch elements independently, so the result is sharded as q is. Each rank takes the patterns,
table slices and learned sinks of its heads; arguments that cannot be sliced raise an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ..call import PER_HEAD, Arguments
from ..errors import PatternError, ShapeError, UnsupportedError
from ..patterns import Pattern
from ..patterns.fitting import refuse
from ..terms import Term
from ..terms.term import ScoreMod, as_listed
from ..validate import check_sinks, check_tensors

BATCH, HEADS = 0, 1


def attend_sharded(attend: Callable[[Arguments], tuple[Tensor, Any]], given: Arguments) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of DTensors by calling ``attend`` on each rank's local part; the results are sharded as q is.

    Raises:
        ShapeError: The tensors do not fit each other, their sharding differs from q's, or the parts are uneven.
        PatternError: The pattern differs between the sharded heads or batch elements and cannot be split.
        UnsupportedError: Tokens or channels are sharded, or dropout is used on several ranks.
    """
    q, k, v, pattern = given[:4]
    terms = as_listed(given.terms)
    if not isinstance(pattern, Pattern):
        refuse(pattern)
    inputs: list[DTensor] = []
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, DTensor):
            raise ShapeError(name, type(x).__name__, "a DTensor, like q, k or v", "Distribute all three.")
        inputs.append(x)
        if (x.device_mesh, x.placements) != (inputs[0].device_mesh, inputs[0].placements):
            wanted = f"{inputs[0].placements} on the same mesh, as q"
            remedy = f"Redistribute {name}: .redistribute(placements=q.placements)."
            raise ShapeError(f"{name} placements", f"{x.placements} on {x.device_mesh}", wanted, remedy)
    check_tensors(q, k, v)
    # Check terms against all heads: a slice of a table with too few heads could fit the local heads by chance.
    context = given.context
    nq, nk = (q.shape[2], k.shape[2]) if context is None else (context.seq_len, context.seq_len)
    for term in terms:
        if isinstance(term, Term):
            term.check(q.shape[0], q.shape[1], nq, nk, q.device)
    if given.sink_logits is not None:
        check_sinks(given.sink_logits, q)
    pattern = pattern.bound(q.shape[1], k.shape[1])
    mesh, placements = inputs[0].device_mesh, inputs[0].placements
    parts = _Parts(mesh, placements)
    for name, x in (("q", q), ("k", k), ("v", v)):
        for dim, what in ((BATCH, "batch elements"), (HEADS, "heads")):
            if x.shape[dim] % parts.count(dim):
                wanted = f"a multiple of the {parts.count(dim)} ranks that share them"
                raise ShapeError(f"{name} {what}", x.shape[dim], wanted, "Use fewer ranks.")
    if given.dropout and mesh.size() > 1:
        # Ranks that replicate a part would drop different pairs of it.
        remedy = "Call attention on local tensors, .to_local(), with a generator for each rank."
        raise UnsupportedError("dropout", given.dropout, "0 with DTensors on several ranks", remedy)
    if parts.count(BATCH) > 1 and _by_batch(pattern, q.shape[1]):
        wanted = "one pattern for all batch elements if ranks share the batch"
        remedy = "Call attention on local tensors, .to_local(), with the pattern of this rank's elements."
        raise PatternError("pattern", repr(pattern), wanted, remedy)
    for name, value in given._asdict().items():
        other = name not in ("q", "k", "v", *PER_HEAD)
        if other and isinstance(value, Tensor) and value.numel() > 1 and parts.count(BATCH) > 1:
            wanted = "one number if ranks share the batch"
            raise UnsupportedError(name, f"a tensor of {value.numel()}", wanted, "Pass local tensors.")
    mine: dict[str, Any] = {name: x.to_local() for name, x in zip("qkv", inputs, strict=True)}
    for name in PER_HEAD:
        value = getattr(given, name)
        mine[name] = None if value is None else parts.of(value, {HEADS: 0})
    of_heads = pattern.shard(parts.rank(HEADS), parts.count(HEADS), q.shape[1])
    own = [parts.of_term(x) if isinstance(x, Term) else parts.of_function(x, mine["q"]) for x in terms]
    local = given._replace(**mine, pattern=of_heads, terms=own)
    out, lse = attend(local)
    whole = [DTensor.from_local(x, mesh, placements, run_check=False) for x in (out, lse)]
    return whole[0], whole[1]


def _by_batch(pattern: Pattern, heads: int) -> bool:
    """Return whether a pattern may differ between batch elements in one of its heads."""
    if pattern.extents()[0] is not None:
        return True
    # extents do not say whether a function uses the batch index
    return pattern.has_function and any(pattern.select(0, h) != pattern.select(1, h) for h in range(heads))


class _Parts:
    """The slices of batch and heads that this rank holds."""

    def __init__(self, mesh: DeviceMesh, placements: Sequence[Placement]):
        self.mesh, self.placements = mesh, placements
        self._by: dict[int, int] = {}
        for axis, placement in enumerate(placements):
            if placement.is_replicate():
                continue
            # Only plain Shard is accepted, because a subclass of it lays its parts out differently.
            dim = getattr(placement, "dim", None)
            if type(placement).__name__ != "Shard" or dim not in (BATCH, HEADS) or dim in self._by:
                wanted = "Replicate(), Shard(0) (batch) or Shard(1) (heads), each once"
                remedy = "Use a ContextParallel to shard the sequence; channels cannot be sharded."
                raise UnsupportedError("placements", str(placements), wanted, remedy)
            self._by[dim] = axis

    def count(self, dim: int) -> int:
        """Return the number of ranks that share dimension ``dim`` (batch or heads)."""
        return self.mesh.size(self._by[dim]) if dim in self._by else 1

    def rank(self, dim: int) -> int:
        """Return this rank's index among them."""
        return self.mesh.get_local_rank(self._by[dim]) if dim in self._by else 0

    def of_term(self, term: Term) -> Term:
        """Return a term with this rank's slice of its tables."""
        tables = []
        for table, axes in zip(term.tables, term.axes.values(), strict=True):
            along = [axis.along for axis in axes]
            dims = {dim: along.index(name) for dim, name in ((BATCH, "batch"), (HEADS, "heads")) if name in along}
            tables.append(self.of(table, dims))
        return term.over(*tables) if tables else term

    def of_function(self, function: ScoreMod, q: Tensor) -> ScoreMod:
        """Return a function of this rank's batch elements and heads, for its queries, from one of the whole call's."""
        first_b, first_h = (self.rank(dim) * q.shape[dim] for dim in (BATCH, HEADS))
        if not (first_b or first_h):
            return function
        return lambda score, b, h, i, j: function(score, b + first_b, h + first_h, i, j)

    def of(self, x: Tensor, dims: dict[int, int]) -> Tensor:
        """Return this rank's slice of x; ``dims`` maps BATCH and HEADS to dimensions of x. A size of 1 broadcasts."""
        shared = {dim: at for dim, at in dims.items() if at < x.ndim and x.shape[at] > 1 and dim in self._by}
        if isinstance(x, DTensor):
            at = {self._by[dim]: Shard(place) for dim, place in shared.items()}
            wanted = [at.get(axis, Replicate()) for axis in range(len(self.placements))]
            grads = [
                Partial() if isinstance(one, Replicate) and not of_q.is_replicate() else one
                for one, of_q in zip(wanted, self.placements, strict=True)
            ]
            return x.redistribute(self.mesh, wanted).to_local(grad_placements=grads)
        for dim, place in shared.items():
            size = x.shape[place] // self.count(dim)
            x = x.narrow(place, self.rank(dim) * size, size)
        return x
