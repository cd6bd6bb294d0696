"""Check any attention kernel against the float64 definition, and for faults that kernels often have.

A kernel is a function of (q, k, v) and of any of these parameters: ``allowed`` (bool, (B, Hq, Nq, Nk)), ``pattern`` (a
ringweave pattern), ``scale``, ``q_offset``. It returns out, or (out, lse), and raises ``NotImplementedError`` for calls
that it does not support. The calls are drawn so that every size occurs. A failing call is reduced to a small one, and
printed as a short script that reproduces it. Run

    ringweave audit --kernel module:function
    pytest --pyargs ringweave_audit.conformance --kernel module:function
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ringweave as rw
from ringweave.errors import UnsupportedError
from ringweave.patterns import Pattern, parse

NAMES = ("out", "lse", "dq", "dk", "dv")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LAYOUTS = ("contiguous", "heads last", "every other token", "one batch element")
# Values of each field from simple to hard: a failing trial is reduced towards the first ones. There are 37 lengths, so
# that the default of 40 draws contains each of them.
_VALUES: dict[str, tuple[Any, ...]] = {
    "nk": (
        *range(1, 18), 24, 31, 32, 33, 48, 63, 64, 65, 77, 96, 127, 128, 129, 192, 200, 255, 256, 257, 300, 513,
    ),
    "batch": (1, 2, 3, 4, 5),
    "kv_heads": (1, 2, 3),
    "group": (1, 2, 4),
    "dim": (16, 8, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256),
    "value_dim": (16, 8, 24, 32, 64, 80, 96, 128, 256),
    "dtype": tuple(_DTYPES),
    "layout": _LAYOUTS,
    "scale": (None, 1.0, 0.3, 0.02, -0.2),
    "seed": (0, 1, 2),
}  # fmt: skip
# largest number of scores in a trial; for long sequences, heads and batch elements are reduced
_SCORES = 1 << 19
#: Functions from a length to a pattern with edges that kernels often get wrong.
_PATTERNS: tuple[Callable[[int], str], ...] = (
    lambda n: "Full()",
    lambda n: "Causal()",
    lambda n: f"SlidingWindow({max(1, n // 3)})",
    lambda n: f"SlidingWindow({max(1, n // 4)}, {max(1, n // 8)})",
    lambda n: f"(SlidingWindow({max(1, n // 4)}) | Sinks(2)) & Causal()",
    lambda n: f"Segments({max(1, n // 3)}) & Causal()",
    lambda n: f"KeyPadding({max(1, n - n // 3)}) & Causal()",
    lambda n: f"KeyPadding({n}, {n // 3}) & Causal()",
    lambda n: "~Full()",
    lambda n: f"~SlidingWindow({max(1, n // 2)}, {max(1, n // 2)})",
)


@dataclass(frozen=True)
class Trial:
    """One call of a kernel.

    Attributes:
        pattern: Pattern, or its text.
        nq: Number of queries, which are the last tokens of the sequence.
        nk: Number of keys.
        batch: Number of batch elements.
        heads: Number of query heads.
        kv_heads: Number of key heads.
        dim: Channels of queries and keys.
        value_dim: Channels of values.
        dtype: Name of the inputs' dtype.
        layout: Memory layout of the inputs.
        scale: Factor of the scores; dim**-0.5 by default.
        seed: Seed of the random inputs.
    """

    pattern: str | Pattern
    nq: int
    nk: int
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    dim: int = 16
    value_dim: int = 16
    dtype: str = "float32"
    layout: str = "contiguous"
    scale: float | None = None
    seed: int = 0

    @property
    def factor(self) -> float:
        """Factor of the scores."""
        return self.dim**-0.5 if self.scale is None else self.scale

    @property
    def q_offset(self) -> int:
        """Position of the first query."""
        return self.nk - self.nq

    @property
    def relation(self) -> Pattern:
        """The pattern."""
        return parse(self.pattern) if isinstance(self.pattern, str) else self.pattern

    def allowed(self) -> Tensor:
        """Return the allowed pairs, (B, Hq, Nq, Nk) bool."""
        return self.relation.to_dense(self.nq, self.nk, self.heads, batch=self.batch, q_offset=self.q_offset) > 0

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return random (q, k, v, dout) in the trial's dtype and layout."""
        generator = torch.Generator("cpu").manual_seed(self.seed)

        def draw(heads: int, tokens: int, dim: int) -> Tensor:
            x = torch.randn(self.batch, heads, tokens, dim, generator=generator, device="cpu").to(_DTYPES[self.dtype])
            return laid(x, self.layout)

        return (
            draw(self.heads, self.nq, self.dim),
            draw(self.kv_heads, self.nk, self.dim),
            draw(self.kv_heads, self.nk, self.value_dim),
            draw(self.heads, self.nq, self.value_dim),
        )

    def script(self, kernel: str, rule: str) -> str:
        """Return a script that reproduces the failure."""
        changed = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        given = ", ".join(f"{name}={value!r}" for name, value in changed.items())
        return "\n".join(
            (
                "from ringweave_audit import conformance",
                f"kernel = conformance.load({kernel!r})",
                f"trial = conformance.Trial({given})",
                "q, k, v, dout = trial.inputs()",
                "print(trial.allowed().int())",
                "print(kernel(trial, q, k, v))",
                f"conformance.RULES[{rule!r}](kernel, trial)",
            )
        )


