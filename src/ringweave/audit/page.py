"""Write an audit as one HTML file: a table and a picture of each mask that differs, without scripts or links."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from ..errors import UnsupportedError, message
from .targets import Result
from .verdict import Comparison

#: Colours of pairs that are attended as expected, missing, or extra.
COLOURS = {"as promised": "#5b7fa6", "missing": "#d98a00", "extra": "#c23b4e"}

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Audit of {{ name }}</title>
<style>
:root { color-scheme: light dark; --line: #d0d7de; --faint: #59636e; --bad: #c23b4e; }
@media (prefers-color-scheme: dark) { :root { --line: #3d444d; --faint: #9198a1; --bad: #ff7b8a; } }
body { font: 15px/1.5 ui-sans-serif, -apple-system, "Segoe UI", sans-serif; max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; }
th, td { text-align: left; vertical-align: top; padding: .35rem .7rem .35rem 0; border-bottom: 1px solid var(--line); }
.bad { color: var(--bad); font-weight: 600; } .faint { color: var(--faint); }
figure { display: inline-block; margin: .5rem 1.5rem .5rem 0; max-width: 20rem; vertical-align: top; }
figcaption { font-size: .85rem; } svg { background: #fff; border: 1px solid var(--line); border-radius: 4px; }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; border-radius: 2px; }
</style></head><body>
<h1>Which mask really ran: {{ name }}</h1>
<p>{{ summary }} Every attended pair was found from outputs, not from source code, at {{ tokens }} tokens.</p>
<table><thead><tr><th>implementation</th><th>case</th><th></th><th>found</th></tr></thead><tbody>
{% for r in results %}
<tr><td>{{ r.implementation or "its own" }}</td><td>{{ r.case }}</td>
<td>{% if r.reason and not r.failed %}<span class="faint">-</span>{% elif r.agrees %}agrees
{%- else %}<span class="bad">differs</span>{% endif %}</td>
<td>{% for line in lines(r) %}<div>{{ line }}</div>{% endfor %}</td></tr>
{% endfor %}
</tbody></table>
{% if pictures %}
<h2>Masks that differ</h2>
<p>Queries downwards, keys to the right.{% for name, colour in colours.items() %}
<span class="key" style="background: {{ colour }}"></span>{{ name }}{% endfor %}</p>
{% for caption, svg in pictures %}
<figure>{{ svg|safe }}<figcaption>{{ caption }}</figcaption></figure>
{% endfor %}
{% endif %}
</body></html>
"""


def write_page(name: str, results: Sequence[Result], tokens: int, path: str | Path) -> Path:
    """Write the page and return its path.

    Raises:
        UnsupportedError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ModuleNotFoundError:
        raise UnsupportedError(
            message("jinja2", "not installed", "jinja2 for the page", "pip install ringweave[audit].")
        ) from None
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text = environment.from_string(_PAGE).render(
        name=name, results=results, tokens=tokens, lines=lines, colours=COLOURS, summary=summary(results),
        pictures=list(_pictures(results)),
    )  # fmt: skip
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def summary(results: Iterable[Result]) -> str:
    """Return a sentence with the number of cases that differ."""
    looked = [result for result in results if result.audit is not None or result.failed]
    wrong = sum(not result.agrees for result in looked)
    return f"{wrong} of {len(looked)} cases differ." if wrong else f"All {len(looked)} cases agree."


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
    if result.audit.bypassed:
        said.append(f"a fused path bypasses a module: the output is off by {result.audit.bypassed:.2g}")
    return said or ["no attention call was seen"]


def _pictures(results: Sequence[Result]) -> Iterable[tuple[str, str]]:
    for result in results:
        seen = set()
        for layer in result.audit.layers if result.audit is not None else ():
            if layer.comparison is None or layer.agrees or layer.sentence in seen:
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
