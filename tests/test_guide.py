"""Applying the blocks of CONTRIBUTING.md's guides to a copy of the package gives the results that the guides promise.

Each guide runs in a process of its own, which imports the copy. The C++ and Triton blocks of the score term are
applied too, but not compiled here: the copy has the kernel of this installation, which refuses the new term.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(
    r"^`(?P<file>[^`]+)`, (?:a new file|(?:in (?P<scopes>`\w+`(?: and `\w+`)*), )?"
    r"(?P<how>after|before|in place of) (?P<first>the first )?`(?P<anchor>[^`]+)`):\n```\w+\n(?P<code>.*?)^```$",
    re.M | re.S,
)


class Block(NamedTuple):
    """A block of a guide: its place and its lines."""

    file: str
    how: str | None  # None: a new file
    scopes: tuple[str, ...]
    anchor: str
    first: bool
    code: str

    def apply(self, root: Path) -> None:
        """Apply the block to a copy of the repository."""
        path = root / self.file
        if self.how is None:
            assert not path.exists(), f"{self.file} is there already"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.code, "utf-8")
            return
        lines = path.read_text("utf-8").splitlines(keepends=True)
        for scope in self.scopes or (None,):
            at = self.place(lines, scope)
            begin, end = {"after": (at + 1, at + 1), "before": (at, at), "in place of": (at, at + 1)}[self.how]
            lines[begin:end] = self.code.splitlines(keepends=True)
        path.write_text("".join(lines), "utf-8")

    def place(self, lines: list[str], scope: str | None) -> int:
        """Return the index of the line that the block names; it must be unique, within a function or class if it names one."""
        begin, end = 0, len(lines)
        if scope is not None:
            heads = [i for i, line in enumerate(lines) if re.match(rf"(?:def|class) {scope}\b", line)]
            assert len(heads) == 1, f"{self.file} has {len(heads)} definitions of {scope}"
            begin = heads[0] + 1
            end = next((i for i in range(begin, end) if re.match(r"(?:def|class|@)\b|@", lines[i])), end)
        found = [i for i in range(begin, end) if lines[i].strip() == self.anchor]
        fits = len(found) == 1 or (self.first and found)
        assert fits, f"{self.file} has {len(found)} lines {self.anchor!r}"
        return found[0]


def guides(page: str) -> dict[str, list[Block]]:
    """Return the blocks of each guide, by its heading."""
    found = {}
    for section in page.partition("\n## Guides\n")[2].partition("\n## ")[0].split("\n### ")[1:]:
        blocks = [
            Block(
                each["file"], each["how"], tuple(re.findall(r"\w+", (each["scopes"] or "").replace(" and ", " "))),
                each["anchor"] or "", each["first"] is not None, each["code"],
            )
            for each in BLOCK.finditer(section)
        ]  # fmt: skip
        assert len(blocks) == len(re.findall(r"^```\w", section, re.M)), "a block does not say where it stands"
        found[section.partition("\n")[0]] = blocks
    return found


GUIDES = guides((ROOT / "CONTRIBUTING.md").read_text("utf-8"))

SETUP = """
import sys
from importlib.machinery import PathFinder
# an editable installation would lead to the sources that it was made of
sys.meta_path.insert(0, PathFinder)
import torch
import ringweave as rw
torch.set_num_threads(2)
generator = torch.Generator().manual_seed(7)
def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
def inputs(dtype=torch.float64, nq=200, nk=200):
    return draw(2, 4, nq, 16, dtype=dtype), draw(2, 2, nk, 16, dtype=dtype), draw(2, 2, nk, 16, dtype=dtype)
def grads_of(out, tensors):
    return torch.autograd.grad((out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum(), tensors, retain_graph=True)
def dense(q, k, v, mask, change=lambda t: t):
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = torch.where(mask, change(q @ k.mT / 4), -torch.inf)
    return torch.softmax(scores, -1) @ v
def close(got, wanted, dtype=torch.float64):
    bound = 1e-9 if dtype == torch.float64 else 3e-5
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=bound, rtol=bound)
"""

CHECKS = {
    "Add a pattern": """
