"""Score terms and dropout on a block of pairs, and what the terms' tables get.

Everything here takes pairs as they lie in a block: what is of queries and what is of keys broadcasts along the other
axis, so that blocks of queries by keys and of keys by queries are the same. TERMS is a tuple of kinds, in order, and
``tables`` and ``numbers`` hold a tuple for each. All are None in a call without: then nothing of this is compiled.
Triton compiles anew where an integer of a tuple is 1, or 16 divides it: they come times 16, and are all alike.
"""

# Triton reads these functions' source: it wants neither annotations nor the usual style of names
# ruff: noqa: N803, RET505, RUF005

from __future__ import annotations

import triton
import triton.language as tl

# kinds with tables, and from POINTWISE on those of one score, which :func:`pointwise` computes
ALIBI, DISTANCE, BIAS = tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
POINTWISE = tl.constexpr(16)
SOFTCAP = tl.constexpr(16)
#: The kinds of terms that the kernels compute, by the name in the kind's class: the launcher refuses any other.
KINDS = {"softcap": SOFTCAP.value, "alibi": ALIBI.value, "distance": DISTANCE.value, "bias": BIAS.value}
# how a table's gradient is summed: where every entry has one pair, in place; else as whole numbers
OWN, SUMMED = tl.constexpr(1), tl.constexpr(2)
_TWO_LOG2_E = tl.constexpr(2.8853900817779268)


@triton.jit
def standing(places, offsets, index, b, count, SIDE: tl.constexpr):
    """Find the places in the call, and the positions, of queries (SIDE 0) or keys (1) of a view; anything past the end.

    Positions and their differences fit 32 bits: a pattern has no longer ones.
    """
    place = tl.load(places + index, mask=index < count, other=0)
    return place, (place + tl.load(offsets + 2 * b + SIDE)).to(tl.int32)


@triton.jit
def query_heads(heads, head, local, mine, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Find the heads in the call of a program's rows: one, or a column of them."""
    if HEADS > 1:
        return tl.load(heads + head + local // ROWS, mask=mine, other=0)[:, None]
    else:
        return tl.load(heads + head)


@triton.jit
def tanh(x):
    """Compute tanh; the polynomial is that of Cephes."""
    z = x * x
    near = -5.70498872745e-3 * z + 2.06390887954e-2
    near = near * z - 5.37397155531e-2
    near = near * z + 1.33314422036e-1
    near = near * z - 3.33332819422e-1
    near = near * z * x + x
    far = 1.0 - 2.0 / (tl.math.exp2(tl.abs(x) * _TWO_LOG2_E) + 1.0)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0.0, -far, far))


@triton.jit
def pointwise(t, KIND: tl.constexpr, numbers):
    """Compute the scores after a term of one score, and its slopes."""
    if KIND == SOFTCAP:
        y = tanh(t * (1.0 / numbers[0]))
        after = numbers[0] * y
        slope = 1.0 - y * y
    else:
        tl.static_assert(False, "a kind without a formula")
    return after, slope


@triton.jit
def scored(t, b, head, rows, columns, distance, inside, TERMS: tl.constexpr, tables, numbers):
    """Compute the scores after the terms; and, by term, the slopes of pointwise ones.

    ``distance`` is key - query; ``inside`` says which pairs have a place in tables. A score that is not finite stays.
    """
    state = t
    slopes = ()
    for i in tl.static_range(len(TERMS)):
        slope = 1.0
        if TERMS[i] >= POINTWISE:
            state, slope = pointwise(state, TERMS[i], numbers[i])
        slopes = slopes + (slope,)  # type: ignore[assignment]
        if TERMS[i] == ALIBI:
            state -= tl.load(tables[i][0] + head) * tl.abs(distance).to(tl.float32)
        if TERMS[i] == DISTANCE:
            reach = numbers[i][0] >> 4
            entry = tl.minimum(tl.maximum(distance, -reach), reach) + (reach + head * (2 * reach + 1))
            state += tl.load(tables[i][0] + entry).to(tl.float32)
        if TERMS[i] == BIAS:
            at = b * (numbers[i][0] >> 4) + head * (numbers[i][1] >> 4)
            at += rows * (numbers[i][2] >> 4) + columns * (numbers[i][3] >> 4)
            state += tl.load(tables[i][0] + at, mask=inside, other=0.0).to(tl.float32)
    return tl.where(tl.abs(t) < float("inf"), state, t), slopes


