"""Memory layouts of a 4-D tensor, as Python that makes and fills it."""

from __future__ import annotations

from collections.abc import Callable


def _own(view: Callable[..., str], order: str) -> Callable[..., str]:
    """Return a tensor that is filled and then permuted by ``order``."""

    def text(b: int, h: int, n: int, c: int, dtype: str, fill: str) -> str:
        sides = [{"b": b, "h": h, "n": n, "c": c, "1": 1, "w": n + c - 1}[side] for side in order]
        return f"torch.empty({sides}, dtype=torch.{dtype}){fill}{view(b, h, n, c)}"

    return text


def _part(base: Callable[..., list[int]], index: str) -> Callable[..., str]:
    """Return a part of a tensor that contains NaN elsewhere."""

    def text(b: int, h: int, n: int, c: int, dtype: str, fill: str) -> str:
        view = index.format(b=b, h=h, n=n, c=c, stop=n + 3)
        return f"torch.full({base(b, h, n, c)}, torch.nan, dtype=torch.{dtype}){view}{fill}"

    return text


def _expand(b: int, h: int, n: int, c: int) -> str:
    return f".expand({b}, {h}, {n}, {c})"


LAYOUTS: dict[str, Callable[..., str]] = {
    "contiguous": _own(lambda *_: "", "bhnc"),
    "heads last": _own(lambda *_: ".transpose(1, 2)", "bnhc"),
    "channels first": _own(lambda *_: ".mT", "bhcn"),
    "heads first": _own(lambda *_: ".transpose(0, 1)", "hbnc"),
    "tokens first": _own(lambda *_: ".permute(1, 2, 0, 3)", "nbhc"),
    "reversed": _own(lambda *_: ".permute(3, 2, 1, 0)", "cnhb"),
    "channels outside": _own(lambda *_: ".permute(1, 2, 3, 0)", "cbhn"),
    "one channel": _own(_expand, "bhn1"),
    "one token": _own(_expand, "bh1c"),
    "one head": _own(_expand, "b1nc"),
    "one batch": _own(_expand, "1hnc"),
    "one number": _own(_expand, "1111"),
    "overlapping": _own(lambda b, h, n, c: f".unfold(-1, {c}, 1)", "bhw"),
    "flipped": _own(lambda *_: ".flip(2)", "bhnc"),
    "every other token": _part(lambda b, h, n, c: [b, h, 2 * n, c], "[:, :, ::2]"),
    "every third token": _part(lambda b, h, n, c: [b, h, 3 * n, c], "[:, :, 1::3]"),
    "every other channel": _part(lambda b, h, n, c: [b, h, n, 2 * c], "[..., 1::2]"),
    "every other head": _part(lambda b, h, n, c: [b, 2 * h, n, c], "[:, ::2]"),
    "last channels": _part(lambda b, h, n, c: [b, h, n, c + 5], "[..., 5:]"),
    "first channels": _part(lambda b, h, n, c: [b, h, n, c + 3], "[..., :{c}]"),
    "inner tokens": _part(lambda b, h, n, c: [b, h, n + 7, c], "[:, :, 3:{stop}]"),
    "packed": _part(lambda b, h, n, c: [b, n, 3, h, c], "[:, :, 1].transpose(1, 2)"),
    "offset": _part(lambda b, h, n, c: [b * h * n * c + 3], "[3:].view({b}, {h}, {n}, {c})"),
}


#: views with elements that share memory
SHARED = ("one channel", "one token", "one head", "one batch", "one number", "overlapping")
