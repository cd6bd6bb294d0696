"""Trials: which backends compute a kind of call right, and fastest, on this machine's GPU.

``auto`` uses PyTorch's own engines without a trial. A kernel of another origin, ours among them, takes their place only
where a trial found it right and faster. Each candidate runs in a process of its own, so that a crash or a hang ends
only that process. Its results are compared with the definition, in float64 on the host, in cases that are published
faults of some kernel: NaN in keys that no query attends and after the last token, lengths that are no multiple of 128,
64 channels, queries that attend nothing. The right ones are then timed on the kind of the call. The verdict is stored
by the kind, the device, and the versions of driver, torch, triton and library, so that another version has none.

Kernels that are compiled elsewhere (``Backend.checked``) are only held to the definition before their first use. A
trial does not prove every size right; the tests do that. A backend that the user names runs without one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
import logging
import os
import pickle
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .. import files, units
from ..cache import PROGRAMS, process_cache
from ..call import Call, Operands
from ..environment import driver, setting
from ..errors import UnsupportedError, in_a_line, says_no_memory, warn_once, warned
from ..patterns import BlockTable, Causal, Full, Global, KeyPadding, Pattern, Selected, SlidingWindow
from ..plan import Branch
from ..plan.cuda_sync import require_no_capture
from ..plan.from_lists import listed
from ..precision import Scales, quantize_rows
from ..terms import KINDS
from ..terms.dropout import DROPOUT_LEVELS, Dropout
from ..terms.operands import TermOperands
from . import reference, tuning
from .backend import Backend, Heads, Upstream
from .tuning_keys import call_key, density, where

#: Backends that auto uses only where a trial found them right and faster.
CHALLENGERS = ("triton",)
#: Environment variable; ``background`` makes auto hold a trial beside the first call of each kind.
VARIABLE = "RINGWEAVE_TRIAL"
#: A backend takes the place of the one that auto prefers if that one takes more than this many times its seconds.
CLOSE = 1.05
#: Time limit of one candidate in seconds; compiling takes seconds for each of about ten kernels.
LIMIT = 300.0
_COMMAND = (sys.executable, "-P", "-m", __name__)
_BEGAN, _FOUND = "ringweave: began", "ringweave: found "
_ROUNDS, _CALLS = 5, 10
# limits of the relative root mean square error: well above rounding errors, well below the errors of a wrong kernel
_LIMITS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_TOKENS = 500  # not a multiple of any tile size, so the last tile is incomplete
_HEADS, _KV_HEADS = 4, 2
_log = logging.getLogger("ringweave")


class Outcome(NamedTuple):
    """The outcome of a candidate: why it cannot be used, or None; and its seconds, or None if it was not timed."""

    reason: str | None = None
    seconds: float | None = None


class Verdict(NamedTuple):
    """The outcomes of a trial.

    Attributes:
        of: Kind of the calls, with the device and all versions.
        date: Time of the trial, in UTC.
        outcomes: Outcomes by the name of the backend, in auto's order.
    """

    of: str
    date: str
    outcomes: dict[str, Outcome]

    @property
    def best(self) -> str | None:
        """The backend to use: the first right one, unless another is more than a few per cent faster."""
        seconds = {name: each.seconds for name, each in self.outcomes.items() if each.reason is None}
        right = {name: each for name, each in seconds.items() if each is not None}
        if not right:
            return None
        first, fastest = next(iter(right)), min(right, key=right.__getitem__)
        return fastest if right[fastest] * CLOSE < right[first] else first

    @property
    def age(self) -> str:
        """The time since the trial, in words."""
        then = datetime.datetime.fromisoformat(self.date)
        days = (datetime.datetime.now(datetime.UTC) - then).days
        return "today" if days < 1 else f"{units.count(days, 'day')} ago"

    def __str__(self) -> str:
        """Format the outcomes in one line."""
        said = (
            f"{name} {units.seconds(each.seconds)}" if each.seconds is not None else f"{name}: {each.reason or 'right'}"
            for name, each in self.outcomes.items()
        )  # fmt: skip
        return f"{'; '.join(said)} (tried {self.age})"


class Job(NamedTuple):
    """The work of a process: the checks of a backend, and a call and its branch to time."""

    backend: str
    small: Call
    form: str
    timed: tuple[Call, Branch] | None = None


# ---- verdicts


def form(branch: Branch) -> str:
    """Return the form of a branch's relation: "full", "causal", "sparse", or "selected" for lists of keys."""
    return "selected" if listed(branch.pattern) is not None else branch.dense_kind


