"""Decoding steps on the native kernel: one query at the last key, in each call over other numbers of keys.

The kernel paints the row of keys that a query attends from the pattern's zones, in each call, so a step needs no plan.
A relation by residue is computed in the strided view of the last key, if that changes no bits. Lists of keys that query
heads share are checked and planned by the kernel, too, which filters them by the painted row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import Call, Operands
from ..errors import PatternError, ShapeError
from ..patterns.lists import MANY, Lists
from ..patterns.located import located
from ..plan import branches, summands, view_of_step
from ..plan.tile_size import default_tile_size
from ..precision import Scales, as_codes
from ..relation.rows import tree_of
from ..types import Pages
from . import forks
from .backend import PreparedStep
from .cpu import merge_into, module, shared_lists, variant

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
    """The checked kernel arguments of decoding steps that differ in their number of keys, and in what lists name."""

    plans = ()

    def __init__(self, call: Call, operands: Operands, lists: Lists | None = None):
        q, k, v, scale = operands[:4]
        self._call, self._threads = call, torch.get_num_threads()
        self._pattern = call.pattern if lists is None else lists.relation
        self._several = len(summands(self._pattern)) > 1
        # the kernel takes types and sizes from these; tensors of one token do not keep the caller's alive
        pages = operands.pages
        stored: dict[str, Any] = {"scaled": operands.scales is not None}
        if pages is not None:
            stored["table"] = torch.empty_like(pages.table)
        self._like: dict[str, Any] = {
            "q": _like(q),
            "k": as_codes(_like(k)),
            "v": as_codes(_like(v)),
            "scale": scale,
            **stored,
        }
        # the tiles of pages and of lists do not depend on the lengths
        self._tile = 0 if pages is None else default_tile_size(pages.capacity)
        if lists is not None:
            table = lists.blocks.table
            self._like |= {
                "lists": table.view(*(1, 1, *table.shape[:-2])[-2:], table.shape[-1]), "block_size": lists.block,
                "packs": lists.packed, "group": call.heads // call.kv_heads,
            }  # fmt: skip
            self._tile = lists.tile
        # the number of keys for which the relation of lists was checked
        self._fits = 0
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
        for part in summands(self._pattern):
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
            of_rows = of_head[:: self._like.get("group", 1)]
            native = kernel.Step(**self._like, trees=trees, of_head=of_rows, variant=variant(), wide=self._several)
            parts.append(_Part(native, part.residue_rate if self._pattern is self._call.pattern else 1))
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
        lists: Tensor | None = None,
    ) -> tuple[Tensor, Any] | None:
        """Compute (out, lse); see :class:`~ringweave.backends.backend.PreparedStep`.

        The general path handles channels that are not adjacent, invalid page tables and lists, and scores out of range.
        """
        of_q, of_k, of_v = q.stride(), k.stride(), v.stride()
        keys = keys or k.shape[2]
        parts, alone = self.parts(keys), not self._several
        if of_q[3] != 1 or of_k[3] != 1 or of_v[3] != 1 or parts is None:
            return None
        if lists is not None and keys != self._fits:
            try:
                self._pattern.check(1, keys, keys - 1)
            except PatternError:
                return None
            self._fits = keys
        if self._threads > 1:
            forks.check(q.device)
        tensors = q.data_ptr(), of_q, k.data_ptr(), of_k, v.data_ptr(), of_v
        stored: tuple[int, ...] = () if pages is None else (pages.table.data_ptr(), pages.lengths.data_ptr())
        if scales is not None:
            stored = *stored, scales.k.data_ptr(), scales.v.data_ptr()
        if lists is not None:
            # after the addresses of pages and scales, which a step over lists does not have
            stored = 0, 0, 0, 0, lists.data_ptr()
        whole: tuple[Tensor, Any] | None = None
        for native, rate in parts:
            out = torch.empty_like(self._out)
            lse = torch.empty_like(self._lse) if with_lse or not alone else None
            try:
                below = native.forward(
                    *tensors, out.data_ptr(), 0 if lse is None else lse.data_ptr(), keys, *self._view(keys, rate),
                    self._threads, *stored,
                )  # fmt: skip
            except (ShapeError, MemoryError):
                # the general path names the wrong entry of a page table or of a list, and may compute in pieces
                if pages is None and lists is None:
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


def _lists(call: Call) -> Lists | None:
    """Return the lists that query heads share in decoding steps, which differ in the lists' contents; else None."""
    split = branches(call.pattern, 1, call.nk, heads=call.heads, batch=call.batch, q_offset=call.q_offset)
    lists = shared_lists(split[0], call.heads // call.kv_heads, call.features) if len(split) == 1 else None
    # the number of blocks that the caller states belongs to one length
    return lists if lists is not None and lists.blocks.key_blocks == MANY else None


def prepare_step(call: Call, operands: Operands) -> PreparedStep | None:
    """Prepare the decoding steps of a checked call, for any number of keys; None if the general path computes them."""
    pattern, lists = call.pattern, None
    if pattern.tables:
        lists = _lists(call)
        if lists is None:
            return None
        pattern = lists.relation
    if call.features or pattern.tile_size is not None or not pattern.fixed or not pattern.combinable:
        return None
    steps = Steps(call, operands._replace(scale=call.scale), lists)
    return None if steps.parts(call.nk) is None else steps
