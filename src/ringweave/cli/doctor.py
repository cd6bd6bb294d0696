"""``ringweave doctor``: report what this machine has, which backends run on it, and a verdict."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
from collections import Counter
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from rich.text import Text

from .. import __version__, memory, native, plugins
from ..backends import BACKENDS, cpu, tuning
from ..call import Call
from ..environment import CPU_VARIANT, commit
from ..errors import RingweaveError
from ..patterns import Causal, SlidingWindow
from ..plan import branches
from ..program import preference, trials
from ..units import nbytes
from . import terminal

_OPTIONAL = (
    "numpy",
    "triton",
    "flash-attn-4",
    "typer",
    "rich",
    "matplotlib",
    "psutil",
    "transformers",
    "ringweave-audit",
    "ringweave-gpu",
    "ringweave-lab",
)
_COMPILERS = ("g++", "clang++", "c++", "nvcc")
_MODULE = "ringweave._cpu"
_NOT_BUILT = "none: ringweave was built without a working C++ compiler, or with wheel.cmake=false"
_NOT_LOADED = f"none: {_MODULE} does not load"
_SLOW = "Works, but slowly on this processor: ringweave {}"
_COMPILER = " Reinstall ringweave with a C++ compiler (g++ or clang++), and not with wheel.cmake=false."
_VARIABLES = {
    CPU_VARIANT: "not set: the best instruction set is used",
    tuning.VARIABLE: "not set: the user's cache folder is used",
}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check Python, PyTorch, devices, the native kernel, compilers, packages and backends, and give a verdict."""
    findings = diagnose()
    console = terminal.out()
    if as_json:
        console.print(json.dumps(findings, indent=2), markup=False, soft_wrap=True)
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for section, entries in findings.items():
        table.add_row(section, "", style="bold", end_section=True)
        for name, value in entries.items():
            table.add_row(Text(f"  {name}", style=""), Text(_text(value)))
        if not entries:
            table.add_row("  none", "")
    console.print(table)
    # a redirected verdict stays one line; a terminal wraps it between words
    console.print(f"\n{verdict(findings)}", markup=False, soft_wrap=not console.is_terminal)


def _version() -> str:
    """Return the version, and the commit of a package that runs from a clone."""
    known = commit()
    return f"{__version__}, commit {known}" if known else __version__


def _memory() -> str:
    left = memory.pressure()
    return f"{nbytes(left.free)} free of {nbytes(left.total)} ({left.limit})"


def _text(value: object) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {each}" for name, each in value.items())
    return "not found" if value is None else str(value)


def diagnose() -> dict[str, dict[str, Any]]:
    """Examine this machine and installation; return plain values by section.

    Example:
        >>> from ringweave.cli.doctor import diagnose
        >>> sorted(diagnose())[:4]
        ['backends', 'compilers', 'devices', 'native kernel']
    """
    devices, usual = _devices(), multiprocessing.get_all_start_methods()[0]
    held = trials("cuda")
    variables = _VARIABLES | ({} if held is None else held.variables())
    return {
        "system": {
            "ringweave": _version(),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "memory": _memory(),
            "numa": memory.numa.described(),
            "processes": f"started by {multiprocessing.get_start_method(allow_none=True) or usual}",
        },
        "devices": devices,
        "native kernel": _kernel(),
        "compilers": {name: _compiler(name) for name in _COMPILERS},
        "packages": {name: _installed(name) for name in _OPTIONAL},
        "backends": {name: {kind: _usable(name, kind) for kind in devices} for name in BACKENDS}
        | plugins.absent_backends(BACKENDS),
        "tuning store": _store(),
        "trials": {} if held is None else held.report(),
        "variables": variables | {name: value for name, value in sorted(os.environ.items()) if name in variables},
    }


