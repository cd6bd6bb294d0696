"""Format quantities for people (shares, counts, bytes, operations, times), and parse lengths that people write."""

from __future__ import annotations

import re

_POWERS = {"": 0, "K": 10, "M": 20, "G": 30}


def parse_size(text: str) -> int:
    """Parse a positive whole number with an optional suffix K, M or G, which stand for 2**10, 2**20 and 2**30.

    Raises:
        ValueError: The text is not such a number.
    Example:
        >>> parse_size("65536"), parse_size("64K"), parse_size("1M")
        (65536, 65536, 1048576)
    """
    found = re.fullmatch(r"([0-9]+)([KMG]?)", text.strip().upper())
    if found is None or int(found[1]) < 1:
        raise ValueError(f"{text!r} is not a number such as 65536, 64K or 1M")
    return int(found[1]) << _POWERS[found[2]]


def percent(share: float) -> str:
    """Format a share as a percentage with three significant digits.

    Example:
        >>> percent(0.06427)
        '6.43 %'
    """
    return f"{100 * share:.3g} %"


def count(number: int, word: str) -> str:
    """Format a number with its noun, which gets a plural s unless the number is 1.

    Example:
        >>> count(1, "tile"), count(2000, "tile")
        ('1 tile', '2,000 tiles')
    """
    return f"{number} {word}" if number == 1 else f"{number:,} {word}s"


def nbytes(number: float) -> str:
    """Format bytes in binary units.

    Example:
        >>> nbytes(80.5 * 2**20)
        '80.5 MiB'
    """
    return _scaled(number, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def flops(number: float) -> str:
    """Format floating-point operations in decimal units.

    Example:
        >>> flops(41.44e9)
        '41.4 GFLOP'
    """
    return _scaled(number, 1000, ("FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def seconds(number: float) -> str:
    """Format a time, given in seconds, in decimal units.

    Example:
        >>> seconds(0.00123)
        '1.23 ms'
    """
    return _scaled(number * 1e9, 1000, ("ns", "us", "ms", "s"))


def _scaled(number: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    # with three digits, 999.6 would print as 1e+03
    while number >= 999.5 and power < len(units) - 1:
        number, power = number / base, power + 1
    return f"{number:.3g} {units[power]}"