from ringweave.patterns import Banded, parse
q, k, v = inputs()
for pattern in (Banded(7, 3), Banded(64, 16), Banded(300, 70), Banded(5, 9), Banded(128, 127)):
    distance = torch.arange(200)[:, None] - torch.arange(200)
    mask = (distance % pattern.period < pattern.width)[None, None]
    assert torch.equal(pattern.to_dense(200), mask)
    for tile in ((16, 16), (32, 64), (128, 128)):
        assert torch.equal(pattern.plan(200, tile=tile).to_dense(), mask)
    wide = torch.equal(pattern.plan(90, 700, q_offset=610, tile=16).to_dense(), pattern.to_dense(90, 700, q_offset=610))
    assert wide
    assert parse(str(pattern)) == pattern and parse(f"{pattern!r} & Causal()") == pattern & rw.Causal()
    wanted = dense(q, k, v, mask)
    for backend in ("reference", "dense_batched", "cpu"):
        dtype = torch.float32 if backend == "cpu" else torch.float64
        given = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out = rw.attention(*given, pattern, backend=backend)
        close((out, *grads_of(out, given)), (wanted, *grads_of(wanted, (q, k, v))), dtype)
# empty and full tiles are found as such
assert Banded(64, 16).plan(256, tile=16).nnz < 256 and Banded(5, 9).plan(256, tile=16).mask_words.shape[0] == 0
# the planner looks at the tiles of the bands only
from ringweave.patterns.declared import DECLARED
from tests.patterns import candidates
candidates.check_declared(DECLARED["Banded"])
try:
    Banded(0, 1)
except rw.PatternError:
    pass
else:
    raise AssertionError("a period of 0")
""",
    "Add a score term": """
from ringweave.terms.term import terms_of, written
assert "Clamp" not in dir(rw)
Clamp = rw.terms.Clamp
term, mask = Clamp(-0.4, 0.7), torch.ones(200, 200, dtype=torch.bool).tril()
q, k, v = inputs()
wanted = dense(q, k, v, mask, lambda t: t.clamp(-0.4, 0.7))
for backend in ("reference", "dense_batched", "auto"):
    out = rw.attention(q, k, v, rw.Causal(), terms=term, backend=backend)
    close((out, *grads_of(out, (q, k, v))), (wanted, *grads_of(wanted, (q, k, v))))
# beside another, in its order
both = dense(q, k, v, mask, lambda t: (2 * torch.tanh(t / 2)).clamp(-0.4, 0.7))
close([rw.attention(q, k, v, rw.Causal(), terms=[rw.Softcap(2.0), term])], [both])
assert terms_of(*written([term])) == (term,)
narrow = [x.detach().float() for x in (q, k, v)]
close([rw.attention(*narrow, rw.Causal(), terms=term)], [wanted], torch.float32)
assert rw.attention(*narrow, rw.Causal(), terms=rw.Softcap(2.0), backend="cpu").shape == q.shape
try:
    rw.attention(*narrow, rw.Causal(), terms=term, backend="cpu")
except rw.UnsupportedError as error:
    assert "it computes no Clamp" in str(error), error
else:
    raise AssertionError("the kernel computed a term that it does not know")
# at a bound the slope is that of torch.clamp
edge = [torch.zeros(2, heads, 40, 16, dtype=torch.float64) for heads in (4, 2)]
edge[0][..., 0] = 4.0
edge[1][..., 0] = torch.tensor([-0.5, 0.25, 0.75, 1.0, -1.0], dtype=torch.float64).repeat(8)
edge = [x.requires_grad_() for x in edge]
v40 = v.detach()[:, :, :40].clone().requires_grad_()
wanted = dense(*edge, v40, torch.ones(40, 40, dtype=torch.bool), lambda t: t.clamp(-0.5, 0.75))
out = rw.attention(*edge, v40, terms=Clamp(-0.5, 0.75), backend="dense_batched")
close((out, *grads_of(out, (*edge, v40))), (wanted, *grads_of(wanted, (*edge, v40))))
assert grads_of(out, edge)[1][..., 2, 0].abs().min() > 0
for low, high in ((1.0, 1.0), (1.0, 1.0 + 1e-12), (-1e300, 4.0), (2.0, 1.0), (0.0, 1e39), (float("nan"), 1.0)):
    try:
        Clamp(low, high)
    except rw.ShapeError as error:
        assert "; wanted " in str(error)
    else:
        raise AssertionError("an empty range, or a number that float32 does not have")
