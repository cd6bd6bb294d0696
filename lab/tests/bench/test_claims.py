"""Each figure that README and the pages of benchmarks claim is in the raw lines, as these pages round it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "lab" / "results"
BOTH = "forward + backward"
AMD, INTEL, GPU = "docs/benchmarks/cpu.md", "docs/benchmarks/cpu-intel.md", "docs/benchmarks/gpu.md"

Line = dict[str, Any]


@cache
def lines(name: str) -> tuple[Line, ...]:
    return tuple(map(json.loads, (RESULTS / name).read_text("utf-8").splitlines()))


def line(name: str, **wanted: object) -> Line:
    """Return the first line of a file with these values: cases that follow may measure the same sizes again."""
    return next(one for one in lines(name) if all(one.get(key) == value for key, value in wanted.items()))


def kernel(name: str, dtype: str, direction: str, peer: str, density: str = "10%", tokens: int = 8192) -> Line:
    where = {"case": "kernels", "workload": f"random {density}", "tokens": tokens, "heads": 8}
    return line(name, **where, dtype=dtype, direction=direction, peer=peer)


def median(one: Line) -> float:
    return statistics.median(one["timing"]["seconds"])


def over(name: str, dtype: str, direction: str, peer: str, density: str = "10%", tokens: int = 8192) -> float:
    ratio: float = kernel(name, dtype, direction, peer, density, tokens)["over_first"]["medians"]
    return ratio


def figure(name: str, what: str, size: str) -> float:
    found: float = line(name, what=what, size=size)["figure"]
    return found


def of_kernels() -> Iterator[tuple[str, str]]:
    for dtype in ("float32", "bfloat16"):
        for direction in ("forward", BOTH):
            for page, name in ((AMD, "cpu-kernels.jsonl"), (INTEL, "intel/bench.jsonl")):
                mine = kernel(name, dtype, direction, "ringweave")
                row = f"| {dtype}, {direction} | {median(mine) * 1e3:.0f} | {mine['gflops']:.0f} |"
                yield page, row + f" {mine['peak_share']:.0%} |"
            # dense_batched had this name when it was measured
            peers = [f"{over('cpu-kernels.jsonl', dtype, direction, 'ringweave:gather'):.1f}"]
            if direction == "forward":
                peers.append(f"{over('cpu-kernels.jsonl', dtype, direction, 'flex'):.1f}")
                yield INTEL, f" {over('intel/bench.jsonl', dtype, direction, 'flex'):.1f} |"
            else:
                peers.append("no backward on a CPU")
            dense = f"{over('cpu-kernels.jsonl', dtype, direction, 'sdpa'):.1f}"
            yield AMD, f" | {' | '.join(peers)} | {dense} |"
            yield INTEL, f" | {over('intel/bench.jsonl', dtype, direction, 'sdpa'):.1f} |"
    for density in ("100%", "50%", "25%", "10%", "5%"):
        cells = []
        for dtype in ("float32", "bfloat16"):
            for direction in ("forward", BOTH):
                share = kernel("cpu-kernels.jsonl", dtype, direction, "ringweave", density, 4096)["peak_share"]
                ratio = over("cpu-kernels.jsonl", dtype, direction, "sdpa", density, 4096)
                cells.append(f"{share:.0%} ({ratio:.{0 if ratio >= 9.95 else 1}f})")
        yield AMD, f"| {density} | {' | '.join(cells)} |"


def of_models() -> Iterator[tuple[str, str]]:
    for title, model, tokens, heads, steps in (
        ("a Llama-like layer, 16 heads", "a Llama-like layer", 512, 16, ("inference", "training step")),
        ("ModernBERT's shape, 3 layers, 12 heads", "ModernBERT's shape, 3 layers", 8192, 12,
         ("inference", "training step")),
        ("Mistral-like, 2 layers, 8 heads, window 1,024", "Mistral-like, window 1,024", 16384, 8, ("inference",)),
    ):  # fmt: skip
        for step in steps:
            size = f"{tokens:,} tokens, {heads} heads"
            time = figure("cpu-models.jsonl", f"{model}, {step}: ringweave's time over sdpa's", size)
            memory = figure("cpu-models.jsonl", f"{model}, {step}: peak memory over sdpa's", size)
            name = f"{title}, {step}" if step == steps[0] else f"the same, {step}"
            yield AMD, f"| {name} | {tokens:,} | {time:.2f} | {memory:.2f} |"


def of_decoding() -> Iterator[tuple[str, str]]:
    for heads, dim, tokens in ((32, 128, 32768), (32, 128, 131072), (8, 128, 32768), (32, 64, 32768)):
        size = f"{heads} over 8 heads of {dim}, {tokens} tokens"
        cells = []
        for dtype in ("float32", "bfloat16", "int8", "bfloat16 in pages"):
            middle, best = (
                figure("cpu-decode.jsonl", f"{dtype}: share of the speed of memory, {which}", size)
                for which in ("medians", "best rounds")
            )
            cells.append(f"{middle:.0%} ({best:.0%})")
        peer = figure("cpu-decode.jsonl", "bfloat16: SDPA's time over ringweave's", size)
        yield AMD, f"| {heads} over 8 heads of {dim}, {tokens:,} tokens | {' | '.join(cells)} | {peer:.0f} |"


def of_plans() -> Iterator[tuple[str, str]]:
    for tokens in (16384, 131072, 1048576):
        one = line("cpu-planning.jsonl", workload="window + sinks", tokens=tokens)
        ms, each = median(one) * 1e3, one["nbytes"] / one["tiles"]
        yield AMD, f"| {tokens:,} | {one['tiles']:,} | {ms:.{0 if ms >= 10 else 1}f} | {each:.1f} |"


def upper(one: Line) -> float:
    """Return the upper of the two middle rounds, as the table of a campaign does; its rates are of that."""
    return statistics.median_high(one["timing"]["seconds"])


def campaign(workload: str, direction: str, peer: str) -> Line:
    return line("gpu-campaign.jsonl", case="campaign", workload=workload, direction=direction, peer=peer)


def of_the_gpu() -> Iterator[tuple[str, str]]:
    rows = (
        ("window", ("`triton`", "`flex`", "dense, cuDNN")), ("documents", ("`triton`", "`flex`", "dense, cuDNN")),
        ("blocks of 128", ("`triton`", "`flex`", "dense, cuDNN")), ("blocks of 64", ("`triton`", "dense, cuDNN")),
        ("causal", ("`triton`", "cuDNN", "FlashAttention in PyTorch")),
    )  # fmt: skip
    names = {
        "`triton`": "ringweave:triton", "`flex`": "ringweave", "dense, cuDNN": "sdpa:cudnn", "cuDNN": "sdpa:cudnn",
        "FlashAttention in PyTorch": "sdpa:flash",
    }  # fmt: skip
    for workload, peers in rows:
        for peer in peers:
            forward, backward = (campaign(workload, way, names[peer]) for way in ("forward", "backward"))
            dense = peer == "dense, cuDNN"
            rates = ["" if dense else f"{one['gflops'] / 1e3:.0f}" for one in (forward, backward)]
            yield GPU, f"| {three(upper(forward) * 1e3)} | {rates[0]} | {three(upper(backward) * 1e3)} | {rates[1]} |"
    for where, name in (("in a row", "`triton`, in a row"), ("in pages", "`triton`, in pages of 64"), ("sdpa", "SDPA")):
        cells = [
            figure("gpu-campaign.jsonl", f"decode, {where}: keys and values read", f"32 over 8 heads of 128, {tokens}")
            for tokens in ("32,768 tokens", "131,072 tokens")
        ]
        yield GPU, f"{name} | {cells[0]:.2f} | {cells[1]:.2f} |"


def three(x: float) -> str:
    """Return a number with three digits."""
    return f"{x:.{0 if x >= 99.95 else 1 if x >= 9.995 else 2 if x >= 0.9995 else 3}f}"


def of_first_pages() -> Iterator[tuple[str, str]]:
    float32, bfloat16 = (over("cpu-kernels.jsonl", dtype, BOTH, "sdpa") for dtype in ("float32", "bfloat16"))
    model = figure(
        "cpu-models.jsonl", "Mistral-like, window 1,024, inference: ringweave's time over sdpa's",
        "16,384 tokens, 8 heads",
    )  # fmt: skip
    mine, flex, dense = (
        upper(campaign("window", "forward", peer)) * 1e3 for peer in ("ringweave:triton", "ringweave", "sdpa:cudnn")
    )
    for page in ("README.md", "docs/index.md"):
        yield (
            page,
            f"take 1/{float32:.0f} of the time of PyTorch's dense attention in float32 and 1/{bfloat16:.0f} in bfloat16",
        )
        yield page, f"A Mistral-like model reads 16K tokens in 1/{1 / model:.1f} of the time of its SDPA"
        yield page, f"a window of 1,024 over 65,536 tokens takes {mine:.1f} ms forward"
        yield page, f"dense cuDNN attention {dense:.0f} ms"
    yield "docs/index.md", f"FlexAttention over the same plan {flex:.1f} ms"


def plain(text: str) -> str:
    """Return a page without bold figures and line ends."""
    return " ".join(text.replace("**", "").split())


@pytest.mark.parametrize(
    "claims", [of_first_pages, of_kernels, of_models, of_decoding, of_plans, of_the_gpu], ids=lambda x: x.__name__
)
def test_pages_claim_what_was_measured(claims: Callable[[], Iterator[tuple[str, str]]]) -> None:
    for page, text in claims():
        assert plain(text) in plain((ROOT / page).read_text("utf-8")), f"{page} lacks: {text}"
