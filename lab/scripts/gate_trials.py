"""Measure, for each headline, how often the gate notices a slowdown by 1.3, and how often it fails without one.

    python lab/scripts/gate_trials.py lab/results/baseline.json --runs 10

In every second run all are slowed; each is measured apart from the others, so that is as many trials.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from ringweave_lab.bench import gate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baseline", type=Path)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--only", nargs="+", help="names of headlines; all by default")
    given = parser.parse_args()
    held = gate.baseline(given.baseline)
    if not held:
        raise SystemExit(f"{given.baseline} has nothing of this processor: run ringweave bench --gate with --update")
    wanted = [each for each in gate.HEADLINES if given.only is None or each.name in given.only]
    headlines = gate.prepared(wanted)
    names = [each.name for each in headlines]
    caught, passed = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    for number in range(given.runs):
        for slow in ((), names):
            start = time.perf_counter()
            found = gate.run(held, slow=slow, headlines=headlines)
            for each in found:
                passed[each.headline.name] += not slow and each.passed
                caught[each.headline.name] += bool(slow) and not each.passed
            said = ", ".join(f"{each.headline.name} {each.slower:.2f}" for each in found)
            print(
                f"{number + 1:2} {'slowed' if slow else 'as is ':6} {time.perf_counter() - start:4.0f} s  {said}",
                flush=True,
            )
    for name in names:
        print(f"{name:10} passed {passed[name]} of {given.runs}, caught {caught[name]} of {given.runs}")


if __name__ == "__main__":
    main()
