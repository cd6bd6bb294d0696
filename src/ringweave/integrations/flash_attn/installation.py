"""Modules under flash-attn's names, for code that imports them."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import ExitStack
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# the origin of a module that stands in for one that is not installed
_ORIGIN = "ringweave"


def install() -> ExitStack:
    """Put modules named ``flash_attn`` and ``flash_attn_interface`` where imports find them, unless they are installed.

    Where transformers is installed, its checks are satisfied too: ``attn_implementation="flash_attention_2"`` runs on a
    CPU, and ``"flash_attention_3"``.

    Returns:
        A context manager that restores the former modules at its end; without ``with``, the modules stay.
    Example:
        >>> from ringweave.integrations.flash_attn import install
        >>> with install():
        ...     from flash_attn import flash_attn_func
        >>> flash_attn_func.__module__
        'ringweave.integrations.flash_attn.flash_attn_interface'
    """
    # imported here, because both packages have this function
    from .. import flash_attn, flash_attn_interface

    with ExitStack() as undo:
        if _is_free("flash_attn"):
            _put_package(undo, flash_attn)
            _satisfy_transformers(undo, 2)
        if _is_free("flash_attn_interface"):
            module = _copied("flash_attn_interface", flash_attn_interface)
            _put(undo, module)
            _satisfy_transformers(undo, 3)
        return undo.pop_all()


def _is_free(name: str) -> bool:
    """Return whether no module of this name is installed or imported, not even one of an earlier call."""
    if sys.modules.get(name) is not None:
        return False
    # None in sys.modules blocks an import, and find_spec raises
    return name in sys.modules or importlib.util.find_spec(name) is None


def _put_package(undo: ExitStack, package: ModuleType) -> None:
    """Put copies of flash-attn's package and of the modules in it where imports find them."""
    sources = {
        "flash_attn": package,
        "flash_attn.flash_attn_interface": package.flash_attn_interface,
        "flash_attn.bert_padding": package.bert_padding,
        "flash_attn.layers": package.layers,
        "flash_attn.layers.rotary": package.layers.rotary,
    }
    copies: dict[str, ModuleType] = {}
    for name, source in sources.items():
        copy = copies[name] = _copied(name, source)
        parent, _, inner = name.rpartition(".")
        if parent:
            setattr(copies[parent], inner, copy)
        if hasattr(source, "__path__"):
            copy.__path__ = []
        _put(undo, copy)


def _copied(name: str, source: ModuleType) -> ModuleType:
    """Make a module with the public names of another."""
    module = ModuleType(name, source.__doc__)
    module.__spec__ = ModuleSpec(name, None, origin=_ORIGIN, is_package=hasattr(source, "__path__"))
    listed = [each for each in source.__all__ if each != "install"]
    vars(module).update({each: getattr(source, each) for each in listed}, __all__=listed)
    return module


def _put(undo: ExitStack, module: ModuleType) -> None:
    name, missing = module.__name__, object()
    before: Any = sys.modules.get(name, missing)
    sys.modules[name] = module

    def restore() -> None:
        if sys.modules.get(name) is not module:
            return
        if before is missing:
            del sys.modules[name]
        else:
            sys.modules[name] = before

    undo.callback(restore)


def _satisfy_transformers(undo: ExitStack, version: int) -> None:
    if importlib.util.find_spec("transformers") is not None:
        from .transformers_checks import satisfy

        satisfy(undo, version)
