"""The judge of other libraries' kernels finds wrong, crashing and hanging ones, and keeps each to its own rows."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from typer.testing import CliRunner

import ringweave as rw
from ringweave.cli.app import app
from ringweave_audit import kernel_cases, kernels
from ringweave_audit.kernel_cases import CASES, LIBRARIES, Case, Library
from tests.sampled import is_long

NAMED = {library.name: library for library in LIBRARIES}
#: A case with long rows takes as long as all others together.
SHORT = tuple(case for case in CASES if is_long() or "long rows" not in case.name)

# modules with the libraries' names and signatures; the first breaks in four of its cases
FLASH_ATTN = """
import os, signal, time
import torch, ringweave as rw
from ringweave_audit import kernel_cases
kernel_cases.CASES = [case for case in kernel_cases.CASES if case.name in SHORT]
__version__ = "2.0 stand-in"
print("a line of the library itself")
def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1)):
    if causal and q.shape[3] == 128:
        os.kill(os.getpid(), signal.SIGSEGV)
    if causal and k.shape[1] < q.shape[1]:
        time.sleep(600)
    if causal and not q.is_contiguous() and torch.is_grad_enabled():
        raise ValueError("no strides")
    pattern = rw.Causal() if causal else rw.Full()
    if window_size != (-1, -1):
        pattern = rw.SlidingWindow(window_size[0], window_size[1] + (q.shape[3] == 128))
    out = rw.attention(*(x.transpose(1, 2) for x in (q, k, v)), pattern, q_offset=k.shape[1] - q.shape[1])
    return out.transpose(1, 2)
"""
NATTEN = """
import ringweave as rw
def na1d(q, k, v, kernel_size, dilation=1):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return rw.neighborhood_attention(q, k, v, (kernel_size,), dilation=dilation).transpose(1, 2)
"""
ATTN_GYM = """
import ringweave as rw
def gather_attn(query, local_kv, sparse_kv, kv_indices, *, sliding_window_size, scale):
    assert sliding_window_size == 0
    kv = sparse_kv.nan_to_num() if DROPS_NAN else sparse_kv
    return rw.attention(query, kv, kv, rw.Selected(kv_indices[0]), scale=scale)
"""
XFORMERS = """
def memory_efficient_attention(q, k, v, attn_bias=None):
    import torch
    from .fmha import attn_bias as biases
    five = q.ndim == 5
    k, v = (x.flatten(2, 3) if five else x for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q.flatten(2, 3) if five else q, k, v))
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    if isinstance(attn_bias, biases.LowerTriangularMask):
        mask = mask.tril()
    elif attn_bias is not None:
        mask = torch.block_diag(*(torch.ones(n, n) for n in attn_bias)).bool()
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)
    return out.unflatten(2, (-1, 4)) if five else out
"""
BIASES = """
class LowerTriangularMask: pass
class BlockDiagonalMask(list):
    from_seqlens = classmethod(lambda cls, lengths: cls(lengths))
"""


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cases, "CASES", SHORT)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a function that puts a module on the path, instead of an installed library of that name."""
    monkeypatch.syspath_prepend(tmp_path)
    libraries = set[str]()

    def loaded() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] in libraries]

    def install(name: str, code: str) -> None:
        file = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
        libraries.add(name.partition(".")[0])
        for module in loaded():
            if not str(getattr(sys.modules[module], "__file__", "")).startswith(str(tmp_path)):
                monkeypatch.delitem(sys.modules, module)

    yield install
    for module in loaded():
        del sys.modules[module]


def found(name: str, dtype: str = "fp32") -> dict[str | None, kernels.Row]:
    """Return the rows of a library by their cases, which a process computes."""
    return {row.case: row for row in kernels._rows(NAMED[name], "cpu", dtype)}


def here(name: str) -> dict[str, dict[str, Any]]:
    """Judge a library's cases in this process."""
    library = NAMED[name]
    attend = library.load("cpu")
    return {case.name: kernels.judge(library, attend, case, "cpu", torch.float32) for case in library.cases}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_masks_are_the_patterns_of_their_names(case: Case) -> None:
    patterns: dict[str, rw.Pattern] = {
        "full": rw.Full(), "causal": rw.Causal(), "window": rw.SlidingWindow(60, 20),
        "documents": rw.Documents(case.documents), "selected": rw.Selected(case.lists()),
        "neighborhood": rw.GridNeighborhood(rw.Grid((case.nk,)), (33,), dilation=case.dilation),
    }  # fmt: skip
    offset = 0 if case.mask == "selected" else case.nk - case.nq
    # the first queries are before the first key
    before, rows = max(-offset, 0), min(case.nq, case.nq + offset)
    wanted = patterns[case.mask].to_dense(rows, case.nk, q_offset=max(offset, 0)).reshape(-1, rows, case.nk)[0]
    wanted = functional.pad(wanted, (0, 0, before, 0))
    assert torch.equal(case.allowed(), wanted)
    assert (case.unattended == "NaN") <= bool((~wanted.any(0)).any())
    assert ("empty rows" in case.name) <= bool((~wanted.any(1)).any())


