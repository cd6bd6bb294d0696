"""Send torch's FlexAttention here for tensors on the CPU."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as peer

from ...errors import UnsupportedError
from .attention import flex_attention

# a module of transformers that binds torch's name when it is imported, and caches a compiled function of it
_TRANSFORMERS = "transformers.integrations.flex_attention"


def install() -> Installed:
    """Send ``torch.nn.attention.flex_attention.flex_attention`` to this one on a CPU.

    The name then stands for a function that calls ringweave's if query, key and value are on the CPU. It passes a call
    unchanged to the function that stood there on another device, in compiled code without gradients of query, key or
    value, and if ringweave refuses a call without such gradients by UnsupportedError. A module that imported
    the name from torch earlier keeps torch's function; only that of transformers is changed too, so that
    ``attn_implementation="flex_attention"`` trains on a CPU.

    Returns:
        A context manager that restores the function that stood there when it exits. It need not be entered: the
        function is installed at once.
    Example:
        >>> from torch.nn.attention import flex_attention as torch_flex
        >>> from ringweave.integrations.flex_attention import install
        >>> x = torch.randn(1, 2, 64, 16, requires_grad=True)
        >>> with install():
        ...     torch_flex.flex_attention(x, x, x).sum().backward()
        >>> x.grad.shape
        torch.Size([1, 2, 64, 16])
    """
    return Installed()


class Installed:
    """An installation of the function; as a context manager, it ends when the block does."""

    def __init__(self) -> None:
        self._active = False
        self._former: Callable[..., Any]
        self._function: Callable[..., Any]
        self.__enter__()

    def __enter__(self) -> Self:
        """Install the function, unless it is installed."""
        if not self._active:
            self._former, self._active = peer.flex_attention, True
            self._function = peer.flex_attention = _sending(self, self._former)
            _replace_in_transformers(self._former, self._function)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the function that stood there."""
        # code that holds the function now calls the former one through it
        self._active = False
        former = self._former
        # an earlier installation may have ended before this one
        while (owner := getattr(former, "_installed", None)) is not None and not owner.active:
            former = owner._former
        if peer.flex_attention is self._function:
            peer.flex_attention = former
        _replace_in_transformers(self._function, former)

    @property
    def active(self) -> bool:
        """Whether the function is installed."""
        return self._active


def _sending(installed: Installed, former: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that stands in torch while it is installed."""

    @functools.wraps(former)
    def send(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Any = None,
        block_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # torch.compile names a size by the argument that has it, and torch's CPU kernel fails with some names, so
        # the functions and their tables keep the names that they have in torch's function
        if not installed._active or not query.device.type == key.device.type == value.device.type == "cpu":
            return former(query, key, value, score_mod, block_mask, *args, **kwargs)
        if query.requires_grad or key.requires_grad or value.requires_grad:
            # torch has no gradients on a CPU
            return flex_attention(query, key, value, score_mod, block_mask, *args, **kwargs)
        if torch.compiler.is_compiling():
            # torch compiles it, in one graph
            return former(query, key, value, score_mod, block_mask, *args, **kwargs)
        try:
            return flex_attention(query, key, value, score_mod, block_mask, *args, **kwargs)
        except UnsupportedError:
            return former(query, key, value, score_mod, block_mask, *args, **kwargs)

    send._installed = installed  # type: ignore[attr-defined]
    return send


def _replace_in_transformers(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    module = sys.modules.get(_TRANSFORMERS)
    if module is None or getattr(module, "flex_attention", None) is not old:
        return
    module.flex_attention = new  # type: ignore[attr-defined]
    # the function that it has compiled is compiled anew at its next use
    compiled = getattr(module, "WrappedFlexAttention", None)
    if getattr(compiled, "_instance", None) is not None:
        compiled._instance._is_flex_compiled = False  # type: ignore[union-attr]
