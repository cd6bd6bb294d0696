"""Run ``python -m tests.fuzz``: every backend and instruction set for a share of the time, or one of them."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib.util
import itertools
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

# processes that run together
_AT_ONCE = 2
# seconds for one case, on a busy machine, and for shrinking
_LONGEST, _SHRINKING = 240, 20.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of all backends together, two at a time")
    parser.add_argument("--seed", type=int, help="drawn and printed by default")
    parser.add_argument("--backend", help="one of them: auto, reference, dense_batched, sdpa, cpu or triton")
    parser.add_argument("--variant", help="an instruction set of the cpu backend")
    parser.add_argument("--fine", action="store_true", help="tiles of 16, and strided views whatever they cost")
    parser.add_argument(
        "--sequences", action="store_true", help="sequences of calls that share parts, instead of calls"
    )
    parser.add_argument("--progress", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.seed is None:
        options.seed = secrets.randbelow(10**6)
    if options.backend is None:
        return all_of_them(options.seconds, options.seed)
    if options.variant is not None:
        os.environ["RINGWEAVE_CPU_VARIANT"] = options.variant
    if options.backend == "triton":
        os.environ["TRITON_INTERPRET"] = "1"
    return one(options)


def all_of_them(seconds: float, seed: int) -> int:
    """Run every backend in its own process."""
    from ringweave.backends import BACKENDS, cpu

    native = cpu.module()
    jobs = [["--backend", name] for name in ("auto", "reference", "sdpa")]
    jobs += [["--backend", "dense_batched", "--fine"]]
    for i, name in enumerate(native.variants() if native else []):
        jobs.append(["--backend", "cpu", "--variant", name, *["--fine"] * (i % 2)])
    jobs += [["--backend", "triton"]] if "triton" in BACKENDS and importlib.util.find_spec("triton") is not None else []
    jobs += [["--backend", name, "--sequences"] for name in ("auto", "dense_batched")]
    share = seconds * _AT_ONCE / len(jobs)
    print(f"seed {seed}, {share:.0f} seconds each", flush=True)
    waiting, running, failed = list(reversed(jobs)), [], 0
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < _AT_ONCE:
                running.append(Process(waiting.pop(), seed, share, Path(folder, str(len(waiting)))))
            time.sleep(0.05)
            for process in [each for each in running if each.ended()]:
                running.remove(process)
                failed += process.report()
    return 1 if failed else 0


class Process:
    """One backend's process, and a file with its present case, which is kept after a crash."""

    def __init__(self, job: list[str], seed: int, seconds: float, case: Path):
        self.job, self.case = [*job, "--seed", str(seed)], case
        case.touch()
        command = [sys.executable, "-m", "tests.fuzz", *self.job, "--seconds", str(seconds), "--progress", str(case)]
        environment = os.environ | {"OMP_NUM_THREADS": "2"}
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.end = time.monotonic() + 2 * seconds + 120

    def ended(self) -> bool:
        if self.process.poll() is None and time.monotonic() > self.end:
            self.process.kill()
        return self.process.poll() is not None

    def report(self) -> bool:
        """Print the process's output, and return whether it failed."""
        said, code = self.process.communicate()[0], self.process.returncode
        print(said, end="", flush=True)
        if code < 0 or (code and "FIND" not in said):
            how = f"dies of {signal.Signals(-code).name}" if code < 0 and code != -signal.SIGKILL else "hangs or stops"
            print(f"FIND: python -m tests.fuzz {' '.join(self.job)} {how}\n{self.case.read_text()}")
        return code != 0


class Over(KeyboardInterrupt):
    """The time is over; Hypothesis lets this exception pass."""


def one(options: argparse.Namespace) -> int:
    """Run one backend in this process, up to its first find."""
    faulthandler.enable()
    import hypothesis
    from hypothesis import strategies as st
    from hypothesis.database import InMemoryExampleDatabase

    from . import sequences
    from .calls import FINE, text
    from .check import Find, Refused, check
    from .strategies import BYTES, Choices, calls

    warnings.simplefilter("error")
    warnings.simplefilter("ignore", hypothesis.errors.HypothesisWarning)
    if options.backend == "triton":
        # discarded results may combine infinities, and numpy, which computes for the interpreter, warns of that
        warnings.simplefilter("ignore", RuntimeWarning)
    name = options.backend + f" --variant {options.variant}" * bool(options.variant) + " --fine" * options.fine
    name += " --sequences" * options.sequences
    if options.fine:
        exec(FINE)
    counts: Counter[str] = Counter()
    shown, before, ends = "", 0, float("inf")

    # a failing case is kept, and then made small
    @hypothesis.settings(
        database=InMemoryExampleDatabase(), deadline=None, report_multiple_bugs=False,
        phases=[hypothesis.Phase.reuse, hypothesis.Phase.shrink], suppress_health_check=[*hypothesis.HealthCheck],
    )  # fmt: skip
    @hypothesis.given(st.data())
    def tried(data: Any) -> None:
        nonlocal shown, before, ends
        if time.monotonic() > ends:
            raise Over
        # a call that hangs prints its stack
        faulthandler.dump_traceback_later(_LONGEST, exit=True)
        call = None if options.sequences else data.draw(calls(options.backend))
        if call is not None and options.progress:
            options.progress.write_text(text(call, None, options.variant, options.fine))
        try:
            if call is None:
                sequences.run(options.backend, Choices(data.draw))
            counts["checked" if call is None else check(call)] += 1
        except Refused:
            counts["refused"] += 1
        except Find as find:
            if not shown:
                before, ends = sum(counts.values()), time.monotonic() + _SHRINKING
            # the last one is the smallest
            shown = f"{find}\n{find.line}" if call is None else text(call, find, options.variant, options.fine)
            raise

    start = time.monotonic()
    try:
        for index in itertools.count():
            if index == 1:
                # the first call also loads modules that torch loads late, which takes seconds on a busy machine
                start = time.monotonic()
            if index and time.monotonic() - start > options.seconds:
                break
            # uniform draws: Hypothesis' own would be of plain calls for the most part
            tried.hypothesis.fuzz_one_input(Random(f"{options.backend} {options.seed} {index}").randbytes(BYTES))
    except Find:
        with contextlib.suppress(Find, Over):
            tried()
    if shown:
        again = f"python -m tests.fuzz --backend {name} --seed {options.seed}"
        print(f"FIND after {before} cases: {again}\n{shown}\n", flush=True)
    ran, seconds = sum(counts.values()), time.monotonic() - start
    print(
        f"{name}: {ran} cases ({', '.join(f'{n} {what}' for what, n in sorted(counts.items()))}) in {seconds:.0f} s, "
        f"{ran / seconds:.0f} a second, seed {options.seed}",
        flush=True,
    )
    return 1 if shown else 0


if __name__ == "__main__":
    sys.exit(main())
