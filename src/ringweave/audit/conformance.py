"""Whether somebody's attention kernel is right: the float64 definition, and what kernels get wrong in silence.

A kernel is a function of (q, k, v) and of what it asks for by name: ``allowed`` (bool, (B, Hq, Nq, Nk)), ``pattern`` (a
ringweave pattern), ``scale``, ``q_offset``. It gives out, or (out, lse). What it cannot do it refuses by
``NotImplementedError``. Calls are drawn so that each size comes up. One that fails is made small, and printed as ten
lines to paste. Run

    ringweave audit --kernel module:function
    pytest --pyargs ringweave.audit.conformance --kernel module:function
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

from ..errors import UnsupportedError, message
from ..patterns import Pattern, parse

NAMES = ("out", "lse", "dq", "dk", "dv")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LAYOUTS = ("contiguous", "heads last", "every other token", "one batch element")
# values of each field from simple to hard: a trial that fails is moved towards the first ones. 37 lengths: the usual 40
# draws have each of them
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
# scores of a trial, at most: heads and batch elements give way to length
_SCORES = 1 << 19
#: By length; relations that kernels get wrong at their edges.
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
        pattern: A pattern, or one as text.
        nq: Queries, the last ones of the sequence.
        nk: Keys.
        batch: Batch elements.
        heads: Query heads.
        kv_heads: Key heads.
        dim: Channels of queries and keys.
        value_dim: Channels of values.
        dtype: Name of the inputs' type.
        layout: How they lie in memory.
        scale: Factor of the scores; dim**-0.5 by default.
        seed: Of the numbers.
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
        """(B, Hq, Nq, Nk) bool."""
        return self.relation.to_dense(self.nq, self.nk, self.heads, batch=self.batch, q_offset=self.q_offset) > 0

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(q, k, v, dout), drawn in the trial's type and laid out as it says."""
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
        """Write the lines that make it fail again."""
        changed = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        given = ", ".join(f"{name}={value!r}" for name, value in changed.items())
        return "\n".join(
            (
                "from ringweave.audit import conformance",
                f"kernel = conformance.load({kernel!r})",
                f"trial = conformance.Trial({given})",
                "q, k, v, dout = trial.inputs()",
                "print(trial.allowed().int())",
                "print(kernel(trial, q, k, v))",
                f"conformance.RULES[{rule!r}](kernel, trial)",
            )
        )


def laid(x: Tensor, layout: str) -> Tensor:
    """The same numbers with other strides; ``one batch element`` repeats the first."""
    if layout == "heads last":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "every other token":
        return x.repeat_interleave(2, 2)[:, :, ::2]
    return x[:1].expand(x.shape) if layout == "one batch element" else x


class Kernel:
    """A function with what it asks for."""

    def __init__(self, function: Callable[..., Any], name: str):
        self.function, self.name = function, name
        parameters = inspect.signature(function).parameters.values()
        anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        known = ("allowed", "pattern", "scale", "q_offset")
        self.wants = [name for name in known if name in {p.name for p in parameters}]
        if not {"allowed", "pattern"} & {*self.wants}:
            remedy = "Wrap it: def kernel(q, k, v, allowed), or with a parameter named pattern."
            got = "any keywords" if anything else ", ".join(p.name for p in parameters)
            raise UnsupportedError(message("kernel", got, "a parameter named allowed or pattern", remedy))

    def __call__(self, trial: Trial, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """(out, lse or None)."""
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
        UnsupportedError: There is no such function, or it asks for nothing that says what may attend.
    Example:
        >>> load("ringweave:attention").wants
        ['pattern', 'scale', 'q_offset']
    """
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        wanted = "module:function that can be imported"
        raise UnsupportedError(message("kernel", repr(name), wanted, f"{error}.")) from None
    return Kernel(found, name)


# ---- the definition --------------------------------------------------------------------------------------------------


def dense(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) by the definition; plain autograd, safe for rows that attend nothing."""
    ratio = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
    empty = ~allowed.any(-1, keepdim=True)
    scores = torch.where(allowed, q @ k.mT * scale, -torch.inf)
    lse = torch.logsumexp(torch.where(empty, 0.0, scores), -1)
    weights = torch.where(allowed, torch.exp(scores - lse[..., None]), 0.0)
    return weights @ v, torch.where(empty[..., 0], -torch.inf, lse)


def _fused(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> Tensor:
    """torch's own attention of the same inputs in their type: what its error is, another's may be twice."""
    empty = ~allowed.any(-1, keepdim=True)
    grouped = q.shape[1] != k.shape[1]
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=allowed | empty, scale=scale, enable_gqa=grouped
    )
    return out.masked_fill(empty, 0.0)


def _close(name: str, got: Tensor, want: Tensor, own: Tensor, summed: float = 0.0) -> None:
    """At most twice torch's own error, or a few roundings of the largest sums."""
    assert not got.isnan().any(), f"{name} holds NaN"
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite), f"{name} is infinite where it should not be, or the other way round"
    stored = torch.finfo(got.dtype).eps
    got, own = got.double()[finite], own.double()[finite]
    want = want[finite]
    size = float(want.abs().max()) if want.numel() else 0.0
    error, allowed = float((got - want).norm()), 2 * float((own - want).norm())
    # sums of many terms that cancel are small beside them: torch may be lucky there
    limit = max(allowed, (16 * torch.finfo(torch.float32).eps + stored) * max(float(want.norm()), size, summed, 1e-3))
    assert error <= limit, f"{name} is off by {error:.2g} (norm), twice torch's own error is {limit:.2g}"


