"""Attention of DTensors whose heads, or batch elements, lie on several ranks: each computes its own, nothing is moved.

Heads and batch elements do not meet in attention, so a sharding by them is the result's too. What belongs to a head,
its pattern, its part of a table, its learned sink, is taken along; what could not be is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..call import PER_HEAD, Arguments
from ..errors import PatternError, ShapeError, UnsupportedError, message
from ..patterns import Pattern
from ..patterns.validate import refuse
from ..terms import Term, as_terms
from ..validate import check_sinks, check_tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

BATCH, HEADS = 0, 1


def attend_sharded(attend: Callable[[Arguments], tuple[Tensor, Any]], given: Arguments) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of DTensors, sharded as q is, by ``attend`` on each rank's part.

    Raises:
        ShapeError: Tensors that do not fit each other, or are sharded otherwise than q, or unevenly.
        PatternError: A pattern that differs by what is sharded, and cannot be taken apart.
        UnsupportedError: A sharding of tokens or channels, or dropout on several ranks.
    """
    from torch.distributed.tensor import DTensor

    q, k, v, pattern = given[:4]
    terms = as_terms(given.terms)
    if not isinstance(pattern, Pattern):
        refuse(pattern)
    inputs: list[DTensor] = []
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, DTensor):
            raise ShapeError(message(name, type(x).__name__, "a DTensor, as q, k or v is", "Distribute all three."))
        inputs.append(x)
        if (x.device_mesh, x.placements) != (inputs[0].device_mesh, inputs[0].placements):
            wanted = f"{inputs[0].placements} of one mesh, as q"
            remedy = f"Redistribute {name}: .redistribute(placements=q.placements)."
            raise ShapeError(message(f"{name} placements", f"{x.placements} of {x.device_mesh}", wanted, remedy))
    check_tensors(q, k, v)
    # of all heads: a rank's part of a table for fewer may fit by chance
    context = given.context
    nq, nk = (q.shape[2], k.shape[2]) if context is None else (context.seq_len, context.seq_len)
    for term in terms:
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
                raise ShapeError(message(f"{name} {what}", x.shape[dim], wanted, "Take fewer ranks."))
    if given.dropout and mesh.size() > 1:
        # ranks that all have the whole would drop different pairs of it
        remedy = "Call it on local tensors, .to_local(), with a generator for each rank."
        raise UnsupportedError(message("dropout", given.dropout, "0 with DTensors on several ranks", remedy))
    if parts.count(BATCH) > 1 and (pattern.extents()[0] is not None or pattern.select(0, 0) != pattern.select(1, 0)):
        wanted = "one for all batch elements where ranks share them"
        remedy = "Call it on local tensors, .to_local(), with the pattern of this rank's elements."
        raise PatternError(message("pattern", repr(pattern), wanted, remedy))
    for name, value in given._asdict().items():
        other = name not in ("q", "k", "v", *PER_HEAD)
        if other and isinstance(value, Tensor) and value.numel() > 1 and parts.count(BATCH) > 1:
            wanted = "one number where ranks share the batch"
            raise UnsupportedError(message(name, f"a tensor of {value.numel()}", wanted, "Call it on local tensors."))
    mine: dict[str, Any] = {name: x.to_local() for name, x in zip("qkv", inputs, strict=True)}
    for name in PER_HEAD:
        value = getattr(given, name)
        mine[name] = None if value is None else parts.of(value, {HEADS: 0})
    of_heads = pattern.shard(parts.rank(HEADS), parts.count(HEADS), q.shape[1])
    local = given._replace(**mine, pattern=of_heads, terms=[parts.of_term(term) for term in terms])
    out, lse = attend(local)
    whole = [DTensor.from_local(x, mesh, placements, run_check=False) for x in (out, lse)]
    return whole[0], whole[1]


class _Parts:
    """Which part of the batch and of the heads this rank has."""

    def __init__(self, mesh: DeviceMesh, placements: Sequence[Placement]):
        self.mesh, self.placements = mesh, placements
        self._by: dict[int, int] = {}
        for axis, placement in enumerate(placements):
            if placement.is_replicate():
                continue
            # BATCH and HEADS; a subclass of Shard lays its parts out otherwise
            dim = getattr(placement, "dim", None)
            if type(placement).__name__ != "Shard" or dim not in (BATCH, HEADS) or dim in self._by:
                wanted = "Replicate(), Shard(0) (batch) or Shard(1) (heads), each once"
                remedy = "Share a sequence with a ContextParallel, channels not at all."
                raise UnsupportedError(message("placements", str(placements), wanted, remedy))
            self._by[dim] = axis

    def count(self, dim: int) -> int:
        """How many ranks share batch or heads."""
        return self.mesh.size(self._by[dim]) if dim in self._by else 1

    def rank(self, dim: int) -> int:
        """Which of them this rank is."""
        return self.mesh.get_local_rank(self._by[dim]) if dim in self._by else 0

    def of_term(self, term: Term) -> Term:
        """Take its part of a term's table."""
        if not term.tables:
            return term
        axes = [axis.along for axis in term.axes]
        dims = {dim: axes.index(along) for dim, along in ((BATCH, "batch"), (HEADS, "heads")) if along in axes}
        return term.over(self.of(term.tables[0], dims))

    def of(self, x: Tensor, dims: dict[int, int]) -> Tensor:
        """Take the rank's part of a tensor whose dimensions of batch and heads are named; 1 stands for all."""
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

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
