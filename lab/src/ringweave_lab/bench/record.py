"""What a case is asked and what it gives: options, records of what was measured, targets, the machine, JSON lines."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

import ringweave
from ringweave.backends import cpu
from ringweave.backends.tuning import processor
from ringweave.errors import UnsupportedError
from ringweave.tune.measure import Ratio, Timing
from ringweave.tune.oracle import Accuracy, Limit
from ringweave.tune.problem import Problem

from .peak import Peak


@dataclass(frozen=True)
class Options:
    """What a user may change of a case; None keeps the case's own size.

    Attributes:
        quick: Take small sizes, for seconds.
        tokens: Sequence length.
        heads: Query heads.
        dtype: Type of the inputs; without one float32, or every type that a case is about.
        device: Where the inputs lie.
        rounds: Timed rounds.
        full: Take every size of a case that has a grid of them, for hours.
        part: One part of a case that has parts with names; None: all.
        folder: Where a case that takes long keeps what it has measured, and goes on from; None: nowhere.
    """

    quick: bool = False
    tokens: int | None = None
    heads: int | None = None
    dtype: torch.dtype | None = None
    device: str = "cpu"
    rounds: int | None = None
    full: bool = False
    folder: str | None = None
    part: str | None = None

    @property
    def sized(self) -> bool:
        """Whether sizes are others than a case's own: targets hold for these alone."""
        return bool(self.quick or self.tokens or self.heads)

    def of(self, problem: Problem) -> Problem:
        """Give a problem the sizes and the type that were asked for."""
        heads = self.heads or problem.heads
        # as many query heads over a key head, where they can be shared so
        ratio = problem.heads // problem.key_heads
        return dataclasses.replace(
            problem,
            tokens=self.tokens or problem.tokens,
            heads=heads,
            kv_heads=None if ratio == 1 else problem.key_heads if heads % problem.key_heads == 0 else heads,
            dtype=self.dtype or problem.dtype,
            device=self.device,
        )


@dataclass(frozen=True)
class PlanCost:
    """What planning one pattern at one length costs.

    Attributes:
        workload: Name of what was planned.
        pattern: Its pattern as text.
        tokens: Its length.
        tiles: Non-empty tiles.
        timing: Seconds of a cold plan.
        nbytes: Size of the plan.
    """

    workload: str
    pattern: str
    tokens: int
    tiles: int
    timing: Timing
    nbytes: int

    @property
    def nanoseconds_per_tile(self) -> float:
        """How long a tile takes, by the median."""
        return self.timing.median / self.tiles * 1e9

    @property
    def bytes_per_tile(self) -> float:
        """How many bytes a tile takes."""
        return self.nbytes / self.tiles


@dataclass(frozen=True)
class Outcome:
    """What came of one peer on one problem.

    Attributes:
        workload: The problem's name.
        tokens: Its length.
        heads: Its query heads.
        kv_heads: Its key heads.
        head_dim: Its head dimension.
        dtype: Its type.
        density: Its allowed pairs over all pairs.
        direction: ``"forward"``, ``"backward"`` or ``"forward + backward"``.
        peer: The peer's name.
        computes: The function that it computes, as a pattern; another one than the problem's for dense peers.
        how: The backend or kernel behind it.
        timing: Seconds; None where it was not timed, and ``reason`` says why.
        over_first: How many times longer than the first peer it took; None where one of them was not timed.
        gflops: Operations on the *problem's* allowed pairs per second, in 10^9: the same count for every peer.
        peak: The most memory that it held.
        accuracy: Errors on the checked rows, against the oracle of the function it computes.
        limit: What was taken as correct.
        setup_seconds: Seconds spent once, on planning or compilation.
        peak_share: ``gflops`` over the device's peak in the same run, where that was measured.
        memory_share: Bytes of all tensors, each read or written once, over the time, next to the speed at which memory
            is read in the same run, where that was measured.
        reason: Why there is no timing.
    """

    workload: str
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    density: float
    direction: str
    peer: str
    computes: str
    how: str = ""
    timing: Timing | None = None
    over_first: Ratio | None = None
    gflops: float | None = None
    peak: Peak | None = None
    accuracy: Accuracy | None = None
    limit: Limit | None = None
    setup_seconds: float | None = None
    peak_share: float | None = None
    memory_share: float | None = None
    reason: str | None = None

    @property
    def wrong(self) -> bool:
        """Whether the peer failed its check."""
        return self.accuracy is not None and self.limit is not None and self.accuracy.excess(self.limit) is not None


