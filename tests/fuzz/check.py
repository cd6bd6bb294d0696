"""Compare one call with its definition in float64, over the masks that :mod:`.trees` defines."""

from __future__ import annotations

import math
import os
import pickle
import signal
import time
import traceback
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import ringweave as rw

from ..dropped import next_seed
from ..oracle import Inputs
from . import score_terms, trees
from .calls import Call, Find, program
from .truth import Truth, rounding, torch_own


class Refused(Exception):  # noqa: N818
    """A named backend refused the call."""


def check(call: Call) -> str:
    """Run a call and check its results; return "checked", or "bounded" where only bounds apply.

    Raises:
        Find: Something is wrong.
        Refused: A named backend refuses.
    """
    names, lines = {}, program(call)
    try:
        return _run(call, names, *("\n".join(part) for part in lines))
    finally:
        if call.poisoned:
            torch.use_deterministic_algorithms(False)
        if "ctx" in names:
            names["ctx"].close()


def _run(call: Call, names: dict[str, Any], inputs: str, lines: str) -> str:
    try:
        exec(inputs, names)
    except Exception as error:
        raise _raised(call, error) from error
    given = {name: names[name] for name in ("q", "k", "v", "dout", "dlse", *call.score_terms.tensors) if name in names}
    versions = {name: x._version for name, x in given.items()}
    state, seed = torch.get_rng_state(), next_seed()
    if call.forked:
        _check_fork(names, lines)
        torch.set_rng_state(state)
    try:
        exec(lines, names)
    except rw.UnsupportedError as error:
        if call.backend == "auto":
            raise Find("refused", str(error)) from error
        raise Refused(str(error)) from error
    except Exception as error:
        raise _raised(call, error) from error
    for name, x in given.items():
        if x._version != versions[name]:
            raise Find("version", f"{name} was written to", f"{name}._version  # wanted {versions[name]}")
    counts = trees.counts(call.tree, call.sizes, call.first)
    _check_mask(call, names, counts)
    x, reached = _inputs(call, names), None
    if call.broken is not None:
        reached = _reached(call, torch.from_numpy(counts.sum(0)) > 0)
        # a broken row only has to be NaN
        x.dout, x.dlse = x.dout.masked_fill(reached[0][..., None], 0.0), x.dlse.masked_fill(reached[0], 0.0)
    tensors = {name: names[name].detach() for name in call.score_terms.tensors}
    truth = Truth(call, x, torch.from_numpy(counts), tensors, seed)
    wanted = ["out"] + ["lse"] * ("lse" in names) + [f"d{name}" for name in call.grads]
    got = {name: names[name].detach() for name in wanted}
    for name in wanted:
        _check_kind(call, name, got[name], truth)
    whole = dict(got)
    if reached is not None:
        _check_broken(reached, truth, got)
    if call.backend == "cpu" and call.how != "merge" and call.seed % 4 == 0:
        torch.set_rng_state(state)
        _check_bits(call, names, lines, whole)
    return _compare(call, truth, got)


def _check_bits(call: Call, names: dict[str, Any], lines: str, got: dict[str, Tensor]) -> None:
    """The native kernel's bits depend neither on the layout nor on the number of threads."""
    plain = dict(names)
    for name in ("q", "k", "v", "dout", *call.score_terms.tensors):
        if name in names:
            leaf = names[name].detach().contiguous().requires_grad_(names[name].requires_grad)
            plain[name] = leaf
    torch.set_num_threads(3 - call.threads)
    exec(lines, plain)
    # torch's own sums, in an order that the layout decides, enter the gradients of sinks, and results that use them
    for name, x in got.items():
        if call.score_terms.sinks is not None and name not in ("out", "lse"):
            continue
        other = plain[name].detach()
        same = (x == other) | (x.isnan() & other.isnan())
        if not same.all():
            place = (~same).nonzero()[0].tolist()
            what = f"{int((~same).sum())} of {x.numel()} differ from those of contiguous copies on other threads"
            raise Find("bits", f"{name}: {what}", f"{name}{place}  # there {float(other[tuple(place)]):.9g}")


