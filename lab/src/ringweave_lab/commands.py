"""The commands that the laboratory adds to ``ringweave``."""

from __future__ import annotations

import typer

from . import batch_invariance
from .bench import command as bench
from .bench.gate_command import gated
from .campaign.command import campaigned
from .demo.command import demo
from .explorer import explore
from .profile.command import profile
from .simulation.command import simulated
from .tune.command import command as tuned


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("bench")(bench.bench)
    app.command("bench page")(bench.page)
    app.command("bench --gate")(gated)
    app.command("bench campaign")(campaigned)
    app.command("bits")(batch_invariance.command)
    app.command("demo")(demo)
    app.command("explore")(explore)
    app.command("profile")(profile)
    app.command("simulate")(simulated)
    app.command("tune")(tuned)
