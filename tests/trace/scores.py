"""Score functions of FlexAttention, and the terms and masks that each one is read as."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

#: Sizes of a call: batch elements, heads, queries, keys. Tables of the functions are of these sizes.
SIZES = B, H, Q, K = 2, 4, 40, 56
INF = math.inf

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
NO_TERM, NEITHER = "general: no score term", "general: neither"


@dataclass(frozen=True)
class Score:
    """A score function.

    Attributes:
        make: Makes the function from tensors.
        reads: The kinds of its terms with its factor and "mask", or "general" or "refused" with words of the reason.
        shapes: Shapes of the tensors.
        learned: ``reads`` where the tensors learn, if it differs.
    """

    make: Callable[..., ScoreMod]
    reads: str
    shapes: tuple[tuple[int, ...], ...] = ()
    learned: str | None = None

    def tables(self, dtype: torch.dtype = torch.float32, learns: bool = False) -> list[Tensor]:
        """Return random tensors, equal ones in each dtype, rounded to float16."""
        generator = torch.Generator().manual_seed(5)
        drawn = [torch.randn(shape, generator=generator).half() for shape in self.shapes]
        return [table.to(dtype).requires_grad_(learns) for table in drawn]

    def said(self, learns: bool) -> str:
        """Return how the function is read."""
        return self.reads if self.learned is None or not learns else self.learned


class _Indexed(TorchFunctionMode):
    """Reads tensors at indices of a pair, which ``Tensor.__getitem__`` would convert to numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            x, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
            whole = (slice(None),) * (x.ndim - sum(part is not Ellipsis for part in index))
            parts = [each for part in index for each in (whole if part is Ellipsis else [part])]
            if all(isinstance(part, (Tensor, int)) or part == slice(None) for part in parts):
                places = [None if isinstance(part, slice) else torch.as_tensor(part) for part in parts]
                return torch.ops.aten.index(x, places)
        return func(*args, **(kwargs or {}))


def by_pair(score_mod: Callable[..., Tensor], scores: Tensor) -> Tensor:
    """Map a score function over all pairs of scores (B, H, Nq, Nk), as FlexAttention does; return it in its dtype."""
    places = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    with _Indexed():
        # a function may write to its arguments
        mapped: Tensor = torch.vmap(score_mod)(scores.flatten().clone(), *(place.flatten().clone() for place in places))
    return mapped.view(scores.shape)


def plain(score_mod: ScoreMod, reads: str) -> Score:
    """Return a function without tables."""
    return Score(lambda: score_mod, reads)


# ---- functions that people use ---------------------------------------------------------------------------------------


class Approximated(torch.autograd.Function):
    """A tanh with a gradient of its own, as for an instruction of a GPU."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.tanh(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor) -> tuple[Tensor, Any]:
        return Approximated.apply(x), dims[0]


def transformers_mods(mask: Tensor, heads: Tensor) -> ScoreMod:
    """The function of transformers' flex_attention_forward: a cap, a mask of floats, and a bias of heads."""

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        s = 50.0 * torch.tanh(s / 50.0)
        s = s + mask[b][0][q][k]
        return s + heads[b][h][0][0]

    return score_mod


def bucketed(table: Tensor) -> ScoreMod:
    """T5's buckets of distances."""

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        distance = (k - q).clamp(max=0).neg()
        large = 16 + (torch.log(distance.float() / 16) / math.log(128 / 16) * 16).long()
        return s + table[torch.where(distance < 16, distance, large.clamp(max=31)), h]

    return score_mod


