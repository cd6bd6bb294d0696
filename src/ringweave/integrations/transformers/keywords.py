"""The keywords that models pass to attention: each is used, has no effect on a call, is refused, or is told once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import ShapeError, UnsupportedError, shown, warn_once
from ...patterns import Documents, Full, Pattern, Segments
from ...patterns.base import parts_of
from ...patterns.documents import keys_of
from ...torch_compat import version
from .masks import PatternMask

#: Keywords without an effect on the pairs and weights of a call, each with the reason.
WITHOUT_EFFECT = {
    "cache_position": "the mask function has read the positions",
    "deterministic": "every backward pass gives the same bits",
    "kernel_options": "they tune the kernels of flex_attention",
    "max_length_k": "flash-attn sizes its launch by it; the bounds hold the lengths",
    "max_length_q": "flash-attn sizes its launch by it; the bounds hold the lengths",
    "num_items_in_batch": "the loss divides by it",
    "output_hidden_states": "the model collects them",
    "output_router_logits": "the model collects them",
    "position_embeddings": "the layer has rotated queries and keys",
    "position_ids": "the mask function and the embeddings have read them",
    "return_dict": "the model arranges its outputs",
    "use_cache": "the cache is updated before attention",
}
#: Keywords that change the result of a call and that ringweave does not implement, each with its meaning.
REFUSED = {
    "block_table": "a paged cache of the library",
    "cache": "a paged cache of the library",
    "cumulative_seqlens_k": "a paged cache of the library",
    "cumulative_seqlens_q": "a paged cache of the library",
    "head_mask": "weights scaled by head",
    "k_cache": "a paged cache of the library",
    "max_seqlen_k": "a paged cache of the library",
    "max_seqlen_q": "a paged cache of the library",
    "read_index": "a paged cache of the library",
    "v_cache": "a paged cache of the library",
    "write_index": "a paged cache of the library",
}
#: Keywords that name the packed documents of a call.
DOCUMENTS = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"})
#: Keywords that need no check.
READ = frozenset(WITHOUT_EFFECT) | DOCUMENTS
OTHER = "Use attn_implementation='sdpa' or 'eager' for this model."
POSITIONS = "Pass position_ids that restart with each document, with use_cache=False and without attention_mask."


def check(given: Mapping[str, Any]) -> None:
    """Refuse the keywords that ringweave does not implement, and warn once about each unknown one.

    Args:
        given: The keywords that the attention function does not name.
    Raises:
        UnsupportedError: A keyword changes the result and is not implemented.
    """
    for name, value in given.items():
        if value is None or value is False or name in READ:
            continue
        if name in REFUSED:
            raise UnsupportedError(name, REFUSED[name], "none", OTHER)
        if not torch.compiler.is_compiling():
            wanted = "a keyword that ringweave's attention function reads"
            remedy = "Attention does not depend on it here; check that another implementation does not read it either."
            warn_once(f"keyword {name}", name, shown(value), wanted, remedy)


def apart(mask: PatternMask, given: Mapping[str, Any], batch: int) -> tuple[Pattern, Documents | None]:
    """Restrict a mask to the packed documents that keywords name, and return its pattern with the documents.

    Bounds are those of flash-attn: cumulative, over the tokens of all batch elements in order. The pattern counts from
    the first token of each document.

    Args:
        mask: The mask of the call; layers that share it share the documents.
        given: The keywords.
        batch: Number of batch elements.
    Raises:
        ShapeError: The documents do not have the call's tokens.
        UnsupportedError: The call has cached keys, a mask that counts from the row, or tokens on several ranks.
    """
    facts = mask.facts
    pattern, (nq, nk) = facts.pattern, facts.sizes[2:]
    q, k, numbers = given.get("cu_seq_lens_q"), given.get("cu_seq_lens_k"), given.get("seq_idx")
    if q is None and k is None and numbers is None:
        return pattern, None
    name = "seq_idx" if q is None and k is None else "cu_seq_lens_q, cu_seq_lens_k"
    if facts.context is not None:
        remedy = "Pass position_ids to shard(): the sharded batch then holds the documents."
        raise UnsupportedError(name, "documents beside a sharded batch", "none", remedy)
    if not (nq == nk and isinstance(facts.q_offset, int) and facts.q_offset == 0) and pattern != Full():
        got = f"documents for {nq} queries over {nk} keys, of which some are cached"
        raise UnsupportedError(name, got, "documents in a call without cached keys", "Pass use_cache=False.")
    known = isinstance(facts.rows, Documents)
    if not known and any(parts_of(pattern, kind) for kind in (Documents, Segments)):
        got = f"documents beside a mask that counts from the first token of the row, {pattern}"
        raise UnsupportedError(name, got, "a mask of windows and padding", POSITIONS)
    documents = _shared(name, q, k, numbers, mask, (batch, nq, nk))
    # a pattern inside the documents could not have the bounds that the mask has
    return pattern.within(documents) if facts.rows is None else pattern & documents, documents


def same_documents(one: Documents, other: Documents, batch: int, tokens: int) -> bool:
    """Return whether two packings have the same documents.

    Raises:
        PatternError: A document of the second is in several pieces.
    """
    other.spans()
    pairs = zip(keys_of(one, tokens), keys_of(other, tokens), strict=True)
    return all(torch.equal(a.expand(batch, tokens), b.expand(batch, tokens)) for a, b in pairs)


def _shared(name: str, q: Any, k: Any, numbers: Any, mask: PatternMask, sizes: tuple[int, int, int]) -> Documents:
    """Return the documents of keywords, which are made once for all layers that share a mask."""
    tensors = [numbers] if name == "seq_idx" else [q, k]
    for each, key in zip(tensors, name.split(", "), strict=True):
        if not isinstance(each, Tensor):
            wanted = "an integer tensor, as its counterpart" if len(tensors) > 1 else "an integer tensor"
            raise ShapeError(key, shown(each), wanted, "Pass it, or neither.")
    if torch.compiler.is_compiling():
        return _documents(name, tensors, sizes)
    # the tensors are compared by identity and version, and the mask keeps them alive
    held = [(x, version(x)) for x in tensors]
    told = mask.found.told
    if told is None or any(x is not y or m != n for (x, m), (y, n) in zip(held, told[0], strict=False)):
        told = mask.found.told = held, _documents(name, tensors, sizes)
    return told[1]


def _documents(name: str, tensors: list[Tensor], sizes: tuple[int, int, int]) -> Documents:
    batch, nq, nk = sizes
    if name == "seq_idx":
        numbers = tensors[0]
        if numbers.shape not in ((batch, nk), (1, nk)) or nq != nk:
            raise ShapeError(name, shown(numbers), f"({batch}, {nk})", "Number each token of the call.")
        return Documents(ids=numbers if len(numbers) == batch else numbers.expand(batch, -1))
    q, k = tensors
    same = q is k or (not torch.compiler.is_compiling() and torch.equal(q, k))
    if batch == 1:
        return Documents(cu_seqlens=q) if same else Documents(cu_seqlens_q=q, cu_seqlens_k=k)
    if torch.compiler.is_compiling() or not same or nq != nk:
        got = f"bounds of {batch} batch elements, compiled or different for queries and keys"
        raise UnsupportedError(name, got, "bounds of one row", "Pass all documents in one row.")
    ends = torch.arange(batch + 1, device=q.device) * nq
    if int(q[0]) != 0 or int(q[-1]) != batch * nq or not bool(torch.isin(ends, q).all()):
        got = f"bounds {q.tolist() if len(q) < 9 else shown(q)}"
        wanted = f"bounds from 0 to {batch * nq}, {nq} tokens in each of {batch} rows, without a document across rows"
        raise ShapeError(name, got, wanted, "Pass all documents in one row.")
    places = torch.arange(batch * nq, device=q.device)
    return Documents(ids=torch.bucketize(places, q[1:], right=True).view(batch, nq))
