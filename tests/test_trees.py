"""A prompt and its completions, packed as a tree, have the results of separate rows; aligned nodes have their bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ringweave as rw
from ringweave.patterns import Pattern
from ringweave.trees import Packed


def rows_of(packed: Packed, x: Tensor) -> list[list[Tensor]]:
    """Return q, k and v (1, heads, tokens, dim) of each path, from embeddings (N, 3, heads, dim)."""
    return [list(row.permute(1, 2, 0, 3)[:, None]) for row in rw.trees.unpack(x, packed)]


@pytest.mark.parametrize("align", [None, False, True, 16, 5])
@pytest.mark.parametrize("lengths", [(3, [4, 0, 5]), (0, [3, 2]), (16, [16, 1]), (128, [128, 256]), (300, [7])])
def test_unpacking_is_the_inverse(lengths: tuple[int, list[int]], align: bool | int | None) -> None:
    prompt, completions = torch.randn(lengths[0], 2), [torch.randn(n, 2) for n in lengths[1]]
    packed = rw.trees.pack(prompt, completions, align=align)
    for row, completion in zip(rw.trees.unpack(packed.tokens, packed), completions, strict=True):
        assert torch.equal(row, torch.cat([prompt, completion]))
    for tokens in packed.paths:
        assert torch.equal(packed.tree.positions()[tokens], torch.arange(len(tokens)))
        assert torch.equal(
            packed.tree.to_dense(len(packed.tokens))[0, 0][tokens][:, tokens], rw.Causal().to_dense(len(tokens))[0, 0]
        )
    side = 128 if align is True else align or 1
    starts = packed.tree.lengths.cumsum(0) - packed.tree.lengths
    # the gaps are roots
    assert not (starts[packed.tree.parents == 0] % side).any()
    if side == 1:
        assert len(packed.tokens) == lengths[0] + sum(lengths[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "pattern", [rw.Causal(), (rw.SlidingWindow(200) | rw.Sinks(4)) & rw.Causal(), rw.Segments(300) & rw.Causal()]
)
@pytest.mark.parametrize("lengths", [(300, [50, 200, 129]), (100, [20, 300]), (2500, [10, 700])])
def test_aligned_nodes_have_the_bits_of_their_paths(
    lengths: tuple[int, list[int]], pattern: Pattern, dtype: torch.dtype
) -> None:
    """Output and lse of each path, with align=True on the cpu backend, equal those of the path alone."""
    prompt, *completions = (torch.randn(n, 3, 2, 16).to(dtype) for n in (lengths[0], *lengths[1]))
    packed = rw.trees.pack(prompt, completions, align=True)
    q, k, v = packed.tokens.permute(1, 2, 0, 3)[:, None]
    got = rw.attention_with_lse(q, k, v, pattern.within(packed.tree), backend="cpu")
    parts = [rw.trees.unpack(each, packed, dim=2) for each in got]
    for out, lse, alone in zip(*parts, rows_of(packed, packed.tokens), strict=True):
        want = rw.attention_with_lse(*alone, pattern, backend="cpu")
        assert torch.equal(out, want.out)
        assert torch.equal(lse, want.lse)


def test_without_alignment_the_bits_differ() -> None:
    """The test above would find a difference: nodes that begin inside of tiles have other sums."""
    prompt, completion = torch.randn(300, 3, 2, 16), torch.randn(200, 3, 2, 16)
    packed = rw.trees.pack(prompt, [completion[:50], completion])
    q, k, v = packed.tokens.permute(1, 2, 0, 3)[:, None]
    out = rw.trees.unpack(rw.attention(q, k, v, packed.tree, backend="cpu"), packed, dim=2)[1]
    want = rw.attention(*rows_of(packed, packed.tokens)[1], rw.Causal(), backend="cpu")
    torch.testing.assert_close(out, want)
    assert not torch.equal(out, want)


@pytest.mark.parametrize("align", [None, True])
def test_losses_and_gradients_are_those_of_separate_rows(align: bool | None) -> None:
    """A step over the tree has the losses of separate rows, and the gradients of weights and of tokens."""
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(50, 32)
    layer = rw.nn.MultiheadAttention(32, 4, pattern=rw.Causal(), rotary_base=1e4, batch_first=True)
    prompt, completions = torch.randint(50, (150,)), [torch.randint(50, (n,)) for n in (40, 7, 90)]
    packed = rw.trees.pack(prompt, completions, align=align)
    parameters = [embedding.weight, *layer.parameters()]
    weights = [torch.randn(150 + len(each), 32) for each in completions]

    x = embedding(packed.tokens)[None]
    out = layer(x, x, x, attn_mask=packed.tree, positions=packed.tree.positions())[0]
    losses = [(row[0] * w).sum() for row, w in zip(rw.trees.unpack(out, packed, dim=1), weights, strict=True)]
    got = torch.autograd.grad(torch.stack(losses).sum(), parameters)

    separate = []
    for completion, w in zip(completions, weights, strict=True):
        x = embedding(torch.cat([prompt, completion]))[None]
        separate.append((layer(x, x, x)[0][0] * w).sum())
    torch.testing.assert_close(losses, separate)
    torch.testing.assert_close(got, torch.autograd.grad(torch.stack(separate).sum(), parameters))
