"""Rotary embeddings, with the names, parameters and returns of ``flash_attn.layers.rotary``."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from ....checks import whole
from ....errors import ShapeError, shown
from ....names import only
from ..caches import numbered, whole_numbers
from ..conventions import checked_bounds, longest
from ..rotary import Rotary


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate the first dimensions of queries or keys by their positions.

    Two dimensions (a, b) become (a cos - b sin, a sin + b cos). Products are made in float32 at least. The tables get
    no gradient.

    Args:
        x: (B, N, H, D), or packed with ``cu_seqlens``, (tokens, H, D).
        cos: Cosines, (positions, rotary dim / 2).
        sin: Sines.
        interleaved: Whether dimensions 0 and 1 rotate together; otherwise 0 and half of the rotary dim.
        inplace: Whether to write the result into ``x``.
        seqlen_offsets: Position of the first token: an int, or one for each sequence, (B,) int32.
        cu_seqlens: Cumulative lengths, (B + 1,) int32.
        max_seqlen: Length of the longest sequence, with ``cu_seqlens``.
    Returns:
        The rotated tokens; ``x`` with ``inplace``.
    Raises:
        ShapeError: Arguments do not fit, or the tables have too few positions.
    Example:
        >>> from ringweave.integrations.flash_attn.layers.rotary import apply_rotary_emb
        >>> angles = torch.outer(torch.arange(10.0), torch.tensor([1.0, 0.1]))
        >>> x = torch.randn(2, 10, 4, 8)  # the first four dimensions rotate
        >>> turned = apply_rotary_emb(x, angles.cos(), angles.sin())
        >>> bool(torch.equal(turned[:, 0], x[:, 0])), bool(torch.equal(turned[..., 4:], x[..., 4:]))
        (True, True)

    References:
        Su et al. (2021), RoFormer: enhanced transformer with rotary position embedding, section 3.4.
    """
    if not isinstance(x, Tensor) or x.ndim != (4 if cu_seqlens is None else 3):
        wanted = "(B, N, H, D)" if cu_seqlens is None else "(tokens, H, D), with cu_seqlens"
        raise ShapeError("x", shown(x), wanted, "flash-attn's layout has tokens before heads.")
    rotary = Rotary.of(cos, sin, interleaved, x.shape[-1])
    if cu_seqlens is None:
        if max_seqlen is not None:
            raise ShapeError("max_seqlen", max_seqlen, "None without cu_seqlens", "Pass both, or neither.")
        turned = _rotated(rotary, x, seqlen_offsets)
    else:
        turned = _packed(rotary, x, seqlen_offsets, cu_seqlens, max_seqlen)
    return x.copy_(turned) if inplace else turned


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate queries and keys in place; see :func:`apply_rotary_emb`.

    Args:
        qkv: (B, N, 3, H, D), or (B, N, H + 2 Hkv, D) with ``num_heads_q``.
        cos: Cosines, (positions, rotary dim / 2).
        sin: Sines.
        cos_k: Cosines of keys; ``cos`` by default.
        sin_k: Sines of keys.
        interleaved: Whether dimensions 0 and 1 rotate together; otherwise 0 and half of the rotary dim.
        seqlen_offsets: Position of the first token: an int, or one for each sequence, (B,) int32.
        num_heads_q: Query heads, if ``qkv`` has four axes.
    Returns:
        ``qkv``.
    Raises:
        ShapeError: Arguments do not fit, or the tables have too few positions.
    """
    q, k = _queries_and_keys(qkv, num_heads_q)
    if (cos_k is None) != (sin_k is None):
        raise ShapeError("cos_k, sin_k", "one of the two", "both or neither", "Pass sines with their cosines.")
    rotary = Rotary.of(cos, sin, interleaved, q.shape[-1])
    of_keys = rotary if cos_k is None else Rotary.of(cos_k, sin_k, interleaved, q.shape[-1])
    # both are computed before either is written, so that a refused call has written nothing
    turned = _rotated(rotary, q, seqlen_offsets), _rotated(of_keys, k, seqlen_offsets)
    for part, found in zip((q, k), turned, strict=True):
        part.copy_(found)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotate the keys of (B, N, 2, H, D) in place, and return it; see :func:`apply_rotary_emb`.

    Args:
        kv: Keys and values.
        cos: Cosines, (positions, rotary dim / 2).
        sin: Sines.
        interleaved: Whether dimensions 0 and 1 rotate together; otherwise 0 and half of the rotary dim.
        seqlen_offsets: Position of the first token: an int, or one for each sequence, (B,) int32.
    Raises:
        ShapeError: Arguments do not fit, or the tables have too few positions.
    """
    if not isinstance(kv, Tensor) or kv.ndim != 5 or kv.shape[2] != 2:
        raise ShapeError("kv", shown(kv), "(B, N, 2, H, D)", "Stack keys and values along axis 2.")
    k = kv[:, :, 0]
    k.copy_(_rotated(Rotary.of(cos, sin, interleaved, k.shape[-1]), k, seqlen_offsets))
    return kv


