"""The units of a campaign: each one runs by name in a separate process and adds its figures to the folder.

    python -m ringweave_lab.campaign.units NAME --folder DIR [--device cuda] [--checkout DIR] [--dry]

With ``--dry`` a unit does everything except the device's work: headlines are measured at small sizes on the CPU, our
kernel in Triton's interpreter; kernels are compiled for an H100; other units write lines without figures.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import ringweave as rw
from ringweave import call as described
from ringweave import device_check
from ringweave.errors import UnsupportedError, in_a_line
from ringweave_gpu import trial, triton

from ..bench.cases import gpu
from ..bench.peak import aside
from ..bench.record import Options, Outcome, Record, Target, environment, plain, write_lines
from ..tune import trials
from ..tune.measure import Runnable, by_clock, interleaved, replayed
from ..tune.problem import BACKWARD, DIRECTIONS, Problem
from ..tune.session import FAILURES, Say
from . import compiling, headlines, precompile
from .precompile import Variant

FIGURES = "figures.jsonl"
#: Reason for missing figures in a dry unit.
DRY = "dry: nothing was measured"
_PAGE = 64
_STREAMED = 2**18
#: Seconds for the tests of all files: less than the unit's limit, so that a file that hangs still gets a line.
_TESTS = 140.0
#: Seconds of a candidate of the trial, so that one that hangs leaves time for the next.
_TRIAL = 35.0
#: The headline that a trial is held for. Without a verdict FlexAttention computes it.
_TRIED = "window"


@dataclass(frozen=True)
class Job:
    """The settings of a unit.

    Attributes:
        folder: Folder for figures.
        device: Device to measure.
        dry: Whether to do everything except the device's work.
        checkout: Working tree whose GPU tests are run.
    """

    folder: Path
    device: str = "cuda"
    dry: bool = False
    checkout: Path | None = None

    def figure(
        self, what: str, size: str, figure: Callable[[], float], unit: str = "x", most: float | None = None
    ) -> Target:
        """Return a measured figure with its upper bound ``most``, or the reason why it is missing."""
        value: float | None = None
        reason: str | None = DRY
        if not self.dry:
            try:
                value, reason = figure(), None
            except FAILURES as error:
                reason = in_a_line(error)
        return Target(what, size, value, most, most is None, unit, reason)


def peaks(job: Job) -> Iterator[Target]:
    """Measure the device's peaks with a copy and a matrix product."""

    def copy() -> float:
        x = torch.randn(2**29, device=job.device)
        y = torch.empty_like(x)
        timing = interleaved({"copy": lambda: y.copy_(x)}, rounds=10, device=job.device)["copy"]
        return 2 * x.nbytes / timing.min / 1e12

    yield job.figure("copy, bytes read and written", "2 GiB", copy, "TB/s")
    of = partial(gpu.matmul_peak, torch.bfloat16, job.device)
    yield job.figure("product of bfloat16", "8,192 x 8,192", lambda: of() / 1e12, "TFLOP/s")


def headline(measure: Callable[[str, str, bool, Say], Iterator[Outcome]], name: str, job: Job) -> Iterator[Outcome]:
    """Measure engines on a headline's problem."""
    yield from measure(name, job.device, job.dry, say)


def ahead(job: Job) -> Iterator[Target]:
    """Compile our kernels of all headlines, in as many processes as there are cores."""
    problems = [each.problem(name, job.device, False) for name, each in headlines.HEADLINES.items()]
    variants = [Variant(problem, BACKWARD) for problem in problems]
    failed: Mapping[Variant, str]
    if job.dry:
        compiling.begin(compiling.HOPPER)
        variants = variants[:1]
        reasons = ((each, precompile.compiled(each)) for each in variants)
        failed = {each: reason for each, reason in reasons if reason is not None}
        count = len(compiling.kernels())
    else:
        failed, count = precompile.precompile(variants, compiling.here())
    yield Target("kernels compiled ahead", f"{len(variants)} problems", float(count), None, True, "kernels")
    for variant, reason in failed.items():
        yield Target("compiled ahead", variant.problem.name, None, None, True, reason=reason)


def small(job: Job) -> Iterator[Target]:
    """Compute eight small cases, under compute-sanitizer if it is installed."""
    for dtype in (torch.bfloat16, torch.float16):
        for dim in (64, 128):
            for dense_kind in ("sparse", "causal"):
                case = described.Call(1, 4, 2, 500, 500, dim, dim, dtype, job.device, True)
                wrong = None if job.dry else device_check.check(triton.BACKEND, case, dense_kind)
                name = f"{str(dtype).removeprefix('torch.')}, {dense_kind}, D {dim}: right"
                yield (
                    Target(name, "500 tokens", None, None, True, reason=wrong)
                    if wrong
                    else job.figure(name, "500 tokens", lambda: 1.0, "")
                )


