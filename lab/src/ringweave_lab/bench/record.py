"""Options and records of a benchmark case: outcomes, targets, the machine, and JSON lines."""

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
from ringweave.backends.tuning_keys import processor
from ringweave.environment import commit
from ringweave.errors import UnsupportedError

from ..tune.measure import Ratio, Timing, ratio
from ..tune.oracle import Accuracy, Limit
from ..tune.problem import Problem
from .peak import Peak


@dataclass(frozen=True)
class Options:
    """The settings of a case that a user may change; None keeps the case's size.

    Attributes:
        quick: Whether to use small sizes, which take seconds.
        tokens: Sequence length.
        heads: Query heads.
        dtype: Type of the inputs; None means float32, or every type that the case measures.
        device: Device of the inputs.
        rounds: Number of timed rounds.
        full: Whether to measure every size of a case with many sizes, which takes minutes or hours.
        part: Name of one part of a case that has parts; None means all.
        folder: Folder in which a long case stores its figures and from which it continues; None stores nothing.
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
        """Whether the sizes differ from the case's; targets hold only for the case's sizes."""
        return bool(self.quick or self.tokens or self.heads)

    def of(self, problem: Problem) -> Problem:
        """Return a problem with the requested sizes and type."""
        heads = self.heads or problem.heads
        # keeps the number of query heads per key head if the requested heads are divisible
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
    """The cost of planning one pattern at one length.

    Attributes:
        workload: Name of the problem.
        pattern: The pattern as text.
        tokens: Sequence length.
        tiles: Number of non-empty tiles.
        timing: Seconds to build a plan that is not cached.
        nbytes: Bytes of the plan.
    """

    workload: str
    pattern: str
    tokens: int
    tiles: int
    timing: Timing
    nbytes: int

    @property
    def nanoseconds_per_tile(self) -> float:
        """Median nanoseconds per tile."""
        return self.timing.median / self.tiles * 1e9

    @property
    def bytes_per_tile(self) -> float:
        """Bytes per tile."""
        return self.nbytes / self.tiles


@dataclass(frozen=True)
class StepCost:
    """The cost of a training step on packed documents, if they are those of the step before and if they are new.

    Attributes:
        tokens: Tokens of all documents.
        documents: Number of documents.
        window: Width of the causal window inside each document; None if every earlier key is attended.
        heads: Query heads.
        head_dim: Channels of a head.
        dtype: Type of the inputs.
        same: Seconds of a step with the same documents as the step before.
        new: Seconds of a step with documents that no earlier step had.
        plan: Seconds to build a plan of new documents.
    """

    tokens: int
    documents: int
    window: int | None
    heads: int
    head_dim: int
    dtype: str
    same: Timing
    new: Timing
    plan: Timing

    @property
    def over_same(self) -> float:
        """Median over rounds of the ratio of a step with new documents to one with the same."""
        return ratio(self.new, self.same).paired

    @property
    def plan_share(self) -> float:
        """Share of the plan in a step with new documents."""
        return ratio(self.plan, self.new).paired


@dataclass(frozen=True)
class Outcome:
    """The result of one peer on one problem.

    Attributes:
        workload: Name of the problem.
        tokens: Sequence length.
        heads: Query heads.
        kv_heads: Key heads.
        head_dim: Channels of a head.
        dtype: Type of the inputs.
        density: Share of allowed pairs.
        direction: ``"forward"``, ``"backward"`` or ``"forward + backward"``.
        peer: Name of the peer.
        computes: Pattern that the peer computes; for dense peers it differs from the problem's.
        how: Name of the backend or kernel.
        timing: Seconds; None if the peer was not timed, for the reason in ``reason``.
        over_first: Ratio of the peer's time to the first peer's; None if one of them was not timed.
        gflops: Operations on the *problem's* allowed pairs per second, in 10^9; the count is the same for every peer.
        peak: Peak memory.
        accuracy: Errors on the checked rows against the oracle of ``computes``.
        limit: Largest errors that count as correct.
        setup_seconds: Seconds spent once, on planning or compilation.
        peak_share: ``gflops`` over the device's peak in the same run, if that was measured.
        memory_share: Bytes of all tensors, each read or written once, per second, over the speed of reading memory in
            the same run, if that was measured.
        reason: Reason why the peer was not timed.
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
    """A measured figure and the bound that it should keep.

    Attributes:
        what: Description of the figure.
        size: Size at which it was measured, as text.
        figure: The measured figure; None if it could not be measured, for the reason in ``reason``.
        bound: The bound; None if the size is too small for one.
        at_least: Whether ``bound`` is a lower bound; otherwise it is an upper one.
        unit: ``"x"`` for a ratio, ``"%"`` for a share, or another unit as it is printed.
        reason: Reason why there is no figure.
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
        """Whether the figure keeps its bound; None if one of them is missing."""
        if self.figure is None or self.bound is None:
            return None
        return self.figure >= self.bound if self.at_least else self.figure <= self.bound

    def spelled(self, value: float | None) -> str:
        """Return a figure as text in the target's unit."""
        if value is None:
            return "-"
        return f"{value:.1%}" if self.unit == "%" else f"{value:.2f} {self.unit}"


