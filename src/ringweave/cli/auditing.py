"""``ringweave audit``: which masks a model's layers, or a kernel, really have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from . import terminal


def audit(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="A transformers model type, configuration or id; module:function that makes a model; a saved model.",
        ),
    ] = None,
    implementation: Annotated[
        str | None, typer.Option("--implementation", "-i", help="Of attention, with commas: eager,sdpa,ringweave.")
    ] = None,
    case: Annotated[
        str | None, typer.Option("--case", "-c", help="unpadded,left,right,packed,cached,static (default: all).")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", "-n", min=8, max=512, help="Sequence length.")] = 24,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the small model, at most.")] = 6,
    trust: Annotated[
        bool, typer.Option("--trust", help="Run code that a saved model or a configuration brings; a pickle is code.")
    ] = False,
    kernel: Annotated[
        str | None, typer.Option(help="Check module:function instead, a kernel of (q, k, v, allowed or pattern).")
    ] = None,
    examples: Annotated[int, typer.Option(min=1, help="Calls that are drawn for each rule of --kernel.")] = 40,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write a page with pictures here: .html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Find which pairs every attention layer of a model attends, against what its configuration promises.

    Ends with status 1 where something differs. Models are made small, with random weights.
    """
    if (target is None) == (kernel is None):
        raise typer.BadParameter("give a TARGET, or --kernel", param_hint="TARGET")
    if kernel is not None:
        _kernel(kernel, examples, as_json)
        return
    from ..audit.page import lines, summary, write_page
    from ..audit.targets import CASES, run
    from ..audit.targets import target as find

    assert target is not None
    cases = tuple(CASES) if case is None else tuple(case.split(","))
    for name in cases:
        if name not in CASES:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(CASES)}", param_hint="--case")
    found = find(target, layers, trust=trust)
    usual = () if ":" in target or target.endswith((".pt", ".pth")) else ("eager", "sdpa")
    implementations = usual if implementation is None else tuple(implementation.split(","))
    console = terminal.out()
    results = list(run(found, implementations, cases, tokens))
    if as_json:
        text = json.dumps([result.as_dict() for result in results], indent=2)
        console.print(text, markup=False, soft_wrap=True)
    else:
        table = Table("implementation", "case", "", "found", box=None, pad_edge=False)
        for result in results:
            mark = Text("-", "dim") if result.reason and not result.failed else Text("agrees", "green")
            mark = mark if result.agrees else Text("differs", "red")
            table.add_row(result.implementation or "its own", result.case, mark, Text("\n".join(lines(result))))
        console.print(table)
        console.print(summary(results), markup=False)
    if out is not None:
        write_page(target, results, tokens, out)
        if not as_json:
            console.print(f"wrote {out}", markup=False, soft_wrap=True)
    if not all(result.agrees for result in results):
        raise typer.Exit(1)


def _kernel(name: str, examples: int, as_json: bool) -> None:
    from ..audit import conformance

    kernel = conformance.load(name)
    verdicts = [conformance.judge(kernel, rule, examples=examples) for rule in conformance.RULES]
    console = terminal.out()
    if as_json:
        figures = [
            {
                "rule": each.rule, "holds": each.failure is None, "tried": each.tried, "refused": each.refused,
                "error": each.failure and each.failure.error, "script": each.failure and each.failure.script,
            }
            for each in verdicts
        ]  # fmt: skip
        console.print(json.dumps(figures, indent=2), markup=False, soft_wrap=True)
    else:
        for each in verdicts:
            mark = Text("broken", "red") if each.failure else Text("holds", "green") if each.tried else Text("refused")
            refused = f", {each.refused} refused" if each.refused else ""
            console.print(Text.assemble(mark, f"  {each.says} ({each.tried} calls{refused})"), soft_wrap=True)
            if each.failure:
                console.print(f"\n{each.failure.error}\n\n{each.failure.script}\n", markup=False, soft_wrap=True)
    if any(each.failure for each in verdicts):
        raise typer.Exit(1)
