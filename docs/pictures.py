"""Draw the documentation's pictures and the gallery of docs/patterns.md from the patterns.

The script also asks the backends which calls they support, for the table of docs/backends.md.

python docs/pictures.py            write docs/pictures/*.svg, the gallery and the table
python docs/pictures.py --check    write nothing; end with 1 where a committed file is stale
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path

import torch

import ringweave as rw
from ringweave.backends import BACKENDS
from ringweave.backends.backend import Backend
from ringweave.call import Call
from ringweave.parallel.planning.placement import contiguous, striped
from ringweave.patterns.declared import DECLARED, SECTIONS, Declared
from ringweave.plan import Branch, branches
from ringweave.program import unsupported_reason
from ringweave.terms import KINDS
from ringweave.terms.function import FUNCTION
from ringweave.units import count
from ringweave_audit.html_report import COLOURS

HERE = Path(__file__).parent
WRITTEN, END = "<!-- {}: written by docs/pictures.py -->", "<!-- end of {} -->"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One picture of the gallery.

    Attributes:
        name: Public name of the pattern or preset.
        code: Expression that builds the pattern.
        build: Function that builds the pattern.
        tokens: Number of queries and keys in the picture.
        heads: Number of query heads in the picture.
    """

    name: str
    code: str
    build: Callable[[], rw.Pattern]
    tokens: int = 1024
    heads: int = 1

    @property
    def file(self) -> str:
        return f"{self.name}.svg"


