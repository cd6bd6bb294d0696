"""``ringweave audit``: find the masks that a model's layers or a kernel really apply."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.table import Table
from rich.text import Text

from ringweave import files, units
from ringweave.cli import terminal
from ringweave.errors import UnsupportedError

from . import conformance, kernels
from .counts import WORDS, Counts
from .html_report import lines, summary, write_page
from .model_zoo import CASES, counts, run
from .model_zoo import target as find_target


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("audit")(audit)
    app.command("audit kernels")(audit_kernels)


def audit(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="Transformers model type, configuration or id; module:function that returns a model; or a saved "
            "model.",
        ),
    ] = None,
    implementation: Annotated[
        str | None,
        typer.Option(
            "--implementation",
            "-i",
            metavar="NAMES",
            help="Implementations of attention, separated by commas, such as eager,sdpa,ringweave "
            "(default: eager,sdpa for transformers models).",
        ),
    ] = None,
    case: Annotated[
        str | None,
        typer.Option(
            "--case",
            "-c",
            metavar="NAMES",
            help="Cases, separated by commas: unpadded, left, right, packed, cached, static (default: all).",
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", "-n", min=8, max=512, metavar="N", help="Sequence length, 8 to 512.")
    ] = 24,
    layers: Annotated[int, typer.Option(min=1, metavar="N", help="Maximum number of layers of the small model.")] = 6,
    trust: Annotated[
        bool,
        typer.Option("--trust", help="Allow code from files to run: loading a saved model (a pickle) runs its code."),
    ] = False,
    kernel: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Check a kernel instead of a model: a function of (q, k, v, allowed or pattern).",
        ),
    ] = None,
    examples: Annotated[
        int, typer.Option(min=1, metavar="N", help="With --kernel: number of calls for each rule.")
    ] = 40,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write a page with pictures to an .html file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Find the pairs that each attention layer of a model attends, and compare them with its configuration.

    Models are built small, with random weights. The exit status is 0 if every case agrees, 1 if a case differs, and 2
    if none differs but a case was not examined: the model does not support it, raised an error, or has no expected
    pattern. Name the cases that a model supports with --case.
    """
    if (target is None) == (kernel is None):
        raise typer.BadParameter("Pass either a TARGET or --kernel.", param_hint="TARGET")
    here = str(Path.cwd())
    if ":" in (target or kernel or "") and not sys.flags.safe_path and here not in sys.path:
        # modules of the current folder are found, as by python -m
        sys.path.insert(0, here)
    if kernel is not None:
        _kernel(kernel, examples, as_json)
        return
    assert target is not None
    cases = tuple(CASES) if case is None else _names(case)
    for name in cases:
        if name not in CASES:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(CASES)}.", param_hint="'--case'")
    found = find_target(target, layers, trust=trust)
    usual = () if ":" in target or target.endswith((".pt", ".pth")) else ("eager", "sdpa")
    implementations = usual if implementation is None else _names(implementation)
    console = terminal.out()
    results = list(run(found, implementations, cases, tokens))
    if as_json:
        found_all = counts(results).as_dict() | {"results": [result.as_dict() for result in results]}
        text = json.dumps(found_all, indent=2)
        console.print(text, markup=False, soft_wrap=True)
    else:
        table = Table("implementation", "case", "", "found", box=None, pad_edge=False)
        for result in results:
            mark = Text(WORDS[result.agrees], _STYLES[result.agrees])
            table.add_row(result.implementation or "default", result.case, mark, Text("\n".join(lines(result))))
        console.print(table)
        console.print(summary(results), markup=False)
    if out is not None:
        write_page(target, results, tokens, out)
        if not as_json:
            console.print(f"wrote {out}", markup=False, soft_wrap=True)
    raise typer.Exit(counts(results).status)


_STYLES = {True: "green", False: "red", None: "dim"}


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _kernel(name: str, examples: int, as_json: bool) -> None:
    kernel = conformance.load(name)
    verdicts = [conformance.judge(kernel, rule, examples=examples) for rule in conformance.RULES]
    counts = Counts.of(each.holds for each in verdicts)
    console = terminal.out()
    if as_json:
        rules = [
            {
                "rule": each.rule, "holds": each.holds, "tried": each.tried, "refused": each.refused,
                "error": each.failure and each.failure.error, "script": each.failure and each.failure.script,
            }
            for each in verdicts
        ]  # fmt: skip
        text = json.dumps(counts.as_dict() | {"rules": rules}, indent=2)
        console.print(text, markup=False, soft_wrap=True)
    else:
        for each in verdicts:
            word = {True: "holds", False: "broken", None: "not examined"}[each.holds]
            mark = Text(word, _STYLES[each.holds])
            console.print(Text.assemble(mark, f"  {each.sentence}"), soft_wrap=True)
            if each.failure:
                console.print(f"\n{each.failure.error}\n\n{each.failure.script}\n", markup=False, soft_wrap=True)
        console.print(counts.sentence("rules"), markup=False)
    raise typer.Exit(counts.status)


def _times(ratio: float | str) -> str:
    """Format an error in units of its limit."""
    return ratio if isinstance(ratio, str) else f"{ratio:.2f}x" if ratio < 100 else f"{ratio:.0f}x"


_VERDICTS = {"right": "green", "wrong": "red", "raises": "red", "crashes": "red", "hangs": "red"}


def audit_kernels(
    device: Annotated[
        str, typer.Option(metavar="NAME", help="Device: cuda, cuda:1 or cpu (default: cuda, if there is one).")
    ] = "cuda" if torch.cuda.is_available() else "cpu",
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32"], typer.Option(metavar="TYPE", help="Type of q, k and v: bf16, fp16 or fp32.")
    ] = "bf16",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the table to a JSON file, row by row.")
    ] = None,
) -> None:
    """Judge the attention kernels of installed libraries by the float64 definition.

    The libraries are torch (SDPA and FlexAttention), flash-attn, attn-gym, NATTEN and xformers. The cases are published
    faults of kernels. Numbers are errors divided by their limits: twice the error of torch's math attention.
    """
    terminal.check_device(device)
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("device", device, "a device of this machine", "Pass --device cpu.")
    found, console = {**kernels.versions(device), "dtype": dtype}, terminal.out()
    rows: list[kernels.Row] = []
    for row in kernels.rows(device, dtype):
        rows.append(row)
        if out is not None:
            files.replace(out, json.dumps(found | {"rows": [each._asdict() for each in rows]}, indent=2) + "\n")
    console.print("Errors in units of their limits: above 1x is wrong, - was not computed.")
    table = Table("library", "case", "forward", "dq", "dk", "dv", "", box=None, pad_edge=False)
    for row in rows:
        numbers = ("" if row.case is None else "-" if number is None else _times(number) for number in row[-4:])
        mark = Text(row.verdict, _VERDICTS.get(row.verdict, "dim"))
        table.add_row(row.library, row.case or "", *numbers, mark)
    console.print(table)
    for (library, verdict, reason), n in Counter((row.library, row.verdict, row.reason) for row in rows).items():
        if reason is not None:
            console.print(f"{library}, {units.count(n, 'row')}, {verdict}: {reason}", markup=False, soft_wrap=True)
    counts = Counter(row.verdict for row in rows)
    console.print(f"{units.count(len(rows), 'row')}: {', '.join(f'{n} {name}' for name, n in counts.items())}.")
    console.print(", ".join(f"{name} {value}" for name, value in found.items() if value), markup=False)