""",
    "Add a backend": """
q, k, v = inputs(nq=150)
table = draw(4, 33)
cases = [
    (rw.Causal(), {}), (rw.SlidingWindow(20, 5) | rw.Sinks(3), {"scale": -0.3}), (rw.Documents([40, 160]), {}),
    (rw.Sinks(8) & ~rw.Causal(), {}), (rw.LongNet([64, 128], [1, 4]), {}),
    (rw.PerHead([rw.Causal(), rw.Full(), rw.Segments(9), rw.Sinks(1)]), {}),
    (rw.Causal(), {"terms": [rw.Softcap(1.5), rw.DistanceBias(table)], "q_offset": 50}),
]
for pattern, options in cases:
    tensors = (q, k, v, table) if "terms" in options else (q, k, v)
    found = []
    for backend in ("dense", "reference"):
        out, lse = rw.attention_with_lse(q, k, v, pattern, backend=backend, **options)
        found.append([out, lse, *grads_of(out, tensors)])
    close(*found)
# a NaN that no query attends goes nowhere
broken = [x.detach().clone().requires_grad_() for x in (q, k, v)]
with torch.no_grad():
    broken[1][:, :, 150:] = broken[2][:, :, 150:] = torch.nan
out = rw.attention(*broken, rw.Causal(), backend="dense")
close(grads_of(out, broken)[:1], grads_of(rw.attention(q, k, v, rw.Causal(), backend="reference"), (q, k, v))[:1])
for refused in ({"dropout": 0.5}, {"precision": rw.Precision(kv=torch.int8)}):
    try:
        with torch.no_grad():
            rw.attention(q, k, v, backend="dense", **refused)
    except rw.UnsupportedError:
        pass
    else:
        raise AssertionError(refused)
long = torch.zeros(1, 1, 5000, 8)
try:
    rw.attention(long, long, long, backend="dense")
except rw.UnsupportedError as error:
    assert "all pairs" in str(error), error
else:
    raise AssertionError("a long sequence")
""",
    "Add an option of a call": """
q, k, v = inputs(torch.float32, 64, 64)
scale = (torch.arange(1, 5) / 3).requires_grad_()
tensors = (q, k, v, scale)
scaled = q * scale[:, None, None]
plain = rw.attention(scaled, k, v, rw.Causal())
wanted = (plain, *grads_of(plain, tensors))
# twice: programs are kept by the arguments that they depend on
for _ in range(2):
    out = rw.attention(q, k, v, rw.Causal(), logit_scale=scale)
    close((out, *grads_of(out, tensors)), wanted, torch.float32)
    with torch.no_grad():
        close([rw.attention(q, k, v, rw.Causal(), logit_scale=scale)], [plain], torch.float32)
        assert not torch.equal(rw.attention(q, k, v, rw.Causal()), plain)
