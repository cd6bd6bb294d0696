"""Explain a call without running it: its pairs, tiles, backends and costs.

All numbers are exact counts from the plan that the call would use, except ``scratch``, which is a bound on a backend's
buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .. import plugins, program
from ..backends import BACKENDS
from ..backends.backend import Backend
from ..call import SIZES, Call, features_of
from ..checks import flag, named_device, whole
from ..errors import ShapeError, shown
from ..patterns import Full, Pattern
from ..patterns.alignment import first_of_sizes
from ..patterns.base import parts_of
from ..patterns.fitting import fitting
from ..patterns.recorded import Recorded
from ..patterns.shifted import Shifted, first_positions, with_offsets
from ..plan import BlockPlan, Branch, branches
from ..plan.causality import causality
from ..score_functions.reading import Positions, check_device, read
from ..score_functions.scored_program import function_of, with_function
from ..terms import Term
from ..terms.term import ScoreMod, as_listed, is_function, written
from ..types import DTYPES, Causality, Place, acc_dtype
from ..units import count, flops, nbytes, percent
from ..validate import checked_dropout, checked_scale

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
    device: str | int | torch.device = "cpu",
    scale: float | None = None,
    q_offset: int | Tensor | Literal["end"] = 0,
    k_offset: int | Tensor = 0,
    backend: str = "auto",
    needs_grad: bool = True,
    terms: Term | ScoreMod | Sequence[Term | ScoreMod] | None = (),
    dropout: float = 0.0,
    as_dict: bool = False,
) -> Any:
    """Explain an attention call: its pairs, tiles, branches, backends and reasons, memory and operations.

    Args:
        pattern: A relation or a LongNet.
        nq: Queries.
        nk: Keys; nq + q_offset by default, if q_offset is an int and k_offset is 0.
        heads: Query heads.
        kv_heads: Key heads; ``heads`` by default.
        head_dim: D of queries and keys.
        value_dim: Dv of values; D by default.
        batch: Batch elements.
        dtype: Dtype of q, k and v.
        device: Device of q, k and v; it need not exist on this machine.
        scale: Factor of the scores; 1 / sqrt(D) by default. A function that multiplies scores is read with it.
        q_offset: Position of the first query: an int, an integer tensor () or (B,), or ``"end"``, as in
            :func:`ringweave.attention`.
        k_offset: Position of the first key: an int, or an integer tensor () or (B,).
        backend: ``"auto"`` or the name of a backend.
        needs_grad: Whether gradients would be needed.
        terms: Score terms, as in :func:`ringweave.attention`. For functions the explanation ends with a line or an
            entry ``score_mod``: the terms that they are, or that they take the slower general path in tiles, and why.
        dropout: Share of the weights that would be dropped.
        as_dict: Whether to return a dict of plain values, which ``json.dumps`` accepts, instead of text.
    Returns:
        Aligned text, or the dict.
    Raises:
        ShapeError: A size is below 1, or the key heads do not divide the query heads.
        PatternError: ``pattern`` is not a pattern, or is made for other sizes.
        UnsupportedError: The named backend cannot run the case, with the reason; or a function has effects.
    Example:
        >>> explain(rw.SlidingWindow(128), 1024, as_dict=True)["tiles"]["computed"]
        15
    """
    first = first_of_sizes(pattern, q_offset, k_offset, batch=batch, nq=nq, nk=nk)
    pattern, q_offset = with_offsets(pattern, first, k_offset, batch)
    if nk is None and isinstance(pattern, Shifted):
        raise ShapeError("nk", None, "the number of keys, with a tensor or a k_offset", "Pass nk.")
    if kv_heads is not None:
        kv_heads = _size("kv_heads", kv_heads)
    pattern, nq, nk, heads, batch, q_offset = fitting(pattern, nq, nk, heads, batch, q_offset, kv_heads)
    pattern, functions = _recognised(pattern._for_call(), Place(batch, heads, nq, nk, q_offset))
    kv_heads = heads if kv_heads is None else kv_heads
    head_dim = _size("head_dim", head_dim)
    scale = checked_scale(scale, head_dim)
    value_dim = head_dim if value_dim is None else _size("value_dim", value_dim)
    needs_grad, as_dict = flag("needs_grad", needs_grad, ShapeError), flag("as_dict", as_dict, ShapeError)
    if heads % kv_heads:
        raise ShapeError(
            "kv_heads", kv_heads, f"a divisor of the {heads} query heads", "Change one of the two numbers."
        )
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise ShapeError("dtype", shown(dtype), "float32, float16, bfloat16 or float64", "Name one of them.")
    program.check_name(backend)
    kind = named_device(device).type
    given, dropout, said, function = as_listed(terms), checked_dropout(dropout), "", None
    listed = tuple([term for term in given if isinstance(term, Term)])
    if any(map(is_function, given)):
        check_device(named_device(device))
        at = Positions.of(batch, heads, nq, nk, pattern, q_offset)
        found = read(given, at, acc_dtype(dtype), scale)
        said = found.said
        if found.score is None:
            function = function_of(found.function, found.graph, dtype, named_device(device))
        else:
            listed = found.score.terms
            pattern = pattern if isinstance(found.score.pattern, Full) else pattern & found.score.pattern
    for term in listed:
        term.check(batch, heads, nq, nk, term.tables[0].device if term.tables else torch.device(kind))
    learned = sum(table.numel() for term in listed for table in term.learned if table.requires_grad)
    call = Call(
        batch, heads, kv_heads, nq, nk, head_dim, value_dim, dtype, kind, needs_grad,
        features_of(written(listed)[0], dropout), learned if needs_grad else 0, pattern=pattern, q_offset=q_offset,
        backend=backend,
    )  # fmt: skip
    made = Explanation.of(call if function is None else with_function(call, function), functions)
    if not said:
        return made.as_dict() if as_dict else str(made)
    return {**made.as_dict(), "score_mod": said} if as_dict else f"{made}\nscore_mod {said}"


def _recognised(pattern: Pattern, place: Place) -> tuple[Pattern, list[Recorded]]:
    """Return the pattern as a call computes it, and the functions that it has been recognised from."""
    if not pattern.has_function:
        return pattern, []
    functions = [mask.compared(mask.at_place(place)) for mask in parts_of(pattern, Recorded)]
    return pattern._recognised(place), functions


def _size(name: str, value: int) -> int:
    return whole(name, value, 1, error=ShapeError, remedy="Pass the size of the call.")


@dataclass(frozen=True)
class BranchWork:
    """The work of one branch over batch and heads: pairs and tiles; a dense kernel has no plan and 0 tiles."""

    branch: Branch
    backend: Backend
    allowed: int
    computed: int
    tiles: int
    full: int  # tiles in which all pairs are allowed
    plan: BlockPlan | None
    by_query: bool = False  # whether the tiles are those of single queries, with rows for the heads that share a list

    @staticmethod
    def of(call: Call, branch: Branch, backend: Backend) -> BranchWork:
        """Count the pairs and tiles of a branch."""
        if not backend.planned and branch.dense_kind != "sparse":
            # dense kernels take no plan, and causal ones skip the pairs above the diagonal
            return BranchWork(branch, backend, branch.pairs(), branch.pairs(), 0, 0, None)
        by_query = None if backend.by_query is None else backend.by_query(call, branch)
        plan = branch.plan() if by_query is None else by_query
        # number of (batch element, head) pairs that compute each tile
        uses = torch.bincount(plan.row_set.reshape(-1).long(), minlength=plan.row_ptr.shape[0])
        uses = uses.repeat_interleave((plan.row_ptr[:, -1] - plan.row_ptr[:, 0]).long())
        full = int(uses[plan.mask_id < 0].sum())
        pairs = plan.pairs(), plan.computed_pairs()
        return BranchWork(branch, backend, *pairs, plan.tiles, full, plan, by_query is not None)


@dataclass(frozen=True)
class Explanation:
    """The explanation of a call, as text for people or as a dict for programs."""

    call: Call
    steps: tuple[program.Step, ...]
    work: tuple[BranchWork, ...]  # by branch, even for a backend without branches
    future: Causality
    functions: tuple[Recorded, ...]  # the functions that the pattern was recognised from

    @staticmethod
    def of(call: Call, functions: Sequence[Recorded] = ()) -> Explanation:
        """Plan a call and count its work."""
        size = {"heads": call.heads, "batch": call.batch, "q_offset": call.q_offset}
        steps = counted = program.compiled(call)
        if steps and not steps[0].backend.branched:
            # this backend computes every pair of the whole pattern; the branches still show the pattern's sparsity
            split = branches(call.pattern, call.nq, call.nk, **size)
            counted = tuple(program.Step(branch, steps[0].backend) for branch in split)
        work = tuple(BranchWork.of(call, *each) for each in counted)
        return Explanation(call, steps, work, causality(call.pattern, call.nq, call.nk, **size), tuple(functions))

    @property
    def first(self) -> tuple[int | list[int], int | list[int]]:
        """Positions of the first query and the first key; lists with one per batch element if these differ."""
        sides = first_positions(self.call.pattern, self.call.q_offset, self.call.batch, torch.device("cpu")).T.tolist()
        q, k = (side[0] if len(set(side)) == 1 else side for side in sides)
        return q, k

    def as_dict(self) -> dict[str, Any]:
        """Return the explanation as a dict of plain values, which ``json.dumps`` accepts."""
        call, work, future = self.call, self.work, self.future
        everything = call.batch * call.heads * call.nq * call.nk
        allowed = sum(each.allowed for each in work)
        dense = any(not chosen.branched for _, chosen in self.steps)
        computed = everything if dense else sum(each.computed for each in work)
        of_pair = 2 * (call.head_dim + call.value_dim)
        measured = [
            branch for branch, _ in self.steps if self.call.backend == "auto" and program.measured(call, branch)
        ]
        return {
            "pattern": repr(self.call.pattern),
            "functions": self._functions(),
            "sizes": {
                **{name: getattr(call, name) for name in SIZES}, "dtype": str(call.dtype).removeprefix("torch."),
                "q_offset": self.first[0], "k_offset": self.first[1],
                "needs_grad": call.needs_grad, "features": sorted(call.features),
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
                "asked": self.call.backend,
                "chosen": [{"backend": name, "branches": number} for number, name in program.describe(self.steps)],
                "others": _others(self.steps, call, self.call.backend),
                "measured": len(measured),
                "tiles": sorted({branch.tile_size for branch in measured if branch.tile_size is not None}),
                "trials": _trials(self.steps, call),
            },
            "memory": _memory(call, work),
            "flops": {
                "forward": of_pair * computed,
                "backward": round(_BACKWARD * of_pair * computed),
                "dense_forward": of_pair * everything,
                "dense_backward": round(_BACKWARD * of_pair * everything),
                "dense_over_this": everything / computed if computed else None,
            },
        }  # fmt: skip

    def _functions(self) -> list[str]:
        """Describe the pattern's functions: those with the pairs of a pattern, and then how the others are computed."""
        others = {mask.formula: mask.said for mask in parts_of(self.call.pattern, Recorded)}
        recognised = dict.fromkeys([mask.formula for mask in self.functions])
        return [*[each for each in recognised if each not in others], *others.values()]

    def __str__(self) -> str:
        """Format the explanation in aligned lines."""
        facts = self.as_dict()
        backend = facts["backend"]
        pairs, tiles, memory, work = (facts[name] for name in ("pairs", "tiles", "memory", "flops"))
        call = self.call
        heads = count(call.heads, "head")
        if call.kv_heads != call.heads:
            heads += f" over {count(call.kv_heads, 'key head')}"
        dims = f"D {call.head_dim}" + (f", Dv {call.value_dim}" if call.value_dim != call.head_dim else "")
        first = [f" from position {_listed(each)}" if each else "" for each in self.first]
        how = count(tiles["computed"], "tile") if tiles["computed"] else "dense kernels"
        grad = ", with gradients" if call.needs_grad else ""
        over = f", {pairs['computed_over_allowed']:.3g} times the allowed" if pairs["allowed"] else ""
        part = f"computed density {percent(pairs['computed_density'])}{over}"
        lines = [
            ("pattern", facts["pattern"]),
            *(("function", said) for said in facts["functions"]),
            (
                "call",
                f"{call.nq:,} queries{first[0]} x {call.nk:,} keys{first[1]}, batch {call.batch}, {heads}, {dims}",
            ),
            ("", f"{facts['sizes']['dtype']} on {call.device}{grad}"),
            *([("", f"with {', '.join(facts['sizes']['features'])}")] if call.features else []),
            ("allowed", f"{pairs['allowed']:,} of {pairs['all']:,} pairs, density {percent(pairs['density'])}"),
            ("computed", f"{pairs['computed']:,} pairs in {how}, {part}"),
            ("causality", facts["causality"]["text"]),
        ]
        for entry in facts["branches"]:
            lines += [("branch", entry["pattern"]), *(("", text) for text in _branch_text(entry))]
        chosen = ", ".join(f"{each['backend']} x {each['branches']}" for each in backend["chosen"])
        lines.append(("backend", f"{chosen} (asked for {backend['asked']})"))
        if backend["measured"]:
            number = sum(each["branches"] for each in backend["chosen"])
            part = "" if backend["measured"] == number else f", for {backend['measured']} of {number}"
            how = "what ringweave tune measured" if call.device == "cpu" else "a trial"
            lines.append(("", f"chosen by {how} on this machine{part}"))
        for q, k in backend["tiles"]:
            lines.append(("", f"measured here: tiles of {q} x {k}"))
        lines += [("", f"trial: {each}") for each in backend["trials"]]
        for name, reasons in backend["others"].items():
            lines += [("", f"not {name}: {reason}") for reason in reasons]
        tensors = ", ".join(f"{name} {nbytes(memory[name])}" for name in ("q", "k", "v", "out", "lse"))
        lines += [
            ("memory", f"plan {nbytes(memory['plan'])}, backend's own at most about {nbytes(memory['scratch'])}"),
            ("", f"activations {nbytes(memory['activations'])}: {tensors}"),
        ]
        if call.needs_grad:
            lines.append(("", f"gradients {nbytes(memory['gradients'])}"))
        lines.append(("forward", f"{flops(work['forward'])}, dense {flops(work['dense_forward'])}"))
        if call.needs_grad:
            lines.append(("backward", f"{flops(work['backward'])}, dense {flops(work['dense_backward'])}"))
        if work["dense_over_this"] is not None:
            lines.append(("ratio", f"dense computes {work['dense_over_this']:.3g} times as many pairs"))
        return "\n".join(f"{name:<9} {text}" for name, text in lines)


