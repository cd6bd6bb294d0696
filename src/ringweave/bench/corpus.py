"""Real text that is on every machine: the running Python's standard library, bytes as tokens."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import UnsupportedError, message
from .workload import Inputs

_FOREIGN = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Text as tokens.

    Attributes:
        tokens: (N,) uint8.
        files: How many files it is made of.
        source: Where they are.
    """

    tokens: Tensor
    files: int
    source: str

    def batch(self, length: int, generator: torch.Generator) -> Tensor:
        """(1, length + 1) int64: a random excerpt, and the token after it."""
        start = int(torch.randint(0, len(self.tokens) - length, (), generator=generator))
        return self.tokens[None, start : start + length + 1].long()

    def split(self, held_out: int) -> tuple[Corpus, Tensor]:
        """The text without its last ``held_out`` tokens, and those, (1, held_out) int64."""
        kept = Corpus(self.tokens[:-held_out], self.files, self.source)
        return kept, self.tokens[None, -held_out:].long()


def standard_library(limit: int = 4 * 2**20) -> Corpus:
    """The library's ``*.py`` files in sorted order, joined, up to ``limit`` bytes.

    Raises:
        UnsupportedError: This Python has no source files on disk.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    files = 0
    for path in sorted(root.rglob("*.py")):
        if _FOREIGN.isdisjoint(path.relative_to(root).parts):
            text += path.read_bytes()
            files += 1
        if len(text) >= limit:
            break
    if len(text) < 2**16:
        got = f"{len(text)} bytes of *.py files in {root}"
        raise UnsupportedError(message("standard library", got, "at least 64 KiB", "Use a Python with its sources."))
    return Corpus(torch.frombuffer(text[:limit], dtype=torch.uint8).clone(), files, str(root))


def text_inputs(corpus: Corpus, tokens: int, *, heads: int, head_dim: int, seed: int = 0) -> Inputs:
    """q, k, v and dout made of the first tokens of a text by a fixed random embedding and projections.

    Each byte has a random vector, each position a sinusoidal one; their sum is projected to q, k and v. So equal words
    at different places look alike, as in a model. The gradient of the output is the next token's values.
    """
    generator = torch.Generator().manual_seed(seed)
    width = heads * head_dim
    byte = torch.randn(256, width, generator=generator)[corpus.tokens[:tokens].long()]
    angle = torch.arange(tokens)[:, None] * torch.logspace(0, -4, width // 2)[None, :]
    hidden = byte + torch.cat([angle.sin(), angle.cos()], 1)
    hidden = hidden / hidden.std(-1, keepdim=True)

    def projected() -> Tensor:
        weight = torch.randn(width, width, generator=generator) / width**0.5
        x: Tensor = hidden @ weight
        return x.view(1, tokens, heads, head_dim).transpose(1, 2).contiguous()

    q, k, v = projected(), projected(), projected()
    return Inputs(q, k, v, v.roll(-1, 2).contiguous())