@triton.jit
def chained(grad, slopes, TERMS: tl.constexpr):
    """Compute the gradient of the scores before the terms from that after them."""
    for i in tl.static_range(len(TERMS) - 1, -1, -1):
        if TERMS[i] >= POINTWISE:
            grad *= slopes[i]
    return grad


@triton.jit
def learned(
    grad, slopes, b, head, rows, columns, distance, TERMS: tl.constexpr, LEARNS: tl.constexpr, tables, numbers,
):  # fmt: skip
    """As :func:`chained`; what tables get is added to theirs. Queries by keys; 0 where there is no pair."""
    for i in tl.static_range(len(TERMS) - 1, -1, -1):
        if TERMS[i] >= POINTWISE:
            # a slope may be none where there is no pair
            grad = tl.where(grad == 0.0, 0.0, grad * slopes[i])
        if LEARNS[i]:
            if TERMS[i] == DISTANCE:
                reach = numbers[i][0] >> 4
                at = reach + head * (2 * reach + 1)
                # most pairs of a long sequence are far: one sum of a row is added for them
                _add(tl.sum(tl.where(distance <= -reach, grad, 0.0), 1, keep_dims=True), at - reach, tables[i])
                _add(tl.sum(tl.where(distance >= reach, grad, 0.0), 1, keep_dims=True), at + reach, tables[i])
                _add(tl.where(tl.abs(distance) < reach, grad, 0.0), at + distance, tables[i])
            else:
                at = b * (numbers[i][4] >> 4) + head * (numbers[i][5] >> 4) + rows * (numbers[i][6] >> 4) + columns
                if LEARNS[i] == OWN:
                    total = tables[i][2] + at
                    tl.store(total, tl.load(total, mask=grad != 0.0, other=0.0) + grad, mask=grad != 0.0)
                else:
                    _add(grad, at, tables[i])
    return grad


@triton.jit
def _add(x, at, table):
    """Add whole numbers of a table's quanta, in any order with the same result; what is not finite is written."""
    finite = tl.abs(x) < float("inf")
    quanta = tl.floor(tl.where(finite, x, 0.0) * tl.load(table[3]) + 0.5)
    # what weights that do not sum to 1 could pass is cut off
    quanta = tl.minimum(tl.maximum(quanta, -(2.0**62)), 2.0**62).to(tl.int64)
    sums, totals = tl.broadcast(table[1] + at, quanta)[0], tl.broadcast(table[2] + at, quanta)[0]
    tl.atomic_add(sums, quanta, mask=quanta != 0, sem="relaxed")
    tl.store(totals, float("nan"), mask=finite == 0)


@triton.jit
def kept(b, head, query, key, drop):
    """Tell which pairs dropout keeps: Philox4x32-10 of (key // 8, query, head, batch), 16 bits each, as dropout.py."""
    low, high = (drop[0] >> 4) | (drop[1] << 12), (drop[2] >> 4) | (drop[3] << 12)
    low, high = low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True)
    counter = (key >> 3).to(tl.uint32, bitcast=True)
    w0, w1, w2, w3 = tl.philox_impl(
        counter, query.to(tl.uint32, bitcast=True), head.to(tl.uint32), b.to(tl.uint32), low, high
    )
    place = key & 7
    word = tl.where(place < 4, tl.where(place < 2, w0, w1), tl.where(place < 6, w2, w3))
    half = (word >> ((key & 1) * 16).to(tl.uint32)) & 0xFFFF
    return half.to(tl.int32) >= drop[4] >> 4
