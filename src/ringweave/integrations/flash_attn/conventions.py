"""The conventions that both versions of flash-attn share: layouts, alignment to the last key, windows and scores.

A query i of Nq is at position i + Nk - Nq, so that the last query is at the last key, in each sequence of a pack too.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ...api import attention, attention_with_lse
from ...axes import Axes
from ...checks import INTEGERS, number
from ...errors import ShapeError, UnsupportedError, shown
from ...patterns import Causal, Documents, Full, Pattern, Segments, SlidingWindow
from ...patterns.base import parts_of
from ...plan.tile_size import DEFAULT_TILE_SIZE
from ...terms import ALiBi, Softcap, Term
from ...validate import checked_dropout, checked_scale

# Sequences with up to this mean number of queries, as in a decoding step, may take a call each. In one call, a tile of
# queries is computed with the keys of all its sequences: a call each is faster from this number of pairs a sequence on,
# over all heads.
_FEW, _MANY_PAIRS = 8, 2**17
_SIDES = ("cu_seqlens_q", "cu_seqlens_k")
_DENSE = Axes("q: float[B Nq Hq D]; k: q[B Nk Hkv D]; v: q[B Nk Hkv Dv]; Hq % Hkv")
_PACKED = Axes("q: float[Nq Hq D]; k: q[Nk Hkv D]; v: q[Nk Hkv Dv]; Hq % Hkv")
_QUERIES, _PACKED_QUERIES = Axes("q: float[B Nq Hq D]"), Axes("q: float[Nq Hq D]")
_SLOPES = Axes("alibi_slopes: float32[B? Hq]")
_ORDER = "flash-attn's layout has tokens before heads."
# the axes that may be empty
_TOKENS = ("B", "Nq", "Nk")

#: Queries, keys and values in flash-attn's layout.
Inputs = tuple[Tensor, Tensor, Tensor]
#: The ``window_size`` argument of flash-attn: (left, right), or a tensor of the two.
WindowSize = tuple[int, int] | Sequence[int] | Tensor


class Options(NamedTuple):
    """The arguments of a call besides its tokens.

    Attributes:
        pattern: Windows and segments, which count from the first key of each sequence.
        scale: Factor of the scores; 1 / sqrt(D) for None.
        softcap: Bound on the scores, before ALiBi; none at 0 or below.
        slopes: ALiBi's slopes, (H,) or (B, H); in a call of packed sequences, (H, keys).
        dropout: Share of the weights that are dropped.
        with_lse: Whether to return lse.
    """

    pattern: Pattern
    scale: float | None = None
    softcap: float = 0.0
    slopes: Tensor | None = None
    dropout: float = 0.0
    with_lse: bool = False

    def checked(self, batch: int, heads: int) -> Options:
        """Check the arguments of a call with ``batch`` sequences and ``heads`` query heads, and return numbers."""
        scale, softcap, slopes, dropout = self.scale, self.softcap, self.slopes, self.dropout
        scale = None if scale is None else checked_scale(scale, 1, "softmax_scale")
        # the checks of a default would take a microsecond each
        if type(softcap) is not float or softcap:
            softcap = number("softcap", softcap, error=ShapeError)
        if type(dropout) is not float or dropout:
            dropout = checked_dropout(dropout, "dropout_p")
        if softcap > 0:
            # a cap that is no number of float32 is refused here, before anything is written
            Softcap(softcap)
        if softcap > 0 and dropout > 0:
            remedy = "Train without dropout, or without the cap."
            raise UnsupportedError("softcap", f"{softcap} with dropout_p={dropout}", "one of the two", remedy)
        if slopes is not None:
            remedy = "Pass one slope for each query head."
            _SLOPES.fit(alibi_slopes=slopes, B=batch, Hq=heads, remedy=remedy)
            slopes = slopes.detach()
            slopes = slopes[0] if slopes.ndim == 2 and batch == 1 else slopes
        return Options(self.pattern, scale, softcap, slopes, dropout, self.with_lse)

    @property
    def terms(self) -> tuple[Term, ...]:
        """The score terms; slopes must be those of all sequences, or (H, keys)."""
        cap = () if self.softcap <= 0 else (Softcap(self.softcap),)
        return cap if self.slopes is None else (*cap, ALiBi(self.slopes))

    @property
    def shared(self) -> bool:
        """Whether all sequences have one set of slopes."""
        return self.slopes is None or self.slopes.ndim == 1

    def of_sequence(self, b: int) -> Options:
        """Return the arguments of one sequence."""
        return self if self.slopes is None or self.shared else self._replace(slopes=self.slopes[b])

    def of_keys(self, bounds: Tensor, keys: int) -> Options:
        """Return the arguments of one call of sequences, with slopes for each of their packed keys if they differ."""
        if self.slopes is None or self.shared:
            return self
        # keys after the last bound are not attended, so their slopes are arbitrary
        place, ends = torch.arange(keys, device=bounds.device), bounds[1:].long()
        sequence = torch.searchsorted(ends, place, right=True).clamp(max=len(ends) - 1)
        return self._replace(slopes=self.slopes[sequence.to(self.slopes.device)].T)


class Result(NamedTuple):
    """Output in flash-attn's layout, and lse with -inf for a query without keys; None unless it was asked for."""

    out: Tensor
    lse: Tensor | None


