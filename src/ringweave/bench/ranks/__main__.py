"""One rank of ``torchrun -m ringweave.bench.ranks PART,PART FOLDER SECONDS``; options lie pickled in the folder."""

from __future__ import annotations

import faulthandler
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from ..case import Options, Target
from ..compare import Outcome
from . import exact, lost, moved, speed
from .group import Ranks

Records = list[Target | Outcome]


def exactness(ranks: Ranks, options: Options, folder: Path) -> Records:
    """What is exact, and then, if it is, what moves."""
    torch.set_num_threads(1)
    found: Records = [*exact.measure(ranks, options)]
    right = not any(isinstance(each, Target) and each.met is False for each in found)
    if ranks.gathered(right)[0]:
        return [*found, *moved.measure(ranks, options)]
    # the speed and the bytes of a wrong result are of no interest
    return [*found, Target("G1, G4, G7, G8, G10", "-", None, None, True, reason="wrong: not exact; not measured")]


PARTS: dict[str, Callable[[Ranks, Options, Path], Records]] = {
    "exact": exactness,
    "lost": lost.measure,
    "speed": speed.measure,
}


def main() -> None:
    """Run some parts; rank 0 writes the records of each."""
    parts, place, seconds = sys.argv[1:4]
    # whatever happens to the launcher, no rank outlives its time
    faulthandler.dump_traceback_later(float(seconds), exit=True)
    folder = Path(place)
    options = pickle.loads((folder / "options").read_bytes())
    ranks = Ranks(float(seconds))
    for part in parts.split(","):
        records = PARTS[part](ranks, options, folder)
        if ranks.rank == 0:
            (folder / part).write_bytes(pickle.dumps(records))
    ranks.close()


if __name__ == "__main__":
    main()
