"""Kernel arguments for tensors, score terms and dropout."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ringweave.plan import BlockPlan
from ringweave.terms import Term
from ringweave.terms.operands import TermOperands

from .kernels.score_terms import KINDS, SLOPES_OF_KEYS
from .launch_config import padded


def strides(*tensors: Tensor) -> tuple[int, list[int]]:
    """Return a common divisor of the strides over batch, heads and tokens, and the strides divided by it.

    The divisor is 16 (only if a tensor has 8-bit elements), 8 or 1. Loads of 16 bytes at a time need strides that are
    multiples of 16 bytes.
    """
    # the stride of a dimension with at most one element is arbitrary
    steps = [step if side > 1 else 0 for x in tensors for step, side in zip(x.stride()[:3], x.shape, strict=False)]
    units = (16, 8) if any(x.element_size() == 1 for x in tensors) else (8,)
    unit = next((unit for unit in units if all(step % unit == 0 for step in steps)), 1)
    return unit, [step // unit for step in steps]


def wide(plan: BlockPlan, *tensors: Tensor) -> bool:
    """Return whether offsets within a tile need more than 32 bits."""
    return any(max(plan.q_tile, plan.kv_tile) * x.stride(2) >= 2**31 for x in tensors)


def head_bytes(*tensors: Tensor) -> int:
    """Return the bytes of one head, summed over the tensors."""
    return sum(x.shape[2] * x.shape[3] * x.element_size() for x in tensors)


def describable(*tensors: Tensor) -> bool:
    """Return whether tensor descriptors support all tensors: aligned to 16 bytes, not broadcast, not empty."""
    return all(
        x.numel() > 0
        and x.data_ptr() % 16 == 0
        and x.stride(3) == 1
        and all(step > 0 and step * x.element_size() % 16 == 0 for step in x.stride()[:3])
        for x in tensors
    )


def described(x: Tensor, tokens: int) -> TensorDescriptor:
    """Return a descriptor of tiles (tokens, channels) of a tensor (B, H, N, D)."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, tokens, padded(x.shape[3])])


# factor of integer arguments, so that all are specialised in the same way; see kernels/score_terms.py
_ALIKE = 16


class TermArguments(NamedTuple):
    """Kernel arguments for terms and dropout; None if absent.

    Attributes:
        places: (heads, rows, columns, offsets), int64, as in TermOperands.
        tables: Tensors of each term.
        numbers: Numbers of each term; kernels are not compiled again for other values.
        drop: (seed in four pieces of 16 bits, lowest first, threshold, factor of kept weights).
        terms: Kind of each term.
        holes: Whether a term may leave a row without any weight.
    """

    places: tuple[Tensor, ...] | None = None
    tables: tuple[tuple[Tensor, ...], ...] | None = None
    numbers: tuple[tuple[float, ...], ...] | None = None
    drop: tuple[float, ...] | None = None
    terms: tuple[int, ...] | None = None
    holes: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments that every kernel takes."""
        return {
            "places": self.places, "tables": self.tables, "numbers": self.numbers, "drop": self.drop,
            "TERMS": self.terms, "SCORED": self.places is not None,
        }  # fmt: skip


def of(terms: TermOperands | None, device: torch.device) -> TermArguments:
    """Return the kernel arguments for the terms and dropout of a view."""
    if terms is None:
        return TermArguments()
    dropout = terms.dropout
    # the places of a strided view are strided too
    places = (terms.heads.contiguous(), terms.rows.contiguous(), terms.columns.contiguous(), terms.offsets.contiguous())
    drop = None
    if dropout is not None:
        seed = (dropout.seed >> shift & 0xFFFF for shift in (0, 16, 32, 48))
        drop = (*(_ALIKE * each for each in (*seed, dropout.threshold)), dropout.factor)
    if not terms.terms:
        return TermArguments(places, drop=drop)
    kinds = tuple(SLOPES_OF_KEYS.value if _of_keys(term) else KINDS[term.kernel] for term in terms.terms)
    tables = tuple(_table(term, device) for term in terms.terms)
    numbers = tuple(_numbers(term) for term in terms.terms)
    return TermArguments(places, tables, numbers, drop, kinds, any(bool(term.learns) for term in terms.terms))


def _of_keys(term: Term) -> bool:
    """Return whether a term is ALiBi with a slope for each key."""
    return term.kernel == "alibi" and term.tables[0].ndim == 2


def _table(term: Term, device: torch.device) -> tuple[Tensor, ...]:
    """Return a term's tables in float32; a table with an entry for every pair is passed unchanged."""
    return tuple(x if term.places else x.to(device).float().contiguous() for x in term.tables)


def _numbers(term: Term) -> tuple[float, ...]:
    """Return a term's numbers: for distances the table's reach, for a bias and slopes of keys strides of the table."""
    if term.kernel == "distance":
        return (_ALIKE * (term.tables[0].shape[1] // 2),)
    if _of_keys(term):
        return (_ALIKE * term.tables[0].shape[1],)
    if term.kernel != "bias":
        return term.numbers
    table = term.tables[0]
    steps = (step if side > 1 else 0 for step, side in zip(table.stride(), table.shape, strict=True))
    return tuple(_ALIKE * each for each in steps)
