"""Run ``python -m tests.fuzz``: every backend and instruction set for a share of the time, or one of them."""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import mmap
import os
import secrets
import signal
import struct
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

# processes that run together
_AT_ONCE = 2
_MOST_FINDS = 3
# seconds for one case and for shrinking it, on a busy machine
_LONGEST = 240


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
    parser.add_argument("--case", type=int, help="the number of one case, to run alone")
    parser.add_argument("--finds", type=int, default=_MOST_FINDS, help="different ones, after which a process stops")
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
    while waiting or running:
        while waiting and len(running) < _AT_ONCE:
            running.append(Process(waiting.pop(), seed, share))
        time.sleep(0.05)
        for process in [each for each in running if each.ended()]:
            running.remove(process)
            failed += process.report()
    return 1 if failed else 0


class Process:
    """One backend's process, and the number of its present case, which is kept after a crash."""

    def __init__(self, job: list[str], seed: int, seconds: float):
        self.job = [*job, "--seed", str(seed)]
        self.place = Path(f"/tmp/ringweave-fuzz-{os.getpid()}-{'-'.join(word.strip('-') for word in job)}")
        self.place.write_bytes(bytes(8))
        command = [sys.executable, "-m", "tests.fuzz", *self.job, "--seconds", str(seconds), "--progress", self.place]
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
            (index,) = struct.unpack("q", self.place.read_bytes())
            how = f"dies of {signal.Signals(-code).name}" if code < 0 and code != -signal.SIGKILL else "hangs or stops"
            print(f"FIND: case {index} of {' '.join(self.job)} {how}")
            if "--sequences" not in self.job:
                from .calls import draw, program

                inputs, lines = program(draw(self.job[1], int(self.job[-1]), index))
                print(*inputs, *lines, sep="\n")
        self.place.unlink()
        return code != 0


def one(options: argparse.Namespace) -> int:
    """Run one backend in this process."""
    faulthandler.enable()
    import torch

    from . import sequences
    from .calls import draw
    from .check import Find, Refused, check
    from .shrink import FINE, shrink, text

    warnings.simplefilter("error")
    if options.backend == "triton":
        # discarded results may combine infinities, and numpy, which computes for the interpreter, warns of that
        warnings.simplefilter("ignore", RuntimeWarning)
    name = options.backend + f" --variant {options.variant}" * bool(options.variant) + " --fine" * options.fine
    name += " --sequences" * options.sequences
    if options.fine:
        exec(FINE)
    progress = mmap.mmap(os.open(options.progress, os.O_RDWR), 8) if options.progress else bytearray(8)
    counts: Counter[str] = Counter()
    kinds: set[str] = set()
    index = -1 if options.case is None else options.case - 1
    start = time.monotonic()
    while options.case is None or index < options.case:
        index += 1
        if index == 1:
            # the first call also loads modules that torch loads late, which takes seconds on a busy machine
            start = time.monotonic()
        if time.monotonic() - start > options.seconds and options.case is None and index:
            break
        # a call that hangs prints its stack
        faulthandler.dump_traceback_later(_LONGEST, exit=True)
        progress[:8] = struct.pack("q", index)
        again = f"python -m tests.fuzz --backend {name} --seed {options.seed} --case {index}"
        if options.sequences:
            try:
                sequences.run(options.backend, options.seed, index)
                counts["checked"] += 1
            except Find as find:
                counts["finds"] += 1
                if find.kind not in kinds:
                    print(f"FIND: {again}\n{find}\n{find.line}\n", flush=True)
                kinds.add(find.kind)
                if len(kinds) >= options.finds:
                    break
            continue
        call = draw(options.backend, options.seed, index)
        try:
            counts[check(call)] += 1
        except Refused:
            counts["refused"] += 1
        except Find as find:
            counts["finds"] += 1
            with torch.random.fork_rng():
                smaller, shown = shrink(call, find)
            printed = text(smaller, shown, options.variant, options.fine)
            terms = [term.kind for term in smaller.score_terms.terms]
            key = (
                f"{shown.kind} {smaller.tree.kind} {smaller.layouts if shown.kind.startswith('value') else ''} {terms}"
            )
            if key not in kinds:
                print(f"FIND: {again}\n{printed}\n", flush=True)
            kinds.add(key)
            if len(kinds) >= options.finds:
                break
    ran = sum(counts.values())
    seconds = time.monotonic() - start
    print(
        f"{name}: {ran} cases ({', '.join(f'{n} {what}' for what, n in sorted(counts.items()))}) in {seconds:.0f} s, "
        f"{ran / seconds:.0f} a second, seed {options.seed}",
        flush=True,
    )
    return 1 if counts["finds"] else 0


if __name__ == "__main__":
    sys.exit(main())
