"""What a call would compute, with which backends, and what that costs; nothing is run.

All numbers are exact counts of the plan that the call would use, except ``scratch``, which is a bound on a backend's
own buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .checks import DTYPES, checked_dropout, extras
from .errors import ShapeError, UnsupportedError, message, shown
from .ops import dispatch
from .ops.backend import Backend, Case
from .patterns import Pattern
from .patterns.fit import fitting
from .patterns.numbers import flag, named_device, whole
from .patterns.shifted import Shifted, first_positions, placed
from .plan import BlockPlan, Branch, Causality, branches, causality
from .terms import Term, as_terms
from .types import acc_dtype
from .units import count, flops, nbytes, percent

_BACKWARD = 2.5  # five matrix products against two


def explain(
    pattern: Pattern,
    nq: int,
    nk: int | None = None,
    *,
    heads: int = 1,
    kv_heads: int | None = None,
    head_dim: int = 64,
    value_dim: int | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    q_offset: int | Tensor = 0,
    k_offset: int | Tensor = 0,
    backend: str = "auto",
    needs_grad: bool = True,
    terms: Term | Sequence[Term] | None = (),
    dropout: float = 0.0,
    as_dict: bool = False,
) -> Any:
    """Say what an attention call would compute: pairs, tiles, branches, backends and why, memory, operations.

    Args:
        pattern: A relation or a LongNet.
        nq: Queries.
        nk: Keys; nq + q_offset by default, where that is an int and k_offset 0.
        heads: Query heads.
        kv_heads: Key heads; as many by default.
        head_dim: D of queries and keys.
        value_dim: Dv of values; D by default.
        batch: Batch elements.
        dtype: Of q, k and v.
        device: Where they would be; it need not exist here.
        q_offset: Position of the first query; an int, or an integer tensor () or (B,).
        k_offset: Position of the first key, alike.
        backend: ``"auto"``, or one by name.
        needs_grad: Whether a gradient would be asked for.
        terms: Of the scores, as of :func:`ringweave.attention`.
        dropout: Share of the weights that would be dropped.
        as_dict: Return the numbers as a dict of plain values, which ``json.dumps`` takes.
    Returns:
        Aligned text, or the dict.
    Raises:
        ShapeError: A size below 1, or key heads that do not divide the query heads.
        PatternError: No pattern, or one that is made for other sizes.
        UnsupportedError: The named backend cannot run the case, with the reason.
    Example:
        >>> explain(rw.SlidingWindow(128), 1024, as_dict=True)["tiles"]["computed"]
        15
    """
    pattern, q_offset = placed(pattern, q_offset, k_offset, batch)
    if nk is None and isinstance(pattern, Shifted):
        raise ShapeError(message("nk", None, "the number of keys, with a tensor or a k_offset", "Pass nk."))
    if kv_heads is not None:
        kv_heads = _size("kv_heads", kv_heads)
    pattern, nq, nk, heads, batch, q_offset = fitting(pattern, nq, nk, heads, batch, q_offset, kv_heads)
    kv_heads = heads if kv_heads is None else kv_heads
    head_dim = _size("head_dim", head_dim)
    value_dim = head_dim if value_dim is None else _size("value_dim", value_dim)
    needs_grad, as_dict = flag("needs_grad", needs_grad, ShapeError), flag("as_dict", as_dict, ShapeError)
    if heads % kv_heads:
        raise ShapeError(
            message("kv_heads", kv_heads, f"a divisor of the {heads} query heads", "Repeat or drop key heads.")
        )
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise ShapeError(message("dtype", shown(dtype), "float32, float16, bfloat16 or float64", "Name one of them."))
    if not isinstance(backend, str) or backend not in dispatch.names():
        wanted = f"one of {', '.join(dispatch.names())}"
        raise UnsupportedError(message("backend", shown(backend), wanted, "Use 'auto'."))
    kind = named_device(device).type
    terms, dropout = as_terms(terms), checked_dropout(dropout)
    for term in terms:
        term.check(batch, heads, nq, nk, term.tables[0].device if term.tables else torch.device(kind))
    learned = sum(table.numel() for term in terms if (table := term.learned) is not None and table.requires_grad)
    case = Case(batch, heads, kv_heads, nq, nk, head_dim, value_dim, dtype, kind, needs_grad, extras(terms, dropout))
    made = Explanation.of(pattern, replace(case, learned=learned if needs_grad else 0), q_offset, backend)
    return made.as_dict() if as_dict else str(made)


def _size(name: str, value: int) -> int:
    return whole(name, value, 1, error=ShapeError, remedy="Pass the size of the call.")


@dataclass(frozen=True)
class BranchWork:
    """What one branch computes, over batch and heads."""

    branch: Branch
    backend: Backend
    allowed: int
    computed: int
    tiles: int
    full: int
    plan: BlockPlan | None

    @staticmethod
    def of(branch: Branch, backend: Backend) -> BranchWork:
        """Count the pairs and tiles of a branch."""
        if not backend.planned and branch.structure != "sparse":
            # dense kernels take no plan, and a causal one skips what is above the diagonal
            return BranchWork(branch, backend, branch.pairs(), branch.pairs(), 0, 0, None)
        plan = branch.plan()
        # how many batch elements and heads compute each tile
        uses = torch.bincount(plan.group.reshape(-1).long(), minlength=plan.row_ptr.shape[0])
        uses = uses.repeat_interleave((plan.row_ptr[:, -1] - plan.row_ptr[:, 0]).long())
        full = int(uses[plan.bits < 0].sum())
        return BranchWork(branch, backend, plan.pairs(), plan.computed_pairs(), plan.tiles, full, plan)


@dataclass(frozen=True)
class Explanation:
    """What a call would compute: its text is for people, its dict for programs.

    Attributes:
        pattern: A relation or a LongNet.
        case: Sizes and types of the call.
        q_offset: Position of the first query.
        asked: The backend that was asked for.
        steps: The branches that are computed, each with its backend.
        work: What they compute; of a backend that takes the pattern whole, what branches would.
        future: Which pairs see the future.
    """

    pattern: Pattern
    case: Case
    q_offset: int
    asked: str
    steps: tuple[tuple[Branch, Backend], ...]
    work: tuple[BranchWork, ...]
    future: Causality

    @staticmethod
    def of(pattern: Pattern, case: Case, q_offset: int, backend: str) -> Explanation:
        """Plan a call, and count what it would compute."""
        size = {"heads": case.heads, "batch": case.batch, "q_offset": q_offset}
        steps = counted = tuple(dispatch.program(pattern, case, q_offset, backend))
        if steps and not steps[0][1].branched:
            # it takes the pattern whole and computes every pair; the branches still say how sparse the pattern is
            counted = tuple((branch, steps[0][1]) for branch in branches(pattern, case.nq, case.nk, **size))
        work = tuple(BranchWork.of(*each) for each in counted)
        future = causality(pattern, case.nq, case.nk, **size)
        return Explanation(pattern, case, q_offset, backend, steps, work, future)

    @property
    def first(self) -> tuple[int | list[int], int | list[int]]:
        """Positions of the first query and key: one, or one for each batch element where they differ."""
        sides = first_positions(self.pattern, self.q_offset, self.case.batch, torch.device("cpu")).T.tolist()
        q, k = (side[0] if len(set(side)) == 1 else side for side in sides)
        return q, k

    def as_dict(self) -> dict[str, Any]:
        """Say it in plain values, which ``json.dumps`` takes."""
        case, work, future, names = self.case, self.work, self.future, {chosen.name for _, chosen in self.steps}
        everything = case.batch * case.heads * case.nq * case.nk
        allowed = sum(each.allowed for each in work)
        dense = any(not chosen.branched for _, chosen in self.steps)
        computed = everything if dense else sum(each.computed for each in work)
        of_pair = 2 * (case.head_dim + case.value_dim)
        measured = [branch for branch, _ in self.steps if self.asked == "auto" and dispatch.measured(case, branch)]
        return {
            "pattern": repr(self.pattern),
            "sizes": {
                "batch": case.batch, "heads": case.heads, "kv_heads": case.kv_heads, "nq": case.nq, "nk": case.nk,
                "head_dim": case.head_dim, "value_dim": case.value_dim, "dtype": str(case.dtype).removeprefix("torch."),
                "device": case.device, "q_offset": self.first[0], "k_offset": self.first[1],
                "needs_grad": case.needs_grad, "extras": sorted(case.extras),
            },
            "pairs": {
                "allowed": allowed, "computed": computed, "all": everything, "density": allowed / everything,
                "computed_density": computed / everything,
                "computed_over_allowed": computed / allowed if allowed else None,
            },
            "causality": {
                "causal": future.is_causal, "future_pairs": future.pairs,
                "first": None if future.first is None else future.first._asdict(), "text": str(future),
            },
            "tiles": {
                "computed": 0 if dense else sum(each.tiles for each in work),
                "full": 0 if dense else sum(each.full for each in work),
            },
            "branches": _branches(work),
            "backend": {
                "asked": self.asked,
                "chosen": [{"backend": name, "branches": number} for number, name in dispatch.describe(self.steps)],
                "others": _others(self.steps, case, self.asked),
                "measured": len(measured),
                "tiles": sorted({branch.sides for branch, _ in self.steps if branch.sides is not None}),
                "blocks": _configs(case) if "triton" in names else [],
            },
            "memory": _memory(case, work),
            "flops": {
                "forward": of_pair * computed,
                "backward": round(_BACKWARD * of_pair * computed),
                "dense_forward": of_pair * everything,
                "dense_backward": round(_BACKWARD * of_pair * everything),
                "dense_over_this": everything / computed if computed else None,
            },
        }  # fmt: skip

    def __str__(self) -> str:
        """Say it in aligned lines."""
        facts = self.as_dict()
        backend = facts["backend"]
        case, pairs, tiles, memory, work = self.case, *(facts[name] for name in ("pairs", "tiles", "memory", "flops"))
        heads = count(case.heads, "head")
        if case.kv_heads != case.heads:
            heads += f" over {count(case.kv_heads, 'key head')}"
        dims = f"D {case.head_dim}" + (f", Dv {case.value_dim}" if case.value_dim != case.head_dim else "")
        first = [f" from position {_listed(each)}" if each else "" for each in self.first]
        how = count(tiles["computed"], "tile") if tiles["computed"] else "dense kernels"
        grad = ", with gradients" if case.needs_grad else ""
        over = f", {pairs['computed_over_allowed']:.3g} times the allowed" if pairs["allowed"] else ""
        part = f"computed density {percent(pairs['computed_density'])}{over}"
        lines = [
            ("pattern", facts["pattern"]),
            ("call", f"{case.nq} queries{first[0]} x {case.nk} keys{first[1]}, batch {case.batch}, {heads}, {dims}"),
            ("", f"{facts['sizes']['dtype']} on {case.device}{grad}"),
            *([("", f"with {', '.join(facts['sizes']['extras'])}")] if case.extras else []),
            ("allowed", f"{pairs['allowed']} of {pairs['all']} pairs, density {percent(pairs['density'])}"),
            ("computed", f"{pairs['computed']} pairs in {how}, {part}"),
            ("causality", facts["causality"]["text"]),
        ]
        for entry in facts["branches"]:
            lines += [("branch", entry["pattern"]), *(("", text) for text in _branch_text(entry))]
        chosen = ", ".join(f"{each['backend']} x {each['branches']}" for each in backend["chosen"])
        lines.append(("backend", f"{chosen} (asked for {backend['asked']})"))
        if backend["measured"]:
            number = sum(each["branches"] for each in backend["chosen"])
            part = "" if backend["measured"] == number else f", for {backend['measured']} of {number}"
            lines.append(("", f"chosen by what ringweave tune measured on this machine{part}"))
        for q, k in backend["tiles"]:
            lines.append(("", f"measured here: tiles of {q} x {k}"))
        lines += [("", f"measured here: {each}") for each in backend["blocks"]]
        for name, reasons in backend["others"].items():
            lines += [("", f"not {name}: {reason}") for reason in reasons]
        held = ", ".join(f"{name} {nbytes(memory[name])}" for name in ("q", "k", "v", "out", "lse"))
        lines += [
            ("memory", f"plan {nbytes(memory['plan'])}, backend's own at most about {nbytes(memory['scratch'])}"),
            ("", f"activations {nbytes(memory['activations'])}: {held}"),
        ]
        if case.needs_grad:
            lines.append(("", f"gradients {nbytes(memory['gradients'])}"))
        lines.append(("forward", f"{flops(work['forward'])}, dense {flops(work['dense_forward'])}"))
        if case.needs_grad:
            lines.append(("backward", f"{flops(work['backward'])}, dense {flops(work['dense_backward'])}"))
        if work["dense_over_this"] is not None:
            lines.append(("ratio", f"dense computes {work['dense_over_this']:.3g} times as many pairs"))
        return "\n".join(f"{name:<9} {text}" for name, text in lines)


def _listed(first: int | list[int]) -> str:
    return str(first) if isinstance(first, int) else f"{min(first)} to {max(first)}"


def _branches(work: Sequence[BranchWork]) -> list[dict[str, Any]]:
    """Describe views by rate, relation and backend: they differ in offset alone, and are one entry."""
    alike: dict[tuple[int, str, str], list[BranchWork]] = {}
    for each in work:
        alike.setdefault((each.branch.rate, repr(each.branch.pattern), each.backend.name), []).append(each)
    entries = []
    for (rate, pattern, backend), members in alike.items():
        plans = [each.plan for each in members if each.plan is not None]
        entries.append({
            "rate": rate, "pattern": pattern, "backend": backend, "views": len(members),
            "heads": sorted({head for each in members for head in range(*each.branch.heads)}),
            "queries": sorted({each.branch.nq for each in members}),
            "keys": sorted({each.branch.nk for each in members}), "tiles": sum(each.tiles for each in members),
            "full": sum(each.full for each in members), "partial": sum(each.tiles - each.full for each in members),
            "tile": [list(sides) for sides in sorted({(plan.q_tile, plan.kv_tile) for plan in plans})],
            "masks": max((plan.masks.shape[0] for plan in plans), default=0),
            "groups": max((plan.row_ptr.shape[0] for plan in plans), default=0),
        })  # fmt: skip
    return entries


def _configs(case: Case) -> list[str]:
    # what this needs is not loaded for the other backends
    from .ops.triton.launch_config import measured

    return measured(case)


def _others(steps: Sequence[tuple[Branch, Backend]], case: Case, asked: str) -> dict[str, list[str]]:
    """Say why the backends that were not taken for some branch were not."""
    reasons: dict[str, list[str]] = {}
    for branch, chosen in steps:
        refused = {backend.name: reason for backend, reason in dispatch.candidates(case, branch)}
        if asked != "auto":
            why = "was asked for"
        else:
            why = "is preferred" if dispatch.measured(case, branch) is None else "was measured to be faster here"
        for name, backend in dispatch.BACKENDS.items():
            if name == chosen.name:
                continue
            if name not in dispatch.PREFERENCE:
                tuned = backend.branched and not backend.experimental
                reason = "used only when named" + (", or where measured to be fastest" if tuned else "")
            else:
                reason = refused[name] or f"could run it; {chosen.name} {why}"
            if reason not in reasons.setdefault(name, []):
                reasons[name].append(reason)
    return reasons


def _memory(case: Case, work: Sequence[BranchWork]) -> dict[str, int]:
    """Count bytes of the plans, of the call's tensors, and a bound on the backends' own buffers."""
    size = case.dtype.itemsize
    q = case.batch * case.heads * case.nq * case.head_dim * size
    out = case.batch * case.heads * case.nq * case.value_dim * size
    k, v = (case.batch * case.kv_heads * case.nk * dim * size for dim in (case.head_dim, case.value_dim))
    lse = case.batch * case.heads * case.nq * acc_dtype(case.dtype).itemsize
    # views of one length share a plan
    plans = {id(each.plan): each.plan for each in work if each.plan is not None}
    return {
        "plan": sum(plan.nbytes for plan in plans.values()),
        "q": q, "k": k, "v": v, "out": out, "lse": lse,
        "activations": q + k + v + out + lse,
        "gradients": q + k + v + out if case.needs_grad else 0,
        "scratch": max((each.backend.scratch(case, each.branch) for each in work), default=0),
    }  # fmt: skip


def _branch_text(entry: dict[str, Any]) -> list[str]:
    def span(values: list[int]) -> str:
        return f"{values[0]}" if len(values) == 1 else f"{values[0]}-{values[-1]}"

    views = f"{count(entry['views'], 'view')} of every {entry['rate']}th token" if entry["rate"] > 1 else "all tokens"
    lines = [f"{views}, {span(entry['queries'])} x {span(entry['keys'])}, {entry['backend']}"]
    if entry["tile"]:
        sides = " or ".join(f"{q} x {k}" for q, k in entry["tile"])
        lines.append(
            f"{count(entry['tiles'], 'tile')} of {sides}: {entry['full']} full, {entry['partial']} partial with "
            f"{count(entry['masks'], 'distinct mask')}, {count(entry['groups'], 'group')} of heads"
        )
    return lines
