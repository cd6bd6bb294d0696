"""Add the option ``--kernel`` for ``pytest --pyargs ringweave_audit.conformance``, without importing ringweave."""

from __future__ import annotations

from typing import Any


def pytest_addoption(parser: Any) -> None:
    """Add the option ``--kernel MODULE:FUNCTION`` to pytest."""
    parser.getgroup("ringweave").addoption(
        "--kernel", metavar="MODULE:FUNCTION", help="the attention kernel that ringweave_audit.conformance checks"
    )
