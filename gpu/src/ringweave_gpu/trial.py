"""Trials: which backends compute a kind of call right, and fastest, on this machine's GPU.

``auto`` uses PyTorch's own engines without a trial. A kernel of another origin, ours among them, takes their place only
where a trial found it right and faster. Each candidate runs in a process of its own, so that a crash or a hang ends
only that process. Its results are compared with the definition in the small cases of ``ringweave.device_check``. The
right ones are then timed on the kind of the call. The verdict is stored by the kind, the device, and the versions of
driver, torch, triton and library, so that another version has none.

Kernels that other libraries compile on this machine (``Backend.checked``) are only held to the definition before their
first use, in a process too. A trial does not prove every size right; the tests do that. A backend that the user names
runs without one.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ringweave import device_check, files, units
from ringweave.backends import BACKENDS, tuning
from ringweave.backends.backend import Backend, Upstream
from ringweave.backends.tuning_keys import call_key, density, where
from ringweave.cache import PROGRAMS, process_cache
from ringweave.call import Call
from ringweave.device_check import check, form, left_out, sample, small
from ringweave.environment import driver, setting
from ringweave.errors import in_a_line, says_no_memory, warn_once, warned
from ringweave.plan import Branch
from ringweave.plan.cuda_sync import require_no_capture

from . import register

#: Environment variable; ``background`` makes auto hold a trial beside the first call of each kind.
VARIABLE = "RINGWEAVE_TRIAL"
#: A backend takes the place of the one that auto prefers if that one takes more than this many times its seconds.
CLOSE = 1.05
#: Time limit of one candidate in seconds; compiling takes seconds for each of about ten kernels.
LIMIT = 300.0
_COMMAND = (sys.executable, "-P", "-m", __name__)
_BEGAN, _FOUND = "ringweave: began", "ringweave: found "
_ROUNDS, _CALLS = 5, 10
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


def report() -> dict[str, str]:
    """Return the current verdicts by the kind of call, and the number on other versions or devices."""
    verdicts = stored()
    now = [each for each in verdicts if is_current(each)]
    facts = {each.of.split("; ", 4)[-1]: f"{each.best or 'none'}: {each}" for each in now}
    if len(now) < len(verdicts):
        facts["ignored"] = f"{len(verdicts) - len(now)} on other versions or devices"
    return facts


def variables() -> dict[str, str]:
    """Return the variable that trials read, and the effect of its absence."""
    return {VARIABLE: "not set: trials are held only by ringweave tune --gpu"}


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
        outcomes[name], stays = _apart(Job(name, small(call), form(branch), (call, branch)))
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

    Dense kernels are PyTorch's and are checked in this process, in milliseconds. Others are compiled on this machine:
    they are checked in a process of their own, and the verdict is stored.
    """
    compiles = form(branch) in ("sparse", "selected")
    return device_check.reason(backend, call, branch, _checked if compiles else None)


@process_cache
def _checked(backend: Backend, small: Call, form: str) -> str | None:
    """Return why a backend fails the check of a form, by the stored verdict or a check in a process of its own."""
    about = dataclasses.replace(small, device=torch.device(small.device).type, features=frozenset())
    of = f"check of {backend.name}, {form}; {about}; {sorted(small.features)}; {where(small.device)}; {_made_of()}"
    verdict = _stored(_file(of), of)
    if verdict is None:
        # raised and not returned, so that no verdict is cached
        require_no_capture(small.device)
        outcome, lasts = _apart(Job(backend.name, small, form))
        verdict = Verdict(of, _now(), {backend.name: outcome})
        if lasts:
            _keep(verdict)
    found = verdict.outcomes[backend.name].reason
    if found is not None:
        left_out(backend, small, found)
    return found


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
    register()
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


# ---- the clock


@torch.no_grad()
def seconds(backend: Backend, call: Call, branch: Branch) -> float:
    """Return the median seconds of a backend's forward, or of its backward if the call needs gradients."""
    device = torch.device(call.device)
    operands, dout = sample(call, branch, str(device))
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
