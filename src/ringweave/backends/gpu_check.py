"""Check of a GPU kernel on the current GPU: auto chooses a kernel only after it has computed a small case correctly.

One source is compiled for GPUs of many generations, by compilers of many versions, and no test machine has them all.
So before auto first uses a GPU kernel for a dtype, head dimensions and dense kind, the kernel computes a few hundred
tokens of that kind, and the result is compared with the reference. A kernel that does not compile or is wrong is
excluded for the life of the process, with a warning in the log. Kernels that are compiled on this machine are tried in
a separate process (``tried``), so that a crash or a hang ends only that process, and the verdict is stored on disk.
Other kernels are tried in this process. The check does not prove every size right; the tests do that. A backend that
the user names runs without a check.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from .. import files
from ..cache import process_cache
from ..call import Call, Operands
from ..errors import in_a_line, says_no_memory
from ..patterns import BlockTable, Causal, Full, Global, Pattern, SlidingWindow
from ..plan import Branch
from ..precision import Scales, quantize_rows
from ..terms import KINDS
from ..terms.dropout import DROPOUT_LEVELS, Dropout
from ..terms.operands import TermOperands
from . import reference, tuning
from .backend import Backend, Upstream
from .tuning_keys import where

# limits of the relative root mean square error: well above rounding errors, well below the errors of a wrong kernel
_LIMITS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_TOKENS = 500  # not a multiple of any tile size, so the last tile is incomplete
_HEADS, _KV_HEADS = 4, 2
_log = logging.getLogger("ringweave")


def reason(backend: Backend, call: Call, branch: Branch) -> str | None:
    """Return why auto should not use a backend for a branch on the current GPU; None if its check passed.

    Also None if there is no GPU to check it on.
    """
    if call.device != "cuda" or not torch.cuda.is_available():
        return None
    device = f"cuda:{torch.cuda.current_device()}"
    small = dataclasses.replace(
        call, batch=1, heads=_HEADS, kv_heads=_KV_HEADS, nq=_TOKENS, nk=_TOKENS, device=device, paged=False
    )
    dense_kind = branch.dense_kind
    try:
        return _verdict(backend, small, dense_kind, tuning.current() if backend.compiled else None)
    except _CapturingError:
        return "it has not been tried on this GPU, and no trial can run during a graph capture: call it once before"


class _CapturingError(Exception):
    """Raised instead of a verdict while a graph is captured, when no trial can run, so that none is cached."""


@process_cache
def _verdict(backend: Backend, small: Call, dense_kind: str, blocks: object) -> str | None:
    """Return the verdict on a small case with the current measured blocks; it is cached for the life of the process."""
    stored = known(*kept(backend.name, small, dense_kind)) if backend.compiled else None
    if stored is None and torch.cuda.is_current_stream_capturing():
        raise _CapturingError
    if stored is not None:
        (verdict,) = stored
    elif backend.compiled:
        verdict = tried(backend.name, small, dense_kind, functools.partial(check, backend, small, dense_kind))
    else:
        verdict = check(backend, small, dense_kind)
    if verdict is not None:
        _log.warning("auto leaves out the backend %s on %s: %s", backend.name, small.device, verdict)
    return verdict


def check(backend: Backend, call: Call, dense_kind: str) -> str | None:
    """Compute small cases of a dense kind and describe the first that is wrong; None if all are right."""
    verdicts = (_check(backend, call, pattern) for pattern in _patterns(dense_kind))
    return next((verdict for verdict in verdicts if verdict is not None), None)


def _patterns(dense_kind: str) -> tuple[Pattern, ...]:
    """Return the patterns to try for a dense kind; together they cover each way in which kernels load tiles."""
    if dense_kind != "sparse":
        return (Full() if dense_kind == "full" else Causal(),)
    blocks = torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0, 1]], device="cpu").bool()
    return (
        SlidingWindow(260, 20) | Global(3),  # full tiles, partial tiles with keys that no query attends, longer rows
        SlidingWindow(260, 0),  # partial tiles without such keys, which descriptors can load
        BlockTable(blocks, 128),  # only full tiles
    )


def _check(backend: Backend, call: Call, pattern: Pattern) -> str | None:
    generator = torch.Generator(call.device).manual_seed(0)

    def drawn(heads: int, tokens: int, dim: int) -> Tensor:
        x = torch.randn(call.batch, heads, tokens, dim, generator=generator, device=call.device)
        return x.to(call.dtype)

    q, k = drawn(call.heads, call.nq, call.head_dim), drawn(call.kv_heads, call.nk, call.head_dim)
    v, dout = drawn(call.kv_heads, call.nk, call.value_dim), drawn(call.heads, call.nq, call.value_dim)
    branch = Branch.whole(pattern, call.nq, call.nk, heads=call.heads, batch=call.batch)
    scales = None
    if call.kv_dtype is not None:
        (k, of_k), (v, of_v) = quantize_rows(k, call.kv_dtype), quantize_rows(v, call.kv_dtype)
        scales = Scales(of_k, of_v)
    operands = Operands(q, k, v, call.head_dim**-0.5, _term_operands(call, generator), None, scales)
    out, lse = reference.forward(operands, branch, call.dtype)

    def results(of: Backend) -> dict[str, Tensor]:
        if not call.needs_grad:
            return dict(zip(("out", "lse"), of.forward(operands, branch, call.dtype), strict=True))
        assert of.backward is not None
        upstream = Upstream(dout, lse, of.delta(dout, out, lse, None), out)
        grads = of.backward(upstream, operands, branch, call.dtype)
        return dict(zip(("dq", "dk", "dv"), grads, strict=True))

    def with_tables(of: Backend) -> dict[str, Tensor]:
        """Return the results and the gradients of the terms' tables."""
        learned = [] if operands.terms is None else [total for total in operands.terms.totals if total is not None]
        for total in learned:
            total.zero_()
        found = results(of)
        return found | {f"table {i}": total.clone() for i, total in enumerate(learned)}

    exact = with_tables(reference.BACKEND)
    try:
        computed = with_tables(backend)
        errors = {name: _error(computed[name], exact[name]) for name in exact}
    except Exception as error:  # noqa: BLE001 compilers raise exceptions of any type
        return f"tried on this GPU, it raises {in_a_line(error)}"
    wrong = [f"{name} by {error:.2g}" for name, error in errors.items() if not error <= _LIMITS[call.dtype]]
    return f"tried on this GPU, it is wrong: {', '.join(wrong)} of its size" if wrong else None


