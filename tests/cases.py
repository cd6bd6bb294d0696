"""Patterns that tests are parametrised over, for any length: all kinds of the semantics' table, and expressions of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

import ringweave as rw
from ringweave.patterns import Pattern
from ringweave.patterns.declared import DECLARED
from ringweave.patterns.traced import of_graph
from ringweave.trace.symbols import trace
from ringweave.types import Place


def _not_future(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q >= k) & ((q + k) % 3 != 0)


def _by_head(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q - k).abs() <= 5 * (h + 1)


def _documents(n: int) -> Pattern:
    lengths = []
    while sum(lengths) < n:
        lengths.append(min(1 + 37 * len(lengths), n - sum(lengths)))
    return rw.Documents(lengths)


def _tree(n: int) -> Pattern:
    """Return a tree with an empty node, a chain, and children that do not follow their parents."""
    parents, lengths = [-1, 0, 0, 1, 2, 2, -1], [n // 3, n // 9, 0, n // 9, n // 5, n // 7]
    return rw.Tree(parents, [*lengths, n - sum(lengths)])


def _image(n: int) -> rw.Grid:
    """Return a grid as square as the number of tokens allows, with boxes that do not divide it."""
    height = max(h for h in range(1, math.isqrt(n) + 1) if n % h == 0)
    return rw.Grid((height, n // height), (3, 7))


def _chosen(n: int, most: int, block_size: int = 1, lead: tuple[int, ...] = ()) -> torch.Tensor:
    """Return lists of at most ``most`` blocks for each of ``n`` queries, with pads and repeats."""
    generator = torch.Generator("cpu").manual_seed(n)
    return torch.randint(-1, -(-n // block_size), (*lead, n, most), generator=generator, device="cpu")


def _compared(n: int) -> Pattern:
    """Return tables of zones: bands of distances, and queries with several runs of keys or none."""
    at = torch.arange(n, device="cpu")
    least, most, value, marked = at - 40, at.clamp(min=n // 3), at * 5 // 3 % 70, at % 90 > 4

    def function(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return marked[q] & (least[q] <= k) & (k <= most[q]) | (value[k] <= 3 * (q // 32) - 5)

    pattern = of_graph(trace(function), Place(1, 1, n, n))
    assert pattern is not None
    return pattern


#: name -> pattern for a length; each works with four heads and any batch
PATTERNS: dict[str, Callable[[int], Pattern]] = {
    "full": lambda n: rw.Full(),
    "nothing": lambda n: ~rw.Full(),
    "causal": lambda n: rw.Causal(),
    "future": lambda n: ~rw.Causal(),
    "window": lambda n: rw.SlidingWindow(40, 10),
    "global": lambda n: rw.SlidingWindow(20) | rw.Global(sorted({0, n // 2})),
    "sinks": lambda n: (rw.SlidingWindow(64) | rw.Sinks(3)) & rw.Causal(),
    "segments": lambda n: rw.Segments(50),
    "dilated": lambda n: rw.Dilated(5, 4),
    "window_and_dilated": lambda n: rw.SlidingWindow(20, 20) | rw.Dilated(8, 16),
    "strided": lambda n: rw.Strided(7) & rw.Causal(),
    "far_strided": lambda n: rw.Strided(300),
    "documents": _documents,
    "documents_by_ids": lambda n: rw.Documents(ids=torch.arange(n, device="cpu") * 7 // 150 - 1),
    "documents_in_pieces": lambda n: rw.Documents(ids=torch.arange(n, device="cpu") // 31 % 3),
    "keys": lambda n: rw.KeyPadding(n - n // 4, n // 3) & rw.Causal(),
    "within_documents": lambda n: ((rw.SlidingWindow(20) | rw.Sinks(3)) & rw.Causal()).within(_documents(n)),
    "within_keys": lambda n: (rw.Dilated(5, 4) | rw.Global([2])).within(rw.KeyPadding(n, n // 5)),
    "token_tree": _tree,
    "within_token_tree": lambda n: (rw.SlidingWindow(20) | rw.Sinks(3) | ~rw.Strided(3)).within(_tree(n)),
    "causal_documents": lambda n: _documents(n) & rw.Causal(),
    "prefix": lambda n: rw.PrefixLM(33),
    "periodic": lambda n: rw.patterns.Periodic(50, 10, 13) & rw.Causal(),
    "table": lambda n: rw.patterns.random_blocks(n, 0.6, block_size=48),
    "table_per_head": lambda n: rw.patterns.random_blocks(n, 0.6, block_size=32, heads=4),
    "selected": lambda n: rw.Selected(_chosen(n, 9)),
    "selected_per_head": lambda n: rw.Selected(_chosen(n, 3, 20, (4,)), 20) & ~rw.Strided(3),
    "selected_blocks": lambda n: rw.Selected(_chosen(n, 3, 16), 16) & rw.Causal() | rw.SlidingWindow(9) & rw.Causal(),
    "function": lambda n: rw.from_mask_mod(_not_future),
    "function_per_head": lambda n: rw.from_mask_mod(_by_head) & ~rw.Segments(70),
    "per_head": lambda n: rw.PerHead([rw.Causal(), rw.SlidingWindow(9), ~rw.Causal(), rw.Causal()]),
    "longformer": lambda n: rw.patterns.longformer(30, [token for token in (1, 9) if token < n], causal=True),
    "bigbird": lambda n: rw.patterns.bigbird(n, window=20, global_tokens=5, random=2, block_size=32),
    "fixed": lambda n: rw.patterns.sparse_transformer_fixed(50, 7),
    "variable": lambda n: rw.patterns.variable(n, local_blocks=(1, 2), block_size=32, random=1),
    "local_global": lambda n: rw.patterns.local_global(20, 37),
    "dilated_blocks": lambda n: rw.patterns.dilated_blocks(3, [1, 4, 16]),
    "natten": lambda n: rw.patterns.natten_1d(9, 3, tokens=n),
    "compared": _compared,
    "compared_and_causal": lambda n: _compared(n) & rw.Causal() | ~_compared(n) & rw.Strided(7),
    "image": lambda n: rw.GridNeighborhood(_image(n), [min(3, side) for side in _image(n).shape], causal=(False, True)),
    "tree": lambda n: (rw.Causal() | rw.Strided(5)) & ~rw.Segments(70) | ~(rw.SlidingWindow(99) | rw.Sinks(4)),
}

#: Patterns without a case: those that methods make, mixtures, and those with test files of their own.
ELSEWHERE = {"Within", "LongNet", "GridWindows", "Neighborhood", "TokenMask", "BlockTable"}
#: Pattern names in the cases above.
NAMED = {name for make in (*PATTERNS.values(), _documents, _tree) for name in make.__code__.co_names}
# a declared pattern without a case uses its example, which must then work at any length
PATTERNS |= {
    name: functools.partial(lambda example, n: rw.patterns.parse(example), known.example)
    for name, known in DECLARED.items()
    if name not in NAMED | ELSEWHERE
}

#: patterns on which terms that count distances are refused
TREES = {"token_tree", "within_token_tree"}

#: mixtures, in which a key may count several times; four heads
MIXTURES: dict[str, Callable[[int], Pattern]] = {
    "longnet": lambda n: rw.LongNet([32, 128], [1, 4]),
    "longnet_causal": lambda n: rw.LongNet([32, 128, 512], [1, 2, 8], causal=True, offset="grouped"),
    "longnet_partitioned": lambda n: rw.LongNet([32, 96, 128], [1, 3, 4], heads="partitioned", offset=1),
}

#: ways to lay tensors (2, H, N, D) out in memory, some of which contain other numbers
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as they lie": lambda x: x,
    "heads last": lambda x: x.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1),
    "channels apart": lambda x: x.mT.contiguous().mT,
    "every other token": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "every third channel": lambda x: x.repeat_interleave(3, 3)[..., ::3],
    "odd offset": lambda x: torch.cat([torch.randn(3, dtype=x.dtype), x.flatten()])[3:].view(x.shape),
    "a lazy negation": lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag if x.dtype == torch.float32 else x,
    "one element for all": lambda x: x[:1].expand(x.shape),
    "one channel": lambda x: x[..., :1].expand(x.shape),
    "one token": lambda x: x[:, :, :1].expand(x.shape),
    "overlapping": lambda x: torch.randn(x[0].numel(), dtype=x.dtype).as_strided(x.shape, (0, x.shape[2], 1, 1)),
    "tokens before heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
}
