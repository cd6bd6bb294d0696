"""Find by gradients which inputs each output of a function or a whole model depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringweave.errors import ShapeError, shown
from ringweave.patterns import Pattern


@dataclass(frozen=True, eq=False)
class Reach:
    """The inputs that each output depends on.

    Attributes:
        agrees: Whether every dependency follows a path of allowed pairs; None if no output was compared.
        sentence: Description of the result.
        depends: (B, Nq, B, Nk) bool, whether output i of element b depends on input j of element c.
        promised: (B, Nq, Nk) bool, whether a path of allowed pairs leads from output i to input j.
        leaks: The first dependencies without such a path: (element, output, element, input).
    """

    agrees: bool | None
    sentence: str
    depends: Tensor
    promised: Tensor
    leaks: tuple[tuple[int, int, int, int], ...]

    def __str__(self) -> str:
        return self.sentence


def leaks(
    fn: Callable[..., Any],
    inputs: Tensor | Mapping[str, Any],
    promise: Pattern | Sequence[Pattern] | Tensor,
    *,
    rows: Tensor | None = None,
) -> Reach:
    """Find outputs that depend on tokens they must not see, from the gradient of each output with respect to the input.

    Each output token takes a backward pass, so use ten to a hundred tokens. If a gradient is NaN, for example next to
    rows without keys, the input is changed instead, and every output that changes depends on it. A dependency that
    vanishes by rounding is missed; every reported dependency is real.

    Args:
        fn: Function ``fn(x)`` from (B, N, C) to (B, Nq, ...), or to an object with ``last_hidden_state`` or ``logits``;
            or a model that is called as ``fn(**inputs)`` with ``inputs_embeds``.
        inputs: x, or the model's keyword arguments with ``inputs_embeds``, or with ``input_ids`` if the model has
            ``get_input_embeddings()``.
        promise: One pattern for any number of layers, or a sequence with the pattern of each layer, or the allowed
            dependencies of the whole model, (B or 1, Nq, Nk) bool.
        rows: (B, Nq) bool, outputs to check; for example False for padding. All by default.
    Returns:
        A :class:`Reach`.
    Raises:
        ShapeError: An operand has another rank, or the output is not differentiable in the input.
    Example:
        >>> def future(x):
        ...     return x + x.roll(-1, 1)
        >>> print(rw.audit.leaks(future, torch.randn(1, 8, 4), rw.Causal()))
        7 leaks, first: output 0 depends on input 1: the future is visible
    """
    with torch.inference_mode(False), torch.enable_grad():
        return _found(fn, inputs, promise, rows)


def _found(
    fn: Callable[..., Any],
    inputs: Tensor | Mapping[str, Any],
    promise: Pattern | Sequence[Pattern] | Tensor,
    rows: Tensor | None,
) -> Reach:
    x, call = _leaf(fn, inputs)
    out = _output(call(x))
    if out.ndim < 3 or out.shape[0] != x.shape[0]:
        raise ShapeError("fn", shown(out), f"out of ({x.shape[0]}, Nq, ...)", "Return one row for each token.")
    if not out.requires_grad:
        got = "an output without a gradient"
        raise ShapeError("fn", got, "an output differentiable in x", "Call it without no_grad or detach.")
    batch, nq, nk = x.shape[0], out.shape[1], x.shape[1]
    flat = out.reshape(batch, nq, -1)
    weights = torch.randn(flat.shape[-1], generator=torch.Generator("cpu").manual_seed(0), device="cpu").to(flat)
    sums = flat @ weights
    depends, unknown = torch.zeros(2, batch, nq, batch, nk, dtype=torch.bool, device="cpu")
    for b in range(batch):
        for i in range(nq):
            (grad,) = torch.autograd.grad(sums[b, i], x, retain_graph=True, allow_unused=True)
            if grad is not None:
                depends[b, i] = ((grad != 0) & ~grad.isnan()).any(-1).cpu()
                unknown[b, i] = grad.isnan().any(-1).cpu() & ~depends[b, i]
    for c, j in unknown.flatten(0, 1).any(0).nonzero().tolist():
        with torch.no_grad():
            moved = x.detach().clone()
            moved[c, j] = -moved[c, j] + 1
            other = _output(call(moved)).reshape(batch, nq, -1)
        changed = (other != flat) & ~(other.isnan() & flat.isnan())
        depends[:, :, c, j] |= unknown[:, :, c, j] & changed.any(-1).cpu()
    promised = _paths(promise, batch, nq, nk)
    own = torch.zeros(batch, nq, batch, nk, dtype=torch.bool, device="cpu")
    for b in range(batch):
        own[b, :, b] = promised[b]
    wrong = depends & ~own
    if rows is not None:
        if not bool(rows.any()):
            return Reach(None, "not examined: no output is compared", depends, promised, ())
        wrong &= rows.cpu()[:, :, None, None]
    found = wrong.nonzero()
    if not len(found):
        return Reach(True, "no output depends on a token that it must not see", depends, promised, ())
    first = tuple((b, i, c, j) for b, i, c, j in found[:5].tolist())
    return Reach(False, _sentence(len(found), first[0], nk - nq), depends, promised, first)


def _sentence(number: int, first: tuple[int, int, int, int], q_offset: int) -> str:
    b, i, c, j = first
    what = "1 leak:" if number == 1 else f"{number:,} leaks, first:"
    if b != c:
        return f"{what} output {i} of row {b} depends on row {c}: batch elements see each other"
    why = ": the future is visible" if j > i + q_offset else ""
    return f"{what} output {i} depends on input {j}{f' in row {b}' if b else ''}{why}"


def _leaf(fn: Callable[..., Any], inputs: Tensor | Mapping[str, Any]) -> tuple[Tensor, Callable[[Tensor], Any]]:
    if isinstance(inputs, Tensor):
        x = inputs.detach().clone().requires_grad_()
        call: Callable[[Tensor], Any] = fn
    else:
        rest = dict(inputs)
        ids, embedded = rest.pop("input_ids", None), rest.pop("inputs_embeds", None)
        if embedded is None and (ids is None or not hasattr(fn, "get_input_embeddings")):
            got = ", ".join(inputs)
            raise ShapeError("inputs", got, "inputs_embeds, or input_ids of a model", "Pass embeddings.")
        with torch.no_grad():
            embedded = fn.get_input_embeddings()(ids) if embedded is None else embedded  # type: ignore[attr-defined]
        x = embedded.detach().clone().requires_grad_()

        def call(x: Tensor) -> Any:
            return fn(inputs_embeds=x, **rest)

    if x.ndim != 3:
        raise ShapeError("inputs", shown(x), "(B, N, C)", "Give each token a vector.")
    return x, call


def _output(found: Any) -> Tensor:
    for name in ("last_hidden_state", "logits"):
        if hasattr(found, name):
            return getattr(found, name)  # type: ignore[no-any-return]
    found = found[0] if isinstance(found, tuple) else found
    if not isinstance(found, Tensor):
        raise ShapeError("fn", shown(found), "a tensor", "Return (B, Nq, ...).")
    return found


def _paths(promise: Pattern | Sequence[Pattern] | Tensor, batch: int, nq: int, nk: int) -> Tensor:
    """Return where paths of allowed pairs lead, (B, Nq, Nk); the queries are the last tokens."""
    if isinstance(promise, Tensor):
        return promise.cpu().expand(batch, nq, nk)

    def step(pattern: Pattern) -> Tensor:
        heads = pattern.extents()[1] or 1
        dense = pattern.to_dense(nk, nk, heads, batch=batch).any(1)
        # residual connections let every token see itself
        return dense | torch.eye(nk, dtype=torch.bool, device="cpu")

    if isinstance(promise, Pattern):
        paths = step(promise)
        for _ in range(nk.bit_length()):
            paths = (paths.float() @ paths.float()) > 0
    else:
        paths = torch.eye(nk, dtype=torch.bool, device="cpu").expand(batch, nk, nk)
        for pattern in promise:
            paths = (step(pattern).float() @ paths.float()) > 0
    return paths[:, nk - nq :]


__all__ = ["Reach", "leaks"]
