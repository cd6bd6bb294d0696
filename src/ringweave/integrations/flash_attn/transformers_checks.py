"""The checks of transformers for flash-attn: a package with a distribution, a GPU, and a model on it."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from transformers import modeling_flash_attention_utils as functions
from transformers import modeling_utils
from transformers.utils import import_utils

#: Module and distribution of each version.
_PACKAGES = {2: ("flash_attn", "flash-attn"), 3: ("flash_attn_interface", "flash-attn-3")}


def satisfy(undo: ExitStack, version: int) -> None:
    """Let a version of flash-attn pass all checks, until ``undo`` is closed."""
    name = f"is_flash_attn_{version}_available"
    check = getattr(import_utils, name, None)
    if check is None:
        return

    def available(kernels_fallback_ok: bool = False) -> bool:
        return True

    distributions: dict[str, list[str]] = getattr(import_utils, "_package_distribution_mapping", dict)()
    module, distribution = _PACKAGES[version]
    if module not in distributions:
        undo.callback(distributions.pop, module, None)
        distributions[module] = [distribution]
    # functions that were loaded for the name may be those of another module, and are again after the end
    undo.callback(_forget)
    _forget()
    _replace(name, check, available)
    undo.callback(_replace, name, available, check)
    # versions before the table of all checks have methods with a version's number
    kinds = getattr(functions, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", {})
    if version in kinds:
        own = kinds[version]
        undo.callback(own.update, general_availability_check=own["general_availability_check"])
        own["general_availability_check"] = available
    for method in ("_flash_attn_can_dispatch", f"_flash_attn_{version}_can_dispatch"):
        before = getattr(modeling_utils.PreTrainedModel, method, None)
        if before is not None:
            undo.callback(setattr, modeling_utils.PreTrainedModel, method, before)
            setattr(modeling_utils.PreTrainedModel, method, _without_devices(before, version))


def _replace(name: str, old: object, new: object) -> None:
    """Replace a check in every module that has imported it, such as a script or another library."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)


def _forget() -> None:
    """Drop the functions that were loaded, and cached answers about versions."""
    functions._loaded_implementation = None
    for name, check in vars(import_utils).items():
        if name.startswith("is_flash_attn") and hasattr(check, "cache_clear"):
            check.cache_clear()


def _without_devices(check: Callable[..., bool], version: int) -> Callable[..., bool]:
    """Return a check of a model that does not look at the devices of its parameters, as before they exist."""
    signature = inspect.signature(check)

    @functools.wraps(check)
    def can_dispatch(*args: Any, **options: Any) -> bool:
        given = signature.bind(*args, **options)
        if given.arguments.get("flash_attn_version", version) == version:
            given.arguments["is_init_check"] = True
        return check(*given.args, **given.kwargs)

    return can_dispatch
