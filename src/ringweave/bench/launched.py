"""Commands that start processes of their own, such as torchrun: bounded in time, none left behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
    words: list[str],
    *,
    threads: int,
    until: float,
    look: Callable[[], None] = lambda: None,
    may_fail: bool = False,
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
