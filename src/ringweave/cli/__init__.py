"""The command ``ringweave``: pictures, explanations and checks in a shell; needs the extra ``cli``."""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    """Run the command line, or print which packages to install for it."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(  # noqa: T201  (rich may be missing)
            f"ringweave: the command line needs {' and '.join(missing)}. Run: pip install 'ringweave[cli]'",
            file=sys.stderr,
        )
        raise SystemExit(1)
    from .app import app

    app()
