"""The named cases of ``ringweave bench``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ringweave.errors import UnsupportedError

from ...tune.session import Say, silent
from ..peak import aside
from ..record import CaseResult, Measuring, Options, Record
from . import (
    attention,
    decoding,
    gpu,
    integrations,
    memory,
    models,
    modules,
    packed,
    pages,
    planning,
    prior_tables,
    quality,
    ring,
    score_terms,
    selected,
    tile_sizes,
)
from . import kernels as cpu


@dataclass(frozen=True)
class BenchCase:
    """A named measurement.

    Attributes:
        name: Name on the command line.
        summary: Description in one line.
        measure: Function that starts the measurement.
        grid: Function of the options that returns whether sizes are shown as rows and peers as columns.
    """

    name: str
    summary: str
    measure: Callable[[Options, Say], Measuring]
    grid: Callable[[Options], bool] = lambda options: False


USUAL = Options()


def _on_a_gpu(options: Options) -> bool:
    return torch.device(options.device).type == "cuda"


def _kernels(options: Options, say: Say) -> Measuring:
    return gpu.measure(options, say) if _on_a_gpu(options) else cpu.measure(options, say)


CASES: dict[str, BenchCase] = {
    case.name: case
    for case in (
        BenchCase(
            "attention", "window + sinks and 90%-sparse random tiles; all peers side by side", attention.attention
        ),
        BenchCase(
            "kernels", "share of the processor's peak over densities, sizes and types; overheads", _kernels,
            lambda options: not _on_a_gpu(options),
        ),
        BenchCase("planning", "cold plans of many patterns: time and bytes per non-empty tile", planning.measure),
        BenchCase("packed", "training steps with new packed documents, over steps with the same", packed.measure),
        BenchCase("backends", "every backend that runs here, torch's sparse matrices too", attention.backends),
        BenchCase("memory", "peaks of a window, to 4M tokens; scratch reused; what long runs hold", memory.measure),
        BenchCase("decode", "one query over a long cache: share of memory's speed, errors by policy", decoding.measure),
        BenchCase("dilated", "LongNet's mixture and a dilated relation against dense attention", attention.dilated),
        BenchCase("crossover", "sparse against dense over densities from 5% to 100%", attention.crossover),
        BenchCase("tune", "what ringweave tune gains over the usual choice, on four shapes", attention.tuned),
        BenchCase("tiles", "tile sizes, over windows, documents and others", tile_sizes.measure),
        BenchCase("ordering", "long rows first, as kernels start, against rows in their own order", attention.ordering),
        BenchCase("selected", "keys chosen for each query: blocks, single keys, steps, the indexer", selected.measure),
        BenchCase("integrations", "flex_attention and flash_attn, next to PyTorch's own", integrations.measure),
        BenchCase("terms", "score terms and dropout, over the same call without them", score_terms.measure),
        BenchCase("module", "nn.MultiheadAttention, over its projections and the functional call", modules.measure),
        BenchCase("models", "transformers' models: ringweave next to sdpa and eager, time and memory", models.measure),
        BenchCase("quality", "recall of attention, bits per byte, retrieval at a tenth of the pairs", quality.measure),
        BenchCase("seeds", "the described system's published tables, row by row, next to ours", prior_tables.measure),
        BenchCase("pages", "figures that the documentation states beside what it explains", pages.measure),
        BenchCase("ring", "context parallelism: speed on 2 processes, bytes, modelled efficiency", ring.measure),
    )
}  # fmt: skip


def run_case(
    name: str, options: Options = USUAL, say: Say = silent, keep: Callable[[Record], object] = lambda record: None
) -> CaseResult:
    """Run a case by name.

    Args:
        name: One of ``CASES``.
        options: Sizes.
        say: Function that receives progress messages.
        keep: Function that receives each record immediately after its measurement.
    Raises:
        UnsupportedError: The case is unknown.
    Example:
        >>> run_case("planning", Options(quick=True, tokens=1024, rounds=1)).records[0].workload
        'window + sinks'
    """
    if name not in CASES:
        raise UnsupportedError("case", repr(name), f"one of {', '.join(CASES)}", "See ringweave bench --list.")
    start = time.perf_counter()
    case, records = CASES[name], []
    with aside(options.device):
        measuring = case.measure(options, say)
        while True:
            try:
                record = next(measuring)
            except StopIteration as end:
                conclusion = end.value
                break
            records.append(record)
            keep(record)
    say(f"{name}: done in {time.perf_counter() - start:.0f} s")
    return CaseResult(name, tuple(records), conclusion, case.grid(options))