def laid(x: Tensor, layout: str) -> Tensor:
    """Return the numbers with other strides; ``one batch element`` repeats the first element."""
    if layout == "heads last":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "every other token":
        return x.repeat_interleave(2, 2)[:, :, ::2]
    return x[:1].expand(x.shape) if layout == "one batch element" else x


class Kernel:
    """A kernel function, and the names of the parameters that it takes."""

    def __init__(self, function: Callable[..., Any], name: str):
        self.function, self.name = function, name
        parameters = inspect.signature(function).parameters.values()
        anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        known = ("allowed", "pattern", "scale", "q_offset")
        self.wants = [name for name in known if name in {p.name for p in parameters}]
        if not {"allowed", "pattern"} & {*self.wants}:
            remedy = "Wrap it: def kernel(q, k, v, allowed), or with a parameter named pattern."
            got = "any keywords" if anything else ", ".join(p.name for p in parameters)
            raise UnsupportedError("kernel", got, "a parameter named allowed or pattern", remedy)

    def __call__(self, trial: Trial, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """Call the kernel; return out, and lse or None."""
        values: dict[str, Callable[[], Any]] = {
            "allowed": lambda: trial.allowed().to(q.device),
            "pattern": lambda: trial.relation,
            "scale": lambda: trial.factor,
            "q_offset": lambda: trial.q_offset,
        }
        found = self.function(q, k, v, **{name: values[name]() for name in self.wants})
        out, lse = found[:2] if isinstance(found, tuple) else (found, None)
        wanted = (*q.shape[:3], v.shape[3])
        assert tuple(out.shape) == wanted, f"out is {tuple(out.shape)}, not {wanted}"
        return out, lse


def load(name: str) -> Kernel:
    """Import a kernel by ``module:function``.

    Raises:
        UnsupportedError: There is no such function, or it has no parameter ``allowed`` or ``pattern``.
    Example:
        >>> load("ringweave:attention").wants
        ['pattern', 'scale', 'q_offset']
    """
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        wanted = "module:function that can be imported"
        raise UnsupportedError("kernel", repr(name), wanted, f"{error}.") from None
    return Kernel(found, name)


# ---- the definition --------------------------------------------------------------------------------------------------


def _definition(trial: Trial, q: Tensor, k: Tensor, v: Tensor) -> rw.AttentionOutput:
    """Compute (out, lse) by the reference backend, which evaluates the definition in float64."""
    return rw.attention_with_lse(
        q.double(), k.double(), v.double(), trial.relation, scale=trial.factor, q_offset=trial.q_offset,
        backend="reference",
    )  # fmt: skip


def _fused(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> Tensor:
    """Compute torch's attention in the inputs' dtype; a kernel may have twice its error."""
    empty = ~allowed.any(-1, keepdim=True)
    grouped = q.shape[1] != k.shape[1]
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=allowed | empty, scale=scale, enable_gqa=grouped
    )
    return out.masked_fill(empty, 0.0)


def _close(name: str, got: Tensor, want: Tensor, own: Tensor, summed: float = 0.0) -> None:
    """Assert an error of at most twice torch's, or a few roundings of the largest sums."""
    assert not got.isnan().any(), f"{name} holds NaN"
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite), f"{name} is infinite where it should not be, or the other way round"
    stored = torch.finfo(got.dtype).eps
    got, own = got.double()[finite], own.double()[finite]
    want = want[finite]
    size = float(want.abs().max()) if want.numel() else 0.0
    error, allowed = float((got - want).norm()), 2 * float((own - want).norm())
    # a sum of cancelling terms can be tiny, and torch's error on it small by luck, so allow roundings of the terms
    limit = max(allowed, (16 * torch.finfo(torch.float32).eps + stored) * max(float(want.norm()), size, summed, 1e-3))
    assert error <= limit, f"{name} is off by {error:.2g} (norm), the limit is {limit:.2g} (twice torch's error)"