def _listed(first: int | list[int]) -> str:
    return f"{first:,}" if isinstance(first, int) else f"{min(first):,} to {max(first):,}"


def _branches(work: Sequence[BranchWork]) -> list[dict[str, Any]]:
    """Describe the branches, with one entry for all views of a rate, relation and backend, which differ in offset."""
    groups: dict[tuple[int, str, str], list[BranchWork]] = {}
    for each in work:
        groups.setdefault((each.branch.rate, repr(each.branch.pattern), each.backend.name), []).append(each)
    entries = []
    for (rate, pattern, backend), members in groups.items():
        plans = [each.plan for each in members if each.plan is not None]
        entries.append({
            "rate": rate, "pattern": pattern, "backend": backend, "views": len(members),
            "heads": sorted({head for each in members for head in range(*each.branch.heads)}),
            "queries": sorted({each.branch.nq for each in members}),
            "keys": sorted({each.branch.nk for each in members}), "tiles": sum(each.tiles for each in members),
            "full": sum(each.full for each in members), "partial": sum(each.tiles - each.full for each in members),
            "tile": [list(size) for size in sorted({(plan.q_tile, plan.kv_tile) for plan in plans})],
            "masks": max((plan.mask_words.shape[0] for plan in plans), default=0),
            "groups": max((plan.row_ptr.shape[0] for plan in plans), default=0),
            "by_query": any(each.by_query for each in members),
        })  # fmt: skip
    return entries


