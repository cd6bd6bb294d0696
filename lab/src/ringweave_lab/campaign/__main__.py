"""Run the campaign from the sources, without installation and in plain text.

PYTHONPATH=src:gpu/src:lab/src python -m ringweave_lab.campaign --out DIR
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import needs


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(words: Sequence[str] | None = None) -> int:
    """Run the campaign, and return 2 if it cannot begin on this machine, else 0."""
    parser = argparse.ArgumentParser(prog="ringweave_lab.campaign", description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for figures and the output of each unit")
    parser.add_argument("--device", default="cuda", help="GPU to measure: cuda or cuda:1")
    parser.add_argument("--seconds", type=float, default=540.0, help="time limit of this run")
    parser.add_argument("--tarball", type=Path, help="file that holds the figures after each unit; OUT.tar.gz")
    parser.add_argument("--caches", type=Path, help="folder for compiled kernels; in the temporary folder")
    parser.add_argument("--resume", action="store_true", help="continue the campaign of the folder")
    parser.add_argument("--dry", action="store_true", help="small sizes on the CPU instead of the GPU's work")
    given = vars(parser.parse_args(words))
    for line in needs.said():
        say(line)
    if needs.missing(needs.NEEDED):
        say("Install torch 2.11 or later, and set PYTHONPATH=src:gpu/src:lab/src to run from the sources.")
        return 2

    # imported after the checks, since importing torch takes seconds
    from ringweave.errors import RingweaveError

    from .campaign import conduct

    try:
        conduct(given.pop("out"), say=say, **given)
    except RingweaveError as error:
        say(str(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
