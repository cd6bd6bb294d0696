"""What is compared: each way to compute an attention, with what it computes and why it cannot.

Every peer names the function that it computes as a pattern. A dense peer computes more than a sparse pattern asks for:
its time is what dense attention costs, and it is checked against the oracle of its own function.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import ringweave as rw

from ..errors import RingweaveError, UnsupportedError, message
from ..ops.dispatch import BACKENDS, PREFERENCE, describe, program
from ..patterns import BlockTable, LongNet, Pattern
from ..plan import branches
from .gather_scatter import gather_scatter
from .workload import Inputs, Workload

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
_MASK_TOKENS = 16384
_REFERENCE_TOKENS = 4096
_SCORE_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Built:
    """A peer made ready for one workload.

    Attributes:
        attend: (q, k, v) to out.
        function: The pattern that it computes.
        how: The backend or kernel behind it.
        setup_seconds: Spent once, before the first result: planning or compilation.
    """

    attend: Attend
    function: Pattern
    how: str
    setup_seconds: float | None = None

    def forward(self, inputs: Inputs) -> Callable[[], Tensor]:
        """A callable without gradients."""
        q, k, v = (x.detach() for x in inputs[:3])

        def call() -> Tensor:
            with torch.no_grad():
                return self.attend(q, k, v)

        return call

    def forward_backward(self, inputs: Inputs) -> Callable[[], tuple[Tensor, ...]]:
        """A callable that gives (out, dq, dk, dv)."""
        q, k, v = (x.detach().requires_grad_() for x in inputs[:3])

        def call() -> tuple[Tensor, ...]:
            out = self.attend(q, k, v)
            return (out.detach(), *torch.autograd.grad(out, (q, k, v), inputs.dout))

        return call


@dataclass(frozen=True)
class Peer:
    """One way to compute attention.

    Attributes:
        name: As in tables and ``--peers``.
        summary: One line for people.
        supports: Why it cannot run a workload (with gradients or without); None where it can.
        build: Makes it ready.
    """

    name: str
    summary: str
    supports: Callable[[Workload, bool], str | None]
    build: Callable[[Workload, Inputs], Built]


def peers(*names: str) -> list[Peer]:
    """Peers by name.

    Raises:
        UnsupportedError: An unknown name.
    Example:
        >>> [peer.name for peer in peers("ringweave", "sdpa")]
        ['ringweave', 'sdpa']
    """
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise UnsupportedError(message("peer", repr(unknown[0]), f"one of {', '.join(PEERS)}", "Name one of them."))
    return [PEERS[name] for name in names]


def sparse_backends(workload: Workload, *, besides: str) -> list[str]:
    """Names of peers for the backends that auto may choose on a device, but for one it already chose."""
    names = [f"ringweave:{name}" for name in PREFERENCE if BACKENDS[name].planned and name != besides]
    return [name for name in names if PEERS[name].supports(workload, True) is None]


def chosen_backend(workload: Workload, *, backward: bool, name: str = "auto") -> str:
    """The backends that run a workload, such as ``gather`` or ``2 x gather + 1 x sdpa``.

    Raises:
        UnsupportedError: The named backend cannot run it.
    """
    counts = describe(program(workload.pattern, workload.case(backward), 0, name))
    return counts[0][1] if len(counts) == 1 else " + ".join(f"{number} x {backend}" for number, backend in counts)


def _ringweave(backend: str) -> Peer:
    def supports(workload: Workload, backward: bool) -> str | None:
        if backend == "reference" and workload.tokens > _REFERENCE_TOKENS:
            return f"it computes N x N in float64: at most {_REFERENCE_TOKENS} tokens here"
        try:
            chosen_backend(workload, backward=backward, name=backend)
        except RingweaveError as error:
            return str(error)
        return None

    def build(workload: Workload, inputs: Inputs) -> Built:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return rw.attention(q, k, v, workload.pattern, backend=backend)

        start = time.perf_counter()
        how = chosen_backend(workload, backward=False, name=backend)
        sizes = {"heads": workload.heads, "batch": workload.batch}
        for branch in branches(workload.pattern, workload.tokens, workload.tokens, **sizes):
            branch.plan(workload.device)
        return Built(attend, workload.pattern, how, time.perf_counter() - start)

    name = "ringweave" if backend == "auto" else f"ringweave:{backend}"
    what = "the backend that auto chooses" if backend == "auto" else f"the {backend} backend"
    return Peer(name, f"ringweave.attention, {what}", supports, build)


def _dense(workload: Workload, inputs: Inputs) -> Built:
    function = workload.dense_pattern
    causal = function == rw.Causal()
    grouped = workload.key_heads != workload.heads

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return Built(attend, function, "torch SDPA, is_causal=True" if causal else "torch SDPA, no mask")


def _masked(workload: Workload, inputs: Inputs) -> Built:
    start = time.perf_counter()
    grouped = workload.key_heads != workload.heads
    batch, heads = workload.pattern.extents()
    mask = workload.pattern.to_dense(workload.tokens, heads=heads or 1, batch=batch or 1).to(workload.device)
    seconds = time.perf_counter() - start

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)

    return Built(attend, workload.pattern, f"torch SDPA, bool mask of {mask.numel() / 2**20:.0f} MiB", seconds)


def _masked_refusal(workload: Workload, backward: bool) -> str | None:
    if isinstance(workload.pattern, LongNet):
        return "a LongNet is a mixture of branches, not a mask"
    if workload.tokens > _MASK_TOKENS:
        return f"a dense mask is N x N: at most {_MASK_TOKENS} tokens here"
    return None


def _flex(workload: Workload, inputs: Inputs) -> Built:
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    start = time.perf_counter()
    pattern = workload.pattern
    plan = pattern.plan(workload.tokens, heads=workload.heads, batch=workload.batch, device=workload.device)
    block_mask = plan.to_block_mask()
    batch, heads = pattern.extents()
    if batch is None and heads is None:
        # its natural form: the relation itself, inlined by the compiler, and one list of blocks for all heads; of a
        # table that is the mask, which is indexed where lists are searched
        relation = BlockTable(pattern.mask, pattern.block_size) if isinstance(pattern, BlockTable) else pattern

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return relation.allows(q, k)

        def shared(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[:1, :1].contiguous()

        block_mask = BlockMask.from_kv_blocks(
            block_mask.kv_num_blocks[:1, :1].contiguous(),
            block_mask.kv_indices[:1, :1].contiguous(),
            shared(block_mask.full_kv_num_blocks),
            shared(block_mask.full_kv_indices),
            BLOCK_SIZE=(plan.q_tile, plan.kv_tile),
            mask_mod=mask_mod,
            seq_lengths=(workload.tokens, workload.tokens),
        )
    # other workloads' graphs would count against the compiler's limit of variants
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    grouped = workload.key_heads != workload.heads

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = compiled(q, k, v, block_mask=block_mask, enable_gqa=grouped)
        assert isinstance(out, Tensor)
        return out

    built = Built(attend, pattern, "FlexAttention, torch.compile")
    try:
        built.forward(inputs)()
        if torch.device(workload.device).type == "cuda":
            built.forward_backward(inputs)()
    except RuntimeError as error:  # dynamo's and inductor's errors derive from it
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise UnsupportedError(
            message("peer", "'flex'", "a compiler that works", f"{type(error).__name__}: {first[:160]}")
        ) from error
    return Built(attend, pattern, built.how, time.perf_counter() - start)


def _flex_refusal(workload: Workload, backward: bool) -> str | None:
    if isinstance(workload.pattern, LongNet):
        return "a LongNet is a mixture of branches, not a mask"
    if backward and torch.device(workload.device).type == "cpu":
        return "FlexAttention has no backward on a CPU"
    return None


def _gather_scatter(workload: Workload, inputs: Inputs) -> Built:
    start = time.perf_counter()
    plan = workload.pattern.plan(workload.tokens, heads=workload.heads, batch=workload.batch, device=workload.device)
    seconds = time.perf_counter() - start

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gather_scatter(q, k, v, plan)

    return Built(attend, workload.pattern, "gathered tile pairs, scatter_reduce", seconds)


def _gather_scatter_refusal(workload: Workload, backward: bool) -> str | None:
    if isinstance(workload.pattern, LongNet):
        return "a LongNet is a mixture of branches, not one list of tiles"
    plan = workload.pattern.plan(workload.tokens, heads=workload.heads, batch=workload.batch)
    needed = plan.tiles * plan.q_tile * plan.kv_tile * 4 * (3 if backward else 2)
    if needed > _SCORE_BYTES:
        return f"it holds all scores at once: {needed / 2**30:.0f} GiB"
    return None


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        _ringweave("auto"),
        *(_ringweave(name) for name in BACKENDS),
        Peer("sdpa", "torch's dense attention, no mask: what dense costs", lambda workload, backward: None, _dense),
        Peer("sdpa+mask", "torch's attention with a dense bool mask", _masked_refusal, _masked),
        Peer("flex", "FlexAttention, compiled, on the same tiles", _flex_refusal, _flex),
        Peer(
            "gather_scatter",
            "all tile pairs gathered, softmax by scatter_reduce",
            _gather_scatter_refusal,
            _gather_scatter,
        ),
    )
}