out, lse = rw.attention_with_lse(q, k, v, rw.Causal(), logit_scale=scale)
close([lse], [rw.attention_with_lse(scaled, k, v, rw.Causal()).lse], torch.float32)
context = rw.ContextParallel(None, rw.Causal(), 64, heads=(4, 2))
out = rw.attention(q, k, v, rw.Causal(), context=context, logit_scale=scale)
close((out, *grads_of(out, tensors)), wanted, torch.float32)
packed = [x[0].transpose(0, 1) for x in (q, k, v)]
out = rw.varlen_attention(*packed, [0, 64], logit_scale=scale)
close((out.transpose(0, 1)[None], grads_of(out, [scale])[0].isfinite()), (plain[:1], torch.ones(4)), torch.float32)
assert grads_of(out, [scale])[0].abs().min() > 0
layer = rw.nn.MultiheadAttention(32, 4, batch_first=True, pattern=rw.Causal(), logit_scales=True)
x = draw(2, 64, 32, dtype=torch.float32)
before = layer(x, x, x)[0]
assert layer.logit_scale.grad is None and "logit_scale" in layer.state_dict()
before.square().sum().backward()
assert layer.logit_scale.grad.abs().min() > 0
with torch.no_grad():
    layer.logit_scale.mul_(2)
assert not torch.allclose(layer(x, x, x)[0], before)
# the queries are scaled in the dtype of sums and rounded once
factor = torch.tensor([0.37, 0.81, 1.13, 1.91]).requires_grad_()
exact = inputs(torch.bfloat16, 200, 200)
def errors(out, leaves):
    widened = [x.detach().double().requires_grad_() for x in (*exact, factor)]
    want = rw.attention(widened[0] * widened[3][:, None, None], *widened[1:3], rw.Causal(), backend="reference")
    slopes = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    got = torch.autograd.grad((out * slopes).sum(), leaves)
    wanted = torch.autograd.grad((want * slopes.double()).sum(), widened)
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip((out, *got), (want, *wanted))]
leaves = [*exact, factor]
ours = errors(rw.attention(*exact, rw.Causal(), logit_scale=factor), leaves)
rounded_once = (exact[0].float() * factor[:, None, None]).bfloat16()
k2, v2 = (x.repeat_interleave(2, 1) for x in exact[1:])
theirs = errors(torch.nn.functional.scaled_dot_product_attention(rounded_once, k2, v2, is_causal=True), leaves)
assert all(one <= 1.5 * other for one, other in zip(ours, theirs)), (ours, theirs)
assert ours[1] < 4.5e-3, ours
# what computes by another function refuses it
for make in (
    lambda: rw.nn.HierarchicalAttention(32, 4, pool=8, top_k=1, window=8, logit_scales=True),
    lambda: rw.nn.LongNetAttention(32, 4, segments=[16], rates=[2], detach_weights=True, logit_scales=True),
):
    try:
        make()
    except rw.UnsupportedError as error:
        assert "logit_scale: got " in str(error), error
    else:
        raise AssertionError("an option that the module does not use")
mixture = rw.nn.LongNetAttention(32, 4, segments=[16], rates=[2], batch_first=True, logit_scales=True)
mixture(x, x, x)[0].square().sum().backward()
assert mixture.logit_scale.grad.abs().min() > 0
for call in (
    lambda: rw.attention(q, k, v, logit_scale=scale[:3]), lambda: rw.attention(q, k, v, logit_scale=2.0),
    lambda: rw.attention(q, k, v, logit_scale=scale, precision=rw.Precision(kv=torch.int8)),
    lambda: layer(x, x, x, need_weights=True),
):
    try:
        call()
    except rw.RingweaveError:
        pass
    else:
        raise AssertionError("not refused")
cache = rw.PagedCache.empty(batch=2, length=64, heads=2, dim=16)
cache.append(k.detach(), v.detach())
try:
    rw.paged_attention(q[:, :, -1:].detach(), cache, logit_scale=scale.detach())
except TypeError:
    pass
else:
    raise AssertionError("pages took it")
""",
    "Add a distribution's command": """
import tomllib
from pathlib import Path
from ringweave import plugins
try:
    plugins.require_command("density")
except plugins.AbsentError as error:
    assert "run pip install ./density; with the wheels in dist, pip install --find-links dist ringweave-density" in str(error), error
else:
    raise AssertionError("an absent command")
