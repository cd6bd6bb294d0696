"""The Triton kernels: forward by rows; backward as delta, dQ by rows, dK and dV by columns; a join of partial results.

One program computes (a part of) one tile of queries, or of keys, over its list of tiles, in one loop, which goes
past the mask of a full tile by a branch; without the branch a full tile's mask words are all ones. Ends of the sequence
are cut out of the words too. Softmax is in powers of two with the scale folded in. The rows of a program are those of
HEADS query heads that share a list and a key head. A long list is computed in shares; their partial sums are added in
order by a kernel of its own. Every program writes its own results: no atomics but those that add whole numbers to
terms' tables, the same bits each time.

Names: b, a batch element; a *task* is a tile of HEADS query heads (or of a key head); an *item* is a task, or a share
of one, of which a program reads one record of the queue; *code* is the plan's mask number of a tile, -1 for a full one;
*keep* is how many positions from a tile's first are inside the length. A program takes every ``num_programs``-th part
of an item: one, unless the grid is smaller than the queue.
"""

from __future__ import annotations

import contextlib

from .backward import backward_kv, backward_q, delta
from .forward import forward, join

__all__ = ["backward_kv", "backward_q", "delta", "forward", "join"]

# compilers before 3.6 have no such language, or another one: no configuration asks for it there
with contextlib.suppress(ImportError):
    from .pingpong import pingpong

    __all__ += ["pingpong"]