def triples(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return the mask of the gallery's TokenMask; the entry's code repeats the formula."""
    return (q // 64 + k // 64) % 3 == 0


#: Patterns whose declared example cannot be parsed from text.
BUILT: dict[str, Callable[[], rw.Pattern]] = {
    "BlockTable": lambda: rw.BlockTable(torch.eye(8).bool() | (torch.arange(8) == 2), block_size=128),
    "Selected": lambda: rw.Selected(
        (torch.arange(1024)[:, None] // 32 - torch.tensor([0, 1, 5, 12])).clamp(min=-1), block_size=32
    ),
    "TokenMask": lambda: rw.TokenMask(triples),
}


def entry(name: str, known: Declared) -> Entry:
    build = functools.partial(rw.patterns.parse, known.example) if known.text else BUILT[name]
    return Entry(name, known.example, build, known.tokens, known.heads)


GALLERY = {
    section: [entry(name, known) for name, known in sorted(DECLARED.items()) if known.section == section]
    for section in SECTIONS
}
ALGEBRA = [
    Entry(
        "window_and_sinks",
        "(SlidingWindow(192) | Sinks(32)) & Causal()",
        lambda: (rw.SlidingWindow(192) | rw.Sinks(32)) & rw.Causal(),
    ),
    Entry(
        "causal_without_segments",
        "Causal() & ~Segments(256)",
        lambda: rw.Causal() & ~rw.Segments(256),
    ),
    Entry(
        "window_or_dilated",
        "(SlidingWindow(6, 6) | Dilated(3, 8)) & Causal()",
        lambda: (rw.SlidingWindow(6, 6) | rw.Dilated(3, 8)) & rw.Causal(),
        tokens=64,
    ),
    Entry(
        "within_documents",
        "((SlidingWindow(96) | Sinks(32)) & Causal()).within(Documents([160, 480, 96, 288]))",
        lambda: ((rw.SlidingWindow(96) | rw.Sinks(32)) & rw.Causal()).within(rw.Documents([160, 480, 96, 288])),
    ),
]


# ---- the gallery -----------------------------------------------------------------------------------------------------


def reference(name: str) -> str:
    """Return the address of a name on the page of docs/api that describes it."""
    thing = DECLARED[name].make
    path = f"{thing.__module__}.{thing.__qualname__}"
    (page,) = (page for page in sorted((HERE / "api").glob("*.md")) if f"::: {path}\n" in page.read_text("utf-8"))
    return f"api/{page.name}#{path}"


def gallery() -> str:
    """Return the cards of all patterns and presets; the pictures state density, tiles and causality."""
    lines: list[str] = []
    for section, entries in GALLERY.items():
        lines += [f"## {section}", "", '<div class="gallery" markdown>', ""]
        for each in entries:
            sentence = " ".join((inspect.getdoc(DECLARED[each.name].make) or "").split("\n\n")[0].split())
            sentence = re.sub(r":\w+:`(?:ringweave\.)?([\w.]+)`", r"`\1`", sentence).replace("``", "`")
            wide = ' class="wide"' if each.heads > 1 else ""
            lines += [
                f"<div{wide} markdown>",
                "",
                f"### {each.name}",
                "",
                f"{sentence} [API]({reference(each.name)})",
                "",
                f"`{each.code}`",
                "",
                f"![{each.name}](pictures/{each.file})",
                "",
                "</div>",
                "",
            ]
        lines += ["</div>", ""]
    return "\n".join(lines)


# ---- diagrams --------------------------------------------------------------------------------------------------------

INK, FAINT, CARD, EDGE = "#1f2328", "#59636e", "#ffffff", "#d0d7de"
DARK, MIDDLE, LIGHT = "#0b3a75", "#5f8fc7", "#dce9f7"
HUES = ("#0b3a75", "#b4540a", "#2f7d4f", "#8a3f8f")
SANS = "ui-sans-serif, -apple-system, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, 'DejaVu Sans Mono', Consolas, monospace"


def card(width: int, height: int, title: str, parts: list[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" font-family="{SANS}" font-size="13" fill="{INK}">',
            f"<title>{escape(title)}</title>",
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="{CARD}" stroke="{EDGE}"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def text(x: float, y: float, words: str, rest: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {rest}>{escape(words)}</text>'


def grid(x: float, y: float, size: float, colours: list[list[str | None]], line: float = 0.5) -> list[str]:
    """Return a square of coloured cells with a frame."""
    rows, columns = len(colours), len(colours[0])
    high, wide = size / rows, size / columns
    parts = [
        f'<rect x="{x + j * wide:g}" y="{y + i * high:g}" width="{wide:g}" height="{high:g}" fill="{colour}" '
        f'stroke="{CARD}" stroke-width="{line:g}"/>'
        for i, row in enumerate(colours)
        for j, colour in enumerate(row)
        if colour is not None
    ]
    return [*parts, f'<rect x="{x:g}" y="{y:g}" width="{size:g}" height="{size:g}" fill="none" stroke="{FAINT}"/>']


def key(x: float, y: float, items: list[tuple[str, str]], step: int) -> list[str]:
    parts = []
    for i, (colour, words) in enumerate(items):
        parts.append(f'<rect x="{x + i * step:g}" y="{y}" width="13" height="13" fill="{colour}" stroke="{FAINT}"/>')
        parts.append(text(x + i * step + 19, y + 11, words, f'fill="{FAINT}" font-size="12"'))
    return parts


def flow() -> str:
    """Draw the way of a call from a pattern to the output."""
    boxes = [
        ("pattern", "which pairs may attend", "(head, query, key)"),
        ("plan", "which tiles are not empty", "full or partial"),
        ("backend", "computes the tiles", "dense_batched, sdpa, ..."),
        ("(out, lse)", "one per branch", "lse: log-sum-exp"),
        ("merge", "exact combination", "of the branches"),
    ]
    width, height, gap = 176, 78, 28
    parts = []
    for i, (name, first, second) in enumerate(boxes):
        x = 20 + i * (width + gap)
        fill, ink = (DARK, CARD) if name in ("pattern", "plan", "merge") else (LIGHT, INK)
        parts.append(f'<rect x="{x}" y="20" width="{width}" height="{height}" rx="6" fill="{fill}"/>')
        middle = f'text-anchor="middle" fill="{ink}"'
        parts.append(text(x + width / 2, 44, name, f'{middle} font-family="{MONO}" font-weight="600" font-size="15"'))
        parts.append(text(x + width / 2, 66, first, f'{middle} font-size="12"'))
        parts.append(text(x + width / 2, 83, second, f'{middle} font-size="12"'))
        if i:
            end = x - 5
            parts.append(
                f'<path d="M{x - gap + 4} 59H{end}M{end - 6} 54L{end} 59L{end - 6} 64" fill="none" stroke="{FAINT}" '
                f'stroke-width="1.6"/>'
            )
    return card(20 * 2 + 5 * width + 4 * gap, 118, "pattern, plan, backend, (out, lse), merge", parts)


def tiles() -> str:
    """Draw the pairs of a relation beside the tiles of its plan."""
    tokens, side = 128, 16
    pattern = (rw.SlidingWindow(40) | rw.Sinks(6)) & rw.Causal()
    plan = pattern.plan(tokens, tile=side)
    dense = pattern.to_dense(tokens)[0, 0]
    kinds: list[list[str | None]] = [[None] * plan.kv_tiles for _ in range(plan.q_tiles)]
    for row, column, bits in zip(plan.tile_rows().tolist(), plan.col.tolist(), plan.mask_id.tolist(), strict=True):
        kinds[row][column] = DARK if bits < 0 else MIDDLE
    size, left, right, top = 320, 40, 420, 74
    parts = [
        text(left, 34, repr(pattern), f'font-family="{MONO}" font-size="14" font-weight="600"'),
        text(left, 58, f"pattern: {int(dense.sum())} of {tokens**2} pairs allowed", f'fill="{FAINT}"'),
        text(right, 58, f"plan: {plan.nnz} of {plan.q_tiles * plan.kv_tiles} tiles not empty", f'fill="{FAINT}"'),
    ]
    # one rectangle for each run of allowed keys keeps the file small
    step = size / tokens
    for i, row in enumerate(dense.tolist()):
        j = 0
        while j < tokens:
            end = j
            while end < tokens and row[end]:
                end += 1
            if end > j:
                parts.append(
                    f'<rect x="{left + j * step:g}" y="{top + i * step:g}" width="{(end - j) * step:g}" '
                    f'height="{step:g}" fill="{DARK}" shape-rendering="crispEdges"/>'
                )
            j = max(end, j + 1)
    lines = "".join(f"M{left + i * size / 8:g} {top}v{size}M{left} {top + i * size / 8:g}h{size}" for i in range(1, 8))
    parts.append(f'<path d="{lines}" stroke="{EDGE}" fill="none"/>')
    parts += grid(left, top, size, [[None]])
    parts += grid(right, top, size, kinds, line=2)
    items = [(DARK, "full"), (MIDDLE, f"partial ({plan.mask_words.shape[0]} distinct masks)"), (CARD, "empty")]
    for x, item in zip((right, right + 62, right + 256), items, strict=True):
        parts += key(x, top + size + 14, [item], 0)
    parts.append(text(left, top + size + 25, "one query a row, one key a column", f'fill="{FAINT}" font-size="12"'))
    return card(right + size + 46, top + size + 44, f"{pattern!r}: allowed pairs and tiles", parts)


def views() -> str:
    """Draw a dilated relation in token order and in its strided views."""
    tokens, window, rate = 32, 2, 4
    pattern = rw.Dilated(window, rate)
    dense = pattern.to_dense(tokens)[0, 0].tolist()
    whole: list[list[str | None]] = [
        [HUES[i % rate] if allowed else None for j, allowed in enumerate(row)] for i, row in enumerate(dense)
    ]
    inner = rw.SlidingWindow(window, window).to_dense(tokens // rate)[0, 0].tolist()
    size, left, right, top = 320, 40, 430, 74
    parts = [
        text(left, 34, repr(pattern), f'font-family="{MONO}" font-size="14" font-weight="600"'),
        text(left, 58, "in token order: every tile partial", f'fill="{FAINT}"'),
        text(right, 34, repr(rw.SlidingWindow(window, window)), f'font-family="{MONO}" font-size="14"'),
        text(right, 58, "in each view x[:, :, o::4]: a dense window", f'fill="{FAINT}"'),
        *grid(left, top, size, whole),
    ]
    for offset in range(rate):
        x, y = right + offset % 2 * 168, top + offset // 2 * 168
        coloured: list[list[str | None]] = [[HUES[offset] if allowed else None for allowed in row] for row in inner]
        parts += grid(x, y, 134, coloured)
        parts.append(text(x, y + 148, f"o = {offset}", f'fill="{FAINT}" font-size="12"'))
    return card(right + 168 + 134 + 40, top + size + 30, f"{pattern!r} and its strided views", parts)


def mixture() -> str:
    """Draw how often a key counts in head 0 of a LongNet and in the union of its branches."""
    tokens = 32
    counts = rw.LongNet([8, 32], [1, 4]).to_dense(tokens)[0, 0]
    union = (rw.Segments(8) | rw.Strided(4) & rw.patterns.Periodic(4, 0, 1)).to_dense(tokens)[0, 0]
    assert torch.equal(counts > 0, union)
    size, left, right, top = 320, 40, 420, 74
    shade = {0: None, 1: MIDDLE, 2: DARK}
    mono = f'font-family="{MONO}" font-size="14" font-weight="600"'
    parts = [
        text(left, 34, "LongNet([8, 32], [1, 4]), head 0", mono),
        text(left, 58, "mixture: softmax over the multiset of keys", f'fill="{FAINT}"'),
        text(right, 34, "Segments(8) | Strided(4) & ...", mono),
        text(right, 58, "union: a key counts once", f'fill="{FAINT}"'),
        *grid(left, top, size, [[shade[n] for n in row] for row in counts.tolist()]),
        *grid(right, top, size, [[shade[n] for n in row] for row in union.int().tolist()]),
        *key(left, top + size + 14, [(MIDDLE, "counts once"), (DARK, "counts twice")], 120),
    ]
    return card(right + size + 40, top + size + 44, "LongNet's mixture and the union of its branches", parts)


def exchange() -> str:
    """Draw the tiles of a window on four ranks, coloured by the rank that holds the keys."""
    side, ranks, size, top = 16, 4, 320, 74
    pattern = rw.SlidingWindow(3 * side) & rw.Causal()
    plan = pattern.plan(16 * side, tile=side)
    parts = [
        text(40, 34, f"{plan.q_tiles} tiles on {ranks} ranks, a causal window of 3", 'font-weight="600" font-size="14"')
    ]
    for place, left in ((contiguous, 40), (striped, 420)):
        placement = place(16 * side, ranks, side)
        cells: list[list[str | None]] = [[None] * plan.kv_tiles for _ in range(plan.q_tiles)]
        received: set[tuple[int, int]] = set()
        for row, column in zip(plan.tile_rows().tolist(), plan.col.tolist(), strict=True):
            here, there = placement.owner[row], placement.owner[column]
            cells[row][column] = HUES[here] if here == there else LIGHT
            if here != there:
                received.add((int(here), column))
        most = max(sum(rank == each for rank, _ in received) for each in range(ranks))
        words = f"{placement.name}: the busiest rank receives {count(most, 'tile')}"
        parts.append(text(left, 58, words, f'fill="{FAINT}"'))
        parts += grid(left, top, size, cells, line=2)
    items = [(hue, f"rank {rank}'s own keys") for rank, hue in enumerate(HUES)] + [(LIGHT, "another rank's")]
    parts += key(40, top + size + 14, items, 142)
    return card(
        420 + size + 40,
        top + size + 44,
        "Keys that a window needs from other ranks: contiguous and striped placement",
        parts,
    )


def audited() -> str:
    """Draw the attended pairs of three lost masks, and mark the extra ones."""
    size, step, top = 216, 256, 62
    padded = rw.KeyPadding(24, torch.tensor([8]))
    finds = {
        "packed documents": (rw.Causal(), rw.Causal().within(rw.Documents([8, 16]))),
        "a window of 8": (rw.Causal(), rw.SlidingWindow(7)),
        "a window, padded on the left": (rw.Causal(), rw.SlidingWindow(7) & padded),
    }
    parts = []
    for n, (words, (found, asked)) in enumerate(finds.items()):
        compared = rw.audit.compare(found.to_dense(24), asked)
        cells: list[list[str | None]] = [
            [
                COLOURS["extra"] if extra else COLOURS["as promised"] if seen else None
                for extra, seen in zip(*rows, strict=True)
            ]
            for rows in zip(compared.extra[0, 0].tolist(), compared.found[0, 0].tolist(), strict=True)
        ]
        parts.append(text(40 + n * step, 40, words, 'font-weight="600" font-size="14"'))
        parts += grid(40 + n * step, top, size, cells)
    parts += key(40, top + size + 14, [(COLOURS[name], name) for name in ("as promised", "extra")], 120)
    return card(40 + 3 * step, top + size + 44, "Attended pairs: as promised, and extra", parts)


DIAGRAMS = {
    "flow.svg": flow, "tiles.svg": tiles, "views.svg": views, "mixture.svg": mixture, "exchange.svg": exchange,
    "audited.svg": audited,
}  # fmt: skip


# ---- files -----------------------------------------------------------------------------------------------------------


def files() -> dict[Path, str]:
    """Return every file that this script writes, with its text."""
    found = {HERE / "pictures" / name: draw() for name, draw in DIAGRAMS.items()}
    for each in [*(each for entries in GALLERY.values() for each in entries), *ALGEBRA]:
        found[HERE / "pictures" / each.file] = each.build().plot(each.tokens, heads=each.heads)
    for name, what, body in (("patterns.md", "gallery", gallery()), ("backends.md", "what each can", abilities())):
        page, begin, end = HERE / name, WRITTEN.format(what), END.format(what)
        before, rest = page.read_text(encoding="utf-8").split(begin)
        found[page] = f"{before}{begin}\n\n{body}\n{end}{rest.split(end)[1]}"
    return found


# a call that every backend can run on its device, and the changes that are tried one by one
USUAL = Call(1, 8, 8, 4096, 4096, 64, 64, torch.float32, "cpu")
CHANGES: dict[str, dict[str, object]] = {
    "gradients": {"needs_grad": True},
    "float64": {"dtype": torch.float64},
    "float16, bfloat16": {"dtype": torch.bfloat16},
    "grouped queries": {"kv_heads": 2},
    "Dv other than D": {"value_dim": 96},
    "D of 100": {"head_dim": 100, "value_dim": 100},
    "D of 512": {"head_dim": 512, "value_dim": 512},
    **{f"`{name}`": {"features": frozenset({name})} for name in sorted(KINDS)},
    "gradients of a term's table": {"features": frozenset({"DistanceBias"}), "learned": 8, "needs_grad": True},
    "any score function": {"features": frozenset({FUNCTION})},
    "dropout": {"features": frozenset({"dropout"})},
    "keys in pages": {"paged": True},
    "keys in 8 bits": {"kv_dtype": torch.int8},
}


def refuses(backend: Backend, call: Call, branch: Branch) -> bool:
    """Return whether a backend cannot run a branch, for another reason than an absent package."""
    reason = unsupported_reason(backend, call, branch)
    return reason is not None and "pip install" not in reason


def abilities() -> str:
    """Return the table of backends over changes of one call; GPU backends are asked about CUDA tensors."""
    length = USUAL.nq
    chosen = rw.Selected(torch.zeros(length, 1, dtype=torch.int32))
    patterns = rw.SlidingWindow(256), rw.Full(), chosen
    (sparse,), (dense,), (lists,) = (branches(each, length, length) for each in patterns)
    # the changes are those of a dense call, or of lists where a backend computes nothing else
    cases = [(device, branch) for branch in (dense, lists) for device in ("cpu", "cuda")]
    usual = {
        backend: next(
            (each for each in cases if not refuses(backend, dataclasses.replace(USUAL, device=each[0]), each[1])), None
        )
        for backend in BACKENDS.values()
    }
    columns = {backend: case for backend, case in usual.items() if case is not None}
    lines = ["| | " + " | ".join(f"`{each.name}`" for each in columns) + " |", "|---" * (1 + len(columns)) + "|"]
    asked: dict[str, tuple[Call, Branch | None]] = {
        "a sparse pattern": (USUAL, sparse), "lists of chosen keys": (USUAL, lists),
    }  # fmt: skip
    asked |= {name: (dataclasses.replace(USUAL, **change), None) for name, change in CHANGES.items()}  # type: ignore[arg-type]
    for name, (case, branch) in asked.items():
        said = []
        for backend, (device, computed) in columns.items():
            changed = dataclasses.replace(case, device=device)
            said.append("" if refuses(backend, changed, branch or computed) else "yes")
        lines.append(f"| {name} | " + " | ".join(said) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 where a file is stale")
    check = parser.parse_args().check
    wanted = files()
    stale = [path for path, body in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != body]
    left_over = sorted(set((HERE / "pictures").glob("*")) - set(wanted))
    if check:
        for path in [*stale, *left_over]:
            print(f"stale: {path.relative_to(HERE.parent)}; run python docs/pictures.py", file=sys.stderr)
        return 1 if stale or left_over else 0
    (HERE / "pictures").mkdir(exist_ok=True)
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    for path in left_over:
        path.unlink()
    print(f"{len(wanted)} files, {len(stale)} written, {len(left_over)} removed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