# what an installation writes of the project
project = tomllib.loads(Path("density/pyproject.toml").read_text("utf-8"))["project"]
info = Path("density/src/ringweave_density-0.1.0.dist-info")
info.mkdir()
(info / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: {project['name']}\\nVersion: 0.1.0\\n", "utf-8")
groups = project["entry-points"].items()
lines = [f"[{group}]\\n" + "".join(f"{name} = {value}\\n" for name, value in points.items()) for group, points in groups]
(info / "entry_points.txt").write_text("\\n".join(lines), "utf-8")
sys.path.insert(0, str(info.parent.resolve()))
from typer.testing import CliRunner
from ringweave.cli.app import app
done = CliRunner().invoke(app, ["density", "Causal()", "--tokens", "64"])
assert (done.exit_code, done.output) == (0, "50.78%\\n"), done.output
import contextlib, io
from ringweave_command import main
with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
    main(["--help"])
assert "Print the share of the pairs" in said.getvalue()
assert "density" not in said.getvalue().partition("Not installed")[2]
""",
}


#: The repository's own tests that a guide's blocks add cases to. The kernel of the copy does not have the new term.
TESTS = {
    "Add a score term": (
        "tests/test_terms.py",
        "test_formula and clamp and not cpu or hostile_numbers and Clamp and dense_batched or every_kind_is_everywhere",
    ),
    "Add a backend": (
        "tests/test_conformance.py",
        "dense and not dense_batched and not auto and (kit or overflow or broken or infinitely or alike or strides)",
    ),
    "Add an option of a call": ("tests/test_options.py", "logit_scale or every_function"),
}


def copied(to: Path) -> Path:
    """Return a copy of the files that guides change, with this installation's compiled kernel."""
    for folder in ("src/ringweave", "src/ringweave_command", "gpu/src/ringweave_gpu", "tests", "docs/api"):
        # with what is compiled already, which a file keeps until it is written
        shutil.copytree(ROOT / folder, to / folder)
    (to / "csrc").mkdir()
    for file in ("csrc/terms.h", "docs/terms.md", "pyproject.toml", "conftest.py"):
        shutil.copy(ROOT / file, to / file)
    shutil.copy(pytest.importorskip("ringweave._cpu").__file__, to / "src/ringweave")
    return to


@pytest.mark.parametrize("guide", CHECKS)
def test_a_guide_gives_the_promised_result(guide: str, tmp_path: Path) -> None:
    copied(tmp_path)
    for block in GUIDES[guide]:
        block.apply(tmp_path)
    lines = [
        f"{SETUP}sys.path.append({str(ROOT)!r})",
        f"assert rw.__file__.startswith({str(tmp_path)!r}), rw.__file__",
        CHECKS[guide],
    ]
    if guide in TESTS:
        file, chosen = TESTS[guide]
        # in this process, which has loaded torch
        words = [file, "-q", "-k", chosen, "--tb=short", "-p", "no:cacheprovider"]
        lines.append(f"import pytest\nsys.exit(pytest.main({words}))\n")
    program = tmp_path / "program.py"
    program.write_text("\n".join(lines), "utf-8")
    path = (tmp_path / "src", tmp_path / "gpu/src", ROOT / "audit/src", ROOT / "lab/src")
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_guide_is_checked() -> None:
    assert [*GUIDES] == [*CHECKS]
    assert all(GUIDES.values())


def test_a_guide_without_its_anchor_fails(tmp_path: Path) -> None:
    """Each block of each guide fails if its line is missing or exists twice."""
    for blocks in GUIDES.values():
        for block in blocks:
            if block.how is None:
                continue
            lines = (ROOT / block.file).read_text("utf-8").splitlines(keepends=True)
            with pytest.raises(AssertionError, match="has 0"):
                block.place([line for line in lines if line.strip() != block.anchor], next(iter(block.scopes), None))


def test_a_block_that_says_no_place_fails() -> None:
    page = "\n## Guides\n\n### One\n\nSomewhere:\n```py\nx = 1\n```\n\n## Other\n"
    with pytest.raises(AssertionError, match="where it stands"):
        guides(page)
