"""The case ``ring``: context parallelism, each figure next to its target.

What needs ranks runs in processes that torchrun starts on this machine, over Gloo: exactness first, and bytes, memory
and overlap only if all was exact; then ranks that are killed; then speed. What needs none the planning code is asked.
"""

from __future__ import annotations

import pickle
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ..errors import UnsupportedError, message
from .case import CaseResult, Options, Target
from .compare import Outcome, Say
from .launched import LaunchError, torchrun
from .launched import run as run_command

Records = list[Target | Outcome]
# seconds that a launch may last: several times what it takes on two quiet cores
_LIMIT = 400.0


def run(options: Options, say: Say) -> CaseResult:
    """Measure, and set the figures beside their targets.

    ``tokens``, ``heads``, ``dtype`` and ``rounds`` are those of the comparison of speeds.

    Raises:
        UnsupportedError: Another device than the CPU.
    """
    from . import ring_plans

    if options.device != "cpu":
        raise UnsupportedError(message("device", repr(options.device), "'cpu'", "The ring is measured over Gloo."))
    # the clock is looked at where nobody else is; a quick run has no time to start processes thrice
    quick, whole = {"exact,speed,lost": 4}, {"exact": 8, "lost": 8, "speed": 2}
    records: Records = []
    for parts, count in (quick if options.quick else whole).items():
        say(f"{parts}: {count} processes")
        records += launch(parts.split(","), count, options)
    records += ring_plans.measure(options, say)
    records.sort(key=_number)
    targets = [each for each in records if isinstance(each, Target)]
    missed = [each.what for each in targets if each.met is False or each.reason is not None]
    judged = sum(each.met is not None or each.reason is not None for each in targets)
    said = f"{judged - len(missed)} of {judged} targets are met" + (f"; not: {'; '.join(missed)}." if missed else ".")
    return CaseResult("ring", tuple(records), said)


def _number(record: Target | Outcome) -> int:
    """The design's number of a target; what has none comes last."""
    found = re.match(r"G(\d+)", record.what) if isinstance(record, Target) else None
    return int(found[1]) if found else 99


def launch(parts: Sequence[str], ranks: int, options: Options) -> Records:
    """The records of some parts, measured by so many processes.

    Args:
        parts: Of ``ringweave.bench.ranks``; where ranks are lost is the last.
        ranks: How many.
        options: Sizes.
    Returns:
        Their records; for a part that did not come to its end, one that says why.
    """
    from .ranks import lost

    why = ""
    with tempfile.TemporaryDirectory(prefix="ringweave-") as name:
        folder = Path(name)
        (folder / "options").write_bytes(pickle.dumps(options))
        words = torchrun(ranks, "-m", "ringweave.bench.ranks", ",".join(parts), folder, _LIMIT)
        try:
            # where ranks are killed the launcher fails: what survivors have written tells
            run_command(words, threads=1, until=time.monotonic() + _LIMIT, may_fail="lost" in parts)
        except LaunchError as error:
            why = str(error)
        found: Records = []
        for part in parts:
            if part == "lost":
                found += lost.read(folder, ranks, ranks - 2)
            elif (folder / part).exists():
                found += pickle.loads((folder / part).read_bytes())
            else:
                reason = f"wrong: {why or 'the processes ended before it'}"
                found.append(Target(part, f"{ranks} ranks", None, None, True, reason=reason))
    return found