def kind(call: Call, branch: Branch) -> str | None:
    """Return the kind of a call as text, with the device and versions; None if it has no trials."""
    key = None if call.paged or call.device == "cpu" else call_key(call, branch)
    if key is None:
        return None
    facts = [form(branch), *sorted(call.features), *["learned tables"] * bool(call.learned), str(call.kv_dtype or "")]
    return f"{key}; density 2^-{density(branch)}; {', '.join(filter(None, facts))}; {_made_of()}"


def known(call: Call, branch: Branch) -> Verdict | None:
    """Return the stored verdict on a kind of call; it is read once in a process."""
    folder = _folder()
    of = kind(call, branch) if folder.is_dir() else None
    return None if of is None else _stored(_file(of), of)


def stored() -> list[Verdict]:
    """Return all stored verdicts, also those on other versions, newest first."""
    found = (_read(file) for file in sorted(_folder().glob("*.json")))
    return sorted((each for each in found if each is not None), key=lambda each: each.date, reverse=True)


def is_current(verdict: Verdict) -> bool:
    """Return whether a verdict is about the current versions of everything."""
    return verdict.of.endswith(_made_of()) and (where("cuda") or "") in verdict.of


def hold(
    call: Call, branch: Branch, names: Sequence[str], *, store: bool = True, say: Callable[[str], None] = _log.info
) -> Verdict:
    """Hold the trial of a kind of call, and return the verdict.

    Args:
        call: Call on a GPU.
        branch: Branch of it.
        names: The backends that can run it, in auto's order.
        store: Whether auto uses the verdict from now on. A verdict with a want of memory is not stored.
        say: Function that is called with a description of the next step.
    """
    of = kind(call, branch)
    assert of is not None
    outcomes, lasts = dict[str, Outcome](), True
    for name in names:
        say(f"trying {name}")
        outcomes[name], stays = _apart(Job(name, _small(call), form(branch), (call, branch)))
        lasts &= stays
    verdict = Verdict(of, _now(), outcomes)
    for name, each in outcomes.items():
        if each.reason is not None:
            said = f"the trial of the backend {name} on this GPU failed, and auto uses another: {each.reason}"
            warn_once(f"{of} {said}", said)
    if store and lasts:
        _keep(verdict)
    return verdict


_one_at_a_time = threading.Lock()


def begin(call: Call, branch: Branch, names: Callable[[Call, Branch], Sequence[str]]) -> None:
    """Hold a trial in a thread, once for each kind, if the environment asks for trials beside first calls."""
    of = kind(call, branch) if setting(VARIABLE) == "background" else None
    if of is None or warned(f"trial {of}") or known(call, branch) is not None:
        return
    warn_once(f"trial {of}", f"a trial of backends runs beside the first call of a kind: {of}")

    def run() -> None:
        with _one_at_a_time:
            hold(call, branch, names(call, branch))

    threading.Thread(target=run, name="ringweave trial", daemon=True).start()


def reason(backend: Backend, call: Call, branch: Branch) -> str | None:
    """Return why auto should not use a checked backend for a branch on the current GPU; None if its check passed.

    Also None if there is no GPU to check it on.
    """
    if call.device != "cuda" or not torch.cuda.is_available():
        return None
    small = dataclasses.replace(_small(call), device=f"cuda:{torch.cuda.current_device()}")
    try:
        return _checked(backend, small, form(branch))
    except UnsupportedError:
        return "it has not been tried on this GPU, and no trial can run during a graph capture: call it once before"


