"""The figures of README and of the pages are in the raw lines, as the pages round them.

A figure is a number with a unit of time, memory or speed, a percentage, or a ratio such as 1/13 and "3 times"; cells of
a table often have their unit in its head, so claims name them. A figure without a claim is listed with its reason: a
limit that the code sets, an assumption, a test, or a measurement without lines, as its page then says.
"""

from __future__ import annotations

import json
import re
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
RING = "docs/benchmarks/ring.md"
# errors.md quotes messages, and the pages of commands show what these print when the tests run them
PAGES = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]

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
            if tokens == 512:
                time = figure("cpu-models.jsonl", f"{model}, {step}: ringweave's time over eager's", size)
                more = figure("cpu-models.jsonl", f"{model}, {step}: peak memory over eager's", size)
                yield AMD, f" | {memory:.2f} | {time:.2f} | {more:.2f} |"


def of_decoding() -> Iterator[tuple[str, str]]:
    shared: list[float] = []
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
        if heads == 32:
            shared.append(peer)
        yield AMD, f"| {heads} over 8 heads of {dim}, {tokens:,} tokens | {' | '.join(cells)} | {peer:.0f} |"
    yield AMD, f"SDPA takes {min(shared):.0f} to {max(shared):.0f} times as long where four heads share keys."
    yield INTEL, f"(AMD: {min(shared):.0f} to {max(shared):.0f} times)"


def of_plans() -> Iterator[tuple[str, str]]:
    for tokens in (16384, 131072, 1048576):
        one = line("cpu-planning.jsonl", workload="window + sinks", tokens=tokens)
        ms, each = median(one) * 1e3, one["nbytes"] / one["tiles"]
        yield AMD, f"| {tokens:,} | {one['tiles']:,} | {ms:.{0 if ms >= 10 else 1}f} | {each:.1f} |"
    table = line("cpu-planning.jsonl", workload="random 10%")
    ms, each = median(table) * 1e3, table["nbytes"] / table["tiles"]
    yield AMD, f"| 65,536, random table at 10% | {table['tiles']:,} | {ms:.1f} | {each:.1f} |"


def of_small_densities() -> Iterator[tuple[str, str]]:
    speeds = [peak(kernel("cpu-kernels.jsonl", dtype, "forward", "ringweave")) for dtype in ("float32", "bfloat16")]
    yield AMD, f"{speeds[0]:.0f} GFLOP/s in float32, {speeds[1]:.0f} in bfloat16"
    shares = {
        (dtype, direction, tokens): kernel("cpu-kernels.jsonl", dtype, direction, "ringweave", "1%", tokens)[
            "peak_share"
        ]
        for dtype in ("float32", "bfloat16")
        for direction, tokens in (("forward", 16384), (BOTH, 16384), ("forward", 65536))
    }
    row = [f"{share:.0%}" for (_, _, tokens), share in shares.items() if tokens == 16384]
    yield AMD, f"| 1% | {' | '.join(row)} |"
    far = [f"{shares[dtype, 'forward', 65536]:.0%}" for dtype in ("float32", "bfloat16")]
    yield AMD, f"At 65,536 tokens and 1%, forward reaches {far[0]} in float32 and {far[1]} in bfloat16."