# ---- rules -----------------------------------------------------------------------------------------------------------


def exact(kernel: Kernel, trial: Trial) -> None:
    """The output, and lse if returned, match the definition."""
    q, k, v, _ = trial.inputs()
    allowed, scale = trial.allowed(), trial.factor
    out, lse = kernel(trial, q, k, v)
    want, want_lse = _definition(trial, q, k, v)
    _close("out", out.detach(), want, _fused(q, k, v, allowed, scale))
    if lse is not None:
        # a score is a sum of products, which may cancel
        summed = abs(scale) * float(q.norm(dim=-1).max() * k.norm(dim=-1).max())
        _close("lse", lse.detach(), want_lse, want_lse, summed)


def gradients(kernel: Kernel, trial: Trial) -> None:
    """The gradients of q, k and v match the definition."""
    q, k, v, dout = trial.inputs()
    allowed, scale = trial.allowed(), trial.factor

    def grads(dtype: torch.dtype | None, call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Tensor]:
        leaves = [x.detach().clone().to(dtype or x.dtype).requires_grad_() for x in (q, k, v)]
        out = call(leaves[0], leaves[1], leaves[2])
        if not out.requires_grad:
            raise NotImplementedError("it has no gradient")
        found = torch.autograd.grad(out, leaves, dout.to(out.dtype), allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]

    got = grads(None, lambda q, k, v: kernel(trial, q, k, v)[0])
    want = grads(torch.float64, lambda q, k, v: _definition(trial, q, k, v).out)
    own = grads(None, lambda q, k, v: _fused(q, k, v, allowed, scale))
    # With one key per row, the exact gradient of q and k is 0, and rounding depends on the terms, not on their sum.
    products = float(dout.norm(dim=-1).max() * v.norm(dim=-1).max())
    # the rounding error of a score grows with the score, and is the relative error of its weight
    products *= 1 + abs(scale) * float(q.norm(dim=-1).max() * k.norm(dim=-1).max()) / 16
    summed = abs(scale) * products * max(float(q.abs().max()), float(k.abs().max()))
    for name, mine, right, torchs in zip(NAMES[2:], got, want, own, strict=True):
        _close(name, mine, right, torchs, summed)


def row_sums(kernel: Kernel, trial: Trial) -> None:
    """With values of 1, a row returns 1 if it attends any key, and otherwise 0."""
    q, k, v, _ = trial.inputs()
    ones, allowed = torch.ones_like(v), trial.allowed()
    out, _ = kernel(trial, q, k, ones)
    want = allowed.any(-1).to(out.dtype)[..., None].expand_as(out)
    own = float((_fused(q, k, ones, allowed, trial.factor) - want).abs().max())
    slack = max(4 * torch.finfo(out.dtype).eps, 2 * own)
    assert bool(((out - want).abs() <= slack).all()), (
        f"rows of ones give {float(out.min()):.4g} to {float(out.max()):.4g}"
    )


