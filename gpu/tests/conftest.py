"""Backends for tests that run from the sources, without an installation."""

from __future__ import annotations

from ringweave_gpu import register

register()
