"""The problems to measure: a pattern at one size, and its inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

import ringweave as rw
from ringweave.call import Call
from ringweave.patterns import Causal, Full, LongNet, Pattern

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward + backward"
#: Directions that are tuned.
DIRECTIONS = (FORWARD, BOTH)
#: (q, k, v) to out.
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
_TILE = 128


class Sample(NamedTuple):
    """The inputs of attention and the gradient of its output: (B, H, N, D) each, k and v with the key heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


@dataclass(frozen=True)
class RandomBlocks:
    """A random block table, reproducible for each length and shared by all heads.

    Attributes:
        density: Share of blocks, made of the diagonal and random blocks; raised if rows would have the diagonal only.
        block_size: Tokens per block.
        chosen: Number of key blocks of each query block, instead of ``density``.
    """

    density: float = 0.1
    block_size: int = _TILE
    chosen: int | None = None

    def pattern(self, tokens: int, device: str = "cpu") -> Pattern:
        """Return the table for a length on a device."""
        if self.chosen is None:
            density = min(1.0, max(self.density, 1.25 * self.block_size / tokens))
            table = rw.patterns.random_blocks(tokens, density, block_size=self.block_size)
            return table if device == "cpu" else rw.BlockTable(table.mask.to(device), self.block_size)
        blocks = -(-tokens // self.block_size)
        generator = torch.Generator().manual_seed(0)
        indices = torch.rand(blocks, blocks, generator=generator).topk(min(self.chosen, blocks)).indices.to(device)
        counts = torch.full((blocks,), indices.shape[1], device=device)
        return rw.BlockTable(indices=indices, counts=counts, key_blocks=blocks, block_size=self.block_size)


@dataclass(frozen=True)
class RandomKeys:
    """Random lists of keys, at most the query's own position, reproducible for each length and shared by all heads.

    Attributes:
        chosen: Number of keys that each query draws; a key that it draws twice counts once.
    """

    chosen: int

    def pattern(self, tokens: int, device: str = "cpu") -> Pattern:
        """Return the lists for a length on a device."""
        drawn = torch.rand(tokens, self.chosen, generator=torch.Generator().manual_seed(0))
        lists = (drawn * torch.arange(1, tokens + 1)[:, None]).int()
        return rw.Selected(lists.to(device)) & Causal()


@dataclass(frozen=True)
class Problem:
    """An attention problem: a pattern with sizes, dtype and device.

    Attributes:
        name: Name of the problem.
        relation: The pattern, or a recipe for a random one.
        tokens: Number of queries and of keys.
        heads: Number of query heads.
        head_dim: Channels of queries, keys and values.
        batch: Number of batch elements.
        dtype: Dtype of the inputs.
        device: Device of the inputs.
        kv_heads: Number of key heads; ``heads`` by default.
    """

    name: str
    relation: Pattern | RandomBlocks | RandomKeys
    tokens: int
    heads: int = 8
    head_dim: int = 64
    batch: int = 1
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    kv_heads: int | None = None

    @functools.cached_property
    def pattern(self) -> Pattern:
        """The pattern."""
        if isinstance(self.relation, Pattern):
            return self.relation
        return self.relation.pattern(self.tokens, self.device)

    @property
    def key_heads(self) -> int:
        """Number of key heads."""
        return self.kv_heads or self.heads

    @property
    def shape(self) -> tuple[object, ...]:
        """Sizes, dtype and device; problems with the same shape have the same inputs."""
        return self.batch, self.heads, self.key_heads, self.tokens, self.head_dim, self.dtype, self.device

    def case(self, needs_grad: bool) -> Call:
        """Return the call to ask backends about."""
        n, dim, kind = self.tokens, self.head_dim, torch.device(self.device).type
        sizes = self.batch, self.heads, self.key_heads, n, n, dim, dim
        return Call(*sizes, self.dtype, kind, needs_grad, pattern=self.pattern)

    def inputs(self, seed: int = 0) -> Sample:
        """Draw normally distributed inputs, since kernels are faster on zeros; on the device, since a CPU is slow."""
        generator = torch.Generator(self.device).manual_seed(seed)
        # on a CPU, draw in float32 and convert, so that all dtypes get the same numbers
        dtype = torch.float32 if self.device == "cpu" else self.dtype
        q, kv = ((self.batch, heads, self.tokens, self.head_dim) for heads in (self.heads, self.key_heads))
        made = (torch.randn(size, generator=generator, device=self.device, dtype=dtype) for size in (q, kv, kv, q))
        return Sample(*(x.to(self.dtype) for x in made))

    @functools.cached_property
    def density(self) -> float:
        """Share of all pairs that the pattern allows."""
        # a random pattern is counted on the host, which draws it, without a copy from the device
        pattern = self.pattern if isinstance(self.relation, Pattern) else self.relation.pattern(self.tokens)
        return pattern.density(self.tokens, heads=self.heads, batch=self.batch)

    def flops(self, direction: str) -> float:
        """Return the floating-point operations on the allowed pairs: two products forward, five backward."""
        products = {FORWARD: 2, BACKWARD: 5, BOTH: 7}[direction]
        return 2 * products * self.density * self.batch * self.heads * self.tokens**2 * self.head_dim

    def nbytes(self, direction: str) -> int:
        """Return the bytes to read and write: each tensor once, regardless of the pattern."""
        rows, keys = self.heads * self.tokens, self.key_heads * self.tokens
        # forward: q, out, k and v; backward reads these and dout, and writes three gradients
        forward, backward = 2 * rows + 2 * keys, 4 * rows + 4 * keys
        count = {FORWARD: forward, BACKWARD: backward, BOTH: forward + backward}[direction]
        return count * self.batch * self.head_dim * self.dtype.itemsize

    @functools.cached_property
    def dense_pattern(self) -> Pattern:
        """The smallest dense pattern that contains this one: causal if no query attends a later key, else full."""
        if not isinstance(self.relation, Pattern):
            # known without a plan of a random pattern, which may be on a GPU
            return Causal() if isinstance(self.relation, RandomKeys) else Full()
        if isinstance(self.pattern, LongNet):
            return Causal() if self.pattern.causal else Full()
        later = self.pattern & ~Causal()
        return Full() if later.plan(self.tokens, heads=self.heads, batch=self.batch).nnz else Causal()