@dataclass(frozen=True)
class Score:
    """The score of one method with one seed.

    Attributes:
        part: Name of the experiment.
        method: Name of the method.
        tokens: Sequence length.
        seed: Seed, or number of the excerpt.
        steps: Number of training steps.
        unit: Unit of the value.
        density: Share of the causal pairs that the method attends.
        value: The score.
        curve: Losses during training, or recall over updates.
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
        """Values that identify the scored experiment."""
        return self.part, self.method, self.tokens, self.seed, self.steps


@dataclass(frozen=True)
class Published:
    """A published figure of another system, and ringweave's figure for the same quantity.

    Attributes:
        what: Description of the figure.
        published: The figure as published.
        size: Size at which ringweave was measured, as text.
        figure: Ringweave's figure; None if it is missing, for the reason in ``note``.
        unit: Unit of ringweave's figure.
        note: Remark on either figure.
    """

    what: str
    published: str
    size: str
    figure: float | None
    unit: str
    note: str = ""


@dataclass(frozen=True)
class Rule:
    """A target for the outcomes that have given attributes.

    Attributes:
        what: Description of the figure; ``{dtype}``, ``{direction}`` and ``{workload}`` are the outcome's.
        of: Values of the outcome's attributes, such as its peer, or functions that test them.
        figure: Function that returns an outcome's figure.
        bound: The bound.
        at_least: Whether ``bound`` is a lower bound; otherwise it is an upper one.
        unit: Unit of the figure, as in :class:`Target`.
        tokens: Length at which the bound holds; None for any length.
    """

    what: str
    of: Mapping[str, object]
    figure: Callable[[Outcome], float | None]
    bound: float
    at_least: bool = True
    unit: str = "x"
    tokens: int | None = None


def targets(rules: Sequence[Rule], outcomes: Sequence[Outcome], density: str = ".1%") -> list[Target]:
    """Return the targets of outcomes, in the outcomes' order.

    Args:
        rules: Rules that select outcomes and set their bounds.
        outcomes: Measured outcomes.
        density: Format of a density.
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
    """Return the ratio of the outcome's time to the first peer's; None if one of them was not timed."""
    return None if outcome.over_first is None else outcome.over_first.medians


Record: TypeAlias = Outcome | PlanCost | Published | Score | StepCost | Target
#: A running case: it yields records as they are measured, and returns a conclusion in words.
Measuring: TypeAlias = Generator[Record, None, str]
#: A function that receives progress messages.
Say: TypeAlias = Callable[[str], None]


def silent(text: str) -> None:
    """Ignore a progress message."""


@dataclass(frozen=True)
class CaseResult:
    """The figures of a case, and a conclusion.

    Attributes:
        case: Name of the case.
        records: Measured records.
        conclusion: Conclusion in words.
        grid: Whether the outcomes are many sizes of one problem, shown with a row per size and a column per peer.
    """

    case: str
    records: tuple[Record, ...]
    conclusion: str
    grid: bool = False


@dataclass(frozen=True)
class Environment:
    """The machine, the software and the time of a measurement.

    Attributes:
        date: Time in UTC, to the second.
        cpu: Processor model.
        cores: Number of processors that this process may use.
        threads: Number of torch threads.
        load: Load average of the minute before the run; figures are noisy if it is far above 0.
        memory: Bytes of main memory, if known.
        accelerator: Name of the GPU, if one was measured.
        driver: Version of the GPU's driver.
        cuda: CUDA version that torch was built with.
        triton: Version of Triton.
        platform: Operating system and architecture.
        python: Version of Python.
        torch: Version of torch.
        ringweave: Version of ringweave.
        kernel: Instruction set of the native CPU kernel; None if the kernel is missing.
        commit: Short commit of the source tree, if it is a repository; ``+`` marks local changes.
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
        """Short description of the machine."""
        kernel = f", kernel {self.kernel}" if self.kernel else ""
        return f"{self.accelerator or self.cpu}, {self.threads} threads, torch {self.torch}{kernel}"


def environment(device: str = "cpu") -> Environment:
    """Return the environment of this process."""
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
        commit=commit(),
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


def plain(value: Any) -> Any:
    """Convert a value for JSON: dataclasses become objects, and values without a JSON form become text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def write_lines(path: str | Path, records: Iterable[Any]) -> int:
    """Append records to a file as JSON lines, each on the disk before the next, and return their number."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(plain(record), ensure_ascii=False, allow_nan=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
            count += 1
    return count
