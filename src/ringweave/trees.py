"""Pack a prompt and its completions in one sequence, and take results apart again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .checks import whole
from .errors import ShapeError, shown
from .names import only, suggest
from .patterns.tree import Tree
from .plan.tile_size import DEFAULT_TILE_SIZE

__all__ = ["Packed", "pack", "unpack"]
__dir__ = only(__all__)
if not TYPE_CHECKING:
    __getattr__ = suggest(__name__, __all__)


class Packed(NamedTuple):
    """A prompt and its completions in one sequence.

    Attributes:
        tokens: (N, ...), the tokens in the order of the tree's nodes.
        tree: The pattern of the sequence. ``tree.positions()`` are the positions of its tokens.
        paths: The places of the prompt's and the completion's tokens, in order, for each completion.
    """

    tokens: Tensor
    tree: Tree
    paths: list[Tensor]


def pack(prompt: Tensor, completions: Sequence[Tensor], *, align: bool | int | None = None) -> Packed:
    """Pack a prompt and its completions in one sequence, so that the prompt is computed once.

    A kernel sums the keys of a row tile by tile. With ``align`` every node of the tree begins with a tile, on the axis
    and on its path: the prompt's last, incomplete tile is repeated before each completion, and zeros that no other
    token attends fill the gaps. On the ``cpu`` backend output and lse of each path then have the bits that they have in
    a sequence of their own.

    Args:
        prompt: (tokens, ...), such as token numbers or embeddings; it may be empty.
        completions: Tensors (tokens, ...) of any lengths, with the prompt's other sides, dtype and device.
        align: True to begin nodes with a tile; or the tokens of a tile, if the call's tiles have another size.
    Returns:
        The tokens, their tree, and the path of each completion; :func:`unpack` takes results apart.
    Raises:
        ShapeError: There is no completion, or a tensor does not fit the prompt.
        PatternError: ``align`` is not True, False, None or a number of tokens.
    Example:
        >>> packed = rw.trees.pack(torch.tensor([1, 2, 3]), [torch.tensor([4]), torch.tensor([5, 6])])
        >>> packed.tokens
        tensor([1, 2, 3, 4, 5, 6])
        >>> packed.tree
        Tree([-1, 0, 0], [3, 1, 2])
        >>> rw.trees.unpack(packed.tokens, packed)
        [tensor([1, 2, 3, 4]), tensor([1, 2, 3, 5, 6])]
    """
    _check(prompt, completions)
    side = 1
    if align is not None and align is not False:
        side = DEFAULT_TILE_SIZE if align is True else whole("align", align, 1)
    shared = len(prompt) // side * side
    parts, parents, paths = [prompt[:shared]], [-1], []
    end = shared
    for completion in completions:
        gap = -end % side
        if gap:
            # tokens of a tree of their own
            parts.append(prompt.new_zeros(gap, *prompt.shape[1:]))
            parents.append(-1)
            end += gap
        parts.append(torch.cat([prompt[shared:], completion]))
        parents.append(0)
        places = torch.arange(end + len(parts[-1]), device=prompt.device)
        paths.append(torch.cat([places[:shared], places[end:]]))
        end += len(parts[-1])
    return Packed(torch.cat(parts), Tree(parents, [len(part) for part in parts]), paths)


def unpack(x: Tensor, packed: Packed, *, dim: int = 0) -> list[Tensor]:
    """Take the rows of a packed sequence apart: for each completion, those of the prompt and then its own.

    This is the inverse of :func:`pack`, for tokens, hidden states or losses; each result has the rows of a sequence
    that holds the prompt and one completion. It is differentiable: the gradient of a prompt's token is a sum over all
    completions.

    Args:
        x: A tensor with the packed tokens along ``dim``.
        packed: The result of :func:`pack`.
        dim: Dimension of the tokens.
    Raises:
        ShapeError: ``x`` has another number of tokens there.
    Example:
        >>> packed = rw.trees.pack(torch.arange(3), [torch.tensor([7]), torch.tensor([8, 9])])
        >>> [row.shape for row in rw.trees.unpack(torch.randn(1, 4, 6, 32), packed, dim=2)]
        [torch.Size([1, 4, 4, 32]), torch.Size([1, 4, 5, 32])]
    """
    tokens = len(packed.tokens)
    if not isinstance(x, Tensor) or not -x.ndim <= dim < x.ndim or x.shape[dim] != tokens:
        wanted = f"a tensor with the {tokens} packed tokens along dimension {dim}"
        raise ShapeError("x", shown(x), wanted, "Pass the dimension of the tokens as dim.")
    return [x.index_select(dim, path.to(x.device)) for path in packed.paths]


def _check(prompt: object, completions: object) -> None:
    """Raise ShapeError unless completions are tensors that fit the prompt."""
    if not isinstance(prompt, Tensor) or prompt.ndim < 1:
        raise ShapeError("prompt", shown(prompt), "a tensor (tokens, ...)", "Pass one sequence, without a batch.")
    if not isinstance(completions, (list, tuple)) or not completions:
        wanted = "a list of tensors (tokens, ...), one or more"
        raise ShapeError("completions", shown(completions), wanted, "Pass one tensor for each completion.")
    for number, each in enumerate(completions):
        if not isinstance(each, Tensor) or each.ndim != prompt.ndim:
            fits = False
        else:
            fits = (each.shape[1:], each.dtype, each.device) == (prompt.shape[1:], prompt.dtype, prompt.device)
        if not fits:
            wanted = f"a tensor (tokens, ...) that fits the prompt, {shown(prompt)}"
            raise ShapeError(f"completion {number}", shown(each), wanted, "Give it the prompt's sides and dtype.")