# ---- rules -----------------------------------------------------------------------------------------------------------


def exact(kernel: Kernel, trial: Trial) -> None:
    """Out, and lse where there is one, are those of the definition."""
    q, k, v, _ = trial.inputs()
    allowed, scale = trial.allowed(), trial.factor
    out, lse = kernel(trial, q, k, v)
    want, want_lse = dense(q.double(), k.double(), v.double(), allowed, scale)
    _close("out", out.detach(), want, _fused(q, k, v, allowed, scale))
    if lse is not None:
        _close("lse", lse.detach(), want_lse, dense(q.float(), k.float(), v.float(), allowed, scale)[1])


def gradients(kernel: Kernel, trial: Trial) -> None:
    """Gradients of q, k and v are those of the definition."""
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
    want = grads(torch.float64, lambda q, k, v: dense(q, k, v, allowed, scale)[0])
    own = grads(None, lambda q, k, v: _fused(q, k, v, allowed, scale))
    # one pair leaves no gradient but rounding: what is summed, not the sum, says how much of that there is
    products = float(dout.norm(dim=-1).max() * v.norm(dim=-1).max())
    # a score is rounded by its own size, and a weight by as much relative to itself
    products *= 1 + abs(scale) * float(q.norm(dim=-1).max() * k.norm(dim=-1).max()) / 16
    summed = abs(scale) * products * max(float(q.abs().max()), float(k.abs().max()))
    for name, mine, right, torchs in zip(NAMES[2:], got, want, own, strict=True):
        _close(name, mine, right, torchs, summed)


def row_sums(kernel: Kernel, trial: Trial) -> None:
    """With values of 1 a row gives 1 wherever it attends anything, and else 0."""
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
    """A row does not depend on keys and values that it may not attend."""
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
        # heads of a group may see what their neighbour does
        alone = (hidden == ~heads).all(-1)
        worst = float(torch.where(alone[..., None], moved, 0.0).max())
        assert worst <= 1e-5, f"query {row} moves by {worst:.2g} with keys that it may not attend"


def unattended_nan(kernel: Kernel, trial: Trial) -> None:
    """NaN in keys and values that no query attends changes nothing."""
    q, k, v, _ = trial.inputs()
    seen = trial.allowed().any(2).unflatten(1, (trial.kv_heads, -1)).any(2)[..., None]
    k, v = (torch.where(seen, x, torch.nan) for x in (k, v))
    out, _ = kernel(trial, q, k, v)
    assert not out.isnan().any(), "NaN of a key that nobody attends reaches the output"


def strides(kernel: Kernel, trial: Trial) -> None:
    """Views give what contiguous copies give."""
    q, k, v, _ = trial.inputs()
    for layout in _LAYOUTS[1:]:
        q, k, v = (laid(x, layout) for x in (q, k, v))
        got, _ = kernel(trial, q, k, v)
        want, _ = kernel(trial, q.contiguous(), k.contiguous(), v.contiguous())
        worst = float((got.double() - want.double()).abs().max())
        slack = 16 * torch.finfo(got.dtype).eps * max(1.0, float(want.double().abs().max()))
        assert worst <= slack, f"inputs that lie {layout} give an output that is off by {worst:.2g}"


def repeated(kernel: Kernel, trial: Trial) -> None:
    """A batch of equal elements gives equal elements, and equal heads equal heads; inputs stay as they are."""
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
        rule: Its name.
        trial: The smallest call that was found to break it.
        error: What is wrong.
        script: Lines to paste.
    """

    rule: str
    trial: Trial
    error: str
    script: str


@dataclass(frozen=True)
class Verdict:
    """What became of one rule.

    Attributes:
        rule: Its name.
        says: What it says.
        tried: Calls that the kernel took.
        refused: Calls that it refused.
        failure: None where it holds.
    """

    rule: str
    says: str
    tried: int
    refused: int
    failure: Failure | None


def judge(kernel: Kernel | Callable[..., Any] | str, rule: str, *, examples: int = 40) -> Verdict:
    """Hold a kernel to one rule, over drawn calls; what fails is made small.

    Args:
        kernel: A kernel, its function, or ``module:function``.
        rule: A name of ``RULES``.
        examples: Calls to draw.
    Returns:
        A :class:`Verdict`.
    Raises:
        UnsupportedError: No such kernel.
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
    """What is wrong, if anything."""
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
    """Every value of a field as often as any other, in an order of its own: all combinations would be too many."""
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
            # the last two leave few pairs or none, which shows nothing of a length
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
    """Give each field in turn the simplest value with which the trial fails, until no field changes."""
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
                    # as many queries as keys, unless it fails only with fewer
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
    """One test for each rule."""
    if "rule" in metafunc.fixturenames:
        kernel = metafunc.config.getoption("--kernel")
        if kernel is None:
            wanted = "a kernel to check"
            raise UnsupportedError(message("--kernel", "nothing", wanted, "Pass --kernel module:function."))
        metafunc.parametrize("rule", list(RULES))
        metafunc.parametrize("kernel", [load(kernel)], ids=[kernel])


def test_kernel(rule: str, kernel: Kernel) -> None:
    """The rule holds, or here is the smallest call that breaks it."""
    failure = judge(kernel, rule).failure
    assert failure is None, f"{failure.error}\n\n{failure.script}"


__all__ = ["RULES", "Failure", "Kernel", "Trial", "Verdict", "judge", "load"]
