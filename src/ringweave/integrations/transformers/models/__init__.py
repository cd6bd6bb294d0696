"""Modules that one family of models has alone. Each file names the version of transformers that it was read from."""

from __future__ import annotations

from typing import Any

from . import deepseek_v4, minimax_m3, qwen4

#: Functions that run in place of a module's forward, by the name of its class. They get the module and its forward.
HOOKS: dict[str, Any] = {**minimax_m3.HOOKS, **qwen4.HOOKS, **deepseek_v4.HOOKS}
