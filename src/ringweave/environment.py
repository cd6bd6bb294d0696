"""Variables of the environment, for whoever asks for them in every call."""

from __future__ import annotations

import os

from .cache import fact

# os.environ.get raises an error and catches it, twice, where a variable is not set: a microsecond
_values = os.environ._data  # type: ignore[attr-defined]
_key = fact(os.environ.encodekey)


def setting(name: str) -> str:
    """Give a variable's value, "" where it is not set.

    Example:
        >>> setting("RINGWEAVE_NO_SUCH_VARIABLE")
        ''
    """
    found = _values.get(_key(name))
    return "" if found is None else os.environ.decodevalue(found)


def interpreted() -> bool:
    """Tell whether Triton runs kernels on the CPU: its own switch, set before they are loaded."""
    return os.environ.get("TRITON_INTERPRET") == "1"