def sides(window_size: WindowSize) -> tuple[int, int]:
    """Return both sides of a window, -1 for a side without limit."""
    pair = window_size.tolist() if isinstance(window_size, Tensor) else window_size
    try:
        left, right = (_whole(each) for each in pair)
    except (TypeError, ValueError) as error:
        wanted = "two whole numbers, (left, right)"
        raise ShapeError("window_size", shown(pair), wanted, "Pass (-1, -1) for no window.") from error
    return max(left, -1), max(right, -1)


def _whole(side: Any) -> int:
    if isinstance(side, torch.SymInt):
        # a trace's number stays symbolic
        return cast(int, side)
    return operator.index(side)


def longest(name: str, count: object) -> int:
    """Return the number of tokens of the longest sequence, which a trace may know as a symbol."""
    if isinstance(count, int):
        return count
    try:
        return operator.index(cast(int, count))
    except TypeError as error:
        raise ShapeError(name, shown(count), "a whole number", "Pass the tokens of the longest sequence.") from error


def reaches(side: int, count: int) -> bool | None:
    """Return whether a side of a window is at least ``count`` wide; None if a trace does not know the count."""
    if not torch.compiler.is_compiling():
        return side >= count
    # torch loads this module with its compiler
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    if guard_or_false(side >= count):
        return True
    return False if guard_or_false(side < count) else None


def relation(left: int | None, right: int | None, reach: int) -> Pattern:
    """Return the pattern of a window; a side of None has no limit, or is ``reach`` wide beside a limited side."""
    if left is None and right is None:
        return Full()
    if left is None and right == 0:
        return Causal()
    return SlidingWindow(reach if left is None else left, reach if right is None else right)


def attend(inputs: Inputs, options: Options) -> Result:
    """Compute attention of q, k, v (B, N, H, D), with the last query at the last key."""
    q, k, v = (x.transpose(1, 2) for x in inputs)
    if 0 in (len(q), q.shape[2], k.shape[2]):
        return _of_nothing(q, k, v, options.with_lse)
    # where every pair is attended, positions change nothing
    first = 0 if isinstance(options.pattern, Full) and options.slopes is None else k.shape[2] - q.shape[2]
    if options.slopes is None or options.slopes.ndim == 1:
        out, lse = _attended(q, k, v, options, first)
        return Result(_contiguous(out.transpose(1, 2)), lse)
    # a slope belongs to a head, so the sequences' heads are those of one sequence
    whole = options._replace(slopes=options.slopes.flatten())
    heads, (q, k, v) = q.shape[:2], (x.flatten(0, 1)[None] for x in (q, k, v))
    out, lse = _attended(q, k, v, whole, first)
    out = out[0].unflatten(0, heads)
    return Result(_contiguous(out.transpose(1, 2)), None if lse is None else lse[0].unflatten(0, heads))


def _contiguous(out: Tensor) -> Tensor:
    """Return a contiguous output that callers may write to, as to flash-attn's: backward keeps the one of the call."""
    return out.clone(memory_format=torch.contiguous_format) if out.requires_grad else out.contiguous()