def of_targets() -> Iterator[tuple[str, str]]:
    def value(what: str, digits: str = ".2f", **where: str) -> str:
        return f"{line('cpu-kernels.jsonl', what=what, **where)['figure']:{digits}}"

    tile, view = (
        "time per tile at density 1% over that at 50%",
        "speed of the view x[:, :, ::4] over contiguous tensors",
    )
    peer, dense, peak = "FlexAttention's time over ringweave's", "dense SDPA's time", "share of the FMA peak"
    for dtype, tiles, views in (
        ("float32", "32,768 tokens, 2 heads: time per tile at 1% over that at 50%, float32",
         "speed of the view `x[:, :, ::4]` over contiguous tensors, float32 forward, both"),
        ("bfloat16", "the same in bfloat16", "the same in bfloat16"),
    ):  # fmt: skip
        forward, both = f"{dtype} forward", f"{dtype} {BOTH}"
        yield AMD, f"| {forward}: {peer} | {value(f'{forward}: {peer}')} |"
        yield AMD, f"| {forward}: {peak} | {value(f'{forward}: {peak}', '.0%')} |"
        yield AMD, f"| {both}: {dense} | {value(f'{both}: {dense}', '.1f')} |"
        whole = {"size": "4,096 tokens, 8 heads, D 64, density 100%"}
        pair = ", ".join(value(f"{way}: {dense}", **whole) for way in (forward, both))
        yield AMD, f"| 100% density, {dense}: {dtype} forward, both | {pair} |"
        yield AMD, f"| {tiles} | {value(f'{forward}: {tile}')} |"
        yield AMD, f"| {views} | {', '.join(value(f'{way}: {view}') for way in (forward, both))} |"
    full = "forward: time per tile with one full row per 64 over that without"
    pair = ", ".join(value(f"{dtype} {full}") for dtype in ("float32", "bfloat16"))
    yield AMD, f"| time per tile with one full row per 64, float32 and bfloat16 | {pair} |"
    most = value("bfloat16 forward: memory beyond q, k, v and out, of these", ".1%")
    yield AMD, f"memory beyond q, k, v and out, of these | {most} |"
    most = value("bfloat16 forward + backward: memory beyond q, k, v, out and gradients, of the gradients", ".1%")
    yield AMD, f"| the same with backward: beyond those and the gradients, of the gradients | {most} |"


SMALL = {
    "one query, 128 keys, 1 head of 64": "one query, 128 keys, 1 head of 64",
    "one query, 128 keys, 8 heads of 64": "one query, 128 keys, 8 heads of 64",
    "forward + backward, 64 tokens, 1 head of 32": "forward + backward, 64 tokens, 1 head of 32, causal",
    "forward + backward, 128 tokens, 4 heads of 64": "forward + backward, 128 tokens, 4 heads of 64, causal",
    "decoding step of 32 layers": "a decoding step of 32 layers of 256 channels, 4 heads",
}


def of_small_calls() -> Iterator[tuple[str, str]]:
    for case, name in SMALL.items():
        us = line("cpu-calls.jsonl", case=case)["us"]
        cells = [f"{us[who]['median']:,.0f} ({us[who]['least']:,.0f})" for who in ("ringweave", "operators", "sdpa")]
        yield AMD, f"| {name} | {' | '.join(cells)} |"
    window = line("cpu-calls.jsonl", case="decoding step of 32 layers")["us"]["ringweave, window"]
    cell = f"{window['median']:,.0f} ({window['least']:,.0f})"
    yield AMD, f"| the same with a window of 256 and 4 sinks | {cell} | | |"
    ratios = [
        f"{us['sdpa']['median'] / us['ringweave']['median']:.2f} in {dtype}"
        for dtype in ("float32", "bfloat16", "float16")
        for us in (line("cpu-calls.jsonl", case=f"forward, 512 tokens, 8 heads of 64, torch.{dtype}")["us"],)
    ]
    yield AMD, f"SDPA's time over ringweave's: {', '.join(ratios)}."


def of_small_calls_on_intel() -> Iterator[tuple[str, str]]:
    for case in SMALL:
        us = line("intel/cpu-calls.jsonl", case=case)["us"]
        step = case == "decoding step of 32 layers"
        for who, row in (
            ("ringweave", f"a {case}, causal" if step else case),
            ("ringweave, window", "which attends less"),
        ):
            if who in us:
                mine, theirs = us[who]["median"], us["sdpa"]["median"]
                cells = [f"{x:.{0 if x > 30 else 1}f}" if x < 1000 else f"{x:,.0f}" for x in (mine, theirs)]
                yield INTEL, f"{row} | {' | '.join(cells)} | {mine / theirs:.{2 if step else 1}f} |"
    for dtype, row in (
        ("float32", "forward, 512 tokens, 8 heads, float32"), ("bfloat16", "the same in bfloat16"),
        ("float16", "the same in float16"),
    ):  # fmt: skip
        us = line("intel/cpu-calls.jsonl", case=f"forward, 512 tokens, 8 heads of 64, torch.{dtype}")["us"]
        mine, theirs = us["ringweave"]["median"], us["sdpa"]["median"]
        yield INTEL, f"| {row} | {mine:,.0f} | {theirs:,.0f} | {mine / theirs:.1f} |"


