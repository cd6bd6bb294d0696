"""Commands that start processes of their own, bounded in time, none left behind: torchrun, and the example trainer.

The trainer runs as a user starts it: as one process alone, and as several that share a sequence.
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

# on the relative difference of losses: float32 sums in another order, which training amplifies
LIMIT = 1e-4
_PERIOD = 0.1
# the line of an exception, of any rank; torchrun's own says nothing more
_CAUSE = re.compile(r"^(?:\[rank\d+\]: )?((?!.*ChildFailedError)[\w.]+Error: .+)$", re.MULTILINE)


class LaunchError(RuntimeError):
    """A command failed, or was not done in time; the message says why."""


def torchrun(processes: int, *target: object, restarts: int = 0) -> list[str]:
    """Give the command line that starts a script, or a module after ``-m``, in some processes of this machine.

    Args:
        processes: How many.
        target: The script and its arguments.
        restarts: How often all are started again when one has died.
    """
    # on this machine's loopback, whatever its name resolves to
    launcher: tuple[str, ...] = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")
    launcher = (*launcher, f"--nproc-per-node={processes}", f"--max-restarts={restarts}")
    return [sys.executable, *map(str, (*launcher, *target))]


def run(
    words: list[str], *, threads: int, until: float, look: Callable[[], None] = lambda: None, may_fail: bool = False
) -> str:
    """Run a command to its end, and give what it printed.

    Args:
        words: The command.
        threads: How many each of its processes has.
        until: When it must have ended, in time.monotonic().
        look: Called now and then.
        may_fail: Whether its exit status says nothing.
    Raises:
        LaunchError: It failed, or was not done in time.
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
    """Start a command; at exit whoever is left of it and its descendants is ended.

    Args:
        words: The command.
        threads: How many each of its processes has.
        log: File descriptor that takes what they print.
    """
    import psutil

    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    # waiting threads sleep: spinning ones would take the cores from the other processes
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    # torch looks up a name for every connection to a store: where the DNS is slow, for 1 s and not for 5
    environment.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
    family = psutil.Process(process.pid)
    try:
        yield process
    finally:
        # torchrun's workers are sessions of their own: they outlive it unless it ends them, or this does
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
    """What a run of the trainer printed.

    Attributes:
        processes: How many share a sequence.
        threads: How many each has.
        losses: Nats per byte, by step.
        tokens_per_second: Median, without the first step.
        received: Bytes that the busiest process received in a forward pass.
        full_ring: Bytes that it would receive if all keys and values went around.
    """

    processes: int
    threads: int
    losses: tuple[float, ...]
    tokens_per_second: float
    received: int
    full_ring: int

    @staticmethod
    def read(path: Path, processes: int, threads: int) -> Steps:
        """Read the trainer's metrics."""
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
    """One process, and several that share its sequences: the same weights, the same excerpts.

    Attributes:
        tokens: Length of a sequence.
        window: Tokens that a token sees before itself.
        alone: One process.
        shared: Several.
    """

    tokens: int
    window: int
    alone: Steps
    shared: Steps

    @property
    def difference(self) -> float:
        """The largest of a step's losses, relative; NaN where one of them is."""
        one, several = np.array(self.alone.losses), np.array(self.shared.losses)
        return float(np.max(np.abs(several - one) / np.abs(one)))

    @property
    def share(self) -> float:
        """Which part of a full ring's bytes was received."""
        return self.shared.received / self.shared.full_ring

    @property
    def correct(self) -> bool:
        """Whether the losses agree; NaN does not."""
        return self.difference <= LIMIT

    def summary(self) -> str:
        """Say the figures in words."""
        losses = "same losses as" if self.correct else "WRONG: other losses than"
        return (
            f"{self.shared.processes} processes share {self.tokens:,} tokens and receive "
            f"{percent(self.share)} of a full ring's bytes; {losses} one process, to {self.difference:.0e}"
        )


def example() -> Path | None:
    """``examples/train_lm.py`` of the checkout that this package is imported from; None where it is installed alone."""
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
        window: Tokens that a token sees before itself.
        steps: Steps of each run.
        threads: What the one process has; the several have as many together, one each at least.
        limit: Seconds that both runs may take together.
        processes: How many share a sequence.
        advance: Told the share done and what happens.
    Returns:
        Both runs; or, in words, why there are none.
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
    """Give the command line of the trainer, through torchrun if there are several processes."""
    if processes > 1:
        return torchrun(processes, script, *options, restarts=restarts)
    return [sys.executable, *map(str, (script, *options))]