def tests(job: Job) -> Iterator[Target]:
    """Run the GPU tests, several files at a time, each in a separate process."""
    root = Path.cwd() if job.checkout is None else job.checkout
    found = sorted(file for folder in ("tests", "gpu/tests") for file in (root / folder).rglob("test_*.py"))
    files = [file for file in found if "mark.gpu" in file.read_text("utf-8")]

    until = time.monotonic() + _TESTS
    # Compiling takes most of the time. The plugin of another package, where it is installed, breaks off runs of several
    # processes, since it warns of them.
    spread = importlib.util.find_spec("xdist") is not None
    several = ("-n", str(max(1, (os.cpu_count() or 1) // 4)), "-p", "no:benchmark") if spread else ()

    def run(file: Path) -> tuple[float | None, str]:
        words = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *several, str(file))
        try:
            ended = subprocess.run(
                words, cwd=root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                timeout=max(0.0, until - time.monotonic()),
            )  # fmt: skip
        except subprocess.TimeoutExpired as expired:
            say((expired.stdout or b"").decode(errors="replace")[-4000:])
            return None, f"not done in the {_TESTS:.0f} s that all files have"
        say(ended.stdout[-4000:])
        # pytest's status 5: no test of the file is for this machine
        return float(ended.returncode if ended.returncode != 5 else 0), ended.stdout[-200:]

    if job.dry:
        yield from (job.figure(f"{file.name}: exit status", "tests", lambda: 0.0, "", 0.0) for file in files)
        return
    with ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 1) // 2))) as pool:
        for file, (code, said) in zip(files, pool.map(run, files), strict=True):
            reason = said.strip().splitlines()[-1] if code != 0 and said.strip() else None
            yield Target(f"{file.name}: exit status", "tests", code, 0.0, False, "", reason)


def bits(job: Job) -> Iterator[Target]:
    """Compute five times, and count results with bits that differ from the first."""
    for name in ("causal", "window", "documents", "sinks"):
        problem = Options(device=job.device).of(gpu.PARTS[name].entries[0][0]) if not job.dry else None

        def differing(problem: Problem | None = problem) -> float:
            assert problem is not None
            inputs = problem.inputs()
            q, k, v = (x.requires_grad_() for x in inputs[:3])
            found: list[tuple[Tensor, ...]] = []
            for _ in range(5):
                out = rw.attention(q, k, v, problem.pattern, backend="triton")
                found.append((out.detach(), *torch.autograd.grad(out, (q, k, v), inputs.dout)))
                # fills memory with NaN, so that reading unwritten values shows
                torch.full((2**28,), math.nan, device=job.device)
            return float(sum(not torch.equal(a, b) for each in found[1:] for a, b in zip(found[0], each, strict=True)))

        size = f"{gpu.PARTS[name].entries[0][0].tokens:,} tokens, 16 heads, D 128"
        yield job.figure(f"{name}: results of five runs that differ", size, differing, "", 0.0)


def decode(job: Job) -> Iterator[Target]:
    """Time one query over a long cache, contiguous and paged, next to SDPA and to the speed of a copy."""
    for tokens in (32768, 131072):
        size = f"32 over 8 heads of 128, {tokens:,} tokens"
        rates = functools.cache(partial(_decoding, tokens, job.device))
        for name in ("in a row", "in pages", "sdpa"):

            def rate(rates: Callable[[], Mapping[str, float | str]] = rates, name: str = name) -> float:
                found = rates()[name]
                if isinstance(found, str):
                    raise UnsupportedError(found)
                return found

            yield job.figure(f"decode, {name}: keys and values read", size, rate, "TB/s")


def _decoding(tokens: int, device: str) -> Mapping[str, float | str]:
    """Return terabytes of keys and values per second; a text if the error exceeds twice SDPA's."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((32, 1), (8, tokens), (8, tokens))
    q, k, v = (
        torch.randn(1, heads, n, 128, generator=generator, device=device, dtype=torch.bfloat16) for heads, n in shapes
    )
    pages = tokens // _PAGE
    order = torch.randperm(pages, generator=generator, device=device)

    def in_pages(x: Tensor) -> Tensor:
        split = x[0].unflatten(1, (pages, _PAGE)).transpose(0, 1)
        made = torch.empty_like(split)
        made[order] = split
        return made

    lengths = torch.tensor([tokens], dtype=torch.int32, device=device)
    cache = rw.PagedCache(in_pages(k), in_pages(v), order[None].int().contiguous(), lengths)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    calls: dict[str, Callable[[], Tensor]] = {
        "in a row": lambda: rw.attention(q, k, v, rw.Causal(), q_offset=tokens - 1, backend="triton"),
        "in pages": lambda: rw.paged_attention(q, cache, backend="triton"),
        "sdpa": lambda: sdpa(q, k, v, enable_gqa=True),
    }
    weights = (q.double().unflatten(1, (8, 4)) @ k.double()[:, :, None].mT / math.sqrt(128)).softmax(-1)
    exact = (weights @ v.double()[:, :, None]).flatten(1, 2)
    errors = {name: float((call().double() - exact).norm()) for name, call in calls.items()}
    replays: dict[str, Runnable] = {}
    refused: dict[str, str] = {}
    for name, call in calls.items():
        try:
            if errors[name] <= 2 * errors["sdpa"]:
                replays[name] = replayed(call)
            else:
                refused[name] = f"wrong by {errors[name]:.2g}, sdpa by {errors['sdpa']:.2g}"
        except RuntimeError as error:
            refused[name] = in_a_line(error)
    timings = interleaved(replays, rounds=10, device=device)
    return {name: 2 * k.nbytes / timing.median / 1e12 for name, timing in timings.items()} | refused


def streamed(job: Job) -> Iterator[Target]:
    """Time keys and values on the host and on the device by the clock, since CUDA graphs cannot contain the copies."""
    tokens, window, on_gpu = _STREAMED, rw.SlidingWindow(1023, 0), torch.device(job.device).type == "cuda"
    size = f"8 heads of 128, {tokens:,} tokens, window of 1,024"

    def seconds(backward: bool) -> tuple[float, float]:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, 8, tokens, 128, generator=generator, dtype=torch.bfloat16) for _ in range(3))
        q = q.to(job.device)
        held = [x.pin_memory() if on_gpu else x for x in (k, v)]
        kept = {"host": (q, *held), "device": (q, *(x.to(job.device) for x in held))}
        found = {name: [x.detach().requires_grad_(backward) for x in of] for name, of in kept.items()}

        def call(name: str) -> list[Tensor]:
            leaves = found[name]
            backend = "triton" if on_gpu else "auto"
            out = rw.attention(leaves[0], leaves[1], leaves[2], window, on_oom="stream", backend=backend)
            made = [out.detach(), *(torch.autograd.grad(out, leaves, q) if backward else ())]
            if on_gpu:
                torch.cuda.synchronize()
            return made

        exact, came = ([x.to(job.device) for x in call(name)] for name in ("device", "host"))
        errors = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(came, exact, strict=True)]
        if not all(error <= 1e-2 for error in errors):
            raise UnsupportedError(f"wrong by {max(errors):.2g} of its size")
        calls = {name: partial(call, name) for name in found}
        timings = interleaved(calls, rounds=3, device=job.device, timer=by_clock)
        return timings["host"].median, timings["device"].median

    for name, backward in (("forward", False), ("forward and backward", True)):
        of = functools.cache(partial(seconds, backward))
        moved = 2 * 8 * tokens * 128 * 2 * (3 if backward else 1)

        def rate(of: Callable[[], tuple[float, float]] = of, moved: int = moved) -> float:
            return moved / of()[0] / 1e9

        def over(of: Callable[[], tuple[float, float]] = of) -> float:
            host, there = of()
            return host / there

        yield job.figure(f"streamed, {name}: bytes between host and device", size, rate, "GB/s")
        yield job.figure(f"streamed, {name}: time over that of keys on the device", size, over)


def tried(job: Job) -> Iterator[Target]:
    """Hold the trial of a headline, and store and report the verdicts, as ``ringweave tune --gpu`` does."""
    problem = headlines.HEADLINES[_TRIED].problem(_TRIED, job.device, False)
    what, size = "trial", f"{problem.name}, {problem.tokens:,} tokens"
    if job.dry:
        yield job.figure(what, size, lambda: 0.0, "s")
        return
    trial.LIMIT = _TRIAL
    for direction in DIRECTIONS:
        for verdict in trials(problem, directions=(direction,), say=say):
            for backend, each in verdict.outcomes.items():
                yield Target(what, f"{size}, {direction}, {backend}", each.seconds, None, True, "s", each.reason)
            used = f"auto uses {verdict.best or 'no backend of the trial'}"
            yield Target(f"{what}: {used}", f"{size}, {direction}", float(verdict.best is not None), None, True, "")


def say(text: str) -> None:
    """Print a progress message into the unit's file."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


#: Units by name, the most important first.
UNITS: dict[str, Callable[[Job], Iterable[Record]]] = {
    "peaks": peaks,
    **{f"headline {name}": partial(headline, headlines.others, name) for name in headlines.HEADLINES},
    "ahead": ahead,
    "small": small,
    **{f"own {name}": partial(headline, headlines.own, name) for name in headlines.HEADLINES},
    "tests": tests,
    "trial": tried,
    "bits": bits,
    "decode": decode,
    "streamed": streamed,
}


def main(words: list[str] | None = None) -> int:
    """Run one unit, and return 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("name", choices=UNITS)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--checkout", type=Path)
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args(words)
    job = Job(given.folder, given.device, given.dry, given.checkout)
    device, wrong = "cpu" if job.dry else job.device, False
    head = {
        "case": "campaign",
        "environment": plain(environment(device)),
        "options": plain(Options(device=device)),
    }
    with aside(device):
        for record in UNITS[given.name](job):
            write_lines(job.folder / FIGURES, [head | plain(record)])
            wrong |= isinstance(record, Outcome) and record.wrong
            wrong |= isinstance(record, Target) and (record.met is False or record.reason not in (None, DRY))
    return int(wrong and given.name in ("small", "bits", "tests"))


if __name__ == "__main__":
    sys.exit(main())
