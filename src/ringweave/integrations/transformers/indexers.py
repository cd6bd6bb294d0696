"""Indexers of models, which choose keys for each query, without a tensor of all scores.

An indexer of transformers computes the scores of all pairs for all its heads, masks their sum and takes the best keys.
Here its own forward runs, with a symbol in place of the scores: the symbol remembers what the indexer does with them,
and :func:`ringweave.adaptive.lightning_indexer` makes the choice. An indexer that does anything else with its scores
gets their values.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...adaptive import lightning_indexer
from ...errors import UnsupportedError
from .keywords import OTHER
from .masks import MaskRows, values_of
from .models import HOOKS

# name of the module that chooses keys in an attention layer
_NAME = "indexer"


class Chosen(NamedTuple):
    """What ``topk`` returns, as far as indexers use it.

    Attributes:
        indices: (B, queries, n) int32, ascending; -1 fills the end of a row.
    """

    indices: Tensor


def all_keys(indices: Tensor, keys: int) -> bool:
    """Whether all queries share one list of all keys, which is what an indexer returns that may choose them all."""
    shared = indices.shape[-1] == keys and not any(indices.stride()[:-1])
    return (
        shared
        and indices.device.type == "cpu"
        and torch.equal(indices[0, 0], torch.arange(keys, dtype=indices.dtype, device="cpu"))
    )


class _Symbol:
    """A tensor that is not computed; operations that it does not remember get its values."""

    def values(self) -> Tensor:
        """Compute the tensor."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        return getattr(self.values(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operation of torch with the values."""
        return func(*values_of(cls, args), **values_of(cls, kwargs or {}))


def _give_operators() -> None:
    """Give symbols the operators of Python, which it looks up in a class."""

    def of_values(name: str) -> Any:
        return lambda self, *others: getattr(self.values(), name)(*others)

    for name in ("getitem", "neg", "eq", "ne", "lt", "le", "gt", "ge"):
        setattr(_Symbol, f"__{name}__", of_values(f"__{name}__"))
    for name in ("add", "sub", "mul", "truediv", "matmul", "pow"):
        for side in ("", "r"):
            setattr(_Symbol, f"__{side}{name}__", of_values(f"__{side}{name}__"))


_give_operators()


