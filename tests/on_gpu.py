"""Helpers of tests on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from .cases import MIXTURES, PATTERNS

DEVICE = "cuda"
EVERYTHING = PATTERNS | MIXTURES
T = TypeVar("T")


def captured(step: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Capture a step into a CUDA graph, after warming up on a side stream; return the graph and the tensors that a replay writes."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results
