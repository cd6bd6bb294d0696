"""``ringweave bench --gate``: find slowdowns against stored ratios."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ringweave.cli import terminal

from . import gate
from .cliffs import CLIFFS
from .command import new_table


def gated(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File with the ratios of each processor.")],
    update: Annotated[bool, typer.Option("--update", help="Store the current ratios of this processor.")] = False,
    slow: Annotated[
        list[str] | None,
        typer.Option(metavar="RATIO", help="Slow this ratio down by 1.3 to test the gate; may be repeated."),
    ] = None,
) -> None:
    """Compare ratios of time with stored ones and with bounds; exit with 1 if one is larger. Five minutes at most."""
    names = [each.name for each in gate.HEADLINES]
    for name in slow or ():
        if name not in names:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(names)}", param_hint="--slow")
    console = terminal.out()
    before = gate.baseline(file)
    with console.status("starting") as status:

        def say(text: str) -> None:
            status.update(escape(text))

        if update:
            after = gate.update(file, say)
        else:
            verdicts = gate.run(before, say, slow=slow or (), headlines=(*gate.HEADLINES, *CLIFFS))
    if update:
        _print_baseline(console, before, after)
        console.print(f"wrote {file}", markup=False, soft_wrap=True)
        return
    _print_verdicts(console, verdicts)
    missing = [name for name in names if name not in before]
    if missing:
        lacking = f"nothing of this processor for {', '.join(missing)}" if before else "nothing of this processor"
        console.print(f"{file} has {lacking}: that is held to nothing; --update adds it", markup=False, soft_wrap=True)
    if not all(found.passed for found in verdicts):
        raise typer.Exit(1)


def _print_baseline(console: Console, before: dict[str, gate.Held], after: dict[str, gate.Held]) -> None:
    console.print(gate.kind(), style="bold")
    table = new_table("", "ratio", "was", "is", "may grow by")
    for name, new in after.items():
        was = f"{before[name].ratio:.3f}" if name in before else "-"
        table.add_row(name, was, f"{new.ratio:.3f}", f"{new.tolerance - 1:.0%}")
    console.print(table)


def _print_verdicts(console: Console, verdicts: list[gate.Verdict]) -> None:
    console.print(gate.kind(), style="bold")
    table = new_table("", "ratio", "was", "is", "slower", "may be", "")
    for found in verdicts:
        held, slower, most = found.held, found.slower, found.headline.most
        verdict = "[green]ok[/green]" if found.within else "undecided" if found.passed else "[red]slower[/red]"
        told = ("-", "-", "-", "") if held is None or slower is None else (
            f"{held.ratio:.3f}", f"{slower:.2f} x", f"{held.tolerance:.2f} x", verdict,
        ) if most is None else ("-", "-", f"{most:.3g}", verdict)  # fmt: skip
        table.add_row(found.headline.name, told[0], f"{found.found:.3f}", *told[1:])
    console.print(table)
    worse = [found.headline for found in verdicts if not found.passed]
    for headline in worse:
        said = "slower than it was" if headline.most is None else f"more than {headline.most:.3g}"
        console.print(f"[red]{said}: {headline.name}[/red] ({headline.what})")
    if any(headline.most is None for headline in worse):
        console.print("Where that is meant, --update writes what is now.")
    stale = [found.headline.name for found in verdicts if found.stale]
    if stale:
        console.print(f"so much faster than it was that a slowdown would pass: {', '.join(stale)}; --update holds that")
