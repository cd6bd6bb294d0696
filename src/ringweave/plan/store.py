"""A store on disk for plans that took long to make, by value, for other and later processes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import math
import os
import struct
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..cache import fact
from ..patterns import Pattern
from .block_plan import _TENSORS, BlockPlan, _unflatten

_FORMAT = 2
# numbers of row sets, listed tiles and masks; with the sizes of the call they determine the shape of every tensor
_COUNTS = struct.Struct("<3q")
_DIGEST = 32
# most bytes of tables that are hashed; hashing more can cost more than planning
_MOST_TABLES = 2**28
_log = logging.getLogger("ringweave")


class PlanStore:
    """A folder of plans. Files are written atomically, and a damaged file is ignored.

    The name of a file is a digest of everything that a plan depends on: the pattern's text, its tables' contents, the
    sizes, the tile, and the version of ringweave. Files are never removed; the folder may be removed at any time.

    Args:
        folder: Folder of the files; created at the first write if it is missing.
        seconds: Plans that took longer than this to make are stored.
    """

    def __init__(self, folder: str | Path, seconds: float = 0.05):
        self.folder, self.seconds = Path(folder), seconds

    def name(self, pattern: Pattern, sizes: tuple[int, ...]) -> str | None:
        """Return the name of a plan's file; None for patterns with functions, tables on a GPU, or very large tables."""
        tables = pattern.tables
        size = sum(table.nbytes for table in tables)
        if pattern.has_function or size > _MOST_TABLES or any(t.device.type != "cpu" for t in tables):
            return None
        digest = hashlib.blake2b(repr((_FORMAT, _version(), pattern.spec, sizes)).encode(), digest_size=_DIGEST)
        for table in tables:
            digest.update(repr((table.dtype, tuple(table.shape))).encode())
            digest.update(_bytes(table))
        return digest.hexdigest()

    def load(self, name: str, sizes: tuple[int, ...]) -> BlockPlan | None:
        """Read a plan of these sizes; None if the file is missing or damaged."""
        try:
            data = (self.folder / name).read_bytes()
        except (OSError, MemoryError):
            return None
        digest, body = data[:_DIGEST], data[_DIGEST:]
        plan = _plan_of(body, sizes) if digest == _digest(name, body) else None
        if plan is None:
            _log.warning("a stored plan is broken and ignored: %s", name)
        return plan

    def save(self, name: str, plan: BlockPlan) -> None:
        """Write a plan; log a warning if the folder cannot be written to."""
        plan = plan.to("cpu")
        counts = _COUNTS.pack(plan.row_ptr.shape[0], plan.capacity, plan.mask_words.shape[0])
        data = b"".join((counts, *(_bytes(getattr(plan, each)) for each in _TENSORS)))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, other = tempfile.mkstemp(dir=self.folder, prefix=".")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_digest(name, data) + data)
                Path(other).replace(self.folder / name)
            except BaseException:
                Path(other).unlink(missing_ok=True)
                raise
        except OSError as error:
            _log.warning("a plan could not be stored: %s", error)


def _digest(name: str, body: bytes) -> bytes:
    """Digest a file's contents with its name, so that a renamed file is not taken for another pattern's plan."""
    return hashlib.blake2b(name.encode() + body, digest_size=_DIGEST).digest()


def _plan_of(body: bytes, sizes: tuple[int, ...]) -> BlockPlan | None:
    """Read a plan from a file's contents; None if a kernel would read out of bounds with it."""
    nq, nk, heads, batch, q_offset, q_tile, kv_tile = sizes
    rows, columns = -(-nq // q_tile), -(-nk // kv_tile)
    if len(body) < _COUNTS.size:
        return None
    groups, places, masks = _COUNTS.unpack_from(body)
    shapes = {
        "row_ptr": (groups, rows + 1), "col": (places,), "mask_id": (places,), "col_ptr": (groups, columns + 1),
        "row": (places,), "mask_id_t": (places,), "mask_words": (masks, q_tile, -(-kv_tile // 32)),
        "row_set": (batch, heads),
        "order": (groups * rows,),
    }  # fmt: skip
    if min(groups - 1, places, masks) < 0 or len(body) != _COUNTS.size + 4 * sum(map(math.prod, shapes.values())):
        return None
    # a copy, which is writable and aligned
    words, begin, found = np.frombuffer(body, np.int32, offset=_COUNTS.size).copy(), 0, {}
    for each in _TENSORS:
        found[each] = words[begin : begin + math.prod(shapes[each])].reshape(shapes[each])
        begin += found[each].size
    below = {
        "col": columns,
        "row": rows,
        "mask_id": masks,
        "mask_id_t": masks,
        "row_set": groups,
        "order": groups * rows,
    }
    least = {"mask_id": -1, "mask_id_t": -1}
    if any(found[name].size and not least.get(name, 0) <= found[name].min() <= found[name].max() < end
           for name, end in below.items()):  # fmt: skip
        return None
    for name in ("row_ptr", "col_ptr"):
        flat = found[name].ravel()
        if flat[0] != 0 or flat[-1] != places or (np.diff(flat) < 0).any():
            return None
    return _unflatten([torch.from_numpy(found[each]) for each in _TENSORS], (nq, nk, q_tile, kv_tile, q_offset))


def _bytes(table: Tensor) -> memoryview:
    # as_strided sets the strides of tensors of one element to 1, which view(uint8) requires
    flat = table.detach().contiguous().as_strided((table.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


@fact
def _version() -> str:
    return importlib.metadata.version("ringweave")