def of_quality() -> Iterator[tuple[str, str]]:
    def values(part: str, method: str, tokens: int) -> list[float]:
        return [
            one["value"]
            for one in lines("cpu-quality.jsonl")
            if (one.get("part"), one.get("method"), one.get("tokens")) == (part, method, tokens)
        ]

    def cell(found: list[float], digits: int) -> str:
        return f"{statistics.mean(found):.{digits}f}" if found else ""

    dense = values("bits per byte", "dense", 1024)
    for method, name in {
        "local": "local", "local + random": "local + random", "mean": '`"mean"`', "antidiagonal": '`"antidiagonal"`',
        "top_p": '`"top_p"`', "bounds": '`"bounds"`', "tracker": "tracker", "indexer": "indexer, trained",
        "scheduled": "scheduled from 0.5 to 0.9 sparsity", "hierarchical": "hierarchical (more pairs: means too)",
        "best blocks": "best blocks of each row",
    }.items():  # fmt: skip
        bits = [value / dense[seed] for seed, value in enumerate(values("bits per byte", method, 1024))]
        spelled = [
            *(cell(values(part, method, 4096), 3) for part in ("recall", "recall beyond the window")),
            cell(bits, 3),
            *(cell(values(part, method, 16384), 2) for part in ("associative recall", "needle")),
        ]
        yield "docs/sparse_training.md", f"| {name} | {' | '.join(spelled)} |"


def of_intel() -> Iterator[tuple[str, str]]:
    def value(what: str, size: str, digits: str = ".0%") -> str:
        return f"{figure('intel/bench.jsonl', what, size):{digits}}"

    share, sizes = (
        "share of the speed of memory, medians",
        [f"32 over 8 heads of 128, {n} tokens" for n in (32768, 131072)],
    )
    short, long = ([value(f"{dtype}: {share}", size) for dtype in ("float32", "bfloat16")] for size in sizes)
    yield (
        INTEL,
        (
            f"with 32,768 tokens {short[0]} of the memory read speed in float32 and {short[1]} in bfloat16; "
            f"with 131,072 tokens {long[0]} and {long[1]}."
        ),
    )
    peers = [value("bfloat16: SDPA's time over ringweave's", size, ".1f") for size in sizes]
    yield INTEL, f"SDPA takes {peers[0]} and {peers[1]} times as long in bfloat16"
    shares = [
        kernel(name, "float32", "forward", "ringweave")["peak_share"]
        for name in ("intel/bench.jsonl", "cpu-kernels.jsonl")
    ]
    yield (
        INTEL,
        f"on both threads float32 reaches {shares[0]:.0%} of the FMA peak (one thread 79%, the AMD processor {shares[1]:.0%})",
    )
    tile, size = "time per tile at density 1% over that at 50%", "32,768 tokens, 2 heads, D 64"
    costs = [value(f"{dtype} forward: {tile}", size, ".2f") for dtype in ("float32", "bfloat16")]
    yield (
        INTEL,
        f"A tile costs {costs[0]} times as much at 1% of the tiles as at 50% in float32 and {costs[1]} in bfloat16",
    )
    steps = line("intel/cpu-calls.jsonl", case="decoding step of 32 layers")["us"]
    slower = steps["ringweave"]["median"] / steps["sdpa"]["median"] - 1
    yield INTEL, f"misses its target: {slower:.0%} slower"
    held = [one for one in lines("intel/bench.jsonl") if None not in (one.get("bound"), one.get("figure"))]
    met = sum(one["figure"] >= one["bound"] if one["at_least"] else one["figure"] <= one["bound"] for one in held)
    yield INTEL, f"{met} of the {len(held)} targets in its lines are met."
    peaks = sorted(peak(one) for one in lines("intel/bench.jsonl") if one.get("peak_share"))
    yield INTEL, f"{peaks[0]:.0f} to {peaks[-1]:.0f} GFLOP/s"


