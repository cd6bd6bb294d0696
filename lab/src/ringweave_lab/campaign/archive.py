"""The tarball of a campaign: everything that is worth taking from the machine, in one small file."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path

#: Largest size of the tarball in bytes.
MOST = 16 * 2**20
# bytes of the end of each unit's output
_LOG = 2**18
# bytes that gzip and tar may add
_SPARE = 2**19


def pack(folder: Path, path: Path, first: Sequence[str]) -> None:
    """Write a folder's files to a tarball, which a crash leaves whole: the former one or the new one.

    Args:
        folder: Folder of a campaign.
        path: The tarball.
        first: Names of the most important files. The ends of the outputs of all units follow, as far as there is room.
    """
    files = [folder / name for name in first if (folder / name).is_file()]
    files += sorted(folder.glob("*.log"))
    temporary, left = path.with_name(f".{path.name}.tmp"), MOST - _SPARE
    with temporary.open("wb") as raw:
        with tarfile.open(fileobj=raw, mode="w:gz") as made:
            for file in files:
                data = file.read_bytes()
                data = data[-_LOG:] if file.suffix == ".log" else data[: max(0, left - 2 * tarfile.BLOCKSIZE)]
                # a header and the padding of the last block
                needed = len(data) + 2 * tarfile.BLOCKSIZE
                if needed > left:
                    continue
                left -= needed
                entry = tarfile.TarInfo(f"{folder.name}/{file.name}")
                entry.size, entry.mtime = len(data), int(file.stat().st_mtime)
                made.addfile(entry, io.BytesIO(data))
        raw.flush()
        os.fsync(raw.fileno())
    temporary.replace(path)
