"""The Triton kernels: forward by rows; backward as delta, dQ by rows, dK and dV by columns; a join of partial results.

One program computes (a part of) one tile of queries, or of keys, in one loop over its list of tiles. The loop branches
past the mask of a full tile; compiled without the branch, a full tile's mask words are all ones. The words also exclude
positions beyond the end of the sequence. Softmax uses powers of two, with the scale folded in. A program's rows belong
to HEADS query heads that share a list and a key head. A long list is computed in shares, and the ``join`` kernel adds
their partial sums in order. No two programs write the same result. There are no atomics, so the bits are the same
each time.

Names: ``b`` is a batch element. A *task* is a tile of HEADS query heads (or of a key head). An *item* is a task or a
share of one, with one record in the queue. ``code`` is the plan's mask number of a tile, -1 for a full tile. ``keep``
is the number of positions from a tile's first that are inside the length.
"""

from __future__ import annotations

from .backward import backward_kv, backward_q, delta
from .forward import forward, join

__all__ = ["backward_kv", "backward_q", "delta", "forward", "join"]