def of_memory() -> Iterator[tuple[str, str]]:
    unused = [
        figure("intel/bench.jsonl", f"held but unused, {count} replaced at random", "10000 calls")
        for count in (64, 256)
    ]
    yield (
        "docs/memory.md",
        (f"{unused[0]:.0%} of the held memory was unused with 64 tensors alive, and {unused[1]:.0%} with 256."),
    )
    grown = max(
        figure("intel/bench.jsonl", "resident memory grows by", size)
        for size in ("500 steps of training", "5000 steps of decoding in pages")
    )
    yield (
        "docs/memory.md",
        f"Resident memory grew by at most {grown:.2%} over 500 training steps and over 5,000 decoding steps",
    )


def of_pages() -> Iterator[tuple[str, str]]:
    def value(start: str, size: str = "") -> float:
        found: float = next(
            one["figure"]
            for one in lines("avx2/pages.jsonl")
            if one["what"].startswith(start) and one["size"].endswith(size)
        )
        return found

    rows = value("select and attend 8 blocks of 64 keys")
    yield "docs/adaptive.md", f"of 64 keys took {rows:.0f} times as long as with blocks of 64 queries"
    kv, query = (
        value(f"a step over all keys, over one that chooses 5% by bounds for each {name}") for name in ("key", "query")
    )
    yield "docs/adaptive.md", f"5% of the blocks takes 1/{kv:.1f} of the time of one that attends all keys"
    yield "docs/adaptive.md", f"and 1/{query:.1f} with one for each query head"
    few, some, many = (value(f"plan of {count} new") for count in (3, 16, 64))
    yield "docs/embed.md", f"takes about {few:.0f} ms with 3 documents, {some:.0f} ms with 16 and {many:.0f} ms with 64"
    new, table = value("a score function over its term: a new"), value("a score function over its term: a table")
    yield "docs/flex_attention.md", f"each formula and size of a call, which takes about {new:.1f} ms"
    yield "docs/flex_attention.md", f"are made again at each call, which takes about {table:.1f} ms."
    yield "docs/flex_attention.md", f"which takes about {value('a mask function that reads'):.1f} ms per MiB"
    slow, fast = (1 - value("the fast order", f"rate {rate}") for rate in (16, 64))
    yield "docs/numerics.md", f"Their forward then takes {slow:.0%} less time at rate 16 and {fast:.0%} less at rate 64"


def of_chosen_keys() -> Iterator[tuple[str, str]]:
    size = "8192 x 8192, 16 heads of 64"
    share = figure("avx2/selected.jsonl", "the indexer over PyTorch in chunks", size)
    memory = figure("avx2/selected.jsonl", "memory of the indexer", size)
    yield "docs/adaptive.md", f"it takes {share:.0%} of the time of"
    yield "docs/adaptive.md", f"Beyond the result it holds {memory:.0f} MiB"
    size = "4,096 tokens, 16 heads"
    for name, step in (("forward", "inference"), ("with gradients", "training step")):
        what = f"DeepSeek-V3.2's shape, a layer, 512 keys, {step}: "
        mine = figure("avx2/models.jsonl", f"{what}ringweave's time", size)
        cells = [
            f"{1 / figure('avx2/models.jsonl', f'{what}{of} over {peer}', size):.1f}"
            for of in ("ringweave's time", "peak memory")
            for peer in ("eager's", "sdpa's")
        ]
        yield "docs/chosen_keys.md", f"| {name} | {mine:.1f} s | {' | '.join(cells)} |"


def of_other_processors() -> Iterator[tuple[str, str]]:
    for folder in ("zen5", "avx2"):
        yield from _of_processor(folder)
    speeds = [peak(kernel("zen5/kernels.jsonl", dtype, "forward", "ringweave")) for dtype in ("float32", "bfloat16")]
    yield AMD, f"{speeds[0]:.0f} GFLOP/s in float32, {speeds[1]:.0f} in bfloat16"