class RotaryEmbedding(nn.Module):
    """Rotary embeddings, or xPos with ``scale_base``. The tables grow with the sequence.

    Args:
        dim: Dimensions that rotate, an even number.
        base: Base of the frequencies, base ** (-2 i / dim).
        interleaved: Whether dimensions 0 and 1 rotate together; otherwise 0 and half of ``dim``.
        scale_base: The scale base of xPos; None for rotary embeddings without scales.
        device: Device of the frequencies.
    Example:
        >>> from ringweave.integrations.flash_attn.layers.rotary import RotaryEmbedding
        >>> rotary = RotaryEmbedding(16)
        >>> qkv = torch.randn(1, 10, 3, 4, 32)
        >>> rotary(qkv.clone()).shape
        torch.Size([1, 10, 3, 4, 32])

    References:
        Su et al. (2021), RoFormer: enhanced transformer with rotary position embedding, section 3.4.
        Sun et al. (2022), A length-extrapolatable transformer, section 3.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        # neither is in a state dict
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        self.register_buffer("scale", None if scale_base is None else self._scales(device), persistent=False)
        self._made: tuple[tuple[int, torch.device, torch.dtype, bool], list[Tensor]] | None = None

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate queries and keys in place.

        Args:
            qkv: (B, N, 3, H, D), or (B, N, H + 2 Hkv, D) with ``num_heads_q``; with ``kv`` the queries, (B, N, H, D).
            kv: Keys and values, (B, N, 2, Hkv, D).
            seqlen_offset: Position of the first token: an int, or one for each sequence, (B,) int32.
            max_seqlen: Positions of the tables; those that the call reaches by default.
            num_heads_q: Query heads, if ``qkv`` has four axes and ``kv`` is None.
        Returns:
            ``qkv``, or (``qkv``, ``kv``).
        """
        if max_seqlen is None:
            first = seqlen_offset if isinstance(seqlen_offset, int) else int(seqlen_offset.max())
            max_seqlen = qkv.shape[1] + first
        cos, sin, *of_keys = self._tables(max_seqlen, qkv.device, qkv.dtype)
        if kv is None:
            cos_k, sin_k = of_keys or (None, None)
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        if num_heads_q is not None:
            raise ShapeError("num_heads_q", num_heads_q, "None, with kv", "Leave it out.")
        cos_k, sin_k = of_keys or (cos, sin)
        turned = apply_rotary_emb(qkv, cos, sin, self.interleaved, False, seqlen_offset)
        # either may refuse the call, so both are computed before either is written
        apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)
        return qkv.copy_(turned), kv

    def _frequencies(self, device: torch.device | str | None) -> Tensor:
        steps = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return 1.0 / self.base ** (steps / self.dim)

    def _scales(self, device: torch.device | str | None) -> Tensor:
        steps = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return (steps + 0.4 * self.dim) / (1.4 * self.dim)

    def _tables(self, count: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """Return cosines and sines of positions, (at least count, dim / 2), and those of keys with scales."""
        if self._made is not None:
            (rows, *kind, inference), tables = self._made
            if rows >= count and kind == [device, dtype] and (not inference or torch.is_inference_mode_enabled()):
                return tables
        # in float32, whatever dtype the module was converted to
        inv_freq = self.inv_freq if self.inv_freq.dtype == torch.float32 else self._frequencies(device)
        angles = torch.outer(torch.arange(count, device=device, dtype=torch.float32), inv_freq.to(device))
        cos, sin = angles.cos(), angles.sin()
        if self.scale is None or self.scale_base is None:
            made = [cos, sin]
        else:
            power = (torch.arange(count, device=device, dtype=torch.float32) - count // 2) / self.scale_base
            scale = self._scales(device) ** power[:, None]
            made = [cos * scale, sin * scale, cos / scale, sin / scale]
        tables = [table.to(dtype) for table in made]
        self._made = (count, device, dtype, torch.is_inference_mode_enabled()), tables
        return tables


def _queries_and_keys(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, Tensor]:
    if isinstance(qkv, Tensor) and qkv.ndim == 5 and qkv.shape[2] == 3:
        if num_heads_q not in (None, qkv.shape[3]):
            raise ShapeError("num_heads_q", num_heads_q, f"{qkv.shape[3]}, the heads of qkv", "Leave it out.")
        return qkv[:, :, 0], qkv[:, :, 1]
    if not isinstance(qkv, Tensor) or qkv.ndim != 4:
        wanted = "(B, N, 3, H, D), or (B, N, H + 2 Hkv, D)"
        raise ShapeError("qkv", shown(qkv), wanted, "Put queries, keys and values into one tensor.")
    heads = 0 if num_heads_q is None else whole("num_heads_q", num_heads_q, 1, error=ShapeError)
    rest = qkv.shape[2] - heads
    if not heads or rest < 2 or rest % 2:
        wanted = f"a number of heads that leaves as many key heads as value heads of {qkv.shape[2]}"
        raise ShapeError("num_heads_q", num_heads_q, wanted, "Pass the number of query heads.")
    return qkv[:, :, :heads], qkv[:, :, heads : heads + rest // 2]


def _rotated(rotary: Rotary, x: Tensor, offsets: int | Tensor) -> Tensor:
    """Rotate tokens (B, N, H, D)."""
    if isinstance(offsets, int):
        return rotary.rotate_from(x, offsets)
    first = torch.tensor(whole_numbers("seqlen_offsets", offsets, 0, len(x)), device=x.device)
    return rotary.rotate(x, first[:, None] + torch.arange(x.shape[1], device=x.device))


def _packed(rotary: Rotary, x: Tensor, offsets: int | Tensor, bounds: Tensor, max_seqlen: int | None) -> Tensor:
    """Rotate packed tokens (tokens, H, D); tokens past the last sequence stay as they are."""
    stops = checked_bounds((bounds, bounds), (len(x), len(x)), ("cu_seqlens", "cu_seqlens"))[0]
    sizes = [stop - start for start, stop in itertools.pairwise(stops)]
    most = max(sizes)
    if max_seqlen is None or longest("max_seqlen", max_seqlen) < most:
        raise ShapeError("max_seqlen", max_seqlen, f"at least {most}, the longest sequence", "Pass it with cu_seqlens.")
    sequence, step = numbered(sizes, x.device)
    first = torch.tensor(whole_numbers("seqlen_offsets", offsets, 0, len(sizes)), device=x.device)
    turned = rotary.rotate(x[: stops[-1]], first[sequence] + step)
    return torch.cat([turned, x[stops[-1] :]])


#: The older name of :func:`apply_rotary_emb`.
apply_rotary_emb_func = apply_rotary_emb

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
]
__dir__ = only(__all__)
