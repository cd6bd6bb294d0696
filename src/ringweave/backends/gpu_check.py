"""A kernel's check on the GPU that is here: auto takes a kernel for GPUs once it has computed a small case right on it.

One source is compiled for GPUs of many generations, by compilers of many versions, and no test machine has them all.
So the first time that auto would give a GPU kernel work of some type, head dimensions and structure, the kernel first
computes a few hundred tokens of that kind, which are compared with the definition. A kernel that does not compile or is
wrong is left out while the process lives, and the log says so. Kernels that are compiled here are tried in a separate
process (``tried``), which a crash or a hang ends alone, and the verdict is kept on disk; others are tried in this one.
It is no proof of every size: tests are for that. A kernel that is named runs without a check.
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
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from .. import files
from ..cache import fact
from ..call import Call, Operands
from ..errors import in_a_line, says_no_memory
from ..patterns import BlockTable, Causal, Full, Global, Pattern, SlidingWindow
from ..plan import Branch
from ..precision import Scales, store
from ..terms import KINDS, STEPS, Dropout, TermOperands
from . import reference, tuning
from .backend import Backend, Upstream
from .tuning import where

# error over result, both as root mean squares: well above what rounding does, well below what a wrong kernel does
_LIMITS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_TOKENS = 500  # the last tile of any size is cut short
_HEADS, _KV_HEADS = 4, 2
_log = logging.getLogger("ringweave")


def reason(backend: Backend, call: Call, branch: Branch) -> str | None:
    """Say why auto should not give a branch to a backend on the current GPU; None where its check went well.

    None, too, where there is no GPU to check it on.
    """
    if call.device != "cuda" or not torch.cuda.is_available():
        return None
    device = f"cuda:{torch.cuda.current_device()}"
    small = dataclasses.replace(
        call, batch=1, heads=_HEADS, kv_heads=_KV_HEADS, nq=_TOKENS, nk=_TOKENS, device=device, paged=False
    )
    structure = branch.structure
    try:
        return _verdict(backend, small, structure, tuning.current() if backend.compiled else None)
    except _CapturingError:
        return "it has not been tried on this GPU, and nothing can be while a graph is captured: call once before"


class _CapturingError(Exception):
    """Nothing can be tried while a graph is captured: no verdict, and none to remember."""


@fact
def _verdict(backend: Backend, small: Call, structure: str, blocks: object) -> str | None:
    """Give the verdict on a small case with the measured blocks there are; it stands while the process lives."""
    stored = known(*kept(backend.name, small, structure)) if backend.compiled else None
    if stored is None and torch.cuda.is_current_stream_capturing():
        raise _CapturingError
    if stored is not None:
        (verdict,) = stored
    elif backend.compiled:
        verdict = tried(backend.name, small, structure, functools.partial(check, backend, small, structure))
    else:
        verdict = check(backend, small, structure)
    if verdict is not None:
        _log.warning("auto leaves out the backend %s on %s: %s", backend.name, small.device, verdict)
    return verdict


def check(backend: Backend, call: Call, structure: str) -> str | None:
    """Compute small cases of a structure, and say what is wrong with the first that is wrong: None if nothing is."""
    verdicts = (_check(backend, call, pattern) for pattern in _patterns(structure))
    return next((verdict for verdict in verdicts if verdict is not None), None)


def _patterns(structure: str) -> tuple[Pattern, ...]:
    """Make what is tried of a structure: each way in which tiles are loaded."""
    if structure != "sparse":
        return (Full() if structure == "full" else Causal(),)
    blocks = torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0, 1]], device="cpu").bool()
    return (
        SlidingWindow(260, 20) | Global(3),  # full tiles, partial ones with keys that nobody attends, longer rows
        SlidingWindow(260, 0),  # partial tiles without such keys, which descriptors can load
        BlockTable(blocks, 128),  # none partial
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
        (k, of_k), (v, of_v) = store(k, call.kv_dtype), store(v, call.kv_dtype)
        scales = Scales(of_k, of_v)
    operands = Operands(q, k, v, call.head_dim**-0.5, _scoring(call, generator), None, scales)
    out, lse = reference.forward(operands, branch, call.dtype)

    def results(of: Backend) -> dict[str, Tensor]:
        if not call.needs_grad:
            return dict(zip(("out", "lse"), of.forward(operands, branch, call.dtype), strict=True))
        assert of.backward is not None
        upstream = Upstream(dout, lse, of.delta(dout, out, lse, None), out)
        grads = of.backward(upstream, operands, branch, call.dtype)
        return dict(zip(("dq", "dk", "dv"), grads, strict=True))

    def with_tables(of: Backend) -> dict[str, Tensor]:
        """Results, and what the terms' tables got."""
        learned = [] if operands.terms is None else [total for total in operands.terms.totals if total is not None]
        for total in learned:
            total.zero_()
        found = results(of)
        return found | {f"table {i}": total.clone() for i, total in enumerate(learned)}

    exact = with_tables(reference.BACKEND)
    try:
        computed = with_tables(backend)
        errors = {name: _error(computed[name], exact[name]) for name in exact}
    except Exception as error:  # noqa: BLE001 compilers raise whatever they stumble over
        return f"tried on this GPU, it raises {in_a_line(error)}"
    wrong = [f"{name} by {error:.2g}" for name, error in errors.items() if not error <= _LIMITS[call.dtype]]
    return f"tried on this GPU, it is wrong: {', '.join(wrong)} of its size" if wrong else None