def _of_processor(folder: str) -> Iterator[tuple[str, str]]:
    name = f"{folder}/kernels.jsonl"
    for dtype in ("float32", "bfloat16"):
        for direction in ("forward", BOTH):
            mine = kernel(name, dtype, direction, "ringweave")
            cells = [f"{median(mine) * 1e3:.0f}", f"{mine['gflops']:.0f}", f"{mine['peak_share']:.0%}"]
            cells.append(f"{over(name, dtype, direction, 'ringweave:dense_batched'):.1f}")
            flex = f"{over(name, dtype, direction, 'flex'):.1f}" if direction == "forward" else "no backward on a CPU"
            cells += [flex, f"{over(name, dtype, direction, 'sdpa'):.1f}"]
            yield AMD, f"| {dtype}, {direction} | {' | '.join(cells)} |"
    for tokens in (32768, 131072):
        size = f"32 over 8 heads of 128, {tokens} tokens"
        cells = []
        for dtype in ("float32", "bfloat16", "int8"):
            what = f"{dtype}: share of the speed of memory, medians"
            runs = [
                one["figure"] for one in lines(f"{folder}/decode.jsonl") if (one["what"], one["size"]) == (what, size)
            ]
            least = f"{min(runs) * 100:.0f} to " * (len(runs) > 1)
            cells.append(f"{least}{max(runs):.0%} in {dtype}")
        yield AMD, f"{tokens:,} tokens {cells[0]}, {cells[1]} and {cells[2]}"
    size = "8192 tokens, 16 heads over 1 key head of 64"
    blocks = [
        figure(f"{folder}/selected.jsonl", f"16 blocks of 64, {way} over causal", size)
        for way in ("forward", "with gradients")
    ]
    step = figure(
        f"{folder}/selected.jsonl", "a step, a new list each time, over the dense step",
        "65536 keys, 16 heads over 1 key head of 576 and 512, 2048 keys",
    )  # fmt: skip
    yield AMD, f"take {blocks[0]:.2f} of the time of causal attention forward and {blocks[1]:.2f} with gradients"
    yield AMD, f"a step over 2,048 of 65,536 keys {step:.2f} of the step over all"


def of_modules_on_ranks() -> Iterator[tuple[str, str]]:
    for name, heads in (("MoBA, 3 of 16 blocks", 4), ("NSA", 1)):
        size = f"8,192 tokens, 16 heads over {heads} of 64, forward + backward"
        speed, share = (
            figure("avx2/ring.jsonl", f"{name}: {what}", size)
            for what in (
                "speed of 2 ranks x 1 thread over 1 rank x 2 threads",
                "bytes that the busier rank receives over a full ring's",
            )
        )
        yield RING, f"| {name} | {heads} | {speed:.2f} | {share:.0%} |"


def of_terms() -> Iterator[tuple[str, str]]:
    costs = [one["figure"] for one in lines("cpu-terms.jsonl")]
    yield AMD, f"score terms and dropout ({min(costs):.2f} to {max(costs):.2f} of the time without)"


def peak(one: Line) -> float:
    """Return the speed that a line's share refers to."""
    speed: float = one["gflops"] / one["peak_share"]
    return speed


