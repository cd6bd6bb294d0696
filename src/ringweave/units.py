"""Quantities as text for people: shares, counts, bytes, operations."""

from __future__ import annotations


def percent(share: float) -> str:
    """A share with three significant digits.

    Example:
        >>> percent(0.06427)
        '6.43 %'
    """
    return f"{100 * share:.3g} %"


def count(number: int, word: str) -> str:
    """A number and what it counts.

    Example:
        >>> count(1, "tile"), count(2, "tile")
        ('1 tile', '2 tiles')
    """
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def nbytes(number: float) -> str:
    """Bytes in binary units.

    Example:
        >>> nbytes(80.5 * 2**20)
        '80.5 MiB'
    """
    return _scaled(number, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def flops(number: float) -> str:
    """Floating-point operations in decimal units.

    Example:
        >>> flops(41.44e9)
        '41.4 GFLOP'
    """
    return _scaled(number, 1000, ("FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def seconds(number: float) -> str:
    """Time in decimal units.

    Example:
        >>> seconds(0.00123)
        '1.23 ms'
    """
    return _scaled(number * 1e9, 1000, ("ns", "us", "ms", "s"))


def _scaled(number: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    # 999.6 would read 1e+03 with three digits
    while number >= 999.5 and power < len(units) - 1:
        number, power = number / base, power + 1
    return f"{number:.3g} {units[power]}"
