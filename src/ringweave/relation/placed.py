"""A leaf that is not a list of zones, inside documents."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .arrays import Int64, Words, combine_ids, packed, unpacked
from .lines import NONE, Line
from .node import ELEMENT, EMPTY, FULL, Frame, Node, Origin, Sides, Tiles
from .zones import Zones, several


class Documents(NamedTuple):
    """Documents in their order.

    Attributes:
        zones: The queries and keys of each document: one run of keys in each group, and a band of distances.
        origin: Position of the query that has position 0 in its document. A document with fewer queries than keys
            begins after it, and one with more queries before it.
        first: Position of the key that has position 0. The keys of a document begin there, or after it.
    """

    zones: Zones
    origin: Int64
    first: Int64


class _Parts(NamedTuple):
    """Parts of tiles inside documents: the tile, the parts on positions of the documents, and the margins around."""

    tile: Int64
    inside: Tiles
    margins: tuple[Int64, ...]


class Placed(Node):
    """A leaf with positions counted from the first key of each document; tiles are cut at the documents."""

    def __init__(self, leaf: Node, documents: Documents):
        self.leaf, self.documents = leaf, documents

    def _parts(self, tiles: Tiles) -> _Parts:
        zones, origin, first = self.documents
        q_lo, q_hi, k_lo, k_hi = zones.sides(tiles)
        tile, document, _ = zones.overlaps(q_lo, q_hi, k_lo, k_hi)
        q0, q1 = np.maximum(q_lo[tile], zones.q0[document]), np.minimum(q_hi[tile], zones.q1[document])
        k0, k1 = np.maximum(k_lo[tile], zones.k0[document]), np.minimum(k_hi[tile], zones.k1[document])
        margins = q0 - q_lo[tile], q_hi[tile] - q1, k0 - k_lo[tile], k_hi[tile] - k1
        q_base, k_base = origin[document], first[document]
        element, zero = tiles.q.element[tiles.qi[tile]], np.zeros(len(tile), np.int64)
        q, k = Sides(q0 - q_base, q1 - q_base, element, zero), Sides(k0 - k_base, k1 - k_base, element, zero)
        return _Parts(tile, Tiles.of(q, k), margins)

    def touched(self, frame: Frame, within: Line | None = None) -> Line:
        return self.documents.zones.touched(frame, within)

    def filled(self, frame: Frame, within: Line | None = None) -> Line:
        return NONE

    def classes(self, tiles: Tiles) -> Int64:
        tile, inside, margins = self._parts(tiles)
        code = self.leaf.classes(inside)
        used = code != EMPTY
        tile, code = tile[used], code[used]
        around = [side[used] for side in margins]
        whole = (code == FULL) & (sum(around) == 0)
        return several(tile, np.where(whole, FULL, combine_ids(code, *around)), len(tiles.qi))

    def words(self, tiles: Tiles, size: tuple[int, int]) -> Words:
        tile, inside, margins = self._parts(tiles)
        dense = unpacked(self.leaf.words(inside, size), size[1])
        out = np.zeros((len(tiles.qi), *size), np.bool_)
        high, wide = inside.q.hi - inside.q.lo, inside.k.hi - inside.k.lo
        sides = zip(tile, margins[0], margins[2], high, wide, strict=True)
        for i, (number, row, column, h, w) in enumerate(sides):
            out[number, row : row + h, column : column + w] = dense[i, :h, :w]
        return packed(out)

    def contains(self, q: Tensor, k: Tensor, origin: Origin) -> Tensor:
        zones, q_first, k_first = self.documents
        inside = zones.contains(q, k, origin)
        base = origin.element * ELEMENT if zones.each else 0
        document = torch.searchsorted(torch.tensor(zones.q1, device=q.device), (q + base).contiguous(), right=True)
        document.clamp_(max=max(zones.groups - 1, 0))
        if not zones.groups:
            return inside
        of_q, of_k = (torch.tensor(side - base, device=q.device)[document] for side in (q_first, k_first))
        # a function may index tables by positions, so those of pairs outside of documents are 0
        mine, theirs = torch.where(inside, q - of_q, 0), torch.where(inside, k - of_k, 0)
        return inside & self.leaf.contains(mine, theirs, Origin(origin.element))
