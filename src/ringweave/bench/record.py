"""What a measurement is filed under: the machine it ran on, and JSON lines."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ringweave

from ..errors import UnsupportedError
from ..ops import cpu
from ..ops.kinds import processor


@dataclass(frozen=True)
class Environment:
    """Where and when figures were taken.

    Attributes:
        date: UTC, to the second.
        cpu: Processor model.
        cores: Processors that this process may use.
        threads: Threads that torch uses.
        load: Load average of the last minute when taken; far above 0 before a run, figures are noisy.
        memory: Bytes of main memory, where known.
        accelerator: The GPU's name, if the figures are of one.
        driver: Its driver's version.
        cuda: Version that torch was built with.
        triton: Version.
        platform: Operating system.
        python: Version.
        torch: Version.
        ringweave: Version.
        kernel: Instruction set of the native CPU kernel; None where it is absent.
        commit: Short commit of the source tree, if it is one; ``+`` marks local changes.
    """

    date: str
    cpu: str
    cores: int
    threads: int
    load: float | None
    memory: int | None
    accelerator: str | None
    driver: str | None
    cuda: str | None
    triton: str | None
    platform: str
    python: str
    torch: str
    ringweave: str
    kernel: str | None
    commit: str | None


def environment(device: str = "cpu") -> Environment:
    """The record of this process's surroundings."""
    affinity = getattr(os, "sched_getaffinity", None)
    load = getattr(os, "getloadavg", None)
    return Environment(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        cpu=processor(),
        cores=len(affinity(0)) if affinity else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        load=round(load()[0], 2) if load else None,
        memory=_memory(),
        accelerator=torch.cuda.get_device_name() if torch.device(device).type == "cuda" else None,
        driver=_driver() if torch.device(device).type == "cuda" else None,
        cuda=torch.version.cuda,
        triton=_version("triton"),
        platform=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=str(torch.__version__),
        ringweave=ringweave.__version__,
        kernel=_kernel(),
        commit=_commit(),
    )


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return found[0] if found else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _kernel() -> str | None:
    try:
        return cpu.variant()
    except UnsupportedError:
        return None


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _commit() -> str | None:
    here = Path(ringweave.__file__).resolve().parent

    def git(*words: str) -> str:
        found = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, timeout=5, check=True)
        return found.stdout.strip()

    try:
        # an installed copy may lie inside some other repository: only a tracked one counts
        git("ls-files", "--error-unmatch", "__init__.py")
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def plain(value: Any) -> Any:
    """A value as JSON knows it: dataclasses as objects, anything that has no JSON form as its text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def write_lines(path: str | Path, records: Iterable[Any]) -> int:
    """Append records as JSON lines; the number written."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(plain(record), ensure_ascii=False, allow_nan=True) + "\n")
            count += 1
    return count
