"""The counts of an audit: how many parts agreed, differed and were not examined."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: The word for each verdict.
WORDS = {True: "agrees", False: "differs", None: "not examined"}


@dataclass(frozen=True)
class Counts:
    """Counts of an audit's parts: the calls of a model, the cases of a command, or the rules of a kernel.

    Attributes:
        agreed: Number of parts that were examined and agree.
        differing: Number of parts that were examined and differ.
        unexamined: Number of parts that were not examined.
    """

    agreed: int
    differing: int
    unexamined: int

    @classmethod
    def of(cls, verdicts: Iterable[bool | None]) -> Counts:
        """Count verdicts: True agrees, False differs, None was not examined."""
        each = list(verdicts)
        return cls(each.count(True), each.count(False), each.count(None))

    @property
    def examined(self) -> int:
        """Number of parts that were examined."""
        return self.agreed + self.differing

    @property
    def agrees(self) -> bool | None:
        """True if all parts agree, False if any differs, None if none differs and some or all were not examined."""
        return False if self.differing else None if self.unexamined or not self.agreed else True

    @property
    def status(self) -> int:
        """Exit status: 0 if all parts agree, 1 if any differs, 2 if none differs but some are unexamined."""
        return {True: 0, False: 1, None: 2}[self.agrees]

    def as_dict(self) -> dict[str, bool | int | None]:
        """Return the verdict and the four counts as values that can be written as JSON."""
        return {
            "agrees": self.agrees, "examined": self.examined, "agreed": self.agreed, "differing": self.differing,
            "unexamined": self.unexamined,
        }  # fmt: skip

    def sentence(self, parts: str) -> str:
        """Return a sentence with the four counts.

        Args:
            parts: Plural of the parts' name.
        Example:
            >>> Counts(2, 1, 4).sentence("cases")
            '7 cases: 3 examined, 2 agree, 1 differ, 4 not examined.'
        """
        return (
            f"{self.examined + self.unexamined} {parts}: {self.examined} examined, {self.agreed} agree, "
            f"{self.differing} differ, {self.unexamined} not examined."
        )
