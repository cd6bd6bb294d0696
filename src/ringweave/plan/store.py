"""Plans on disk: those that took long to make, by value, for other processes and later ones."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import io
import logging
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from ..patterns import Pattern
from .block_plan import _SIZES, _TENSORS, BlockPlan

_FORMAT = 1
_DIGEST = 32
# hashing more than that costs as much as many a plan
_MOST_TABLES = 2**28
_log = logging.getLogger("ringweave")


class PlanStore:
    """A folder of plans. A file is written whole or not at all, and one that is not what was written is ignored.

    The name of a file is a digest of all that a plan depends on: the pattern's text, its tables' contents, the sizes,
    the tile, the version of ringweave. Nothing is ever removed: remove the folder when you like.

    Args:
        folder: Made where it is missing, at the first write.
        seconds: Plans that took longer to make are kept.
    """

    def __init__(self, folder: str | Path, seconds: float = 0.05):
        self.folder, self.seconds = Path(folder), seconds

    def name(self, pattern: Pattern, sizes: tuple[int, ...]) -> str | None:
        """Name what a plan is made of; None for what has no value on disk: functions, and tables on a GPU."""
        tables = pattern.tables
        size = sum(table.nbytes for table in tables)
        if "TokenMask(" in pattern.spec or size > _MOST_TABLES or any(t.device.type != "cpu" for t in tables):
            return None
        digest = hashlib.blake2b(repr((_FORMAT, _version(), pattern.spec, sizes)).encode(), digest_size=_DIGEST)
        for table in tables:
            digest.update(repr((table.dtype, tuple(table.shape))).encode())
            digest.update(_bytes(table))
        return digest.hexdigest()

    def load(self, name: str) -> BlockPlan | None:
        """Read a plan; None where there is none, or a file that is broken."""
        try:
            data = (self.folder / name).read_bytes()
        except OSError:
            return None
        digest, body = data[:_DIGEST], data[_DIGEST:]
        if digest != hashlib.blake2b(body, digest_size=_DIGEST).digest():
            _log.warning("a stored plan is broken and ignored: %s", name)
            return None
        found = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
        return BlockPlan(*found)

    def save(self, name: str, plan: BlockPlan) -> None:
        """Write a plan, if the folder can be written to."""
        plan = plan.to("cpu")
        body = io.BytesIO()
        torch.save([getattr(plan, each) for each in (*_TENSORS, *_SIZES)], body)
        data = body.getvalue()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, other = tempfile.mkstemp(dir=self.folder, prefix=".")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(hashlib.blake2b(data, digest_size=_DIGEST).digest() + data)
                Path(other).replace(self.folder / name)
            except BaseException:
                Path(other).unlink(missing_ok=True)
                raise
        except OSError as error:
            _log.warning("a plan could not be stored: %s", error)


def _bytes(table: Tensor) -> memoryview:
    return table.detach().contiguous().view(-1).view(torch.uint8).numpy().data


@functools.cache
def _version() -> str:
    return importlib.metadata.version("ringweave")