@process_cache
def _checked(backend: Backend, small: Call, form: str) -> str | None:
    """Return why a backend fails the check of a form, once in a process.

    Dense kernels are PyTorch's and are checked in this process, in milliseconds. Others are compiled on this machine:
    they are checked in a process of their own, and the verdict is stored.
    """
    about = dataclasses.replace(small, device=torch.device(small.device).type, features=frozenset())
    of = f"check of {backend.name}, {form}; {about}; {sorted(small.features)}; {where(small.device)}; {_made_of()}"
    apart = form in ("sparse", "selected")
    verdict = _stored(_file(of), of) if apart else None
    if verdict is None:
        # raised and not returned, so that no verdict is cached
        require_no_capture(small.device)
        outcome, lasts = (
            _apart(Job(backend.name, small, form)) if apart else (Outcome(check(backend, small, form)), False)
        )
        verdict = Verdict(of, _now(), {backend.name: outcome})
        if lasts:
            _keep(verdict)
    found = verdict.outcomes[backend.name].reason
    if found is not None:
        _log.warning("auto leaves out the backend %s on %s: %s", backend.name, small.device, found)
    return found


def _small(call: Call) -> Call:
    """Return the call of the checks for a kind of call: a few hundred tokens, without a pattern."""
    sizes = 1, _HEADS, _KV_HEADS, _TOKENS, _TOKENS, call.head_dim, call.value_dim
    about = call.needs_grad, call.features, int(call.learned > 0), False, call.kv_dtype
    return Call(*sizes, call.dtype, call.device, *about)


def _folder() -> Path:
    return tuning.tuning_file().parent / "trials"


def _file(of: str) -> Path:
    return _folder() / f"{hashlib.sha256(of.encode()).hexdigest()[:24]}.json"


@process_cache
def _stored(file: Path, of: str) -> Verdict | None:
    """Read the verdict on a kind; None if there is none, or the file is about another kind."""
    found = _read(file)
    return found if found is not None and found.of == of else None


def _read(file: Path) -> Verdict | None:
    """Read a verdict; None if the file is missing, unreadable or no verdict."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        line = files.parse(files.read(file))
        outcomes = {name: Outcome(*each) for name, each in line["outcomes"].items()}
        right = all(
            isinstance(each.reason, str | None) and isinstance(each.seconds, float | None) for each in outcomes.values()
        )
        datetime.datetime.fromisoformat(line["date"])
        return Verdict(line["of"], line["date"], outcomes) if right and isinstance(line["of"], str) else None
    return None


def _keep(verdict: Verdict) -> None:
    file = _file(verdict.of)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        files.replace(file, json.dumps(verdict._asdict()))
    except OSError as error:
        _log.info("the trial's verdict is not stored: %s", error)
    _stored.cache_clear()
    # programs hold the backends that they were compiled for
    PROGRAMS.trim()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@process_cache
def _made_of() -> str:
    """Return the version of the GPU's driver, if the system reports it, and a digest of our kernels."""
    digest = hashlib.sha256()
    for file in sorted((Path(__file__).parent / "triton").rglob("*.py")):
        digest.update(file.read_bytes())
    found = driver()
    return f"{f'driver {found}' if found else 'no driver'}; kernels {digest.hexdigest()[:16]}"


# ---- a process of its own


