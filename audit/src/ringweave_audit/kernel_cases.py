"""The attention kernels of other libraries, as ``ringweave audit kernels`` calls them, and the cases that it tries."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

#: Number of NaN tokens after the last one in a padded tensor.
PADDING = 70
# numbers of the masks: keys before and after a query's own, keys of a neighborhood, listed keys
_LEFT, _RIGHT, _NEIGHBORS, _LISTED = 60, 20, 33, 37


class Case(NamedTuple):
    """Sizes, mask and memory of a call."""

    name: str
    mask: str
    nq: int = 457
    nk: int = 457
    heads: int = 4
    kv_heads: int = 4
    dim: int = 64
    memory: str = "contiguous"
    unattended: str = "finite"
    dilation: int = 1
    batch: int = 2

    @property
    def documents(self) -> list[int]:
        """Lengths of the documents."""
        return [100, 1, 130, self.nk - 231]

    def lists(self) -> Tensor:
        """Return distinct keys for each query, -1 where there are fewer, (Nq, 37); every seventh query has none."""
        draw = torch.Generator().manual_seed(0)
        lists = torch.rand(self.nq, self.nk - PADDING, generator=draw).argsort(-1)[:, :_LISTED]
        lists[torch.rand(lists.shape, generator=draw) < 0.1] = -1
        lists[::7] = -1
        return lists

    def allowed(self) -> Tensor:
        """Return the mask, bool of (Nq, Nk); the last query is at the last key."""
        i, j = torch.arange(self.nq)[:, None], torch.arange(self.nk)[None]
        ahead = j - i - (self.nk - self.nq)
        if self.mask == "causal":
            return ahead <= 0
        if self.mask == "window":
            return (ahead >= -_LEFT) & (ahead <= _RIGHT)
        if self.mask == "documents":
            of = torch.arange(4).repeat_interleave(torch.tensor(self.documents))
            return of[:, None] == of[None]
        if self.mask == "neighborhood":
            rate = self.dilation
            length = (self.nk - i % rate + rate - 1) // rate  # tokens with the residue of the query
            first = torch.minimum((i // rate - _NEIGHBORS // 2).clamp(min=0), length - _NEIGHBORS)
            return (i % rate == j % rate) & (j // rate >= first) & (j // rate < first + _NEIGHBORS)
        if self.mask == "selected":
            lists = self.lists()
            marked = torch.zeros(self.nq, self.nk + 1, dtype=torch.bool)
            return marked.scatter_(1, lists.where(lists >= 0, self.nk), True)[:, :-1]
        return torch.ones(self.nq, self.nk, dtype=torch.bool)

    def sizes(self) -> dict[str, Any]:
        """Return everything that a reproducer needs, besides the dtype; inputs are normal numbers."""
        more: dict[str, dict[str, Any]] = {
            "window": {"left": _LEFT, "right": _RIGHT}, "documents": {"lengths": self.documents},
            "neighborhood": {"kernel_size": _NEIGHBORS, "dilation": self.dilation}, "selected": {"keys": _LISTED},
        }  # fmt: skip
        names = ("mask", "batch", "heads", "kv_heads", "nq", "nk", "dim", "memory", "unattended")
        return {name: getattr(self, name) for name in names} | more.get(self.mask, {})


CASES = (
    Case("dense", "full", 300),
    Case("dense, NaN in padding", "full", 300, memory="padded with NaN"),
    Case("dense, long rows", "full", 130, 16421, 2, 2),
    Case("causal, 512 tokens", "causal", 512, 512),
    Case("causal, odd length", "causal"),
    Case("causal, 128 channels", "causal", dim=128),
    Case("causal, grouped queries", "causal", heads=8, kv_heads=2),
    Case("causal, packed q, k, v", "causal", memory="a view of packed q, k, v"),
    Case("causal, NaN in padding", "causal", memory="padded with NaN"),
    Case("causal, empty rows", "causal", 457, 300),
    Case("window", "window"),
    Case("window, 128 channels", "window", dim=128),
    Case("window, grouped queries", "window", heads=8, kv_heads=2),
    Case("window, NaN in unattended keys", "window", 200, unattended="NaN"),
    Case("documents", "documents", batch=1),
    Case("documents, 128 channels", "documents", dim=128, batch=1),
    Case("documents, packed q, k, v", "documents", memory="a view of packed q, k, v", batch=1),
    Case("neighborhood", "neighborhood"),
    Case("neighborhood, 512 tokens, 128 channels", "neighborhood", 512, 512, dim=128),
    Case("neighborhood, dilated", "neighborhood", dilation=3),
    Case("neighborhood, grouped queries", "neighborhood", heads=8, kv_heads=2),
    Case("neighborhood, packed q, k, v", "neighborhood", memory="a view of packed q, k, v"),
    Case("neighborhood, NaN in padding", "neighborhood", memory="padded with NaN"),
    Case("selected, empty rows", "selected"),
    Case("selected, 128 channels", "selected", dim=128),
    Case("selected, grouped queries", "selected", heads=8, kv_heads=2),
    Case("selected, NaN in unattended keys", "selected", unattended="NaN"),
    Case("selected, long rows", "selected", 130, 16421),
)


# ---- the libraries ---------------------------------------------------------------------------------------------------

Attend = Callable[[Tensor, Tensor, Tensor, Case], Tensor]


def _sdpa(backend: str, device: str) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
        square = case.mask == "causal" and case.nq == case.nk
        mask = None if square or case.mask == "full" else case.allowed().to(q.device)
        grouped = case.heads != case.kv_heads
        call = functools.partial(functional.scaled_dot_product_attention, is_causal=square, enable_gqa=grouped)
        with sdpa_kernel(getattr(SDPBackend, backend)), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                out: Tensor = call(q, k, v, mask)
                return out
            except RuntimeError as error:
                if not any(words in str(error) for words in ("No available kernel", "No viable backend")):
                    raise
                raise NotImplementedError(" ".join(str(each.message) for each in warned) or str(error)) from None

    return attend


def _flex(device: str) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    call: Any = flex_attention if torch.device(device).type == "cpu" else torch.compile(flex_attention)

    def attend(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
        torch.compiler.reset()  # after eight recompilations, torch would run the function without compiling it
        offset = case.nk - case.nq
        of = torch.arange(4, device=q.device).repeat_interleave(torch.tensor(case.documents, device=q.device))
        masks: dict[str, Callable[..., Tensor]] = {
            "causal": lambda b, h, i, j: j <= i + offset,
            "window": lambda b, h, i, j: (j - i - offset >= -_LEFT) & (j - i - offset <= _RIGHT),
            "documents": lambda b, h, i, j: of[i] == of[j],
        }
        mask = masks.get(case.mask)
        blocks = mask and create_block_mask(mask, None, None, case.nq, case.nk, device=str(q.device))
        out: Tensor = call(q, k, v, block_mask=blocks, enable_gqa=case.heads != case.kv_heads)
        return out

    return attend


def _flash_attn(device: str) -> Attend:
    function = importlib.import_module("flash_attn").flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
        if q.dtype is torch.float32:
            raise NotImplementedError("flash-attn computes fp16 and bf16")
        window = (_LEFT, _RIGHT) if case.mask == "window" else (-1, -1)
        out: Tensor = function(q, k, v, causal=case.mask == "causal", window_size=window)
        return out

    return attend


def _attn_gym(device: str) -> Attend:
    function = importlib.import_module("attn_gym.sparse").gather_attn

    def attend(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
        # keys are also the values there, so values are further channels, of which queries have 0
        kv = torch.cat([k, v], -1).flatten(0, 1)[:, None]
        q = functional.pad(q, (0, case.dim)).unflatten(1, (case.kv_heads, -1)).flatten(0, 1)
        lists = case.lists().int().to(q.device).expand(len(q), -1, -1).contiguous()
        unread = kv.new_zeros(len(q), 1, case.nq, 2 * case.dim)
        joined = function(q, unread, kv, lists, sliding_window_size=0, scale=case.dim**-0.5)
        out: Tensor = joined[..., case.dim :].unflatten(0, (-1, case.kv_heads)).flatten(1, 2)
        return out

    return attend


def _natten(device: str) -> Attend:
    function = importlib.import_module("natten.functional").na1d

    def attend(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
        out: Tensor = function(q, k, v, kernel_size=_NEIGHBORS, dilation=case.dilation)
        return out

    return attend


def _xformers(device: str) -> Attend:
    function = importlib.import_module("xformers.ops").memory_efficient_attention
    biases = importlib.import_module("xformers.ops.fmha.attn_bias")

    def attend(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
        if case.nq > case.nk:
            raise NotImplementedError("xformers does not define rows without keys")
        bias = None
        if case.mask == "causal":
            bias = biases.LowerTriangularMask()
        elif case.mask == "documents":
            bias = biases.BlockDiagonalMask.from_seqlens(case.documents)
        grouped = case.heads != case.kv_heads
        if grouped:
            q = q.unflatten(2, (case.kv_heads, -1))
            k, v = (x[:, :, :, None].expand(-1, -1, -1, q.shape[3], -1) for x in (k, v))
        out: Tensor = function(q, k, v, attn_bias=bias)
        if grouped:
            out = out.flatten(2, 3)
        return out

    return attend


class Library(NamedTuple):
    """A library: how to load it, its masks, and whether its tensors are (B, N, H, D)."""

    name: str
    module: str
    load: Callable[[str], Attend]
    masks: tuple[str, ...]
    tokens_first: bool = True

    @property
    def cases(self) -> list[Case]:
        """The cases with masks that the library has."""
        return [case for case in CASES if case.mask in self.masks]

    def version(self) -> str:
        """Return the version of the installed distribution."""
        try:
            return importlib.metadata.version(self.module.replace("_", "-"))
        except importlib.metadata.PackageNotFoundError:
            return str(getattr(sys.modules[self.module], "__version__", "unknown"))


_USUAL = ("full", "causal", "window", "documents")
LIBRARIES = (
    *(
        Library(f"SDPA {backend.split('_')[0].lower()}", "torch", functools.partial(_sdpa, backend), _USUAL, False)
        for backend in ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")
    ),
    Library("FlexAttention", "torch", _flex, _USUAL, False),
    Library("flash-attn", "flash_attn", _flash_attn, ("full", "causal", "window")),
    Library("attn-gym", "attn_gym", _attn_gym, ("selected",), False),
    Library("NATTEN", "natten", _natten, ("neighborhood",)),
    Library("xformers", "xformers", _xformers, ("full", "causal", "documents")),
)  # fmt: skip
