"""The case ``terms``: the time of score terms and dropout over the same call without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import ringweave as rw
from ringweave.errors import UnsupportedError

from ...tune.measure import interleaved, ratio
from ...tune.problem import DIRECTIONS, FORWARD, Problem
from ...tune.session import Say
from ..record import Measuring, Options, Target

# upper bounds on the ratio of forward times; other kinds of calls have no target
_BOUNDS = {"softcap": 1.25, "distance": 1.25, "dropout": 1.4}
_CHECKED = 256  # tokens of the check


def _calls(heads: int, device: str) -> dict[str, dict[str, Any]]:
    """Return the arguments of each kind of call."""
    generator = torch.Generator(device).manual_seed(0)
    table = torch.randn(heads, 257, generator=generator, device=device).requires_grad_()
    return {
        "without": {},
        "softcap": {"terms": rw.Softcap(30.0)},
        "alibi": {"terms": rw.ALiBi.of_heads(heads)},
        "distance": {"terms": rw.DistanceBias(table)},
        "dropout": {"dropout": 0.1},
        "sinks": {"sink_logits": torch.zeros(heads, device=device)},
    }


def measure(options: Options, say: Say) -> Measuring:
    """Check each kind of call against the reference, and time it in turn with the plain call."""
    dtypes = [options.dtype] if options.dtype else [torch.float32, torch.bfloat16]
    said: list[str] = []
    for dtype in dtypes:
        tokens, heads = (512, 2) if options.quick else (4096, 4)
        problem = options.of(Problem("causal", rw.Causal(), tokens, heads, 128, dtype=dtype))
        kinds = _calls(problem.heads, problem.device)
        _check(problem, kinds)
        inputs = problem.inputs()
        for direction in DIRECTIONS:
            name = str(dtype).removeprefix("torch.")
            say(f"terms, {name}, {direction}")
            calls = {kind: _call(problem, inputs, direction, options) for kind, options in kinds.items()}
            timings = interleaved(calls, rounds=options.rounds or (3 if options.quick else 7), device=problem.device)
            for kind in list(kinds)[1:]:
                bound = _BOUNDS.get(kind) if direction == FORWARD and not options.sized else None
                cost = ratio(timings[kind], timings["without"]).medians
                yield Target(f"{kind}, {direction}, {name}", f"{problem.tokens} tokens", cost, bound, False)
                if direction == FORWARD:
                    said.append(f"{kind} {cost:.2f} x ({name})")
    return f"Forward time over that without: {', '.join(said)}."


def _call(
    problem: Problem, inputs: tuple[Tensor, ...], direction: str, options: dict[str, Any]
) -> Callable[[], object]:
    q, k, v, dout = inputs
    if direction == FORWARD:
        return lambda: rw.attention(q, k, v, problem.pattern, **options)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    tables = [x for term in (options["terms"],) for x in term.tables if x.requires_grad] if "terms" in options else []

    def both() -> object:
        return torch.autograd.grad(rw.attention(q, k, v, problem.pattern, **options), [q, k, v, *tables], dout)

    return both


def _check(problem: Problem, kinds: dict[str, dict[str, Any]]) -> None:
    """Raise UnsupportedError unless the results equal the reference's, which drops the same pairs."""
    q, k, v, _ = (x[:, :, :_CHECKED] for x in problem.inputs())
    for kind, options in kinds.items():
        results = []
        for backend in ("auto", "reference"):
            torch.manual_seed(0)
            results.append(rw.attention(q, k, v, problem.pattern, backend=backend, **options).detach().float())
        got, wanted = results
        error = float((got - wanted).norm() / wanted.norm())
        if not error <= 8 * torch.finfo(problem.dtype).eps:
            raise UnsupportedError(kind, f"an error of {error:.1e}", "the reference's result", "Report it.")