def _apart(job: Job) -> tuple[Outcome, bool]:
    """Run a job in a separate process; return the outcome, and whether it may be stored."""
    if not Path(_COMMAND[0]).name.startswith(("python", "pypy")):
        # Python is embedded in another program, and the command would start that program again
        return Outcome("it was not tried, since no process of Python can be started"), False
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), VARIABLE: ""}
    try:
        work = pickle.dumps(job)
        ended = subprocess.run(_COMMAND, input=work, capture_output=True, timeout=LIMIT, env=environment)
    except subprocess.TimeoutExpired as expired:
        began = _BEGAN in _text(expired.stdout)
        said = f"tried on this GPU, it did not finish in {LIMIT:.0f} s"
        return Outcome(said if began else f"it was not tried: no process began in {LIMIT:.0f} s"), began
    except (OSError, pickle.PicklingError, AttributeError, TypeError) as error:
        # also a pattern of a function that cannot be sent to another process
        return Outcome(f"it was not tried: {in_a_line(error)}"), False
    lines = _text(ended.stdout).splitlines()
    if _BEGAN not in lines:
        return Outcome(f"it was not tried in a separate process: {' '.join(_text(ended.stderr).split())[-200:]}"), False
    found = [line.removeprefix(_FOUND) for line in lines if line.startswith(_FOUND)]
    # the output of a dying process may be incomplete
    with contextlib.suppress(IndexError, ValueError):
        outcome = Outcome(*files.parse(found[0]))
        return outcome, not says_no_memory(outcome.reason or "")
    code = ended.returncode
    how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    # SIGKILL may come from the system's out-of-memory killer, so that verdict is not stored
    return Outcome(f"tried on this GPU, it crashed its process ({how})"), code != -signal.SIGKILL


def _text(printed: bytes | None) -> str:
    return (printed or b"").decode(errors="replace")


def main() -> None:
    """Run a job in this process and print its outcome."""
    from . import BACKENDS

    job: Job = pickle.load(sys.stdin.buffer)
    # fail before the trial begins if this process cannot use the device, since that says nothing about the kernel
    torch.ones(1, device=job.small.device)
    _say(_BEGAN)
    backend = BACKENDS[job.backend]
    outcome = Outcome(check(backend, job.small, job.form))
    if outcome.reason is None and job.timed is not None:
        try:
            outcome = Outcome(None, seconds(backend, *job.timed))
        except Exception as error:  # noqa: BLE001 compilers raise exceptions of any type
            outcome = Outcome(f"timed on this GPU, it raises {in_a_line(error)}")
    _say(_FOUND + json.dumps(outcome))


def _say(line: str) -> None:
    sys.stdout.write(f"\n{line}\n")
    sys.stdout.flush()


# ---- the checks


class Case(NamedTuple):
    """A small case: a call of the case's sizes, its pattern, and whether its inputs are hostile."""

    call: Call
    pattern: Pattern
    hostile: bool = False


