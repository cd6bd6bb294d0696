"""``ringweave explain``: what a call would compute, with which backends and why, and what it costs."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import torch
import typer

from ..explain import explain as explained
from ..patterns import parse
from . import terminal
from .show import Heads, PatternText, Tokens


def explain(
    pattern: PatternText,
    tokens: Tokens,
    heads: Heads = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key heads. [default: as many as query heads]")] = None,
    head_dim: Annotated[int, typer.Option(min=1, help="Dimension of a head.")] = 64,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16", "float64"], typer.Option(help="Type of q, k and v.")
    ] = "float32",
    device: Annotated[str, typer.Option(help="Where they would be: cpu, cuda, mps; it need not exist here.")] = "cpu",
    backend: Annotated[str, typer.Option(help="'auto', or a backend by name.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Say what attention over a pattern would compute and cost; nothing is run."""
    try:
        torch.device(device)
    except RuntimeError:
        raise typer.BadParameter(f"{device!r} is no device of PyTorch", param_hint="'--device'") from None
    relation = parse(pattern)
    facts = explained(
        relation,
        tokens,
        heads=heads or relation.extents()[1] or 1,
        kv_heads=kv_heads,
        head_dim=head_dim,
        batch=relation.extents()[0] or 1,
        dtype=getattr(torch, dtype),
        device=device,
        backend=backend,
        as_dict=as_json,
    )
    text = json.dumps(facts, indent=2) if as_json else facts
    terminal.out().print(text, markup=False, soft_wrap=True)