def sandwich(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Sums of cosines of the distance."""
    rates = 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    ratio = (h + 1) * 8.0 / H
    return s + torch.cos((q - k) * rates).sum() / ratio


def graphormer(edge: Tensor) -> ScoreMod:
    """Means of entries along paths."""
    generator = torch.Generator().manual_seed(1)
    edges = torch.randint(0, 5, (B, Q, K, 3), generator=generator, dtype=torch.int32)
    lengths = torch.randint(0, 4, (B, Q, K), generator=generator, dtype=torch.int32)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        total = torch.zeros_like(s)
        for step in range(3):
            total = total + torch.where(step < lengths[b, q, k], edge[h, step, edges[b, q, k, step]], 0.0)
        return s + total / lengths[b, q, k].clamp(min=1)

    return score_mod


def checkerboard(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where(torch.abs(k - q) % 2 == 1, s * 0.5, torch.where((k - q) % 2 == 0, s * 2.0, s))


USED: dict[str, Score] = {
    "nothing": plain(lambda s, b, h, q, k: s, ""),
    "attention-gym: alibi": plain(lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / H)), "DistanceBias"),
    "attention-gym: soft cap": plain(lambda s, b, h, q, k: torch.tanh(s / 20) * 20, "Softcap"),
    "attention-gym: approximate soft cap": plain(
        lambda s, b, h, q, k: 20 * Approximated.apply(s / 20), "refused: autograd.Function"
    ),
    "attention-gym: graphormer, spatial": Score(
        lambda t, d=torch.randint(0, 6, (B, Q, K), generator=torch.Generator().manual_seed(0), dtype=torch.int32): (
            lambda s, b, h, q, k: s + t[h, d[b, q, k]]
        ),
        NEITHER,
        ((H, 8),),
    ),
    "attention-gym: graphormer, edges": Score(graphormer, NO_TERM, ((H, 3, 5),)),
    "attention-gym: sandwich": plain(sandwich, "DistanceBias"),
    "attention-gym: gelu": plain(lambda s, b, h, q, k: F.gelu(s), NO_TERM),
    "attention-gym: relu": plain(lambda s, b, h, q, k: F.relu(s), NO_TERM),
    "attention-gym: latent attention": Score(
        lambda a, c: lambda s, b, h, q, k: s + 0.3 * torch.dot(a[b, h, q], c[b, h // H, k]),
        NEITHER,
        ((B, H, Q, 6), (B, 1, K, 6)),
    ),
    "notebook: checkerboard": plain(checkerboard, NO_TERM),
    "notebook: causal": plain(lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")), "mask"),
    "notebook: relative": plain(lambda s, b, h, q, k: s + (q - k), "DistanceBias"),
    "transformers: cap, mask and heads": Score(
        transformers_mods, "Softcap, Bias, Bias", ((B, 1, Q, K), (B, H, 1, 1)), "general: needs gradients"
    ),
    "T5": Score(bucketed, "DistanceBias", ((32, H),)),
}

# ---- terms in their spellings ----------------------------------------------------------------------------------------


def doubled(rows: Tensor, columns: Tensor) -> ScoreMod:
    """A sum whose summands are shared by many sums."""

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        total = rows[q] + columns[k]
        for _ in range(8):
            total = total + total
        return s + total - 3.0

    return score_mod


SPELLINGS: dict[str, Score] = {
    "cap": plain(lambda s, b, h, q, k: 5.0 * torch.tanh(s / 5.0), "Softcap"),
    "cap by a factor": plain(lambda s, b, h, q, k: (s * (1 / 3.0)).tanh() * 3.0, "Softcap"),
    "cap in a tensor": plain(lambda s, b, h, q, k, cap=torch.tensor(3.0): cap * torch.tanh(s / cap), "Softcap"),
    "factor": plain(lambda s, b, h, q, k: s * 5 / 2, "factor 2.5"),
    "negated": plain(lambda s, b, h, q, k: -(2 * s), "factor -2"),
    "named operands": plain(
        lambda s, b, h, q, k: torch.sub(torch.mul(other=2, input=s), other=torch.abs(input=torch.sub(q, other=k))),
        "factor 2, DistanceBias",
    ),
    "cap with named operands": plain(
        lambda s, b, h, q, k: torch.mul(torch.tanh(input=torch.div(s, other=5.0)), other=5.0), "Softcap"
    ),
    "named operands of a mask": plain(
        lambda s, b, h, q, k: torch.where(other=-INF, input=torch.neg(input=s), condition=q >= k), "factor -1, mask"
    ),
    "table in the score's dtype": Score(
        lambda t: lambda s, b, h, q, k: s + t.double().to(s)[h, q, k] + t.to(s)[h, q, k], "Bias, Bias", ((H, Q, K),)
    ),
    "slopes in the score's dtype": Score(
        lambda t: lambda s, b, h, q, k: s - t.type_as(s)[h] * (q - k).abs(), "ALiBi", ((H,),), "DistanceBias"
    ),
    "cast": plain(lambda s, b, h, q, k: s.to(s.dtype).clone() * 2, "factor 2"),
    "slopes": Score(lambda t: lambda s, b, h, q, k: s - t[h] * (q - k).abs(), "ALiBi", ((H,),), "DistanceBias"),
    "negative slopes": Score(
        lambda t: lambda s, b, h, q, k: s + -(abs(k - q) * t[h]), "ALiBi", ((H,),), "DistanceBias"
    ),
    "negative distances": Score(
        lambda t: lambda s, b, h, q, k: s + -abs(k - q) * t[h], "ALiBi", ((H,),), "DistanceBias"
    ),
    "opposite slopes": Score(
        lambda t: lambda s, b, h, q, k: s + (q - k).abs() * -t[h], "ALiBi", ((H,),), "DistanceBias"
    ),
    "slopes of a table": Score(
        lambda t: lambda s, b, h, q, k: s - torch.sigmoid(t)[1, h] * (k - q).abs(), "ALiBi", ((2, H),), "DistanceBias"
    ),
    "one slope": plain(lambda s, b, h, q, k: s - 0.1 * torch.abs(q - k), "ALiBi"),
    "floats": plain(lambda s, b, h, q, k: s - (q.float() - k.float()).pow(2) / 100, "DistanceBias"),
    "comparison": plain(lambda s, b, h, q, k: torch.where(q > k, 0.5, -1.0) + s, "DistanceBias"),
    "added -inf": plain(lambda s, b, h, q, k: s + torch.where(q >= k + 5, 0.0, -INF), "DistanceBias"),
    "-inf everywhere": plain(lambda s, b, h, q, k: s + torch.where(q - k > 1000, 0.0, -INF), "DistanceBias"),
    "-inf for heads": plain(lambda s, b, h, q, k: s + torch.where(h > 1, 0.0, -INF), "DistanceBias"),
    "-inf for keys": plain(lambda s, b, h, q, k: s + torch.where((k < 30) & (b > 0), 0.0, -INF), "Bias"),
    "by distance": Score(lambda t: lambda s, b, h, q, k: s + t[h, q - k + K], "DistanceBias", ((H, Q + K),)),
    "shifted": Score(lambda t: lambda s, b, h, q, k: s + t[(k + Q) - q], "DistanceBias", ((Q + K,),)),
    "clipped": Score(
        lambda t: lambda s, b, h, q, k: s + t[h, torch.clamp(k - q, -8, 8) + 8], "DistanceBias", ((H, 17),)
    ),
    "by head": Score(lambda t: lambda s, b, h, q, k: s + t[h], "DistanceBias", ((H,),)),
    "of keys": Score(lambda t: lambda s, b, h, q, k: s + t[b, k], "Bias", ((B, K),), "general: needs gradients"),
    "of queries": plain(lambda s, b, h, q, k: s + q % 3, "Bias"),
    "by pair": Score(lambda t: lambda s, b, h, q, k: s + t[b, h, q, k], "Bias", ((B, H, Q, K),)),
    "a larger table": Score(lambda t: lambda s, b, h, q, k: s + t[h, q, k], "Bias", ((H + 1, Q + 2, K + 3),)),
    "step by step": Score(lambda t: lambda s, b, h, q, k: s + t[b][0][q][k], "Bias", ((B, 1, Q, K + 4),)),
    "transposed": Score(lambda t: lambda s, b, h, q, k: s + t[k, h, q], "Bias", ((K, H, Q),)),
    "from the end": Score(lambda t: lambda s, b, h, q, k: s + t[-1, q, k], "Bias", ((3, Q, K),)),
    "two": plain(lambda s, b, h, q, k: s - (q - k).abs() * 0.1 + h, "ALiBi, DistanceBias"),
    "sums in both": Score(
        lambda t, u: lambda s, b, h, q, k: s + (t[q, k] - (u[h] - h * 0.25)), "DistanceBias, Bias", ((Q, K), (H,))
    ),
    "shared sums": Score(doubled, "Bias, Bias, DistanceBias", ((Q,), (K,)), "general: needs gradients"),
    "head and cap": Score(
        lambda t, u: lambda s, b, h, q, k: 9 * (0.7 * s / 9).tanh() + t[q, k] - u[h],
        "factor 0.7, Softcap, Bias, DistanceBias",
        ((Q, K), (H,)),
    ),
    "bfloat16 table": plain(
        lambda s, b, h, q, k, t=torch.arange(Q + K).div(7).bfloat16(): s + t[q - k + K], "DistanceBias"
    ),
    "computed table": Score(
        lambda t: lambda s, b, h, q, k: s + torch.sigmoid(t[0] * 2).t()[k, q], "Bias", ((2, Q, K),)
    ),
    "number of a parameter": Score(lambda t: lambda s, b, h, q, k: s * t.item(), "factor", ((),)),
}

# ---- masks -----------------------------------------------------------------------------------------------------------

MASKS: dict[str, Score] = {
    "causal and a term": Score(
        lambda t: lambda s, b, h, q, k: torch.where(q >= k, s - t[h] * (q - k).abs(), -INF),
        "ALiBi, mask", ((H,),), "DistanceBias, mask",
    ),
    "window": plain(lambda s, b, h, q, k: torch.where((q - k).abs() < 9, s, -INF), "mask"),
    "two masks": plain(
        lambda s, b, h, q, k: torch.where(q >= k, torch.where(q - k < 9, 2 * s, -INF), -INF), "factor 2, mask"
    ),
    "other order": plain(lambda s, b, h, q, k: torch.where(q < k, -INF, s), "mask"),
    "masked fill": plain(lambda s, b, h, q, k: s.masked_fill(q < k, -INF), "mask"),
    "in a tensor": plain(lambda s, b, h, q, k, low=torch.tensor(-INF): torch.where(q >= k, s, low), "mask"),
    "residues": plain(lambda s, b, h, q, k: torch.where((q - k) % 4 > 0, s, -INF), "mask"),
    "empty rows": plain(lambda s, b, h, q, k: torch.where(q >= k + 5, s, -INF), "mask"),
    "nothing allowed": plain(lambda s, b, h, q, k: torch.where(q - k > 1000, s, -INF), "mask"),
    "under a bias": plain(lambda s, b, h, q, k: torch.where(q >= k, s, -INF) + h, NO_TERM),
    "of the score": plain(lambda s, b, h, q, k: torch.where(s > 0, s, -INF), NO_TERM),
    "low": plain(lambda s, b, h, q, k: torch.where(q >= k, s, -1e9), NO_TERM),
}  # fmt: skip

# ---- functions that no terms compute ---------------------------------------------------------------------------------

OFFSET = torch.tensor(9)


class Straight(torch.autograd.Function):
    """The identity with a gradient of its own."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor) -> tuple[Tensor, Any]:
        return Straight.apply(x), dims[0]


GENERAL: dict[str, Score] = {
    "other cap": plain(lambda s, b, h, q, k: 5.0 * torch.tanh(s / 4.0), NO_TERM),
    "after a cap": plain(lambda s, b, h, q, k: 2 * (3 * torch.tanh(s / 3)), "general: multiplies the score after"),
    "detached": plain(lambda s, b, h, q, k: s.detach() + s * 0, NO_TERM),
    "without the score": plain(lambda s, b, h, q, k: q * 0.1, "general: does not depend on the score"),
    "product of positions": plain(lambda s, b, h, q, k: s + q * k * 1e-3, NEITHER),
    "position of a group": plain(lambda s, b, h, q, k: s - (q // 4 - k // 4).abs() * 0.1, NEITHER),
    "rounded": plain(lambda s, b, h, q, k: s + ((q + 0.3) - k) * 0.01, NEITHER),
    "distance by batch": plain(lambda s, b, h, q, k: s + (b + 1) * (q - k) * 0.01, NEITHER),
    "next query": Score(lambda t: lambda s, b, h, q, k: s + t[h, q + 1, k], "Bias", ((H, Q + 1, K),)),
    "query before the first": Score(lambda t: lambda s, b, h, q, k: s + t[h, q - 1, k], NEITHER, ((H, Q, K),)),
    "queries before the end": Score(lambda t: lambda s, b, h, q, k: s + t[h, q - Q, k], NEITHER, ((H, Q, K),)),
    "query and half": Score(lambda t: lambda s, b, h, q, k: s + t[h, (q * 2 + 1) // 2, k], NEITHER, ((H, Q, K),)),
    "query by a tensor": Score(
        lambda t, one=torch.tensor(1): lambda s, b, h, q, k: s + t[h, q + one, k], NEITHER, ((H, Q + 1, K),)
    ),
    "row, then the next key": Score(lambda t: lambda s, b, h, q, k: s + t[h, q, :][k + 1], "Bias", ((H, Q, K + 1),)),
    "head after two": Score(lambda t: lambda s, b, h, q, k: s + t[2 + h, q, k], "Bias", ((H + 2, Q, K),)),
    "difference of one value": plain(
        lambda s, b, h, q, k: s + ((d := q * 0.1 + k) - d), "general: subtracts a value from itself"
    ),
    "a sum of few bits": plain(
        lambda s, b, h, q, k, t=torch.full((K,), 100, dtype=torch.int8): s + (t[q] + t[k]), NEITHER
    ),
    "a sum of 16 bits": plain(
        lambda s, b, h, q, k, t=torch.full((K,), 4e4, dtype=torch.float16): s - (t[q] + t[k]), NEITHER
    ),
    "whole numbers by pair": plain(
        lambda s, b, h, q, k, t=torch.arange(Q * K).view(Q, K): s + t[q, k], NEITHER
    ),
    "scaled by head": Score(lambda t: lambda s, b, h, q, k: s * t[h] + (q - k).abs() * 0.01, NO_TERM, ((H,),)),
    "squared": Score(lambda t: lambda s, b, h, q, k: s + 0.1 * s * s - t[k] * q / 50, NEITHER, ((K,),)),
    "products": Score(lambda t, u: lambda s, b, h, q, k: s + (t[q] * u[k]).sum(), NEITHER, ((Q, 5), (K, 5))),
    "parameter times score": Score(
        lambda t: lambda s, b, h, q, k: s * t, "factor", ((),), NO_TERM
    ),
    "stack": Score(lambda t: lambda s, b, h, q, k: torch.stack([s, t[k]]).logsumexp(0), NO_TERM, ((K,),)),
    "layer": plain(lambda s, b, h, q, k, f=torch.nn.Linear(1, 1): f(s[None])[0], NO_TERM),
    "log of a distance": Score(
        lambda t: lambda s, b, h, q, k: s + t[0] ** 2 * torch.log((q - k).abs().float()),
        "DistanceBias", ((1,),), "general: not finite at a distance",
    ),
}  # fmt: skip

# ---- functions that symbols cannot, or must not, follow --------------------------------------------------------------


def of_tensors(d: Any) -> Any:
    """Penalise a distance in a tensor, and ignore a number."""
    return 0.3 * d.clamp(min=0) if isinstance(d, Tensor) else 0.0


def of_exact_tensors(d: Any) -> Any:
    return 0.3 * d.clamp(min=0) if type(d) is Tensor else 0.0


def swallowing(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    d = torch.zeros(2)
    with contextlib.suppress(Exception):
        d.fill_(1)
    return s - 0.1 * d[h % 2]


def swallowing_an_attribute(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    try:
        return s - 0.1 * (q - k) * (0 if s.requires_grad else 1)
    except Exception:  # noqa: BLE001
        return s


REFUSED: dict[str, Score] = {
    "branch": plain(lambda s, b, h, q, k: s if s > 0 else -s, "refused: value of a score"),
    "random": plain(lambda s, b, h, q, k: s + torch.rand(()), "refused: random"),
    "dropout": plain(lambda s, b, h, q, k: F.dropout(s), "refused: random"),
    "own gradient": plain(lambda s, b, h, q, k: Straight.apply(s), "refused: autograd.Function"),
    "no gradients": plain(lambda s, b, h, q, k: torch.no_grad()(lambda x: x * 2)(s), "refused: no_grad"),
    "write": plain(lambda s, b, h, q, k: s + torch.zeros(H).fill_(1)[h], "refused: writes to a tensor"),
    "caught write": plain(swallowing, "refused: writes to a tensor"),
    "caught attribute": plain(swallowing_an_attribute, "refused: uses .requires_grad"),
    "sets .data": plain(lambda s, b, h, q, k: [setattr(s, "data", s), s][1], "refused: data"),
    "raises": plain(lambda s, b, h, q, k: s + torch.ones(3)[h, q], "general: indices for a tensor"),
}

#: Functions that compute another value with tensors than with symbols.
TYPES: dict[str, Score] = {
    "isinstance": plain(lambda s, b, h, q, k: s - of_tensors(q - k), "DistanceBias"),
    "is_tensor": plain(lambda s, b, h, q, k: s * 2 if torch.is_tensor(s) else s, ""),
    "class": plain(lambda s, b, h, q, k: s - 0.1 * (q - k) if s.__class__ is Tensor else s, ""),
    "type": plain(lambda s, b, h, q, k: s - of_exact_tensors(q - k), "DistanceBias"),
    "subclass": plain(lambda s, b, h, q, k: s * 0.5 if issubclass(type(s), Tensor) else s, ""),
    "name": plain(lambda s, b, h, q, k: s if type(k).__name__ == "Symbol" else s - 0.2 * (q - k).abs(), ""),
}


def writing(write: Callable[[Tensor], object]) -> ScoreMod:
    """Return a function that writes to a distance and does not use the result of the write."""

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        d = (q - k).float()
        write(d)
        return s - 0.1 * d

    return score_mod


def writing_to_the_score(write: Callable[[Tensor, Tensor], object]) -> ScoreMod:
    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        write(s, 0.1 * (q - k))
        return s

    return score_mod


#: Functions that readers before this one took for others: writes, and offsets of a distance.
MISREAD: dict[str, Score] = {
    "offset": plain(lambda s, b, h, q, k: s - 0.3 * (q - k + 9).abs(), "DistanceBias"),
    "offset in a tensor": plain(lambda s, b, h, q, k: s - (q - k + OFFSET).abs() * 0.3, "DistanceBias"),
    "offsets on both": plain(lambda s, b, h, q, k: s - 0.3 * abs((q + 5) - (k - 4)), "DistanceBias"),
    "offset of the last key": Score(
        lambda t: lambda s, b, h, q, k: s + -abs(k - (q + K - 30)) * t[h], "DistanceBias", ((H,),)
    ),
    "offset of one": plain(lambda s, b, h, q, k: s - 0.01 * (k - q - 1).abs(), "DistanceBias"),
    "offset of floats": plain(lambda s, b, h, q, k: s - 0.3 * (q.float() - k.float() + 2).abs(), "DistanceBias"),
    "negated offset": plain(lambda s, b, h, q, k: s - 0.3 * (-(q - 3) + k).abs(), "DistanceBias"),
    "large": plain(lambda s, b, h, q, k: s - 0.3 * ((q + 2**24 + 1).float() - (k + 2**24).float()), NEITHER),
    "abs_": plain(writing(torch.abs_), "ALiBi"),
    "abs_ as a method": plain(writing(lambda d: d.abs_()), "ALiBi"),
    "relu_": plain(writing(lambda d: F.relu_(d)), "DistanceBias"),
    "inplace=": plain(writing(lambda d: F.relu(d, inplace=True)), "refused: writes"),
    "inplace by position": plain(writing(lambda d: F.leaky_relu(d, 0.2, True)), "refused: writ"),
    "overload": plain(writing(lambda d: torch.ops.aten.relu_.default(d)), "DistanceBias"),
    "packet": plain(writing(lambda d: torch.ops.aten.abs_(d)), "ALiBi"),
    "module": plain(writing(torch.nn.ReLU(inplace=True)), "refused: writes"),
    "tanh_ of the score": plain(writing_to_the_score(lambda s, d: torch.tanh_(s)), NO_TERM),
    "add_ to the score": plain(writing_to_the_score(lambda s, d: s.add_(d)), "DistanceBias"),
    "mul_ of the score": plain(writing_to_the_score(lambda s, d: s.mul_(2)), "factor 2"),
    "second name": plain(writing_to_the_score(lambda s, d: operator.iadd(s, d)), "DistanceBias"),
    "product": plain(writing_to_the_score(lambda s, d: operator.imul(s, 0.5)), "factor 0.5"),
    "difference": plain(writing_to_the_score(lambda s, d: operator.isub(s, d)), "DistanceBias"),
    "quotient": plain(writing_to_the_score(lambda s, d: operator.itruediv(s, 3)), "factor 0.333333"),
    "power of a distance": plain(writing(lambda d: operator.ipow(d, 2)), "DistanceBias"),
}

SCORES: dict[str, Score] = {
    name: score for group in (USED, SPELLINGS, MASKS, GENERAL, REFUSED, TYPES, MISREAD) for name, score in group.items()
}