def _cases(call: Call, form: str) -> Iterator[Case]:
    """Yield the cases of a form; together they cover each way in which kernels load tiles."""
    n = call.nq
    narrow = dataclasses.replace(call, head_dim=64, value_dim=64)
    if form == "full":
        yield Case(call, Full())
        yield Case(narrow, Full(), hostile=True)
    elif form == "causal":
        yield Case(call, Causal())
        # no query attends the last keys
        yield Case(dataclasses.replace(narrow, nq=n - 200), Causal(), hostile=True)
    elif form == "selected":
        lists = torch.randint(-1, n, (n, 37), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        lists[::7] = -1
        chosen = Selected(lists.to(call.device))
        yield Case(call, chosen)
        yield Case(narrow, chosen & KeyPadding(n - 70), hostile=True)
    else:
        # full tiles, partial tiles with keys that no query attends, longer rows
        yield Case(call, SlidingWindow(260, 20) | Global(3))
        # partial tiles without such keys, which descriptors can load
        yield Case(call, SlidingWindow(260, 0))
        # only full tiles, also of 256 x 128
        blocks = torch.tensor([[1, 0, 1, 0], [1, 0, 1, 0], [0, 1, 1, 1], [0, 1, 1, 1]], device="cpu").bool()
        yield Case(dataclasses.replace(call, nq=512, nk=512), BlockTable(blocks, 128))
        # the last queries attend nothing
        yield Case(narrow, SlidingWindow(40, 20) & KeyPadding(n - 70), hostile=True)


def check(backend: Backend, call: Call, form: str) -> str | None:
    """Compute small cases of a form and describe the first that is wrong; None if all that it can run are right."""
    tried = False
    for case in _cases(call, form):
        about = dataclasses.replace(case.call, device=torch.device(call.device).type)
        branch = Branch.whole(case.pattern, about.nq, about.nk, heads=about.heads, batch=about.batch)
        if backend.unsupported_reason(about, branch) is not None:
            continue
        tried = True
        verdict = _check(backend, case, branch)
        if verdict is not None:
            return verdict
    return None if tried else "it can run no case of the trial"


def _check(backend: Backend, case: Case, branch: Branch) -> str | None:
    call = case.call
    exact, dout = _sample(call, branch, "cpu")
    if case.hostile:
        _spoil(exact, dout, branch)
    wanted = _results(reference.BACKEND, exact, dout, branch, call, None)
    given = _on(exact, torch.device(call.device), case.hostile)
    lse = wanted["lse"].to(call.device), wanted["out"].to(call.device)
    try:
        computed = _results(backend, given, dout.to(call.device), branch, call, lse)
        errors = {name: _error(computed[name].cpu(), wanted[name]) for name in computed}
    except Exception as error:  # noqa: BLE001 compilers raise exceptions of any type
        return f"tried on this GPU, it raises {in_a_line(error)}"
    wrong = [f"{name} by {error:.2g}" for name, error in errors.items() if not error <= _LIMITS[call.dtype]]
    return f"tried on this GPU, it is wrong: {', '.join(wrong)} of its size" if wrong else None


def _results(
    of: Backend, operands: Operands, dout: Tensor, branch: Branch, call: Call, forward: tuple[Tensor, Tensor] | None
) -> dict[str, Tensor]:
    """Return the results of a direction, and gradients of the terms' tables; ``forward`` is the exact (lse, out)."""
    if forward is None or not call.needs_grad:
        out, lse = of.forward(operands, branch, call.dtype)
        found = {"out": out, "lse": lse}
    else:
        lse, out = forward
        found = {}
    if call.needs_grad:
        assert of.backward is not None
        learned = [] if operands.terms is None else [total for total in operands.terms.totals if total is not None]
        upstream = Upstream(dout, lse, of.delta(dout, out, lse, None), out)
        grads = of.backward(upstream, operands, branch, call.dtype)
        found |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
        found |= {f"table {i}": total for i, total in enumerate(learned)}
    return found


def _sample(call: Call, branch: Branch, device: str) -> tuple[Operands, Tensor]:
    """Draw the operands of a branch of a call, and the gradient of its output, on a device."""
    generator = torch.Generator(device).manual_seed(0)
    shared = Heads(branch, call.heads // call.kv_heads)
    kv_heads = shared.count if shared.repeat is None else branch.head_count

    def drawn(heads: int, tokens: int, dim: int) -> Tensor:
        return torch.randn(call.batch, heads, tokens, dim, generator=generator, device=device).to(call.dtype)

    q, k = drawn(branch.head_count, branch.nq, call.head_dim), drawn(kv_heads, branch.nk, call.head_dim)
    v, dout = drawn(kv_heads, branch.nk, call.value_dim), drawn(branch.head_count, branch.nq, call.value_dim)
    scales = None
    if call.kv_dtype is not None:
        (k, of_k), (v, of_v) = quantize_rows(k, call.kv_dtype), quantize_rows(v, call.kv_dtype)
        scales = Scales(of_k, of_v)
    return Operands(q, k, v, call.head_dim**-0.5, _terms(call, branch, generator), None, scales), dout


def _terms(call: Call, branch: Branch, generator: torch.Generator) -> TermOperands | None:
    """Return example terms and dropout for a branch; their tables get gradients if those of the call do."""
    if not call.features:
        return None
    device, sides = generator.device, (call.batch, branch.head_count, branch.nq, branch.nk)
    terms = tuple(kind.example(*sides, generator) for name, kind in KINDS.items() if name in call.features)
    totals = tuple(
        term.total(name, torch.float32) if call.learned and name in term.learns else None
        for term in terms for name in term.axes
    )  # fmt: skip
    heads, rows, columns = (torch.arange(side, device=device) for side in sides[1:])
    offsets = torch.zeros(call.batch, 2, dtype=torch.int64, device=device)
    dropout = Dropout(DROPOUT_LEVELS // 8, 2**40 + 7) if "dropout" in call.features else None
    return TermOperands(terms, dropout, heads, rows, columns, offsets, totals)


def _spoil(operands: Operands, dout: Tensor, branch: Branch) -> None:
    """Write NaN into keys that no query attends, and into queries that attend nothing, with their gradients."""
    allowed = branch.pattern.to_dense(branch.nq, branch.nk, branch.head_count, batch=branch.batch)[0].any(0)
    for x, alive in (
        (operands.k, allowed.any(0)),
        (operands.v, allowed.any(0)),
        (operands.q, allowed.any(1)),
        (dout, allowed.any(1)),
    ):
        if x.is_floating_point() and x.element_size() > 1:
            x[:, :, ~alive] = torch.nan


def _on(operands: Operands, device: torch.device, padded: bool) -> Operands:
    """Return operands on a device; ``padded`` puts NaN after the last token in memory."""

    def moved(x: Tensor) -> Tensor:
        if not padded or x.element_size() == 1:
            return x.to(device)
        more = torch.full((*x.shape[:2], x.shape[2] + 140, x.shape[3]), torch.nan, dtype=x.dtype, device=device)
        more[:, :, : x.shape[2]] = x
        return more[:, :, : x.shape[2]]

    terms, scales = operands.terms, operands.scales
    if terms is not None:
        there = {name: getattr(terms, name).to(device) for name in ("heads", "rows", "columns", "offsets")}
        tables = tuple(term.over(*(table.to(device) for table in term.tables)) for term in terms.terms)
        totals = tuple(None if total is None else torch.zeros_like(total, device=device) for total in terms.totals)
        terms = terms._replace(terms=tables, totals=totals, **there)
    scales = None if scales is None else Scales(*(x.to(device) for x in scales))
    return operands.map(moved)._replace(terms=terms, scales=scales)


def _error(computed: Tensor, exact: Tensor) -> float:
    """Return the relative root mean square error; an lse of -inf is no error where it is expected."""
    computed, exact = computed.double(), exact.double()
    off = torch.where(computed == exact, 0.0, computed - exact)
    return float(off.norm() / exact[exact.isfinite()].norm())


# ---- the clock


@torch.no_grad()
def seconds(backend: Backend, call: Call, branch: Branch) -> float:
    """Return the median seconds of a backend's forward, or of its backward if the call needs gradients."""
    device = torch.device(call.device)
    operands, dout = _sample(call, branch, str(device))
    run: Callable[[], object] = functools.partial(backend.forward, operands, branch, call.dtype)
    if call.needs_grad:
        out, lse = backend.forward(operands, branch, call.dtype)
        upstream = Upstream(dout, lse, backend.delta(dout, out, lse, None), out)
        assert backend.backward is not None
        run = functools.partial(backend.backward, upstream, operands, branch, call.dtype)
    found = []
    for count in (2, *[_CALLS] * _ROUNDS):
        _wait(device)
        began = time.perf_counter()
        for _ in range(count):
            run()
        _wait(device)
        found.append((time.perf_counter() - began) / count)
    # the first round compiles
    return statistics.median(found[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
