"""The case ``ring``: context parallelism, each figure next to its target.

What needs ranks runs in processes that torchrun starts on this machine, over Gloo: exactness first, and bytes, memory
and overlap only if all was exact; then ranks that are killed; then speed. What needs none the planning code is asked.
"""

from __future__ import annotations

import pickle
import tempfile
import time
from pathlib import Path

from .case import CaseResult, Options, Target
from .compare import Outcome, Say
from .launched import LaunchError, torchrun
from .launched import run as run_command

Records = list[Target | Outcome]
# seconds that a part may last: several times what it takes on two quiet cores
_LIMITS = {"exact": 400.0, "lost": 120.0, "speed": 300.0}


def run(options: Options, say: Say) -> CaseResult:
    """Measure, and set the figures beside their targets.

    ``tokens``, ``heads``, ``dtype`` and ``rounds`` are those of the comparison of speeds.
    """
    from . import ring_plans

    ranks = 4 if options.quick else 8
    records: Records = []
    for part, count in (("exact", ranks), ("lost", ranks), ("speed", 2)):
        say(f"{part}: {count} processes")
        records += launch(part, count, options)
    records += ring_plans.measure(options, say)
    targets = [each for each in records if isinstance(each, Target)]
    missed = [each.what for each in targets if each.met is False or each.reason is not None]
    judged = sum(each.met is not None or each.reason is not None for each in targets)
    said = f"{judged - len(missed)} of {judged} targets are met" + (f"; not: {'; '.join(missed)}." if missed else ".")
    return CaseResult("ring", tuple(records), said)


def launch(part: str, ranks: int, options: Options) -> Records:
    """A part's records, measured by so many processes.

    Args:
        part: One of ``ringweave.bench.ranks``.
        ranks: How many.
        options: Sizes.
    Returns:
        Its records; one with a reason if the processes did not come to an end.
    """
    from .ranks import lost

    seconds = _LIMITS[part]
    with tempfile.TemporaryDirectory(prefix="ringweave-") as name:
        folder = Path(name)
        (folder / "options").write_bytes(pickle.dumps(options))
        words = torchrun(ranks, "-m", "ringweave.bench.ranks", part, folder, seconds)
        try:
            # where ranks are killed the launcher fails: what survivors have written tells
            run_command(words, threads=1, until=time.monotonic() + seconds, may_fail=part == "lost")
        except LaunchError as error:
            return [Target(part, f"{ranks} ranks", None, None, True, reason=f"wrong: {error}")]
        if part == "lost":
            return [*lost.read(folder, ranks, ranks - 2)]
        found: Records = pickle.loads((folder / part).read_bytes())
    return found