def _trials(steps: Sequence[tuple[Branch, Backend]], call: Call) -> list[str]:
    """Return the verdicts of trials on the branches' kinds, with their ages."""
    verdicts = (program.verdict_on(call, branch) for branch, _ in steps)
    return list(dict.fromkeys(str(each) for each in verdicts if each is not None))


def _others(steps: Sequence[tuple[Branch, Backend]], call: Call, named: str) -> dict[str, list[str]]:
    """Return the reasons against each backend that was not chosen for some branch."""
    reasons: dict[str, list[str]] = {}
    for branch, chosen in steps:
        refused = {backend.name: reason for backend, reason in program.candidates(call, branch)}
        if named != "auto":
            why = "was asked for"
        else:
            why = "is preferred" if program.measured(call, branch) is None else "was measured to be faster here"
        for name, backend in BACKENDS.items():
            if name == chosen.name:
                continue
            if name in refused:
                reason = refused[name] or f"could run it; {chosen.name} {why}"
            else:
                reason = _used_when_named(backend, call)
            if reason not in reasons.setdefault(name, []):
                reasons[name].append(reason)
    if call.device != "cpu":
        reasons |= {name: [said] for name, said in plugins.absent_backends(BACKENDS).items()}
    return reasons


def _used_when_named(backend: Backend, call: Call) -> str:
    if backend.before is not None:
        return "on a CPU it is used only when named"
    may = ", or where measured to be fastest" if backend.branched and not backend.experimental else ""
    return f"used only when named{may}"