def _attended(q: Tensor, k: Tensor, v: Tensor, options: Options, first: int = 0) -> tuple[Tensor, Tensor | None]:
    """Return (out, lse) of tensors (B, H, N, D); lse is None unless it was asked for.

    The first query is at position ``first``, counted from the first key.
    """
    # segments count from the first key, so that they move by whole ones
    step = next((part.length for part in parts_of(options.pattern, Segments)), 1)
    k_offset = -(min(first, 0) // step) * step
    given: dict[str, Any] = {
        "scale": options.scale, "terms": options.terms, "dropout": options.dropout, "q_offset": first + k_offset,
        "k_offset": k_offset,
    }  # fmt: skip
    # flash-attn computes in the dtype of its inputs, under autocast too
    device = q.device.type
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
        if options.with_lse:
            return attention_with_lse(q, k, v, options.pattern, **given)
        return attention(q, k, v, options.pattern, **given), None


def _of_nothing(q: Tensor, k: Tensor, v: Tensor, with_lse: bool) -> Result:
    """Return the zeros of a call without queries or keys, connected to its inputs for backward."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out = (q @ k[:, :, :0].mT) @ v[:, :, :0]
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device) if with_lse else None
    return Result(out.transpose(1, 2).contiguous(), lse)


def joined(parts: Sequence[Result], dim: int) -> Tensor | None:
    """Concatenate the lse of several calls; None if they have none."""
    found = [part.lse for part in parts if part.lse is not None]
    return torch.cat(found, dim) if found else None


def attend_packed(inputs: Inputs, bounds: tuple[Tensor, Tensor], options: Options) -> Result:
    """Compute attention of sequences that are packed end to end, (tokens, H, D); lse is (H, tokens).

    Tokens after the last bound belong to no sequence: their output is 0, and no query attends them.

    Args:
        inputs: q, k and v.
        bounds: Cumulative lengths of queries and of keys, (sequences + 1,).
        options: Arguments besides the tokens.
    """
    q, k, v = inputs
    if torch.compiler.is_compiling():
        # a trace does not know the bounds; the operator checks them
        documents = _with_last(bounds, len(q), len(k))
        return _in_documents(inputs, documents, options.of_keys(bounds[1], len(k)))
    of_q, of_k = checked_bounds(bounds, (len(q), len(k)))
    inputs = q[: of_q[-1]], k[: of_k[-1]], v[: of_k[-1]]
    same = of_q == of_k
    count, rows = len(of_q) - 1, min(of_q[-1], DEFAULT_TILE_SIZE)
    few = not same and of_q[-1] <= _FEW * count and rows * of_k[-1] * q.shape[1] > _MANY_PAIRS * count
    # documents of one packing may not be empty
    apart = few or not of_q[-1] or not of_k[-1]
    queries, keys = ([b - a for a, b in itertools.pairwise(side)] for side in (of_q, of_k))
    if len({*queries}) == len({*keys}) == 1 and (apart or not options.shared):
        result = _as_batch(inputs, (count, queries[0]), (count, keys[0]), options)
    elif apart:
        result = _by_sequence(inputs, queries, keys, options)
    else:
        given: dict[str, Any] = (
            {"cu_seqlens": sorted({*of_q})} if same else {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k}
        )
        result = _in_documents(inputs, Documents(**given), options.of_keys(bounds[1], of_k[-1]))
    return with_rest(result, len(q))


def _with_last(bounds: tuple[Tensor, Tensor], queries: int, keys: int) -> Documents:
    """Return the documents of bounds, one of the queries after the last bound, without keys, and one of such keys."""
    of_q, of_k = bounds
    for name, side in zip(_SIDES, bounds, strict=True):
        if not isinstance(side, Tensor) or side.ndim != 1:
            raise ShapeError(
                name, shown(side), "an int32 tensor (sequences + 1,) that grows from 0", "Sum the lengths."
            )
    return Documents(
        cu_seqlens_q=torch.cat([of_q, of_q.new_tensor([queries, queries])]),
        cu_seqlens_k=torch.cat([of_k, of_k[-1:], of_k.new_tensor([keys])]),
    )


def with_rest(result: Result, tokens: int) -> Result:
    """Append zeros for the queries of no sequence to a packed result, up to a number of tokens."""
    rest = tokens - len(result.out)
    if not rest:
        return result
    lse = None if result.lse is None else F.pad(result.lse, (0, rest), value=-torch.inf)
    return Result(F.pad(result.out, (0, 0, 0, 0, 0, rest)), lse)


def _in_documents(inputs: Inputs, documents: Documents, options: Options) -> Result:
    """Compute attention of packed sequences in one call."""
    q, k, v = (x.transpose(0, 1)[None] for x in inputs)
    out, lse = _attended(q, k, v, options._replace(pattern=options.pattern.within(documents)))
    return Result(_contiguous(out[0].transpose(0, 1)), None if lse is None else lse[0])


def _as_batch(inputs: Inputs, of_q: tuple[int, int], of_k: tuple[int, int], options: Options) -> Result:
    """Compute attention of packed sequences of one length in one call; both sizes are (sequences, tokens)."""
    q, k, v = (x.unflatten(0, size) for x, size in zip(inputs, (of_q, of_k, of_k), strict=True))
    whole = attend((q, k, v), options)
    return Result(whole.out.flatten(0, 1), None if whole.lse is None else whole.lse.transpose(0, 1).flatten(1))


def _by_sequence(inputs: Inputs, queries: list[int], keys: list[int], options: Options) -> Result:
    """Compute attention of packed sequences, which have so many queries and keys, in a call for each."""
    # the gradients of a split are joined once, where those of slices are summed in full
    each = zip(*(x.split(lengths) for x, lengths in zip(inputs, (queries, keys, keys), strict=True)), strict=True)
    parts = [attend((q[None], k[None], v[None]), options.of_sequence(b)) for b, (q, k, v) in enumerate(each)]
    lse = joined(parts, 2)
    return Result(torch.cat([part.out[0] for part in parts]), None if lse is None else lse[0])


def sequences(bounds: Tensor) -> int:
    """Return the number of sequences that cumulative lengths have, without checking them."""
    return len(bounds) - 1 if isinstance(bounds, Tensor) and bounds.ndim else 0


def checked_bounds(
    bounds: tuple[Tensor, Tensor], tokens: tuple[int, int], names: tuple[str, str] = _SIDES
) -> tuple[list[int], list[int]]:
    """Read cumulative lengths; raise ShapeError unless they are those of equally many sequences of at most ``tokens``.

    Args:
        bounds: Those of queries and of keys.
        tokens: Number of packed queries and of packed keys.
        names: Names of the caller's arguments.
    """
    listed = []
    for name, side, most in zip(names, bounds, tokens, strict=True):
        fits = isinstance(side, Tensor) and side.ndim == 1 and side.dtype in INTEGERS and len(side) > 1
        values = side.tolist() if fits else []
        if not fits or values[0] != 0 or any(a > b for a, b in itertools.pairwise(values)):
            got = shown(values) if fits else shown(side)
            raise ShapeError(name, got, "an int32 tensor (sequences + 1,) that grows from 0", "Sum the lengths.")
        if values[-1] > most:
            raise ShapeError(name, shown(values), f"at most {most}, the packed tokens", "Correct the lengths.")
        listed.append(values)
    if len(listed[0]) != len(listed[1]):
        got = f"{len(listed[1]) - 1} sequences of keys for {len(listed[0]) - 1} of queries"
        raise ShapeError("cu_seqlens_k", got, "one for each", "Pass bounds of one batch.")
    return listed[0], listed[1]


def check_layout(q: Tensor, k: Tensor, v: Tensor, *, packed: bool = False) -> None:
    """Raise ShapeError unless q, k and v are (B, N, H, D), or (tokens, H, D) if sequences are packed."""
    remedy = "" if getattr(q, "ndim", None) == (3 if packed else 4) else _ORDER
    (_PACKED if packed else _DENSE).fit(q=q, k=k, v=v, empty=_TOKENS, remedy=remedy)


def check_queries(q: Tensor, *, packed: bool = False) -> None:
    """Raise ShapeError unless q is (B, N, H, D), or (tokens, H, D) if sequences are packed."""
    (_PACKED_QUERIES if packed else _QUERIES).fit(q=q, empty=_TOKENS, remedy=_ORDER)


def output_and_lse(result: Result, empty: float) -> tuple[Tensor, Tensor]:
    """Return a result with gradients of the output only, and ``empty`` as the lse of queries without keys.

    The lse has a gradient of zero, as that of flash-attn's autograd functions.
    """
    out, lse = result.out, result.lse
    assert lse is not None
    lse = lse.detach().masked_fill(torch.isneginf(lse), empty)
    # the sum of no elements
    return out, lse + out[None][:0].sum() if out.requires_grad else lse
