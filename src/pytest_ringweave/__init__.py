"""The option of ``pytest --pyargs ringweave.audit.conformance --kernel module:function``; does not import ringweave."""

from __future__ import annotations

from typing import Any


def pytest_addoption(parser: Any) -> None:
    """Add ``--kernel``."""
    parser.getgroup("ringweave").addoption(
        "--kernel", metavar="MODULE:FUNCTION", help="the attention kernel that ringweave.audit.conformance checks"
    )
