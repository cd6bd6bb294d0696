"""Run torchrun and the example trainer with a time limit, and end all their processes.

The trainer runs as a user starts it: as one process, and as several processes that share a sequence.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

import ringweave
from ringweave.units import percent

# Bound on the relative difference of losses: float32 sums differ in order, which training amplifies.
LIMIT = 1e-4
_PERIOD = 0.1
# the line of an exception of any rank, except torchrun's, which adds nothing
_CAUSE = re.compile(r"^(?:\[rank\d+\]: )?((?!.*ChildFailedError)[\w.]+Error: .+)$", re.MULTILINE)


class LaunchError(RuntimeError):
    """Raised if a command fails or exceeds its time; the message gives the reason."""


def torchrun(processes: int, *target: object, restarts: int = 0) -> list[str]:
    """Return the command line that starts a script, or a module after ``-m``, in processes on this machine.

    Args:
        processes: Number of processes.
        target: The script and its arguments.
        restarts: Number of times that all processes are restarted after one has died.
    """
    # uses the loopback address, since the machine's name may resolve to another one
    launcher: tuple[str, ...] = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")
    launcher = (*launcher, f"--nproc-per-node={processes}", f"--max-restarts={restarts}")
    return [sys.executable, *map(str, (*launcher, *target))]


def run(
    words: list[str], *, threads: int, until: float, look: Callable[[], None] = lambda: None, may_fail: bool = False
) -> str:
    """Run a command to its end, and return its output.

    Args:
        words: The command.
        threads: Threads of each process.
        until: Value of time.monotonic() at which it must have ended.
        look: Function that is called from time to time.
        may_fail: Whether to ignore its exit status.
    Raises:
        LaunchError: The command failed or exceeded its time.
    """
    with tempfile.TemporaryFile() as log, started(words, threads=threads, log=log.fileno()) as process:
        while process.poll() is None:
            look()
            if time.monotonic() > until:
                raise LaunchError("not done in time")
            time.sleep(_PERIOD)
        log.seek(0)
        printed = log.read().decode(errors="replace")
    if process.returncode and not may_fail:
        causes = _CAUSE.findall(printed) or printed.splitlines() or ["nothing printed"]
        raise LaunchError(f"exit status {process.returncode} ({causes[-1].strip()[:300]})")
    return printed


@contextmanager
def started(words: list[str], *, threads: int, log: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command, and end it and its descendants at exit.

    Args:
        words: The command.
        threads: Threads of each process.
        log: File descriptor for their output.
    """
    import psutil

    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    # waiting threads sleep, since spinning threads would take the cores of the other processes
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    # torch looks up a name for every connection to a store; this limits a slow DNS to 1 s instead of 5
    environment.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
    family = psutil.Process(process.pid)
    try:
        yield process
    finally:
        # torchrun's workers run in separate sessions and outlive it unless it or this function ends them
        try:
            left = [*family.children(recursive=True), family]
        except psutil.NoSuchProcess:
            left = []
        for each in left:
            try:
                each.kill()
            except psutil.NoSuchProcess:
                continue
        process.wait()
        psutil.wait_procs(left, timeout=5)


@dataclass(frozen=True)
class Steps:
    """The figures of a run of the trainer.

    Attributes:
        processes: Number of processes that share a sequence.
        threads: Threads of each process.
        losses: Nats per byte, by step.
        tokens_per_second: Median, without the first step.
        received: Bytes that the busiest process received in a forward pass.
        full_ring: Bytes that it would receive if all keys and values went around the ring.
    """

    processes: int
    threads: int
    losses: tuple[float, ...]
    tokens_per_second: float
    received: int
    full_ring: int

    @staticmethod
    def read(path: Path, processes: int, threads: int) -> Steps:
        """Return the figures of the trainer's metrics file."""
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return Steps(
            processes,
            threads,
            tuple(line["loss"] for line in lines),
            median(line["tokens_per_second"] for line in lines[1:] or lines),
            max(line["received"] for line in lines),
            lines[0]["full_ring"],
        )


@dataclass(frozen=True)
class SharedTraining:
    """Training by one process, and by several that share its sequences, with equal weights and excerpts.

    Attributes:
        tokens: Length of a sequence.
        window: Tokens before a token that it attends.
        alone: Figures of one process.
        shared: Figures of several processes.
    """

    tokens: int
    window: int
    alone: Steps
    shared: Steps

    @property
    def difference(self) -> float:
        """Largest relative difference of the losses of a step; NaN if a loss is NaN."""
        one, several = np.array(self.alone.losses), np.array(self.shared.losses)
        return float(np.max(np.abs(several - one) / np.abs(one)))

    @property
    def share(self) -> float:
        """Received bytes over the bytes of a full ring."""
        return self.shared.received / self.shared.full_ring

    @property
    def correct(self) -> bool:
        """Whether the losses agree; NaN does not."""
        return self.difference <= LIMIT

    def summary(self) -> str:
        """Return the figures in words."""
        losses = "same losses as" if self.correct else "WRONG: other losses than"
        return (
            f"{self.shared.processes} processes share {self.tokens:,} tokens and receive "
            f"{percent(self.share)} of a full ring's bytes; {losses} one process, to {self.difference:.0e}"
        )


def example() -> Path | None:
    """Return the path of ``examples/train_lm.py``; None if this package was not imported from a checkout."""
    root = Path(ringweave.__file__).resolve().parents[2]
    path = root / "examples" / "train_lm.py"
    return path if path.is_file() and (root / "pyproject.toml").is_file() else None


def around(
    *,
    tokens: int,
    window: int,
    steps: int,
    threads: int,
    limit: float,
    processes: int = 2,
    advance: Callable[[float, str], None] = lambda done, text: None,
) -> SharedTraining | str:
    """Run the trainer with one process, and with several on the same cores.

    Args:
        tokens: Length of a sequence.
        window: Tokens before a token that it attends.
        steps: Steps of each run.
        threads: Threads of the one process; several processes have as many in total, and at least one each.
        limit: Seconds that both runs may take together.
        processes: Number of processes that share a sequence.
        advance: Function that receives the share done and a progress message.
    Returns:
        Both runs, or the reason why they are missing.
    """
    script = example()
    if script is None:
        return "the example lies in a checkout of ringweave, and this ringweave is installed without one"
    until = time.monotonic() + limit
    runs = []
    with tempfile.TemporaryDirectory(prefix="ringweave-") as folder:
        for number, (count, each) in enumerate([(1, threads), (processes, max(1, threads // processes))]):
            out = Path(folder) / f"{count}.jsonl"
            options = ["--tokens", tokens, "--window", window, "--steps", steps, "--out", out]
            words = "one process" if count == 1 else f"{count} processes"

            def look(out: Path = out, number: int = number, words: str = words) -> None:
                done = len(out.read_bytes().splitlines()) if out.exists() else 0
                advance((number + 0.95 * done / steps) / 2, f"{words}, step {done} of {steps}" if done else words)

            try:
                run(command(script, count, *options), threads=each, until=until, look=look)
            except LaunchError as error:
                return f"{words}: {error}"
            runs.append(Steps.read(out, count, each))
    return SharedTraining(tokens, window, runs[0], runs[1])


def command(script: Path, processes: int, *options: object, restarts: int = 0) -> list[str]:
    """Return the command line of the trainer, through torchrun if there are several processes."""
    if processes > 1:
        return torchrun(processes, script, *options, restarts=restarts)
    return [sys.executable, *map(str, (script, *options))]
