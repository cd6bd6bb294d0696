"""Parts of a decoding step, and the runs of lengths that share a plan.

A decoding step has one query, at the position of the last key. Each summand of its pattern is a part. A relation by
residue is computed in the strided view of the last key, in which it is a step again. Lengths with one plan form a run,
so a program that was made for one length of a run computes the others.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from ..cache import PATTERNS
from ..errors import PatternError
from ..patterns import Pattern
from ..patterns.base import DistanceProfile
from .branches import Branch, Spacing, summands
from .tile_size import default_tile_size

# approximate bytes of an entry about a pattern
_PATTERN_BYTES = 2048


class Run(NamedTuple):
    """A run of decoding steps that share a plan, except for the tiles that each step skips.

    Attributes:
        key: Key that is equal for all steps of the run.
        first: The first tile that a step may skip.
        behind: Number of keys that this step skips from there on.
    """

    key: Hashable
    first: int
    behind: int


class StepPart(NamedTuple):
    """A summand of a decoding step, in token order or in the strided view of the last key.

    Attributes:
        pattern: The relation, on positions of the view.
        rate: Distance in tokens between the keys of the view; 1 in token order.
        first: The first key of the view, as an index into k.
        keys: Number of keys in the view.
        spacing: Places of the keys in the whole, for a relation by residue.
        run: The run of the view's lengths.
    """

    pattern: Pattern
    rate: int
    first: int
    keys: int
    spacing: Spacing | None
    run: Run

    @property
    def key(self) -> Hashable:
        """Key that is equal for all steps in which this part shares a plan."""
        return self.rate, self.first, self.run.key

    def alone(self) -> StepPart:
        """Return the part of this length alone, which skips no keys."""
        return self._replace(run=Run("alone", 0, 0))

    def branch(self, heads: int, batch: int, tile_size: tuple[int, int] | None) -> Branch:
        """Return the branch that computes the part over the keys that its run does not skip."""
        near = self.keys - self.run.behind
        place = (0, heads, 1), self.rate, 0, self.first
        return Branch(self.pattern, *place, 1, near, near - 1, batch, tile_size=tile_size, spacing=self.spacing)


class _Summand(NamedTuple):
    pattern: Pattern
    look: DistanceProfile | None


def parts_of_step(spec: str, keys: int, kv_tile: int, views: bool) -> tuple[StepPart, ...]:
    """Return the parts of a decoding step with one query at the last key; empty for a mixture.

    Args:
        spec: Text of a pattern without tables.
        keys: Number of keys.
        kv_tile: Keys in a tile of the whole.
        views: Whether strided views of the keys may be taken; pages have none.
    """
    found: tuple[_Summand, ...] | None = PATTERNS.get(("summands", spec))
    if found is None:
        from ..patterns.reader import rebuild

        pattern = rebuild(spec, ())
        listed = summands(pattern) if pattern.combinable else ()
        found = tuple(_Summand(part, part.distance_profile()) for part in listed)
        PATTERNS.put(("summands", spec), found, _PATTERN_BYTES)
    return tuple([_part(part, look, keys, kv_tile, views) for part, look in found])


def _part(pattern: Pattern, look: DistanceProfile | None, keys: int, kv_tile: int, views: bool) -> StepPart:
    rate = pattern.residue_rate
    if rate == 1:
        return StepPart(pattern, 1, 0, keys, None, _run(look, keys, kv_tile))
    inside = _in_view(pattern, keys, kv_tile) if views else None
    return inside or StepPart(pattern, 1, 0, keys, Spacing(0, 1, kv_tile), _run(look, keys, kv_tile))


def _in_view(pattern: Pattern, keys: int, kv_tile: int) -> StepPart | None:
    """Return the part in the view of the last key; None if its tiles would change bits, or it has no such view."""
    rate = pattern.residue_rate
    first = (keys - 1) % rate
    count = -(-(keys - first) // rate)
    tile = default_tile_size(count)
    if count > tile and tile * rate % kv_tile:
        return None
    key = "view", pattern.spec, rate, first
    found: tuple[_Summand, ...] | None = PATTERNS.get(key)
    if found is None:
        inside = pattern.restride(rate, first)
        found = () if inside is None or inside.tile_size else (_Summand(inside, inside.distance_profile()),)
        PATTERNS.put(key, found, _PATTERN_BYTES)
    for inside, look in found:
        try:
            inside.check(1, count, count - 1)
        except PatternError:
            # a table's last block may have no token in the view
            return None
        return StepPart(inside, rate, first, count, Spacing(first % kv_tile, rate, kv_tile), _run(look, count, tile))
    return None


def _run(look: DistanceProfile | None, keys: int, kv_tile: int) -> Run:
    """Return the run of a step; a pattern that does not depend on distance has a run for each length.

    Steps that attend all keys share a plan while the keys fill the same number of tiles, since all tiles are full.
    Steps of a window share a plan if they end at the same place in a tile.
    """
    if look is None:
        return Run((kv_tile, "alone", keys), 0, 0)
    if keys - 1 <= look.every:
        return Run((kv_tile, -(-keys // kv_tile)), 0, 0)
    first = -(-look.first // kv_tile)
    # at least one whole tile is not skipped
    behind = min((keys - 1 - look.back) // kv_tile - first, (keys - 1) // kv_tile - 1) * kv_tile
    return (
        Run((kv_tile, "alone", keys), 0, 0)
        if look.far or behind < 0
        else Run((kv_tile, "last", keys - behind), first, behind)
    )
