"""``ringweave audit kernels``: attention kernels of other libraries, as installed here, against the float64 definition.

Each library runs in a process of its own, so that a crash or a hang ends only one row of the table. The cases are
published faults of kernels. A result may have twice the error that torch's math attention has in the same dtype, and no
row of it more than four times the error of torch's worst row. A query that attends nothing returns 0.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringweave.environment import driver
from ringweave.errors import in_a_line

from .kernel_cases import LIBRARIES, PADDING, Attend, Case, Library

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: Time limits in seconds, of the start of a process with its imports, and of a case; FlexAttention compiles for each.
LOADING, LIMIT = 120.0, 180.0
_DEATHS = 3  # a library that ended so many processes is not tried further
_SAID = "ringweave: "


class Row(NamedTuple):
    """A row of the table; numbers are errors divided by their limits, or "nan" and "inf"."""

    library: str
    version: str | None
    case: str | None
    sizes: dict[str, Any] | None
    verdict: str
    reason: str | None = None
    forward: float | str | None = None
    dq: float | str | None = None
    dk: float | str | None = None
    dv: float | str | None = None


def _definition(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Compute softmax(q k' / sqrt(D)) v, and 0 for a query that attends nothing."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    empty = ~allowed.any(-1, keepdim=True)
    scores = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(~(allowed | empty), -torch.inf)
    out: Tensor = scores.softmax(-1) @ v
    return out.masked_fill(empty, 0.0)


def _torchs(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Compute torch's math attention, in the dtype of its inputs throughout."""
    empty = ~allowed.any(-1, keepdim=True)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)  # it holds for a CPU too
    with sdpa_kernel(SDPBackend.MATH):
        out = functional.scaled_dot_product_attention(q, k, v, allowed | empty, enable_gqa=True)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)
    return out.masked_fill(empty, 0.0)


def _gradients(attend: Callable[..., Tensor], inputs: list[Tensor], dout: Tensor, *more: Any) -> list[Tensor]:
    """Return the output and the gradients of the inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out: Tensor = attend(*leaves, *more)
    if not out.requires_grad:
        raise NotImplementedError("it computes no gradients")
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]


def _placed(x: Tensor, case: Case, library: Library, device: str) -> Tensor:
    """Return (B, H, N, D) on a device in a library's layout; all other numbers in its memory are NaN."""
    x = x.transpose(1, 2).to(device)
    batch, tokens, heads, dim = x.shape
    if case.memory == "contiguous":
        return x.contiguous() if library.tokens_first else x.transpose(1, 2).contiguous()
    if case.memory == "padded with NaN":
        there = x.new_full((batch, tokens + PADDING, heads, dim), torch.nan)[:, :tokens]
    else:
        there = x.new_full((batch, tokens, 3, heads, dim), torch.nan)[:, :, 1]
    there.copy_(x)
    return there if library.tokens_first else there.transpose(1, 2)


def _ratio(got: Tensor, exact: Tensor, own: Tensor) -> float:
    """Return the error divided by its limit."""
    error, allowed = (x.detach().cpu().double() - exact for x in (got, own))
    tiny = torch.finfo(torch.float64).tiny
    whole = float(error.norm()) / max(2 * float(allowed.norm()), tiny)
    rows = float(error.norm(dim=-1).max()) / max(4 * float(allowed.norm(dim=-1).max()), tiny)
    return math.nan if math.isnan(whole) else max(whole, rows)