@dataclass(frozen=True)
class Target:
    """A figure, and what it is to be.

    Attributes:
        what: What the figure is, in words.
        size: At which size it was taken.
        figure: What was measured; None where it could not be, and ``reason`` says why.
        bound: What it is to be; None where the size is too small to say.
        at_least: Whether ``bound`` is the least or the most.
        unit: ``"x"``, a ratio, ``"%"``, a share shown in hundredths, or a unit as it is written.
        reason: Why there is no figure.
    """

    what: str
    size: str
    figure: float | None
    bound: float | None
    at_least: bool
    unit: str = "x"
    reason: str | None = None

    @property
    def met(self) -> bool | None:
        """Whether the figure is as it should be; None where nothing can be said."""
        if self.figure is None or self.bound is None:
            return None
        return self.figure >= self.bound if self.at_least else self.figure <= self.bound

    def spelled(self, value: float | None) -> str:
        """Write a figure in the target's unit."""
        if value is None:
            return "-"
        return f"{value:.1%}" if self.unit == "%" else f"{value:.2f} {self.unit}"


@dataclass(frozen=True)
class Score:
    """How well one method does one thing, with one seed.

    Attributes:
        part: What is scored.
        method: Who.
        tokens: At which length.
        seed: With which seed, or on which excerpt.
        steps: After how many training steps.
        unit: What the value is.
        density: Share of the causal pairs that the method has.
        value: The score.
        curve: What led to it: losses, or recall over updates.
    """

    part: str
    method: str
    tokens: int
    seed: int
    steps: int
    unit: str
    density: float = 0.0
    value: float = 0.0
    curve: tuple[float, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """What it is a score of."""
        return self.part, self.method, self.tokens, self.seed, self.steps


@dataclass(frozen=True)
class Published:
    """A figure that was published of another system, and ours of the same thing.

    Attributes:
        what: What the figure is, in words.
        published: The figure as it was published.
        size: At which size ours was taken.
        figure: Ours; None where there is none, and ``note`` says why.
        unit: Of ours.
        note: What there is to say of either.
    """

    what: str
    published: str
    size: str
    figure: float | None
    unit: str
    note: str = ""


@dataclass(frozen=True)
class Rule:
    """Which outcomes have a target.

    Attributes:
        what: Words for the figure; ``{dtype}``, ``{direction}`` and ``{workload}`` are the outcome's.
        of: Attributes that an outcome has, such as its peer, or what they are to be.
        figure: What is looked at.
        bound: What it is to be.
        at_least: Whether that is the least or the most.
        unit: The figure's unit, as in :class:`Target`.
        tokens: The length at which the bound holds; None for any.
    """

    what: str
    of: Mapping[str, object]
    figure: Callable[[Outcome], float | None]
    bound: float
    at_least: bool = True
    unit: str = "x"
    tokens: int | None = None


def targets(rules: Sequence[Rule], outcomes: Sequence[Outcome], density: str = ".1%") -> list[Target]:
    """Set outcomes next to their targets, in their order.

    Args:
        rules: Which outcomes have one.
        outcomes: What was measured.
        density: How a density is written.
    """
    return [
        Target(
            rule.what.format(dtype=each.dtype, direction=each.direction, workload=each.workload),
            f"{each.tokens:,} tokens, {each.heads} heads, D {each.head_dim}, density {each.density:{density}}",
            rule.figure(each),
            rule.bound if rule.tokens in (None, each.tokens) else None,
            rule.at_least,
            rule.unit,
            each.reason,
        )
        for each in outcomes
        for rule in rules
        if all(_is(getattr(each, name), wanted) for name, wanted in rule.of.items())
    ]


def _is(value: object, wanted: object) -> bool:
    return bool(wanted(value)) if callable(wanted) else value == wanted


def over_first(outcome: Outcome) -> float | None:
    """Tell how many times longer than the first peer it took."""
    return None if outcome.over_first is None else outcome.over_first.medians


Record: TypeAlias = Outcome | PlanCost | Published | Score | Target
#: A case at work: it gives records as they come, and at its end a conclusion in words.
Measuring: TypeAlias = Generator[Record, None, str]
#: Told what happens next.
Say: TypeAlias = Callable[[str], None]


def silent(text: str) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class CaseResult:
    """A case's figures, and what they say in a sentence.

    Attributes:
        case: The case's name.
        records: What was measured.
        conclusion: What that says, in words.
        grid: Whether outcomes are many sizes of one thing: shown a line each, with peers as columns.
    """

    case: str
    records: tuple[Record, ...]
    conclusion: str
    grid: bool = False


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

    @property
    def machine(self) -> str:
        """What computes, in a few words."""
        kernel = f", kernel {self.kernel}" if self.kernel else ""
        return f"{self.accelerator or self.cpu}, {self.threads} threads, torch {self.torch}{kernel}"


def environment(device: str = "cpu") -> Environment:
    """Record this process's surroundings."""
    affinity = getattr(os, "sched_getaffinity", None)
    load = getattr(os, "getloadavg", None)
    return Environment(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        cpu=processor(),
        cores=len(affinity(0)) if affinity else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        load=round(load()[0], 2) if load else None,
        memory=_memory(),
        accelerator=torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else None,
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
    """Make a value what JSON knows: dataclasses as objects, anything that has no JSON form as its text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def write_lines(path: str | Path, records: Iterable[Any]) -> int:
    """Append records as JSON lines, each as soon as it comes, and count them."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(plain(record), ensure_ascii=False, allow_nan=True) + "\n")
            file.flush()
            count += 1
    return count