def _memory(call: Call, work: Sequence[BranchWork]) -> dict[str, int]:
    """Count the bytes of the plans and of the call's tensors, and bound the backends' buffers."""
    size = call.dtype.itemsize
    q = call.batch * call.heads * call.nq * call.head_dim * size
    out = call.batch * call.heads * call.nq * call.value_dim * size
    k, v = (call.batch * call.kv_heads * call.nk * dim * size for dim in (call.head_dim, call.value_dim))
    lse = call.batch * call.heads * call.nq * acc_dtype(call.dtype).itemsize
    # views of equal length share a plan, which counts once
    plans = {id(each.plan): each.plan for each in work if each.plan is not None}
    return {
        "plan": sum(plan.nbytes for plan in plans.values()),
        "q": q, "k": k, "v": v, "out": out, "lse": lse,
        "activations": q + k + v + out + lse,
        "gradients": q + k + v + out if call.needs_grad else 0,
        "scratch": max((each.backend.scratch(call, each.branch) for each in work), default=0),
    }  # fmt: skip


def _branch_text(entry: dict[str, Any]) -> list[str]:
    def span(values: list[int]) -> str:
        return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,}-{values[-1]:,}"

    views = f"{count(entry['views'], 'view')} of every {entry['rate']}th token" if entry["rate"] > 1 else "all tokens"
    lines = [f"{views}, {span(entry['queries'])} x {span(entry['keys'])}, {entry['backend']}"]
    if entry["tile"]:
        sizes = " or ".join(f"{q} x {k}" for q, k in entry["tile"])
        lines.append(
            f"{count(entry['tiles'], 'tile')} of {sizes}: {entry['full']:,} full, {entry['partial']:,} partial with "
            f"{count(entry['masks'], 'distinct mask')}, {count(entry['groups'], 'group')} of heads"
        )
    if entry["by_query"]:
        lines.append("by lists of single queries: the rows of a tile are the heads that share a list")
    return lines