def _reached(call: Call, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows that attend a broken key, and the keys that those rows attend."""
    assert call.broken is not None
    batch, head, key = call.broken
    ratio = call.sizes.heads // call.kv_heads
    rows = torch.zeros(allowed.shape[:3], dtype=torch.bool)
    of_head = slice(head * ratio, (head + 1) * ratio)
    rows[batch, of_head] = allowed[batch, of_head, :, key]
    return rows, (allowed & rows[..., None]).any(2).unflatten(1, (call.kv_heads, ratio)).any(2)


def _check_broken(reached: tuple[Tensor, Tensor], truth: Truth, got: dict[str, Tensor]) -> None:
    """Check that results reached by a broken key are NaN, and copy the true values over them in ``got``."""
    rows, keys = reached
    for name, x in got.items():
        broken = keys if name in ("dk", "dv") else rows
        broken = broken if name == "lse" else broken[..., None].expand_as(x)
        bad = x.isposinf() | x.isnan() if name == "lse" else x.isnan()
        # NaN elsewhere is found by the comparisons that follow
        if not (name == "dv" and truth.call.loss == "lse"):
            _same("broken key", name, bad & broken, broken, x, truth.results[name])
        if name != "lse":
            truth.results[name] = truth.results[name].masked_fill(broken, 0.0)
        got[name] = torch.where(broken, truth.results[name], x.double()).to(x.dtype)


def _check_fork(names: dict[str, Any], lines: str) -> None:
    """Check that a forked process computes, or raises that it cannot; it never waits for threads that it lacks."""
    child = os.fork()
    if not child:
        try:
            exec(lines, dict(names))
            os._exit(0)
        except rw.UnsupportedError:
            os._exit(0)
        finally:
            os._exit(1)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            if status:
                raise Find("fork", f"a forked process ends with {status}")
            return
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise Find("fork", "a forked process computes for a minute: it waits for threads that it has not")


def _raised(call: Call, error: Exception) -> Find:
    frames = traceback.extract_tb(error.__traceback__)
    where = next((f for f in reversed(frames) if "ringweave" in f.filename), frames[-1])
    name = type(error).__name__
    return Find(f"raised {name}", f"{error} ({where.filename.rsplit('/src/')[-1]}, {where.lineno})"[:600])


def _check_mask(call: Call, names: dict[str, Any], counts: Any) -> None:
    s = call.sizes
    if "pattern" not in names:
        return
    which = "pattern"
    if call.first is not None:
        # a pattern by indices, which has no public constructor
        which = "rw.patterns.shifted.with_offsets(pattern, torch.tensor({}), torch.tensor({}), {})[0]"
        which = which.format(list(call.first.q), list(call.first.k), s.batch)
        names = names | {"pattern": eval(which, {"rw": rw, "torch": torch, "pattern": names["pattern"]})}
        s = replace(s, nk=call.nk, q_offset=0)
    asked = f"{which}.to_dense({s.nq}, {s.nk}, {s.heads}, batch={s.batch}, q_offset={s.q_offset})"
    wanted = torch.from_numpy(counts.sum(0))
    dense = names["pattern"].to_dense(s.nq, s.nk, s.heads, batch=s.batch, q_offset=s.q_offset)
    _same_mask("to_dense", asked, dense, wanted)
    if call.tree.kind == "LongNet":
        return
    # a plan with tiles of a random size
    tile = [(16, 16), (16, 16), (16, 32), (32, 16), (32, 32), (32, 64), (128, 16), (48, 80)][call.seed // 4 % 8]
    sizes = f"{s.nq}, {s.nk}, heads={s.heads}, batch={s.batch}, q_offset={s.q_offset}"
    made = f"rw.plan({which}, {sizes}, tile={tile})"
    plan = rw.plan(names["pattern"], s.nq, s.nk, heads=s.heads, batch=s.batch, q_offset=s.q_offset, tile=tile)
    _same_mask("plan", f"{made}.to_dense()", plan.to_dense(), wanted)
    if call.seed % 4:
        return
    density = names["pattern"].density(s.nq, s.nk, heads=s.heads, batch=s.batch, q_offset=s.q_offset)
    if density != float(wanted.sum()) / wanted.numel():
        raise Find(
            "density", f"{density}", f"pattern.density({sizes})  # wanted {int(wanted.sum())} / {wanted.numel()}"
        )
    if not any(tree.kind in ("function", "from_block_mask") for tree in call.tree.walk()):
        again = pickle.loads(pickle.dumps(names["pattern"]))
        if again != names["pattern"] or hash(again) != hash(names["pattern"]):
            raise Find(
                "pickle", repr(again), "__import__('pickle').loads(__import__('pickle').dumps(pattern)) == pattern"
            )


def _same_mask(kind: str, asked: str, dense: Tensor, wanted: Tensor) -> None:
    wrong = (dense.long() != wanted).nonzero()
    if len(wrong):
        at = wrong[0].tolist()
        raise Find(kind, f"{len(wrong)} of {wanted.numel()} pairs", f"{asked}{at}  # wanted {int(wanted[tuple(at)])}")


def _inputs(call: Call, names: dict[str, Any]) -> Inputs:
    q, k, v = (names[name].detach() for name in "qkv")
    if call.dead or call.broken:
        # unattended keys may have any values; the results that a broken key reaches are checked apart
        q, k, v = (x.nan_to_num() for x in (q, k, v))
    s = call.sizes
    dout = names.get("dout", torch.zeros(s.batch, s.heads, s.nq, call.value_dim, dtype=q.dtype))
    return Inputs(q, k, v, dout, names.get("dlse", torch.zeros(s.batch, s.heads, s.nq)))


def _check_kind(call: Call, name: str, got: Tensor, truth: Truth) -> None:
    wide = call.dtype == "float64"
    if name in ("out", "lse"):
        shape = truth.wide[3].shape if name == "out" else truth.x.q.shape[:3]
        dtype = truth.x.q.dtype if name == "out" or wide else torch.float32
    else:
        shape, dtype = truth.leaves[name[1:]].shape, truth.leaves[name[1:]].dtype
    if got.shape != shape or got.dtype != dtype:
        raise Find(
            "shape", f"{name} is {got.dtype} {tuple(got.shape)}", f"{name}.shape, {name}.dtype  # {tuple(shape)}"
        )


def _compare(call: Call, truth: Truth, got: dict[str, Tensor]) -> str:
    want = {name: truth.results[name] for name in got}
    stored = torch.finfo(truth.x.q.dtype)
    # where exponents are off by a per cent, each kernel's weights are rounded differently, and only bounds hold
    bounded = truth.size * truth.exponent_unit > 0.01
    if float(truth.products.max()) > float(torch.finfo(torch.float32).max) / 4:
        return "out of range"
    if "lse" in got:
        empty = truth.results["lse"].isneginf()
        _same("empty rows", "lse", got["lse"].isneginf(), empty, got["lse"], want["lse"])
    for name in list(got):
        limit = float(
            torch.finfo(torch.float32).max if name == "lse" else min(stored.max, torch.finfo(got[name].dtype).max)
        )
        alive = want[name][~want[name].isneginf()]
        huge = alive.numel() and float(alive.abs().max()) > limit / 64
        if huge or (name not in ("out", "lse") and (bounded or truth.slope_size > limit / 64)):
            del got[name], want[name]
    for name, x in got.items():
        _same("not finite", name, x.isfinite() | x.isneginf(), torch.ones_like(x, dtype=torch.bool), x, want[name])
    if bounded:
        _in_hull(call, truth, got)
        return "bounded"
    floor: dict[str, float] | None = None
    for name, x in got.items():
        finite = want[name].isfinite()
        off = float((x.double() - want[name])[finite].norm())
        size = float(want[name][finite].norm())
        if off <= torch.finfo(x.dtype).eps * size:
            continue
        floor = floor or rounding(truth)
        if off <= UNITS * floor[name] + _lost(x):
            continue
        theirs = torch_own(truth)[name] * size
        if not off <= 2 * theirs:
            at = (x - want[name]).nan_to_num(0.0).abs().argmax()
            place = [int(i) for i in torch.unravel_index(at, x.shape)]
            what = f"error {off:.1e} of {size:.1e}, torch's own {theirs:.1e}, rounding {floor[name]:.1e}"
            raise Find(f"value of {name}", what, _element(name, place, want[name]))
    return "checked"


#: units of rounding that are always allowed, since torch may happen to be more exact
UNITS = 2.0


def _lost(x: Tensor) -> float:
    """Return the precision lost to values too small for their dtype, or for the float32 that sums them."""
    kind = torch.finfo(x.dtype)
    return math.sqrt(x.numel()) * (kind.smallest_normal * kind.eps + 2**10 * torch.finfo(torch.float32).smallest_normal)


def _same(kind: str, name: str, got: Tensor, wanted: Tensor, x: Tensor, want: Tensor) -> None:
    wrong = (got != wanted).nonzero()
    if len(wrong):
        place = wrong[0].tolist()
        raise Find(f"{kind} of {name}", f"{len(wrong)} of {got.numel()}", _element(name, place, want))


def _element(name: str, place: list[int], want: Tensor) -> str:
    return f"{name}{place}  # wanted {float(want[tuple(place)]):.6g}"


def _in_hull(call: Call, truth: Truth, got: dict[str, Tensor]) -> None:
    """Check bounds that hold for any weights: out is between the values of its row, and lse close above the largest score."""
    counts = truth.counts.sum(0)
    allowed = counts > 0
    eps = torch.finfo(truth.x.q.dtype).eps
    if "lse" in got:
        top = torch.maximum(torch.where(allowed, truth.scores, -torch.inf).amax(-1), truth.sinks)
        alive = top.isfinite()
        slack = 1e-5 * truth.size + math.log(max(2, 1 + int(counts.sum(-1).max())))
        near = ~alive | ((got["lse"].double() - top).abs() <= slack)
        _same("bounds", "lse", near, torch.ones_like(near), got["lse"], truth.results["lse"])
    v = truth.wide[2]
    largest = (
        v.abs().amax((-1, -2))[..., None, None] * score_terms.STEPS / (score_terms.STEPS - call.score_terms.dropped)
    )
    inside = (
        got["out"].double().abs() <= largest * (1 + eps * (8 + v.shape[2] / 8)) + 1e-30
        if "out" in got
        else torch.ones(1)
    )
    if "out" in got:
        _same("bounds", "out", inside, torch.ones_like(inside), got["out"], truth.results["out"])