def test_each_fault_ends_only_its_row(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library with a crash, a hang, an error and a wrong mask is right in its other rows."""
    installed("flash_attn", FLASH_ATTN.replace("SHORT", repr({case.name for case in SHORT})))
    monkeypatch.setattr(kernels, "LIMIT", 15.0)
    rows = found("flash-attn", "bf16")
    assert list(rows) == [case.name for case in SHORT if case.mask in NAMED["flash-attn"].masks]
    faults = {name: row for name, row in rows.items() if row.verdict != "right"}
    assert {name: row.verdict for name, row in faults.items()} == {
        "causal, 128 channels": "crashes", "causal, packed q, k, v": "raises", "causal, NaN in padding": "raises",
        "causal, empty rows": "hangs", "window, 128 channels": "wrong",
    }  # fmt: skip
    assert "SIGSEGV" in str(faults["causal, 128 channels"].reason)
    assert faults["causal, packed q, k, v"].reason == "gradients: ValueError: no strides"
    assert faults["causal, packed q, k, v"].forward is not None
    assert faults["causal, empty rows"].reason == "it did not finish in 15 s"
    assert float(faults["window, 128 channels"].forward or 0) > 10
    right = rows["window"]
    assert right.version == "2.0 stand-in"
    assert right.sizes == {
        "mask": "window", "batch": 2, "heads": 4, "kv_heads": 4, "nq": 457, "nk": 457, "dim": 64,
        "memory": "contiguous", "unattended": "finite", "left": 60, "right": 20,
    }  # fmt: skip
    assert all(0 < float(number or 0) <= 1 for number in right[-4:])


def test_right_libraries_are_right(installed: Any) -> None:
    """Their calls have the libraries' layouts, so correct functions with their signatures pass."""
    installed("natten.functional", NATTEN)
    installed("xformers.ops.__init__", XFORMERS)
    installed("xformers.ops.fmha.attn_bias", BIASES)
    assert {row["verdict"] for row in here("NATTEN").values()} == {"right"}
    rows = here("xformers")
    refused = rows.pop("causal, empty rows")
    assert refused["verdict"] == "refused"
    assert "forward" not in refused
    assert {row["verdict"] for row in rows.values()} == {"right"}


def test_attn_gym_takes_distinct_lists(installed: Any) -> None:
    installed("attn_gym.sparse", ATTN_GYM.replace("DROPS_NAN", "True"))
    assert {row["verdict"] for row in here("attn-gym").values()} == {"right"}
    for case in NAMED["attn-gym"].cases:
        lists = [row[row >= 0] for row in case.lists()]
        assert all(len(row.unique()) == len(row) for row in lists)


@pytest.mark.parametrize(
    ("code", "verdict", "says"),
    [
        ("import nowhere_at_all", "does not load", "nowhere_at_all"),
        ("import os; os.abort()", "crashes", "SIGABRT"),
    ],
)
def test_a_library_that_does_not_load_is_one_row(installed: Any, code: str, verdict: str, says: str) -> None:
    installed("flash_attn", code)
    (row,) = found("flash-attn").values()
    assert (row.verdict, row.case) == (verdict, None)
    assert says in str(row.reason)


@pytest.mark.parametrize(
    ("code", "verdict", "says"),
    [
        (None, "not installed", "No module named 'flash_attn'"),
        ("raise ImportError('undefined symbol: _ZN2at')", "does not load", "undefined symbol"),
        ("flash_attn_3 = None", "does not load", "flash_attn_func"),
    ],
)
def test_the_process_of_a_library_says_why_it_does_not_load(
    installed: Any, code: str | None, verdict: str, says: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if code is not None:
        installed("flash_attn", code)
    monkeypatch.setattr("sys.argv", ["kernels", "flash-attn", "cpu", "fp32", "0"])
    kernels.main()
    message = json.loads(capsys.readouterr().out.strip().removeprefix("ringweave: "))
    assert message["verdict"] == verdict
    assert says in message["reason"]


@pytest.mark.long
def test_a_library_that_always_crashes_is_given_up(installed: Any) -> None:
    installed("natten.functional", "import os\ndef na1d(*q, **more): os._exit(0)")
    verdicts = [row.verdict for row in found("NATTEN").values()]
    assert verdicts == ["crashes"] * 3 + ["not tried"] * (len(verdicts) - 3)


def judged(attend: Any, name: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Judge a function of (q, k, v, case) over (B, H, N, D) in this process."""
    library = Library("here", "torch", lambda device: attend, ("causal",), tokens_first=False)
    return kernels.judge(library, attend, next(case for case in CASES if case.name == name), "cpu", dtype)


def causal(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, case.allowed(), enable_gqa=True)


@pytest.mark.parametrize("dtype", list(kernels.DTYPES))
def test_a_wrong_gradient_is_found(dtype: str) -> None:
    """A gradient that is off by 5 per cent is wrong, while the other results are right."""

    def off(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
        return causal(q, k * 1.05 - k.detach() * 0.05, v, case)

    name = "causal, odd length"
    result = judged(causal, name, kernels.DTYPES[dtype])
    assert result["verdict"] == "right"
    result = judged(off, name, kernels.DTYPES[dtype])
    assert (result["verdict"], result["reason"]) == ("wrong", "dk above the limit")
    assert result["dk"] > 1 >= max(result["dq"], result["dv"])


def test_one_wrong_row_is_found() -> None:
    """One row of 3,656 with a tenth of it missing is wrong, and so is one NaN."""

    def smaller(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
        rows = torch.ones((*q.shape[:3], 1), dtype=q.dtype)
        rows[0, 0, 0] = 0.9
        return causal(q, k, v, case) * rows

    result = judged(smaller, "causal, odd length")
    assert result["verdict"] == "wrong"
    result = judged(lambda q, k, v, case: causal(q, k, v, case) * torch.nan, "causal, odd length")
    assert (result["forward"], result["reason"]) == ("nan", "forward, dq, dk, dv not a number")


def test_missing_gradients_are_refused() -> None:
    result = judged(lambda q, k, v, case: causal(q, k, v, case).detach(), "causal, odd length")
    assert (result["verdict"], result["reason"]) == (
        "refused", "gradients: NotImplementedError: it computes no gradients",
    )  # fmt: skip
    assert result["forward"] <= 1


def test_what_is_wrong_comes_before_an_error_of_the_gradients() -> None:
    """The reason of a wrong row names its results, whether or not there are gradients."""
    result = judged(lambda q, k, v, case: causal(q, k, v, case).detach() * torch.nan, "causal, odd length")
    assert (result["verdict"], result["reason"]) == (
        "wrong", "forward not a number; gradients: NotImplementedError: it computes no gradients",
    )  # fmt: skip


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_has_units_and_fits(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number has its unit, a result that was not computed has a dash, and no line of the table is too long."""
    case = CASES[0]
    rows = [
        kernels.Row("SDPA cudnn", "2", case.name, {}, "right", None, 0.1234, 0.5, 1.0, 0.25),
        kernels.Row("SDPA math", "2", "window, NaN in unattended keys", {}, "wrong", "forward not a number", "nan"),
        kernels.Row("attn-gym", "2", case.name, {}, "wrong", "dq above the limit", 0.5, 1234.5, 1.001, 2.0),
        kernels.Row("NATTEN", None, None, None, "not installed", "no module"),
    ]
    monkeypatch.setattr(kernels, "rows", lambda device, dtype: iter(rows))
    done = CliRunner().invoke(app, ["audit", "kernels", "--device", "cpu"], env={"COLUMNS": str(columns)})
    assert done.exit_code == 0, done.output
    head, _, *lines = done.output.splitlines()
    assert head == "Errors in units of their limits: above 1x is wrong, - was not computed."
    end = next(place for place, line in enumerate(lines) if line.startswith("NATTEN"))
    table = lines[: end + 1]
    assert max(map(len, table)) <= columns
    if columns < 120:
        # a long name of a case takes two lines, and numbers stay whole
        assert all(number in " ".join(table).split() for number in ("0.12x", "1234x", "nan", "-", "right"))
        return
    assert table[0].split()[-5:] == ["0.12x", "0.50x", "1.00x", "0.25x", "right"]
    assert table[1].split()[-5:] == ["nan", "-", "-", "-", "wrong"]
    assert table[2].split()[-5:] == ["0.50x", "1234x", "1.00x", "2.00x", "wrong"]
    assert table[3].split() == ["NATTEN", "not", "installed"]
    assert "SDPA math, 1 row, wrong: forward not a number" in done.output


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command prints a kernel of torch's own and an absent library, and writes the rows with the versions."""
    chosen = NAMED["FlexAttention"]._replace(masks=("documents",))
    monkeypatch.setattr(kernels, "LIBRARIES", (chosen, NAMED["NATTEN"]))
    monkeypatch.setattr(Library, "cases", property(lambda library: [CASES[14]]))
    file = tmp_path / "table.json"
    done = CliRunner().invoke(
        app, ["audit", "kernels", "--device", "cpu", "--dtype", "fp32", "--out", str(file)], env={"COLUMNS": "120"}
    )
    assert done.exit_code == 0, done.output
    assert "refused: gradients: NotImplementedError: FlexAttention does not support backward on CPU" in done.output
    table = json.loads(file.read_text())
    assert (table["torch"], table["device"], table["dtype"]) == (torch.__version__, "cpu", "fp32")
    assert {"date", "triton", "driver", "cuda"} <= {*table}
    assert [(row["library"], row["verdict"]) for row in table["rows"]] == [
        ("FlexAttention", "refused"), ("NATTEN", "not installed"),
    ]  # fmt: skip
    assert done.output.count("\n") < 40


def test_a_device_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    done = CliRunner().invoke(app, ["audit", "kernels", "--device", "cuda"])
    assert done.exit_code == 2
    assert "--device cpu" in done.output
