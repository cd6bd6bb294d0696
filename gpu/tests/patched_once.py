"""Make Triton's interpreter faster; a pytest plugin for processes that run it: ``-p gpu.tests.patched_once``.

For each call of a kernel's function by another, the interpreter searches the whole language for names to replace,
although the launch has replaced them. Here it searches only if an original name is found. For each operation it makes a
table of types, which is kept here. It computes sums and products of integers again with 64 bits to find overflows, and
drops its finding unless TRITON_DEBUG is set. With this plugin it looks for overflows in that case only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any


def pytest_configure() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        # this release of Triton does not undo its replacements
        return
    replace = interpreter._patch_lang

    @functools.cache
    def seen(function: Callable[..., Any]) -> list[ModuleType]:
        return [each for each in (tl, tl.core) if any(each is value for value in function.__globals__.values())]

    def once(function: Callable[..., Any]) -> Any:
        if any(tl.core.is_builtin(each.load) for each in seen(function)):
            return replace(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = once

    of_numpy = interpreter._get_np_dtype
    known = functools.cache(of_numpy)
    # types of pointers and of blocks have no hash
    interpreter._get_np_dtype = lambda kind: (of_numpy if kind.scalar.is_ptr() else known)(kind.scalar)

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
