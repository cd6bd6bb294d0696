"""Write an audit as one HTML file: a table and a picture of each mask that differs, without scripts or links."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from torch import Tensor

from .counts import WORDS
from .model_zoo import Result, counts
from .verdict import Comparison

#: Colours of pairs that are attended as expected, missing, or extra.
COLOURS = {"as promised": "#5b7fa6", "missing": "#d98a00", "extra": "#c23b4e"}

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Audit of {{ name }}</title>
<style>
:root { color-scheme: light dark; --back: #ffffff; --text: #1f2328; --line: #d0d7de; --faint: #59636e; --bad: #b3261e;
  --good: #1a7f37; --cells: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --back: #0d1117; --text: #e6edf3; --line: #3d444d; --faint: #9198a1;
  --bad: #ff7b8a; --good: #56d364; --cells: #21262d; } }
body { font: 15px/1.5 ui-sans-serif, -apple-system, "Segoe UI", sans-serif; max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; background: var(--back); color: var(--text); overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; }
th, td { text-align: left; vertical-align: top; padding: .35rem .7rem .35rem 0; border-bottom: 1px solid var(--line); }
th, td:not(:last-child) { overflow-wrap: normal; white-space: nowrap; }
.bad { color: var(--bad); font-weight: 600; } .good { color: var(--good); } .faint { color: var(--faint); }
figure { display: inline-block; margin: .5rem 1.5rem .5rem 0; max-width: min(20rem, 100%); vertical-align: top; }
figcaption { font-size: .85rem; }
svg { background: var(--cells); border: 1px solid var(--line); border-radius: 4px; max-width: 100%; height: auto;
  box-sizing: border-box; }
.key { white-space: nowrap; margin-left: 1em; }
.key span { display: inline-block; width: .8em; height: .8em; margin-right: .3em; border-radius: 2px; }
@media (max-width: 40rem) {
  body { margin: 1rem auto; } h1 { font-size: 1.5rem; } thead { display: none; }
  tr { display: block; padding: .5rem 0; border-bottom: 1px solid var(--line); }
  td { display: inline-block; border: 0; padding: 0 1rem 0 0; } td:last-child { display: block; }
}
</style></head><body>
<h1>Which mask really ran: {{ name }}</h1>
<p>{{ summary }} Every attended pair was found from outputs, not from source code, at {{ tokens }} tokens.</p>
<table><thead><tr><th>implementation</th><th>case</th><th></th><th>found</th></tr></thead><tbody>
{% for r in results %}
<tr><td>{{ r.implementation or "its own" }}</td><td>{{ r.case }}</td>
<td class="{{ {True: "good", False: "bad", None: "faint"}[r.agrees] }}">{{ words[r.agrees] }}</td>
<td>{% for line in lines(r) %}<div>{{ line }}</div>{% endfor %}</td></tr>
{% endfor %}
</tbody></table>
{% if pictures %}
<h2>Masks that differ</h2>
<p>Queries downwards, keys to the right.{% for name, colour in colours.items() %}
<span class="key"><span style="background: {{ colour }}"></span>{{ name }}</span>{% endfor %}</p>
{% for caption, svg in pictures %}
<figure>{{ svg|safe }}<figcaption>{{ caption }}</figcaption></figure>
{% endfor %}
{% endif %}
</body></html>
"""


def write_page(name: str, results: Sequence[Result], tokens: int, path: str | Path) -> Path:
    """Write the page and return its path."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text = environment.from_string(_PAGE).render(
        name=name, results=results, tokens=tokens, lines=lines, colours=COLOURS, summary=summary(results), words=WORDS,
        pictures=list(_pictures(results)),
    )  # fmt: skip
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def summary(results: Iterable[Result]) -> str:
    """Return a sentence with the counts of cases."""
    return counts(results).sentence("cases")


def lines(result: Result) -> list[str]:
    """Describe a result, one line for all layers with the same verdict."""
    if result.audit is None:
        return [result.reason]
    alike: dict[str, list[str]] = {}
    for layer in result.audit.layers:
        alike.setdefault(layer.sentence, []).append(layer.name)
    said = []
    for sentence, names in alike.items():
        who = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        said.append(f"{who}: {sentence}")
    return said + result.audit.remarks()


def _pictures(results: Sequence[Result]) -> Iterable[tuple[str, str]]:
    for result in results:
        seen = set()
        for layer in result.audit.layers if result.audit is not None else ():
            if layer.comparison is None or layer.agrees is not False or layer.sentence in seen:
                continue
            seen.add(layer.sentence)
            place = f"{result.implementation or 'its own'}, {result.case}, {layer.name}"
            b, h = layer.comparison.offenders[0][:2] if layer.comparison.offenders else (0, 0)
            yield f"{place}, row {b}, head {h}: {layer.sentence}", svg(layer.comparison, b, h)


def svg(comparison: Comparison, row: int = 0, head: int = 0) -> str:
    """Draw the expected and the attended pairs of one batch element and head as an SVG.

    Example:
        >>> found = rw.audit.compare(rw.Full().to_dense(8), rw.Causal())
        >>> svg(found).count("<path")
        2
    """
    parts = {
        "as promised": comparison.found & comparison.promised,
        "missing": comparison.missing,
        "extra": comparison.extra,
    }
    queries, keys = comparison.found.shape[2:]
    scale = max(1, 280 // max(queries, keys))
    drawn = "".join(
        f'<path fill="{COLOURS[name]}" d="{_cells(mask[row, head])}"/>'
        for name, mask in parts.items()
        if bool(mask[row, head].any())
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {keys} {queries}" width="{keys * scale}" '
        f'height="{queries * scale}" shape-rendering="crispEdges" role="img">'
        f"<title>{comparison.sentence.replace('<', '').replace('>', '').replace('&', 'and')}</title>{drawn}</svg>"
    )


def _cells(mask: Tensor) -> str:
    """Return the SVG path of a mask: each run of keys in a row is a rectangle."""
    parts = []
    for y, row in enumerate(mask.tolist()):
        x = 0
        while x < len(row):
            end = x
            while end < len(row) and row[end]:
                end += 1
            if end > x:
                parts.append(f"M{x} {y}h{end - x}v1h{x - end}z")
            x = max(end, x + 1)
    return "".join(parts)
