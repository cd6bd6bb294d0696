"""A stable order of whole numbers, in time that grows with how many they are."""

from __future__ import annotations

import numpy as np

from ..patterns.tiles import Int64


def stable_order(keys: Int64, bound: int) -> Int64:
    """The stable ascending order of keys in [0, bound): numpy sorts 16 bits by counting, so 16 at a time."""
    order: Int64 = np.argsort(keys.astype(np.uint16), kind="stable")
    for low in range(16, (bound - 1).bit_length(), 16):
        order = order[np.argsort((keys[order] >> low).astype(np.uint16), kind="stable")]
    return order
