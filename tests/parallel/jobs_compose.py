"""Jobs of test_compose: a model with one context for all layers, under the usual wrappers, against one process."""

from __future__ import annotations

from typing import Any

import torch
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ringweave as rw

from .processes import ring_mesh

# odd, so that no number of ranks and no tile divides it, and there is padding
TOKENS, BATCH, WORDS, WIDTH, HEADS = 203, 2, 64, 32, (4, 2)
WINDOW = rw.SlidingWindow(24) & rw.Causal()
WIDE = (rw.SlidingWindow(12) | rw.Global([0, 1, 150])) & rw.Causal()


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angle = positions[:, None] * torch.logspace(0, -3, half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Layer(nn.Module):
    def __init__(self, pattern: rw.Pattern, context: rw.ContextParallel | None, again: bool) -> None:
        super().__init__()
        self.pattern, self.context, self.again = pattern, context, again
        self.norm = nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH * HEADS[1] // HEADS[0])
        self.out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rw.attention(q, k, v, self.pattern, context=self.context)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        y = self.norm(x)
        q = self.q(y).unflatten(-1, (HEADS[0], -1)).transpose(1, 2)
        k, v = self.kv(y).unflatten(-1, (2, HEADS[1], -1)).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, positions), rotate(k, positions)
        mixed = checkpoint(self.attend, q, k, v, use_reentrant=False) if self.again else self.attend(q, k, v)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, context: rw.ContextParallel | None, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Layer(pattern, context, again) for pattern in (WINDOW, WIDE)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(x)


def alone(words: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of one process with all excerpts (excerpts, TOKENS + 1) complete."""
    model = Model(None)
    logits = model(words[:, :-1], torch.arange(TOKENS))
    loss = cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def backward(model: nn.Module, context: rw.ContextParallel, excerpts: Tensor, factor: float) -> float:
    """Run a step over this rank's shard; return the loss, the sum over its tokens times ``factor``, summed over ranks."""
    words, following = context.shard(excerpts[:, :-1]), context.shard(excerpts[:, 1:])
    logits = model(words, context.positions)
    losses = cross_entropy(logits.transpose(1, 2), following, reduction="none")[:, context.positions < TOKENS]
    loss = losses.sum() * factor
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item()


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


def compose(around: int, wrap: str, again: bool, compiler: str | None, schedule: str = "auto") -> dict[str, Any]:
    """Run a step of the wrapped model on a mesh (data parallel, context parallel), and return its differences from one process.

    Args:
        around: Ranks of a context; the rest is data parallel.
        wrap: "ddp" or "fsdp".
        again: Whether attention is computed again in backward.
        compiler: Backend of torch.compile; None: not compiled.
        schedule: Of the context.
    """
    torch.compiler.reset()
    ranks = dist.get_world_size()
    replicas = ranks // around
    mesh = init_device_mesh("cpu", (replicas, around), mesh_dim_names=("dp", "cp"))
    context = rw.ContextParallel(mesh["cp"], [WINDOW, WIDE], TOKENS, heads=HEADS, schedule=schedule)
    every = torch.randint(0, WORDS, (replicas, BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(2))
    model: nn.Module = Model(context, again)
    if compiler is not None:
        # a layer alone, as users compile: the wrapper's hooks stay outside of the graph; whole_graph compiles both
        model.layers[0].compile(fullgraph=True, backend=compiler)
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    else:
        flat = mesh._flatten("all")
        for layer in model.layers:
            fully_shard(layer, mesh=flat)
        fully_shard(model, mesh=flat)

    # the wrappers average the gradients of this over ranks: the gradient of the mean over all tokens
    total = backward(model, context, every[mesh.get_local_rank("dp")], ranks / (replicas * BATCH * TOKENS))

    wanted, gradients = alone(every.flatten(0, 1))
    errors = {}
    for name, weight in model.named_parameters():
        got = weight.grad.full_tensor() if wrap == "fsdp" else weight.grad
        errors[name] = relative_error(got, gradients[name.removeprefix("module.")])
    received = sum(context.transport.counters.received)
    context.close()
    return {
        "loss": (total / ranks, wanted), "errors": errors, "received": received,
        "padding": context.local * around - TOKENS,
    }  # fmt: skip


def whole_graph(compiler: str) -> float:
    """Compile the whole model to one graph, and return the largest error of loss and gradients."""
    # compiled in this process, not by processes that outlive a killed worker
    torch._inductor.config.compile_threads = 1
    # compiled in every run, whatever the machine's disk cache contains
    torch._functorch.config.enable_autograd_cache = False
    torch.compiler.reset()
    context = rw.ContextParallel(ring_mesh(), [WINDOW, WIDE], TOKENS, heads=HEADS)
    words = torch.randint(0, WORDS, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(2))
    model = Model(context)
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    total = backward(compiled, context, words, 1 / (BATCH * TOKENS))
    wanted, gradients = alone(words)
    errors = [abs(total - wanted) / wanted]
    for name, weight in model.named_parameters():
        dist.all_reduce(weight.grad)
        errors.append(relative_error(weight.grad, gradients[name]))
    context.close()
    return max(errors)


def contexts_in_turn() -> list[bool]:
    """Call one compiled function with several contexts, as after rebuild(), and return whether each equals the eager call."""
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q: Tensor, k: Tensor, v: Tensor, context: rw.ContextParallel) -> Tensor:
        return rw.attention(2 * q, k, v, WINDOW, context=context)

    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, heads, TOKENS, 8, generator=generator) for heads in (HEADS[0], HEADS[1], HEADS[1]))
    same = []
    for placement in ("contiguous", "zigzag", "contiguous"):
        context = rw.ContextParallel(dist.group.WORLD, WINDOW, TOKENS, heads=HEADS, placement=placement)
        x, y, z = (context.shard(tensor, 2).requires_grad_() for tensor in (q, k, v))
        out, wanted = step(x, y, z, context), rw.attention(2 * x, y, z, WINDOW, context=context)
        slopes = [torch.autograd.grad(result.square().sum(), (x, y, z)) for result in (out, wanted)]
        pairs = [(out, wanted), *zip(*slopes, strict=True)]
        same.append(all(torch.equal(got, right) for got, right in pairs))
        context.close()
    return same


def short_batches() -> list[Tensor]:
    """Train on batches that are too short for a block on some ranks, or empty, and return the sums of gradients."""
    sums = []
    torch.manual_seed(0)
    for bare in (
        rw.nn.MixtureOfBlockAttention(WIDTH, 4, block_size=8, top_k=3),
        rw.nn.NativeSparseAttention(WIDTH, 4, compress_block=8, compress_stride=4, block_size=8, top_k=4),
    ):
        # the wrapper raises an error in the next step if a parameter had no gradient
        model = DistributedDataParallel(bare)
        for sizes in ((7, 40), (40, 7), (7, 7), (0, 40), (0, 0), (40, 40)):
            model.zero_grad()
            model(torch.randn(1, sizes[dist.get_rank()], WIDTH)).sum().backward()
            sums.append(torch.stack([p.grad.sum() for p in model.parameters()]))
    return sums