def verdict(findings: dict[str, dict[str, Any]]) -> str:
    """Summarise the findings of :func:`diagnose` in one line: whether ringweave is ready, and what to do if not."""
    kernel, packages, backends = (findings[name] for name in ("native kernel", "packages", "backends"))
    used = kernel["in use"]
    if used in kernel.get("can run", "").split(", "):
        said = f"Ready: the native kernel ({used}) computes on this processor"
        remedy = f" The kernel is {kernel['build']}. {native.REINSTALL}" if "build" in kernel else ""
    elif used.startswith(_NOT_BUILT):
        said, remedy = _SLOW.format("was built without its native kernel"), _COMPILER
    elif used.startswith(_NOT_LOADED):
        said, remedy = _SLOW.format("cannot load its native kernel"), " Reinstall ringweave for this Python."
    else:
        return f"Not ready: {used}"
    parts = [said, f"transformers {'found' if packages['transformers'] else 'not installed'}", _gpu(findings, backends)]
    return "; ".join(parts) + "." + remedy


def _gpu(findings: dict[str, dict[str, Any]], backends: dict[str, Any]) -> str:
    kinds = [kind for kind in findings["devices"] if kind != "cpu"]
    if not kinds:
        return "no GPU"
    able = [name for name in preference(kinds[0]) if _runs(backends, name, kinds[0])]
    return f"{kinds[0]} runs {', '.join(able)}" if able else f"{kinds[0]} found, but no backend for it"


def _runs(backends: dict[str, Any], name: str, kind: str) -> bool:
    said = backends.get(name)
    return isinstance(said, dict) and str(said.get(kind)).startswith("usable")


def _kernel() -> dict[str, str]:
    """Return the instruction sets of the CPU kernel (in use, and supported by this machine), or why it is absent."""
    try:
        kernel = cpu.module()
    except RingweaveError as error:
        return {"in use": str(error)}
    if kernel is None:
        return {"in use": _why_absent()}
    try:
        used = cpu.variant()
    except RingweaveError as error:
        used = str(error)
    facts = {"in use": used, "can run": ", ".join(kernel.variants())}
    other = native.other_build(kernel)
    return facts if other is None else facts | {"build": f"{other[0]}, and not {other[1]}"}


def _store() -> dict[str, str | int]:
    """Return the file of answers that ``ringweave tune`` writes, and its numbers of answers, tiles and blocks."""
    path = tuning.tuning_file()
    tuning.refresh()
    answers = [answer for each in tuning.answers().values() for answer in each.values()]
    facts: dict[str, str | int] = {"file": str(path), "answers": len(answers)}
    tiles = Counter(answer.tile for answer in answers if answer.tile is not None)
    if tiles:
        facts["tiles"] = ", ".join(f"{q} x {k} ({count})" for (q, k), count in sorted(tiles.items()))
    return facts


def _why_absent() -> str:
    if importlib.util.find_spec(_MODULE) is None:
        return f"{_NOT_BUILT}; the dense_batched backend computes instead"
    try:
        importlib.import_module(_MODULE)
    except ImportError as error:
        return f"{_NOT_LOADED} ({error}); the dense_batched backend computes instead"
    return f"none: {_MODULE} did not load at the start of this process, but loads now. Start it again."


def _devices() -> dict[str, str]:
    devices = {"cpu": f"{os.cpu_count()} processors"}
    if torch.cuda.is_available():
        cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        devices["cuda"] = ", ".join(f"{card.name} ({nbytes(card.total_memory)})" for card in cards)
    if torch.backends.mps.is_available():
        devices["mps"] = "available"
    return devices


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _compiler(name: str) -> str | None:
    path = shutil.which(name)
    if path is None:
        return None
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"{path} does not run ({type(error).__name__})"
    return f"{path} ({said.strip().splitlines()[0]})" if said.strip() else path


def _usable(name: str, device: str) -> str:
    """Return ``usable``, or why a backend refuses a dense or a sparse case on a device."""
    case = Call(1, 1, 1, 256, 256, 64, 64, torch.float32, device, needs_grad=True)
    refused = {}
    for kind, pattern in (("dense", Causal()), ("sparse", SlidingWindow(64))):
        (branch,) = branches(pattern, 256, 256)
        reason = BACKENDS[name].unsupported_reason(case, branch)
        if reason is not None:
            refused[kind] = reason
    if not refused:
        return "usable"
    if len(refused) == 2:
        return f"not usable: {refused['dense']}"
    ((kind, reason),) = refused.items()
    return f"usable, except for {kind} patterns: {reason}"
