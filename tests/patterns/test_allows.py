"""``Pattern.allows`` in compiled code: a pattern of single zones is traced, with no break of the graph."""

from __future__ import annotations

import pytest
import torch

import ringweave as rw
from ringweave import patterns

N = 40
PATTERNS = [
    rw.Full(),
    rw.Causal(),
    rw.SlidingWindow(5) & rw.Causal(),
    rw.Sinks(3) | rw.SlidingWindow(4, 2),
    rw.Sinks(0) | rw.Causal(),
    ~rw.Strided(3) & rw.Causal(),
    rw.Global(2) | rw.Dilated(3, 4),
    ~rw.Segments(7) | patterns.Periodic(8, 2, 5),
    rw.PrefixLM(4),
    patterns.sparse_transformer_fixed(8, 2),
    patterns.longformer(8),
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_patterns_of_single_zones_are_traced(pattern: rw.Pattern) -> None:
    torch.compiler.reset()
    place = torch.arange(N)
    compiled = torch.compile(pattern.allows, fullgraph=True, backend="eager")
    assert torch.equal(compiled(place[:, None], place), pattern.to_dense(N)[0, 0])


@pytest.mark.parametrize("pattern", [rw.Sinks([1, 9]), patterns.Neighborhood(7, 2, tokens=N)], ids=repr)
def test_lists_of_zones_break_the_graph(pattern: rw.Pattern) -> None:
    torch.compiler.reset()
    place = torch.arange(N)
    compiled = torch.compile(pattern.allows, backend="eager")
    assert torch.equal(compiled(place[:, None], place), pattern.to_dense(N)[0, 0])