def of_the_ring() -> Iterator[tuple[str, str]]:
    def values(digits: str, *whats: str) -> str:
        return ", ".join(f"{line('ring-cpu.jsonl', what=what)['figure']:{digits}}" for what in whats)

    named = ("32-tile window", "documents", "dilated, rate 16", "longformer, two-sided", "causal")
    of_bytes = [values(".3f", f"G2 {name}: busiest rank's bytes over a full ring's") for name in named[:-1]]
    for row, cell in (
        ("forward and backward | 8 ranks, 6 patterns, 2 placements",
         values(".3f", "G1 gather: bytes of a message over the plan's least")),
        ("8 ranks, 5 patterns, 2 placements",
         values(".3f", "G1 ring: the same, keys anew for backward (no queries move)")),
        ("| agreements, of the payload | 4 ranks, 8,192 tokens, window 1,024", values(".2%", "G1 agreements, of the payload")),
        ("window of 32 tiles | 2,048 tiles, 8 ranks", of_bytes[0]),
        ("| documents | the same, worst of 6 corpora", of_bytes[1]),
        ("| dilated, rate 16 | the same", f"{float(of_bytes[2]):.0f}"),
        ("512 tiles, 8 ranks, key heads = heads", of_bytes[3]),
        ("longformer, causal | as above", values(".3f", *(f"G3 {name}: most work over mean" for name in named))),
        ("2 nodes x 4 ranks, 6 patterns", values(".3f", "G4 bytes between nodes over the nodes' unions")),
        ("4 ranks, 6 patterns, both schedules", values(".1e", "G5 float64: largest relative error of out, lse, dQ, dK, dV")),
        ("float32: their errors over one device's | the same", values(".2f", "G5 float32: their errors over one device's")),
        ("1, 2, 4, 8 ranks, 6 patterns, float32 and bfloat16",
         values(".0%", "G6 gather: elements of out and lse with one device's bits")),
        ("runs with the same bits | the same", values(".0%", "G6 gather: forward and backward again, all bits the same")),
        ("4 ranks, 16,384 tokens", values(".2f", "G7 ring: live key/value bytes over shard + two stages")),
        ("4 ranks, messages delayed by half a stage's computation",
         values(".0%", "G8 ring, forward: share of the messages' delay that is hidden")),
        ("| ranks that post each receive one stage ahead | the same",
         values(".0%", "G8 ranks that post each receive before the stage before it")),
        ("6 kills, 8 to 3 ranks, 27 errors", values(".2f", "G9 kill -9 within a step: slowest survivor's RingError") + " s"),
        ("slowest regroup | the same", values(".2f", "G9 slowest regroup") + " s"),
        ("with one device's bits | the same",
         values(".0%", "G9 errors that name the lost rank", "G9 outputs before and after that are one device's")),
        ("D 128 | 2 ranks", values(".3f", "G10 int8: bytes over bfloat16's")),
        ("tolerance 0.02; 1e-6",
         values(".2f", "G10 int8: measured error of what was sent, over the tolerance") + "; "
         + values(".0%", "G10 above the tolerance: ranks with the bits and bytes of no encoding")),
        ("8,192 tiles, 64 ranks", values(".0f", "G11 planning of a window") + " ms"),
        ("6 patterns, 3 placements, both schedules",
         values(".0%", "G12 rows that attend the pattern's own keys and no others")),
        ("6 differences, both schedules",
         values(".0%", "G12 ranks that call differently: those that raise", "G12 of these, ranks that had moved nothing by then")),
        ("unsupported calls that raise | 14 calls", values(".0%", "G12 unsupported calls that raise")),
        ("window of 4,096 | 256 GPUs", values(".3f", "model, 4K window: a full ring's efficiency")),
    ):  # fmt: skip
        yield RING, f"{row} | {cell} |"
    spread: list[float] = []
    for dtype in ("float32", "bfloat16"):
        timed = [
            line("ring-cpu.jsonl", dtype=dtype, peer=peer)["timing"]["seconds"]
            for peer in ("1 rank x 2 threads", "2 ranks x 1 thread")
        ]
        one, two = map(statistics.median, timed)
        speed = values(".2f", f"{dtype}: speed of 2 ranks x 1 thread over 1 rank x 2 threads")
        spread += [(max(seconds) - min(seconds)) / statistics.median(seconds) for seconds in timed]
        yield RING, f"| {dtype} | {one:.3f} s | {two:.3f} s | {speed} |"
    yield RING, f"Rounds differed by {min(spread):.0%} to {max(spread):.0%}."


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
    ours, theirs = (campaign("blocks of 128", "forward", peer) for peer in ("ringweave:triton", "flex"))
    backward = campaign("blocks of 128", "backward", "ringweave:triton")
    yield GPU, f"FlexAttention itself | {three(upper(theirs) * 1e3)} | {theirs['gflops'] / 1e3:.0f} | not timed"
    rates = [f"{one['gflops'] / 1e3:.0f}" for one in (ours, backward)]
    yield GPU, f"as fast as FlexAttention | {rates[0]}, {rates[1]}, {upper(theirs) / upper(ours):.2f} |"
    window = [upper(campaign("window", "forward", peer)) for peer in ("ringweave", "ringweave:triton")]
    yield GPU, f"{window[0] / window[1]:.1f} times the `flex` backend for the window"
    fine = campaign("blocks of 64", "forward", "ringweave:triton")
    yield GPU, f"(published: 5.08 ms) | {three(upper(fine) * 1e3)} ms |"
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


CLAIMS = tuple(value for name, value in list(globals().items()) if name.startswith("of_"))


@pytest.mark.parametrize("claims", CLAIMS, ids=lambda x: x.__name__)
def test_pages_claim_what_was_measured(claims: Callable[[], Iterator[tuple[str, str]]]) -> None:
    for page, text in claims():
        assert plain(text) in plain((ROOT / page).read_text("utf-8")), f"{page} lacks: {text}"


