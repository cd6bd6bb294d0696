"""Padding as a pattern: the range of keys that exists in each batch element."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..checks import INTEGERS, integers, whole
from ..errors import PatternError, shown
from ..relation.arrays import Int64
from ..relation.node import ELEMENT, FAR, Node
from ..relation.zones import Zones
from .base import Pattern
from .batch_axis import Enclosing, Spans, rows_of
from .declared import declare


@declare("KeyPadding(832, 192)", "By position", hostile="KeyPadding(n, n - 1)")
class KeyPadding(Enclosing):
    """Every query attends the keys [start, stop) of its batch element, for padding on the right or on the left.

    ``Causal() & KeyPadding(lengths)`` is causal attention over a padded batch. Tensors are not copied, and are read
    when a plan is made: a write to one takes effect at the next call, without recompilation. Batch elements with equal
    bounds share their plan, and masks are made once for each place of a bound in a tile.

    Args:
        stop: End of the keys, exclusive, an int or an integer tensor (B,); a list becomes a tensor.
        start: First key, in the same form.
    Raises:
        PatternError: Bounds are not whole numbers, or have different numbers of batch elements; at use,
            ``0 <= start <= stop <= Nk`` does not hold, or the batch is another one.
    Example:
        >>> rw.KeyPadding(torch.tensor([1, 3])).to_dense(1, 3, batch=2)[:, 0, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 1]], dtype=torch.int32)
        >>> rw.KeyPadding(3, start=1).to_dense(1, 4)[0, 0].int()
        tensor([[0, 1, 1, 0]], dtype=torch.int32)
    """

    def __init__(self, stop: int | Sequence[int] | Tensor, start: int | Sequence[int] | Tensor = 0):
        self.stop, self.start = _bound("stop", stop), _bound("start", start)
        sizes = {table.numel() for table in self.tables} - {1}
        if len(sizes) > 1:
            got = f"{len(self.tables[0])} and {len(self.tables[1])} batch elements"
            raise PatternError("stop, start", got, "one number of batch elements", "Pass tensors of one size.")
        self._rows = sizes.pop() if sizes else 1
        self.__post_init__()

    def _text(self) -> str:
        return self._written(lambda table: "_")

    def __repr__(self) -> str:
        # does not read the tensors, which may be on another device
        return self._written(lambda table: f"<{len(table)} bounds>")

    def _written(self, name: Callable[[Tensor], str]) -> str:
        stop, start = (name(bound) if isinstance(bound, Tensor) else bound for bound in (self.stop, self.start))
        return f"KeyPadding({stop})" if start == 0 else f"KeyPadding({stop}, {start})"

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return tuple([bound for bound in (self.stop, self.start) if isinstance(bound, Tensor)])

    def extents(self) -> tuple[int | None, int | None]:
        return (None if self._rows == 1 else self._rows), None

    def select(self, b: int, h: int) -> Pattern:
        if self._rows == 1:
            return self
        bounds = (x[b : b + 1] if isinstance(x, Tensor) and len(x) > 1 else x for x in (self.stop, self.start))
        return KeyPadding(*bounds)

    def _make(self) -> tuple[Int64, Int64]:
        start, stop = np.empty((2, self._rows), np.int64)
        for name, side, bound in (("start", start, self.start), ("stop", stop, self.stop)):
            if isinstance(bound, Tensor) and bound.shape not in ((1,), (self._rows,)):
                wanted = f"as many as when the pattern was made, {self._rows}"
                remedy = "Write to the bounds in place, or make another KeyPadding."
                raise PatternError(name, f"{shown(bound)} bounds", wanted, remedy)
            side[:] = rows_of(bound, 1) if isinstance(bound, Tensor) else bound
        return start, stop

    def bound_ids(self) -> tuple[Int64, ...]:
        start, stop = self._now
        return start, stop

    def fits(self, nq: int, nk: int, q_offset: int) -> None:
        start, stop = self._now
        wrong = (start < 0) | (start > stop) | (stop > nk)
        if wrong.any():
            b = int(wrong.argmax())
            where = f" in batch element {b}" if self._rows > 1 else ""
            raise PatternError(
                "KeyPadding",
                f"start {start[b]} and stop {stop[b]}{where}",
                f"0 <= start <= stop <= {nk}, the number of keys",
                "Correct the bounds; an element without keys has start = stop.",
            )

    def spans(self) -> Spans:
        start, stop = (side + np.arange(len(side)) * ELEMENT for side in self._now)
        return Spans(start, stop, start, start, stop, self._rows == 1)

    def inside(self, node: Node) -> Node:
        return self.spans().inside(node)

    def sizes(self) -> tuple[Int64, Int64]:
        return self.spans().lengths()

    def zones(self, n: int | None) -> Node:
        start, stop = self._now
        if self._rows == 1:
            return Zones(k=(start, stop))
        base = np.arange(self._rows) * ELEMENT
        return Zones((base - FAR, base + FAR), (base + start, base + stop), each=True)


def _bound(name: str, value: object) -> int | Tensor:
    """Check a bound: an int, or an integer tensor (B,), which is not read."""
    if isinstance(value, Tensor):
        if value.ndim == 1 and value.numel() and value.dtype in INTEGERS and value.layout == torch.strided:
            return value
        wanted = "an int or an integer tensor (B,)"
        raise PatternError(name, shown(value), wanted, "Pass one whole number for each batch element.")
    if isinstance(value, (list, tuple, range, np.ndarray)):
        listed = integers(name, value, 0)
        if not listed:
            raise PatternError(name, shown(value), "a number for each batch element", f"Fill {name}.")
        return torch.tensor(listed, device="cpu")
    return whole(name, value, 0)
