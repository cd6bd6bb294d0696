"""No tensor grows with the square of the text's length, neither a mask nor scores, for any kind of batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ringweave.memory import peak
from ringweave.memory.pressure import to_system

from .tiny import CACHE, config_of, model_of

KINDS = ["whole", "padded", "packed", "prefill"]


class Largest(TorchDispatchMode):
    """A mode that records the bytes of the largest tensor that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes())
        return out


def run(name: str, kind: str, attention: str, n: int) -> None:
    model = model_of(name, attention, config_of(name, max_position_embeddings=n, sliding_window=64))
    ids = torch.randint(3, 64, (1, n))
    if kind == "prefill":
        with torch.no_grad():
            out = model.eval()(ids, use_cache=True, logits_to_keep=1)
            model(ids[:, :1], **{CACHE: out[CACHE]})
        return
    options: dict[str, Any] = {"use_cache": False}
    if kind == "padded":
        options["attention_mask"] = (torch.arange(n) >= n // 5)[None].long()
    if kind == "packed":
        options["position_ids"] = torch.cat([torch.arange(n // 3), torch.arange(n - n // 3)])[None]
    model.train()(ids, labels=ids, **options).loss.backward()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_no_operator_gives_a_tensor_of_tokens_times_tokens(name: str, kind: str) -> None:
    n = 2048
    with Largest() as mine:
        run(name, kind, "ringweave", n)
    # the logits are the largest tensor, with a vocabulary of 64; a mask has a byte for each pair
    assert mine.numel <= n * 64 * 4 < n * n


def test_what_is_counted_sees_the_librarys_mask() -> None:
    n = 2048
    with Largest() as theirs:
        run("mistral", "padded", "sdpa", n)
    assert theirs.numel >= n * n


@pytest.mark.measures
@pytest.mark.parametrize("kind", ["padded", "packed", "prefill"])
def test_32k_tokens_of_a_window_take_less_than_a_mask_of_bytes(kind: str) -> None:
    """This also counts memory that kernels allocate without tensors."""
    n = 32768
    to_system()
    peak.begin(torch.device("cpu"))
    before = peak.in_use(torch.device("cpu"))
    run("mistral", kind, "ringweave", n)
    assert peak.highest(torch.device("cpu")) - before < n * n / 2