def _term_operands(call: Call, generator: torch.Generator) -> TermOperands | None:
    """Return example terms and dropout for a case; their tables have gradients if the case has."""
    if not call.features:
        return None
    device, sides = call.device, (call.batch, call.heads, call.nq, call.nk)
    terms = tuple(kind.example(*sides, generator) for name, kind in KINDS.items() if name in call.features)
    totals = tuple(
        term.total(name, torch.float32) if call.needs_grad and name in term.learns else None
        for term in terms for name in term.axes
    )  # fmt: skip
    heads, rows, columns = (torch.arange(side, device=device) for side in sides[1:])
    offsets = torch.zeros(call.batch, 2, dtype=torch.int64, device=device)
    dropout = Dropout(DROPOUT_LEVELS // 8, 2**40 + 7) if "dropout" in call.features else None
    return TermOperands(terms, dropout, heads, rows, columns, offsets, totals)


def _error(computed: Tensor, exact: Tensor) -> float:
    exact = exact.double()
    return float((computed.double() - exact).norm() / exact.norm())


#: Time limit of a trial in seconds; compiling takes one or two seconds for each of about ten kernels.
LIMIT = 180.0
_COMMAND = (sys.executable, "-P", "-m", __name__)
_BEGAN, _FOUND = "ringweave: began", "ringweave: found "


def kept(name: str, call: Call, dense_kind: str) -> tuple[Path, str]:
    """Return the file that stores the verdict on a kind of case, and the case as text."""
    from .triton import launch_config

    # a set's order differs between processes, so the features are sorted below
    anywhere = dataclasses.replace(call, device=torch.device(call.device).type, features=frozenset())
    about = name, anywhere, *sorted(call.features), dense_kind
    facts = where(call.device), _driver(), *about, _source(), *launch_config.measured(call)
    of = "; ".join(map(str, facts))
    digest = hashlib.sha256(of.encode()).hexdigest()[:24]
    return tuning.tuning_file().parent / "trials" / f"{digest}.json", of


def known(file: Path, of: str) -> tuple[str | None] | None:
    """Read a stored verdict as a tuple of one; None if the file is missing, unreadable or about another case."""
    try:
        line = files.parse(files.read(file))
    except (OSError, ValueError):
        return None
    if not isinstance(line, dict) or line.get("of") != of or not isinstance(line.get("verdict", 0), str | None):
        return None
    return (line["verdict"],)


def tried(name: str, call: Call, dense_kind: str, here: Callable[[], str | None]) -> str | None:
    """Return why a backend should not be used for a kind of case; None if its trial passes.

    Args:
        name: Name of the backend.
        call: Small call on the device.
        dense_kind: Dense kind of the call's branch.
        here: Function that runs the check in this process; used if no other process can start on the device.
    """
    file, of = kept(name, call, dense_kind)
    verdict, lasts = _apart(name, call, dense_kind, here)
    if lasts and not says_no_memory(verdict or ""):
        _keep(file, {"of": of, "verdict": verdict})
    return verdict


def _apart(name: str, call: Call, dense_kind: str, here: Callable[[], str | None]) -> tuple[str | None, bool]:
    """Run the trial in a separate process; return the verdict, and whether it may be stored."""
    if not Path(_COMMAND[0]).name.startswith(("python", "pypy")):
        # Python is embedded in another program, and the command would start that program again
        return here(), True
    paths = os.pathsep.join(path for path in sys.path if path)
    try:
        ended = subprocess.run(
            _COMMAND, input=pickle.dumps((name, call, dense_kind)), capture_output=True, timeout=LIMIT,
            env=os.environ | {"PYTHONPATH": paths},
        )  # fmt: skip
    except subprocess.TimeoutExpired as expired:
        if _BEGAN not in _text(expired.stdout):
            return here(), True
        return f"tried on this GPU, it did not finish in {LIMIT:.0f} s", True
    except OSError:
        return here(), True
    lines = _text(ended.stdout).splitlines()
    if _BEGAN not in lines:
        _log.info("no trial of the backend %s in a separate process: %s", name, _text(ended.stderr)[-200:])
        return here(), True
    found = [line.removeprefix(_FOUND) for line in lines if line.startswith(_FOUND)]
    # the output of a dying process may be incomplete
    with contextlib.suppress(IndexError, ValueError):
        verdict: str | None = files.parse(found[0])
        return verdict, True
    code = ended.returncode
    how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    # SIGKILL may come from the system's out-of-memory killer, so that verdict is not stored
    return f"tried on this GPU, it crashed its process ({how})", code != -signal.SIGKILL


def _text(printed: bytes | None) -> str:
    return (printed or b"").decode(errors="replace")


def _keep(file: Path, line: dict[str, str | None]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        files.replace(file, json.dumps(line))
    except OSError as error:
        _log.info("the trial's verdict is not stored: %s", error)


def _driver() -> str:
    """Return the version of the GPU's driver, if the system reports it."""
    for module in ("nvidia", "amdgpu"):
        try:
            return Path(f"/sys/module/{module}/version").read_text("utf-8").strip()
        except OSError:
            continue
    return "no driver"


@process_cache
def _source() -> str:
    """Return a digest of the source of the kernels and their launch code."""
    digest = hashlib.sha256()
    for file in sorted((Path(__file__).parent / "triton").rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def main() -> None:
    """Run a trial in this process and print its verdict."""
    from . import BACKENDS

    name, call, dense_kind = pickle.load(sys.stdin.buffer)
    # fail before the trial begins if this process cannot use the device, since that says nothing about the kernel
    torch.ones(1, device=call.device)
    _say(_BEGAN)
    _say(_FOUND + json.dumps(check(BACKENDS[name], call, dense_kind)))


def _say(line: str) -> None:
    sys.stdout.write(f"\n{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