def leaks(kernel: Kernel, trial: Trial) -> None:
    """A row does not depend on keys and values that it must not attend."""
    q, k, v, _ = trial.inputs()
    allowed = trial.allowed()
    before, _ = kernel(trial, q, k, v)
    for row in sorted({0, trial.nq // 2, trial.nq - 1}):
        seen = allowed[:, :, row].unflatten(1, (trial.kv_heads, -1)).any(2)[..., None]
        other_k, other_v = (torch.where(seen, x, 50 * torch.randn_like(x)) for x in (k, v))
        after, _ = kernel(trial, q, other_k, other_v)
        moved = (after[:, :, row].double() - before[:, :, row].double()).abs()
        hidden = ~allowed[:, :, row]
        heads = seen.repeat_interleave(trial.heads // trial.kv_heads, 1)[..., 0]
        # query heads of a group share keys; skip heads that must not attend keys which another head of the group sees
        alone = (hidden == ~heads).all(-1)
        worst = float(torch.where(alone[..., None], moved, 0.0).max())
        assert worst <= 1e-5, f"query {row} changes by {worst:.2g} with keys that it must not attend"


def unattended_nan(kernel: Kernel, trial: Trial) -> None:
    """NaN in keys and values that no query attends changes nothing."""
    q, k, v, _ = trial.inputs()
    seen = trial.allowed().any(2).unflatten(1, (trial.kv_heads, -1)).any(2)[..., None]
    k, v = (torch.where(seen, x, torch.nan) for x in (k, v))
    out, _ = kernel(trial, q, k, v)
    assert not out.isnan().any(), "NaN in a key that no query attends reaches the output"


def strides(kernel: Kernel, trial: Trial) -> None:
    """Views give the same output as contiguous copies."""
    q, k, v, _ = trial.inputs()
    for layout in _LAYOUTS[1:]:
        q, k, v = (laid(x, layout) for x in (q, k, v))
        got, _ = kernel(trial, q, k, v)
        want, _ = kernel(trial, q.contiguous(), k.contiguous(), v.contiguous())
        worst = float((got.double() - want.double()).abs().max())
        slack = 16 * torch.finfo(got.dtype).eps * max(1.0, float(want.double().abs().max()))
        assert worst <= slack, f"with the layout {layout!r}, the output is off by {worst:.2g}"


def repeated(kernel: Kernel, trial: Trial) -> None:
    """Equal batch elements and heads give equal outputs, and the inputs are not modified."""
    trial = dataclasses.replace(trial, batch=2, layout="one batch element")
    q, k, v, _ = trial.inputs()
    q = q[:, :1].expand_as(q)
    k, v = k[:, :1].expand_as(k), v[:, :1].expand_as(v)
    copies = [x.clone() for x in (q, k, v)]
    out, _ = kernel(trial, q, k, v)
    apart = float((out.double() - out[:1, :1].double()).abs().max())
    slack = 16 * torch.finfo(out.dtype).eps * max(1.0, float(out.double().abs().max()))
    assert apart <= slack, f"equal batch elements and heads give outputs that are {apart:.2g} apart"
    for name, x, copy in zip("qkv", (q, k, v), copies, strict=True):
        assert torch.equal(x, copy), f"it writes to {name}"


RULES: dict[str, Callable[[Kernel, Trial], None]] = {
    rule.__name__: rule for rule in (exact, gradients, row_sums, leaks, unattended_nan, strides, repeated)
}


@dataclass(frozen=True)
class Failure:
    """A rule that a kernel breaks.

    Attributes:
        rule: Name of the rule.
        trial: The smallest failing call that was found.
        error: Description of the error.
        script: Script that reproduces the failure.
    """

    rule: str
    trial: Trial
    error: str
    script: str


@dataclass(frozen=True)
class Verdict:
    """The result of checking one rule.

    Attributes:
        rule: Name of the rule.
        says: Description of the rule.
        tried: Number of calls that the kernel executed.
        refused: Number of calls that the kernel refused.
        failure: The failure, or None if no call broke the rule.
    """

    rule: str
    says: str
    tried: int
    refused: int
    failure: Failure | None

    @property
    def holds(self) -> bool | None:
        """Whether the kernel obeys the rule; None if it was not examined, because the kernel refused every call."""
        return None if self.failure is None and not self.tried else self.failure is None

    @property
    def sentence(self) -> str:
        """The rule, with the numbers of calls."""
        refused = f", {self.refused} refused" if self.refused else ""
        return f"{self.says} ({self.tried} calls{refused})"


def judge(kernel: Kernel | Callable[..., Any] | str, rule: str, *, examples: int = 40) -> Verdict:
    """Check a kernel against one rule on random calls, and reduce a failing call to a small one.

    Args:
        kernel: A kernel, a function, or ``module:function``.
        rule: Name of a rule in ``RULES``.
        examples: Number of calls to draw.
    Returns:
        A :class:`Verdict`.
    Raises:
        UnsupportedError: There is no such kernel.
    Example:
        >>> judge("ringweave:attention", "row_sums", examples=5).failure is None
        True
    """
    if isinstance(kernel, str):
        kernel = load(kernel)
    elif not isinstance(kernel, Kernel):
        kernel = Kernel(kernel, f"{kernel.__module__}:{kernel.__qualname__}")
    check, counts = RULES[rule], {"tried": 0, "refused": 0}
    says = (check.__doc__ or "").split("\n")[0]
    for draw in _draws(examples, scaled="scale" in kernel.wants):
        error = _breaks(kernel, check, draw, counts)
        if error is not None:
            draw, error = _smallest(kernel, check, draw, error)
            trial = _trial(draw)
            failure = Failure(rule, trial, error, trial.script(kernel.name, rule))
            return Verdict(rule, says, **counts, failure=failure)
    return Verdict(rule, says, **counts, failure=None)


def _breaks(
    kernel: Kernel, check: Callable[[Kernel, Trial], None], draw: dict[str, Any], counts: dict[str, int] | None = None
) -> str | None:
    """Check one call; return the error, or None."""
    outcome, error = "tried", None
    try:
        check(kernel, _trial(draw))
    except (NotImplementedError, UnsupportedError):
        outcome = "refused"
    except AssertionError as failed:
        error = f"{failed}"
    except Exception as failed:  # noqa: BLE001  (of somebody's kernel)
        error = f"{type(failed).__name__}: {failed}"
    if counts is not None:
        counts[outcome] += 1
    return error


def _draws(examples: int, scaled: bool) -> Iterator[dict[str, Any]]:
    """Yield calls in which each value of a field occurs equally often, in random combinations."""
    draw = random.Random(0)
    fields = _VALUES | {"pattern": tuple(range(len(_PATTERNS))), "nq": (1.0, 1.0, 0.0, 0.4)}
    columns = {}
    for name, values in fields.items():
        column: list[Any] = []
        while len(column) < examples:
            column += draw.sample(values, len(values))
        columns[name] = column
    for n in range(examples):
        found = {name: column[n] for name, column in columns.items()}
        if found["nk"] > 24:
            # the last two patterns leave few pairs or none, which does not test a long sequence
            found["pattern"] %= len(_PATTERNS) - 2
        found["nq"] = max(1, round(found["nq"] * found["nk"]))
        if not scaled:
            found["scale"] = None
        for name in ("group", "kv_heads", "batch"):
            while found["batch"] * found["kv_heads"] * found["group"] * found["nk"] ** 2 > _SCORES and found[name] > 1:
                found[name] -= 1
        yield found


def _trial(draw: dict[str, Any]) -> Trial:
    given = dict(draw)
    given["heads"] = given["kv_heads"] * given.pop("group")
    return Trial(**given | {"pattern": _PATTERNS[given["pattern"]](given["nk"])})


def _smallest(
    kernel: Kernel, check: Callable[[Kernel, Trial], None], draw: dict[str, Any], error: str
) -> tuple[dict[str, Any], str]:
    """Set each field in turn to the simplest value with which the trial still fails, until no field changes."""
    fields = {"pattern": range(len(_PATTERNS)), **_VALUES}
    changed = True
    while changed:
        changed = False
        for name, values in fields.items():
            for value in values:
                if value == draw[name]:
                    break
                other = draw | {name: value}
                if name == "nk":
                    # keep nq = nk if the failing call has it
                    other["nq"] = value if draw["nq"] == draw["nk"] else min(draw["nq"], value)
                said = _breaks(kernel, check, other)
                if said is not None:
                    draw, error, changed = other, said, True
                    break
        for nq in (draw["nk"], 1):
            other = draw | {"nq": nq}
            if draw["nq"] not in (1, draw["nk"]) and (said := _breaks(kernel, check, other)) is not None:
                draw, error, changed = other, said, True
    return draw, error


# ---- as pytest runs it -----------------------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: Any) -> None:
    """Generate one test for each rule."""
    if "rule" in metafunc.fixturenames:
        kernel = metafunc.config.getoption("--kernel")
        if kernel is None:
            wanted = "a kernel to check"
            raise UnsupportedError("--kernel", "nothing", wanted, "Pass --kernel module:function.")
        metafunc.parametrize("rule", list(RULES))
        metafunc.parametrize("kernel", [load(kernel)], ids=[kernel])


def test_kernel(rule: str, kernel: Kernel) -> None:
    """The kernel obeys the rule; a failure shows the smallest failing call, and a refused rule is skipped."""
    verdict = judge(kernel, rule)
    failure = verdict.failure
    assert failure is None, f"{failure.error}\n\n{failure.script}"
    if verdict.holds is None:
        import pytest

        pytest.skip(f"not examined: {verdict.sentence}")


__all__ = ["RULES", "Failure", "Kernel", "Trial", "Verdict", "judge", "load"]