def _scoring(call: Call, generator: torch.Generator) -> TermOperands | None:
    """The terms of a case, and its dropout, with numbers of their own; tables learn where gradients are computed."""
    if not call.features:
        return None
    device, sides = call.device, (call.batch, call.heads, call.nq, call.nk)
    terms = tuple(kind.example(*sides, generator) for name, kind in KINDS.items() if name in call.features)
    totals = tuple(
        term.total(torch.float32) if call.needs_grad and term.learned is not None else None for term in terms
    )
    heads, rows, columns = (torch.arange(side, device=device) for side in sides[1:])
    offsets = torch.zeros(call.batch, 2, dtype=torch.int64, device=device)
    dropout = Dropout(STEPS // 8, 2**40 + 7) if "dropout" in call.features else None
    return TermOperands(terms, dropout, heads, rows, columns, offsets, totals)


def _error(computed: Tensor, exact: Tensor) -> float:
    exact = exact.double()
    return float((computed.double() - exact).norm() / exact.norm())


#: Seconds for a trial: compilers take a second or two for each of some ten kernels.
LIMIT = 180.0
_COMMAND = (sys.executable, "-P", "-m", __name__)
_BEGAN, _FOUND = "ringweave: began", "ringweave: found "


def kept(name: str, call: Call, structure: str) -> tuple[Path | None, str]:
    """Name the file of a verdict on a kind of case (None where there is no folder), and spell what it is of."""
    from .triton import launch_config

    folder = tuning.store()
    # a set's members have another order in every process
    anywhere = dataclasses.replace(call, device=torch.device(call.device).type, features=frozenset())
    about = name, anywhere, *sorted(call.features), structure
    facts = where(call.device), _driver(), *about, _source(), *launch_config.measured(call)
    of = "; ".join(map(str, facts))
    digest = hashlib.sha256(of.encode()).hexdigest()[:24]
    return None if folder is None else folder.parent / "trials" / f"{digest}.json", of


def known(file: Path | None, of: str) -> tuple[str | None] | None:
    """Read a verdict that was kept; None where there is none, or it is not readable."""
    try:
        line = {} if file is None else files.parse(files.read(file))
    except (OSError, ValueError):
        return None
    if not isinstance(line, dict) or line.get("of") != of or not isinstance(line.get("verdict", 0), str | None):
        return None
    return (line["verdict"],)


def tried(name: str, call: Call, structure: str, here: Callable[[], str | None]) -> str | None:
    """Say why a backend should not be used for a kind of case; None where its trial goes well.

    Args:
        name: The backend.
        call: A small one, on the device.
        structure: Of its branch.
        here: The check in this process, where no other can be begun on the device.
    """
    file, of = kept(name, call, structure)
    verdict, lasts = _apart(name, call, structure, here)
    if lasts and file is not None and not says_no_memory(verdict or ""):
        _keep(file, {"of": of, "verdict": verdict})
    return verdict


def _apart(name: str, call: Call, structure: str, here: Callable[[], str | None]) -> tuple[str | None, bool]:
    """What a process of its own found, and whether it would find the same again."""
    if not Path(_COMMAND[0]).name.startswith(("python", "pypy")):
        # Python is part of another program, which would begin once more
        return here(), True
    paths = os.pathsep.join(path for path in sys.path if path)
    try:
        ended = subprocess.run(
            _COMMAND, input=pickle.dumps((name, call, structure)), capture_output=True, timeout=LIMIT,
            env=os.environ | {"PYTHONPATH": paths},
        )  # fmt: skip
    except subprocess.TimeoutExpired as expired:
        if _BEGAN not in _text(expired.stdout):
            return here(), True
        return f"tried on this GPU, it was not done in {LIMIT:.0f} s", True
    except OSError:
        return here(), True
    lines = _text(ended.stdout).splitlines()
    if _BEGAN not in lines:
        _log.info("no trial of the backend %s in a process of its own: %s", name, _text(ended.stderr)[-200:])
        return here(), True
    found = [line.removeprefix(_FOUND) for line in lines if line.startswith(_FOUND)]
    # what a process prints as it dies may be cut
    with contextlib.suppress(IndexError, ValueError):
        verdict: str | None = files.parse(found[0])
        return verdict, True
    code = ended.returncode
    how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    # what ends processes for want of memory ends them so
    return f"tried on this GPU, it took its process down ({how})", code != -signal.SIGKILL


def _text(printed: bytes | None) -> str:
    return (printed or b"").decode(errors="replace")


def _keep(file: Path, line: dict[str, str | None]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as into:
            json.dump(line, into)
        Path(temporary).replace(file)
    except OSError as error:
        _log.info("the trial's verdict is not kept: %s", error)


def _driver() -> str:
    """The version of the GPU's driver, where the system says it."""
    for module in ("nvidia", "amdgpu"):
        try:
            return Path(f"/sys/module/{module}/version").read_text("utf-8").strip()
        except OSError:
            continue
    return "no driver"


@fact
def _source() -> str:
    """A digest of the kernels' and their launch code's source."""
    digest = hashlib.sha256()
    for file in sorted((Path(__file__).parent / "triton").rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def main() -> None:
    """Run a trial in this process, and print what it finds."""
    from . import BACKENDS

    name, call, structure = pickle.load(sys.stdin.buffer)
    # a device that gives this process nothing says nothing of the kernel
    torch.ones(1, device=call.device)
    _say(_BEGAN)
    _say(_FOUND + json.dumps(check(BACKENDS[name], call, structure)))


def _say(line: str) -> None:
    sys.stdout.write(f"\n{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
