"""The pairs of a mask function and of a relation, by their definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from ringweave.trace.evaluate import evaluated
from ringweave.trace.graph import Graph
from ringweave.trace.relation import And, Distances, Equal, Lookup, Member, Not, Open, Or, Order, Relation, Side
from ringweave.types import Place


def by_pair(function: Callable[..., Any], place: Place) -> Tensor:
    """Call a mask function for every pair, with 0-dim indices under vmap, as FlexAttention does."""
    q0, k0, h0 = place.q0, place.k0, place.h0
    # FlexAttention takes no number for a mask, and a function of neither index is the same for all pairs
    return create_mask(
        lambda b, h, q, k: torch.as_tensor(function(b, h + h0, q + q0, k + k0)), *place[:4], device="cpu"
    )


def dense(x: Relation, place: Place) -> Tensor:
    """Return the pairs of a relation as (B or 1, H or 1, Nq or 1, Nk or 1) bool."""
    match x:
        case Distances(runs):
            distance = (torch.arange(place.nq)[:, None] + place.q0) - (torch.arange(place.nk) + place.k0)
            inside = [(distance >= least) & (distance <= most) for least, most in runs]
            return torch.stack([torch.zeros_like(distance, dtype=torch.bool), *inside]).any(0)[None, None]
        case Side(table):
            return table
        case Order(u, v):
            return u <= v
        case Equal(u, v, _):
            return u == v
        case Lookup(table, at):
            return table[torch.broadcast_tensors(*at)]
        case Member(rows, v):
            return (rows == v[..., None]).any(-1)
        case Open(node, graph):
            at = {
                n: v.reshape([-1 if i == j else 1 for j in range(4)])
                for i, (n, v) in enumerate(place.lengths().items())
            }
            return evaluated(Graph(graph.nodes, node, graph.tensors, None), at)
        case Not(part):
            return ~dense(part, place)
        case And(parts) | Or(parts):
            joined = torch.broadcast_tensors(*(dense(part, place) for part in parts))
            return torch.stack(joined).all(0) if isinstance(x, And) else torch.stack(joined).any(0)
