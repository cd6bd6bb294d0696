"""Decoding steps on the native kernel: one query at the last key, in each call over other numbers of keys.

The kernel paints the row of keys that a query attends from the pattern's zones, in each call, so a step needs no plan.
A relation by residue is computed in the strided view of the last key, if that changes no bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import Call, Operands
from ..errors import ShapeError
from ..patterns.located import located
from ..plan import summands, view_of_step
from ..plan.tile_size import default_tile_size
from ..precision import Scales
from ..relation.rows import tree_of
from ..types import Pages
from . import forks
from .backend import PreparedStep
from .cpu import as_codes, merge_into, module, variant

# the positions for which a pattern gives its zones, at least; twice as many as there are keys
_POSITIONS = 2**12


class _Part(NamedTuple):
    """A summand of the pattern: the kernel's checked arguments, and the rate of its views."""

    native: Any
    rate: int


class _Made(NamedTuple):
    """The parts of steps of up to ``until`` keys; None if the kernel cannot take their relations."""

    until: int
    parts: list[_Part] | None


class Steps:
    """The checked kernel arguments of decoding steps that differ in their number of keys."""

    plans = ()

    def __init__(self, call: Call, operands: Operands):
        q, k, v, scale = operands[:4]
        self._call, self._threads, self._several = call, torch.get_num_threads(), len(summands(call.pattern)) > 1
        # the kernel takes types and sizes from these; tensors of one token do not keep the caller's alive
        pages = operands.pages
        stored: dict[str, Any] = {"scaled": operands.scales is not None}
        if pages is not None:
            stored["table"] = torch.empty_like(pages.table)
        self._like = {"q": _like(q), "k": as_codes(_like(k)), "v": as_codes(_like(v)), "scale": scale, **stored}
        # the tiles of pages do not depend on the lengths
        self._tile = 0 if pages is None else default_tile_size(pages.capacity)
        # one assignment, since threads share a step
        self._made = _Made(0, None)
        # templates of one element: empty_like of an expanded tensor takes half the time of empty with sizes
        out = torch.empty(1, dtype=torch.float32 if self._several else q.dtype, device="cpu")
        self._out = out.expand(*q.shape[:3], v.shape[3])
        self._lse = torch.empty(1, dtype=torch.float32, device="cpu").expand(q.shape[:3])

    def parts(self, keys: int) -> list[_Part] | None:
        """Return the parts for so many keys; None if the general path computes these steps."""
        made = self._made
        if keys > made.until:
            until = max(_POSITIONS, 1 << (2 * keys - 1).bit_length())
            made = self._made = _Made(until, self._compiled(until))
        return made.parts

    def _compiled(self, until: int) -> list[_Part] | None:
        parts, kernel = list[_Part](), module()
        assert kernel is not None
        for part in summands(self._call.pattern):
            numbers: dict[str, int] = {}
            trees: list[tuple[list[Any], str]] = []
            of_head = []
            for h in range(self._call.heads):
                each = part.select(0, h)
                if each.spec not in numbers:
                    tree = tree_of(located(each, (until, until)).node)
                    # bounds of each batch element are no part of a kind of steps
                    if tree is None or any(leaf.zones.each for leaf in tree.leaves):
                        return None
                    numbers[each.spec] = len(trees)
                    trees.append((tree.compiled, tree.text))
                of_head.append(numbers[each.spec])
            native = kernel.Step(**self._like, trees=trees, of_head=of_head, variant=variant(), wide=self._several)
            parts.append(_Part(native, part.residue_rate))
        return parts

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        with_lse: bool,
        pages: Pages | None = None,
        keys: int = 0,
        scales: Scales | None = None,
    ) -> tuple[Tensor, Any] | None:
        """Compute (out, lse); see :class:`~ringweave.backends.backend.PreparedStep`.

        The general path handles channels that are not adjacent, invalid page tables, and scores out of range.
        """
        of_q, of_k, of_v = q.stride(), k.stride(), v.stride()
        keys = keys or k.shape[2]
        parts, alone = self.parts(keys), not self._several
        if of_q[3] != 1 or of_k[3] != 1 or of_v[3] != 1 or parts is None:
            return None
        if self._threads > 1:
            forks.check(q.device)
        tensors = q.data_ptr(), of_q, k.data_ptr(), of_k, v.data_ptr(), of_v
        stored = () if pages is None else (pages.table.data_ptr(), pages.lengths.data_ptr())
        if scales is not None:
            stored = *stored, scales.k.data_ptr(), scales.v.data_ptr()
        whole: tuple[Tensor, Any] | None = None
        for native, rate in parts:
            out = torch.empty_like(self._out)
            lse = torch.empty_like(self._lse) if with_lse or not alone else None
            try:
                below = native.forward(
                    *tensors, out.data_ptr(), 0 if lse is None else lse.data_ptr(), keys, *self._view(keys, rate),
                    self._threads, *stored,
                )  # fmt: skip
            except ShapeError:
                # the general path checks a page table anew, and names the row and the column
                if pages is None:
                    raise
                return None
            if below:
                return None
            if whole is None:
                whole = out, lse
            else:
                merge_into(*whole, out, lse)  # type: ignore[arg-type]  # parts that are merged have lse
        assert whole is not None
        return whole if alone else (whole[0].to(q.dtype), whole[1] if with_lse else None)

    def _view(self, keys: int, rate: int) -> tuple[int, int, int, int]:
        """Return (first key, rate, keys in a tile, tokens in a tile of the whole).

        The last is 0 unless the relation is one by residue.
        """
        side = self._tile or default_tile_size(keys)
        # pages have no views
        view = view_of_step(keys, 1 if self._tile else rate, side)
        return view.first, view.rate, view.tile if view.rate > 1 else side, side if rate > 1 else 0

    def backward(self, *args: object) -> None:
        """Return None: backward takes the general path."""


def _like(x: Tensor) -> Tensor:
    """Return memory of one token with the sizes of a tensor."""
    return x.new_empty(1, 1, 1, x.shape[3]).expand(x.shape)


def prepare_step(call: Call, operands: Operands) -> PreparedStep | None:
    """Prepare the decoding steps of a checked call, for any number of keys; None if the general path computes them."""
    pattern = call.pattern
    if call.features or pattern.tile_size is not None or not pattern.fixed or not pattern.combinable:
        return None
    steps = Steps(call, operands._replace(scale=call.scale))
    return None if steps.parts(call.nk) is None else steps