def judge(library: Library, attend: Attend, case: Case, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Run a case in this process, and return the verdict, the reason, and errors divided by limits."""
    draw = torch.Generator().manual_seed(0)
    shapes = (case.heads, case.nq), (case.kv_heads, case.nk), (case.kv_heads, case.nk), (case.heads, case.nq)
    *given, dout = (torch.randn(case.batch, *shape, case.dim, generator=draw).to(dtype) for shape in shapes)
    allowed = case.allowed()
    exact = _gradients(_definition, [x.double() for x in given], dout.double(), allowed)
    own = _gradients(_torchs, given, dout, allowed)
    if case.unattended == "NaN":
        for x in given[1:]:
            x[:, :, ~allowed.any(0)] = torch.nan
    inputs = [_placed(x, case, library, device) for x in given]
    found, verdict, reason = dict[str, float](), "right", None

    def record(results: list[Tensor]) -> None:
        # inference and training may take different kernels, and the larger error counts
        for name, got, *known in zip(("forward", "dq", "dk", "dv"), results, exact, own, strict=False):
            ratio = _ratio(got.transpose(1, 2) if library.tokens_first else got, *known)
            before = found.get(name, 0.0)
            found[name] = before if math.isnan(before) or before >= ratio else ratio

    try:
        with torch.no_grad():
            record([attend(inputs[0], inputs[1], inputs[2], case)])
        record(_gradients(attend, inputs, _placed(dout, case, library, device), case))
    except Exception as error:  # noqa: BLE001 libraries and compilers raise exceptions of any type
        verdict = "refused" if isinstance(error, NotImplementedError) else "raises"
        reason = f"{'gradients: ' if found else ''}{in_a_line(error)}"
    faults = {
        "not a number": [name for name, ratio in found.items() if math.isnan(ratio)],
        "above the limit": [name for name, ratio in found.items() if ratio > 1],
    }
    said = [f"{', '.join(names)} {fault}" for fault, names in faults.items() if names]
    if said:
        # wrong results come first, and then an error of the gradients
        verdict, reason = "wrong", "; ".join([*said, *([reason] if reason else [])])
    told = {name: round(ratio, 3) if math.isfinite(ratio) else str(ratio) for name, ratio in found.items()}
    return {"verdict": verdict, "reason": reason, **told}


# ---- a process for each library --------------------------------------------------------------------------------------


def main() -> None:
    """Judge the cases of a library in this process, and print a line of JSON for each."""
    name, device, dtype, first = sys.argv[1:]
    library = next(each for each in LIBRARIES if each.name == name)
    try:
        attend = library.load(device)
    except Exception as error:  # noqa: BLE001 the import of a broken library raises exceptions of any type
        absent = isinstance(error, ModuleNotFoundError) and error.name == library.module
        _say({"verdict": "not installed" if absent else "does not load", "reason": in_a_line(error)})
        return
    _say({"version": library.version()})
    for case in library.cases[int(first) :]:
        found = judge(library, attend, case, device, DTYPES[dtype])
        _say(found)
        if found["verdict"] == "raises" and torch.device(device).type == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                return  # all later calls of this process would fail, and another process does them


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(f"\n{_SAID}{json.dumps(message)}\n")
    sys.stdout.flush()


def rows(device: str, dtype: str) -> Iterator[Row]:
    """Judge all libraries in processes of their own, and yield the rows of the table."""
    for library in LIBRARIES:
        yield from _rows(library, device, dtype)


def _rows(library: Library, device: str, dtype: str) -> Iterator[Row]:
    cases, done, deaths, version = library.cases, 0, 0, None
    while done < len(cases):
        for message in _messages(library, device, dtype, done):
            if "version" in message:
                version = message["version"]
            elif version is None:
                yield Row(library.name, None, None, None, **message)
                return
            else:
                deaths += message["verdict"] in ("crashes", "hangs")
                yield Row(library.name, version, cases[done].name, cases[done].sizes(), **message)
                done += 1
            if done == len(cases):
                # what the process does after its last case is no result
                break
        if deaths == _DEATHS:
            for case in cases[done:]:
                reason = f"the library ended {_DEATHS} processes"
                yield Row(library.name, version, case.name, case.sizes(), "not tried", reason)
            return


def _messages(library: Library, device: str, dtype: str, first: int) -> Iterator[dict[str, Any]]:
    """Yield the messages of a library's process; if it died, the last message says how."""
    paths = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-P", "-m", __name__, library.name, device, dtype, str(first)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
    reader.start()
    said, last, limit, began = 0, "", LOADING, time.monotonic()
    try:
        while (line := lines.get(timeout=max(began + limit - time.monotonic(), 0.0))) is not None:
            if line.startswith(_SAID):
                yield json.loads(line.removeprefix(_SAID))
                said, limit, began = said + 1, LIMIT, time.monotonic()
            last = line.strip() or last
        code = process.wait(LOADING)
    except (queue.Empty, subprocess.TimeoutExpired):
        yield {"verdict": "hangs", "reason": f"it did not finish in {limit:.0f} s"}
        return
    finally:
        process.kill()
        process.wait()
        reader.join(LOADING)
    if code or said < 2:
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        yield {"verdict": "crashes", "reason": f"its process ended ({how}): {last[-200:]}"}


def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


# ---- the report ------------------------------------------------------------------------------------------------------


def versions(device: str) -> dict[str, str | None]:
    """Return the date, and the versions that the rows depend on."""
    gpu = torch.device(device).type == "cuda"
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "torch": torch.__version__,
        "cuda": torch.version.cuda, "triton": triton, "driver": driver(),
        "device": torch.cuda.get_device_name(device) if gpu else device,
    }  # fmt: skip


if __name__ == "__main__":
    main()