class Products(_Symbol):
    """The products of an indexer's queries and keys, (B, queries, heads, keys), which are not computed.

    Args:
        q: (B, queries, heads, D).
        k: (B, 1, D, keys).
        scale: Factor of the products.
        positive: Whether negative products are replaced by 0.
        reading: The mode that made the symbol, which notes the list of keys.
    """

    def __init__(
        self, q: Tensor, k: Tensor, scale: float = 1.0, positive: bool = False, reading: Reading | None = None
    ):
        self.q, self.k, self.scale, self.positive, self.reading = q, k, scale, positive, reading

    def values(self) -> Tensor:
        """Compute the products."""
        products = torch.matmul(self.q, self.k) * self.scale
        return products.relu() if self.positive else products

    def __mul__(self, factor: Any) -> Any:
        if isinstance(factor, float) and factor > 0:
            return Products(self.q, self.k, self.scale * factor, self.positive, self.reading)
        return self.values() * factor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Remember a relu and a weighted sum over the heads; compute the products for other operations."""
        if func in (torch.relu, torch.nn.functional.relu) and len(args) == 1 and not (kwargs or {}).get("inplace"):
            return Products(args[0].q, args[0].k, args[0].scale, True, args[0].reading)
        if func is torch.matmul and len(args) == 2 and isinstance(args[0], Tensor) and args[1].positive and not kwargs:
            products, weights = args[1], args[0]
            if weights.shape == (*products.q.shape[:2], 1, products.q.shape[2]):
                return Scores(products, weights)
        return super().__torch_function__(func, types, args, kwargs)


class Scores(_Symbol):
    """Weighted sums of products over the heads, (B, queries, 1, keys) or (B, queries, keys), which are not computed.

    Args:
        products: The products.
        weights: (B, queries, 1, heads).
        squeezed: Whether there are three dimensions.
        allowed: The mask that the scores got.
    """

    def __init__(self, products: Products, weights: Tensor, squeezed: bool = False, allowed: MaskRows | None = None):
        self.products, self.weights, self.squeezed, self.allowed = products, weights, squeezed, allowed

    @property
    def shape(self) -> torch.Size:
        """Shape of the scores."""
        batch, nq = self.weights.shape[:2]
        nk = self.products.k.shape[-1]
        return torch.Size((batch, nq, nk) if self.squeezed else (batch, nq, 1, nk))

    def values(self) -> Tensor:
        """Compute the scores."""
        scores = torch.matmul(self.weights, self.products.values())
        if self.squeezed:
            scores = scores.squeeze(-2)
        return scores if self.allowed is None else scores.masked_fill(~self.allowed.mask.values()[:, 0], -torch.inf)

    def squeeze(self, dim: int) -> Any:
        """Remove the dimension of the heads."""
        if dim == -2 and not self.squeezed:
            return Scores(self.products, self.weights, True)
        return self.values().squeeze(dim)

    def masked_fill(self, mask: Any, value: float) -> Any:
        """Forbid pairs."""
        if self._unmasked and isinstance(mask, MaskRows) and mask.forbidden and value == -torch.inf:
            return Scores(self.products, self.weights, True, ~mask)
        return self.values().masked_fill(mask, value)

    def __add__(self, mask: Any) -> Any:
        """Add a mask."""
        if self._unmasked and isinstance(mask, MaskRows) and not mask.forbidden and mask.dtype != torch.bool:
            return Scores(self.products, self.weights, True, mask)
        return self.values() + mask

    @property
    def _unmasked(self) -> bool:
        return self.squeezed and self.allowed is None

    def topk(self, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        """Choose the best keys that the mask allows."""
        if self.allowed is None or dim not in (-1, 2) or not largest:
            return self.values().topk(k, dim, largest, sorted)
        mask, (batch, nq, nk), products = self.allowed.mask, self.shape, self.products
        if k >= nk:
            # no score decides, and all queries share the list
            index = torch.arange(nk, dtype=torch.int32, device=self.weights.device).expand(batch, nq, nk)
        else:
            keys, weights = products.k.squeeze(1).mT, self.weights.squeeze(-2)
            index = lightning_indexer(
                products.q, keys, weights, k, mask.pattern, scale=products.scale, q_offset=mask.q_offset
            )
        if products.reading is not None:
            products.reading.chosen = index
        return Chosen(index)


class Reading(TorchFunctionMode):
    """While an indexer's forward runs, its product of queries and keys is a symbol."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False
        # the list of keys, which is in the order of keys and not of scores
        self.chosen: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.matmul and not self.found and len(args) == 2 and not kwargs:
            q, k = args
            fits = isinstance(q, Tensor) and isinstance(k, Tensor) and q.ndim == k.ndim == 4
            if fits and k.shape[1] == 1 and q.shape[3] == k.shape[2]:
                self.found = True
                return Products(q, k, reading=self)
        return func(*args, **(kwargs or {}))


def choose(forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an indexer's forward; with a mask of this library, without a tensor of all scores.

    Raises:
        UnsupportedError: The indexer changes the list of its best keys, perhaps by the order of their scores.
    """
    rows = next((each for each in (*args, *kwargs.values()) if isinstance(each, MaskRows)), None)
    if rows is None or rows.mask.facts.context is not None:
        return forward(*args, **kwargs)
    with Reading() as reading:
        result = forward(*args, **kwargs)
    if not torch.compiler.is_compiling() and reading.chosen is not None and result is not reading.chosen:
        got = f"{type(getattr(forward, '__self__', forward)).__name__}, which changes the list of its best keys"
        raise UnsupportedError("indexer", got, "an indexer that returns the list", OTHER)
    return result


def swap(model: nn.Module) -> None:
    """Let the indexers of a model choose without a tensor of all scores; twice is as once.

    An indexer without a hook of its own runs with a symbol in place of its scores.
    """
    for name, module in model.named_modules():
        own = vars(module).get("forward", None)
        if isinstance(own, partial) and own.func in (choose, *HOOKS.values()):
            continue
        hook = HOOKS.get(type(module).__name__)
        if hook is not None:
            module.forward = partial(hook, module, module.forward)
        elif name.rpartition(".")[2] == _NAME:
            module.forward = partial(choose, module.forward)