# a number with a unit, or a ratio; not the share of tiles that is a size
FIGURE = re.compile(
    r"(?<![\w.,/])(?:1/\d[\d.]*"
    r"|\d[\d,.]*\s?(?:ms|us|microseconds?|s|seconds?|minutes?|hours?|%|times(?! of)|(?:[KMGT]i?B|[GT]FLOP)(?:/s)?)(?![\w/]))"
)
# shares of tiles, which are sizes, and targets
SIZES = re.compile(
    r"density (?:\d+% to )?\d+%|\d+% of the (?:tiles|blocks)|at 10%[,)]|\(1%: 16,384\)"
    r"|[<>]= [\d.]+ ?(?:%|s|ms)?|\(beyond: \d+%\)|100% \| `test_|at (?:most|least) [\d.]+ (?:ms|times)|at most 5% of memory|90% sparse"
    r"|\d+ TFLOP/s forward, \d+ backward"
)
KEPT, LIMIT, ASSUMED, COMMAND = "no lines were kept", "a limit or a size", "an assumption", "how long a command takes"

#: Figures that no raw line has, and why: a limit of the code, an assumption, a test that holds them, or a measurement of
#: which no lines were kept, as the page must then say.
STATED: dict[str, dict[str, str]] = {
    "README.md": {"about 90 seconds of processor time": COMMAND},
    "docs/backends.md": {"more than 5% faster": LIMIT, "beyond 4 GiB (about a million tokens": LIMIT},
    "docs/cli.md": {"more than 5% faster": LIMIT, "takes about 20 seconds; `--seconds`": LIMIT},
    "docs/context.md": {"SIGKILL 30 seconds later": "torchrun"},
    "docs/explorer.md": {"an assumed latency of 50 us": ASSUMED},
    "docs/flex_attention.md": {"of more than 16 KiB": LIMIT, "of more than 1 MiB": LIMIT},
    "docs/memory.md": {
        "64 MiB of keys and values each": LIMIT,
        "128 MiB of bfloat16 keys and values with 16 MiB of private memory": "tests/memory/test_mapped.py",
        "with 15 above 1 MiB": LIMIT,
        "of random sizes from 1 KiB to 4 MiB": LIMIT,
    },
    AMD: {
        "its scores would take more than 8 GiB": LIMIT,
        "not tried: 12 GiB": LIMIT,
        "not tried: 24 GiB": LIMIT,
        "The targets were 80% in float32 and 70% in bfloat16.": LIMIT,
    },
    INTEL: {
        "260 MB of shared cache": "the processor",
        "the cache of 260 MB": "the processor",
        "Shares above 100%": LIMIT,
        "memory read speed | 18 GB/s": KEPT,
        "5% was asked for": LIMIT,
    },
    GPU: {
        "230 microseconds": KEPT,
        "at 20 GB/s": KEPT,
        "takes 11 times as long": KEPT,
        "a window took 1.9 ms before, a causal backward 9.8": KEPT,
        "at most 1,500 seconds": LIMIT,
        "(at most 16 MiB)": LIMIT,
    },
    RING: {"500 TFLOP/s and 50 GB/s for each GPU": ASSUMED},
}


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_of_a_page_is_accounted_for(page: str) -> None:
    text = plain(re.sub(r"^( *)```.*?^\1```", "", (ROOT / page).read_text("utf-8"), flags=re.S | re.M))
    for of_page, claim in (pair for claims in CLAIMS for pair in claims()):
        if of_page == page:
            text = text.replace(plain(claim), " ... ")
    for fragment, reason in STATED.get(page, {}).items():
        assert fragment in text, f"{page} states no longer: {fragment}"
        assert reason != KEPT or KEPT in text, f"{page} does not say that {KEPT}"
        assert "/" not in reason or (ROOT / reason).exists(), reason
        text = text.replace(fragment, " ... ")
    text = SIZES.sub(" ", text)
    left = [text[max(0, found.start() - 60) : found.end() + 40] for found in FIGURE.finditer(text)]
    assert not left, f"{page} has figures that neither a raw line nor STATED has: {left}"
