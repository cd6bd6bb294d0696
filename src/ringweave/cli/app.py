"""The application: its commands, and how an error ends it."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..bench.command import register
from ..errors import RingweaveError
from . import doctor, explain, show, simulation, terminal, tune


class Commands(TyperGroup):
    """The commands; an error of ringweave's own ends any of them with one line and exit code 2, no traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except RingweaveError as error:
            terminal.fail(str(error))
            raise typer.Exit(2) from None


app = typer.Typer(
    name="ringweave",
    cls=Commands,
    help="Exact block-sparse and dilated attention for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"ringweave {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command("show")(show.show)
app.command("explain")(explain.explain)
app.command("simulate")(simulation.simulated)
app.command("doctor")(doctor.doctor)
app.command("tune")(tune.tune)
register(app)
