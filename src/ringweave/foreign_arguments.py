"""Arguments of other libraries' attention functions, and what takes their place here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from .errors import message

_AS_PATTERN = "a pattern"
#: For each argument of PyTorch, transformers, flash-attn and NATTEN: what takes its place, and how to write it.
_OTHERS: Mapping[str, tuple[str, str]] = {
    "attention_mask": (_AS_PATTERN, "Pass KeyPadding(lengths) for padding, with & Causal() for a decoder."),
    "attn_bias": ("terms", "Pass terms=Bias(attn_bias)."),
    "attn_mask": (
        "a pattern, or terms",
        "For a boolean mask pass a rule such as Causal(), or BlockTable(attn_mask, block_size=1). For a mask that is "
        "added to the scores pass terms=Bias(attn_mask).",
    ),
    "alibi_slopes": ("terms", "Pass terms=ALiBi(alibi_slopes)."),
    "block_mask": (_AS_PATTERN, "Pass from_block_mask(block_mask) as the pattern."),
    "causal": (_AS_PATTERN, "Pass Causal() as the pattern, or pattern & Causal()."),
    "dropout_p": ("dropout", "Pass dropout=dropout_p, in training only."),
    "enable_gqa": ("no such argument", "Leave it out: k and v may have fewer heads than q."),
    "is_causal": (_AS_PATTERN, "Pass Causal() as the pattern, or pattern & Causal()."),
    "kernel_size": ("neighborhood_attention", "Call neighborhood_attention(q, k, v, window=kernel_size)."),
    "key_padding_mask": (_AS_PATTERN, "Pass KeyPadding(lengths), or Sinks(mask) with True for the keys to keep."),
    "mask": (_AS_PATTERN, "Pass a rule such as Causal(), or BlockTable(mask, block_size=1)."),
    "mask_mod": (_AS_PATTERN, "Pass from_mask_mod(mask_mod) as the pattern."),
    "score_mod": ("terms", "Pass terms=score_mod, or the Softcap, ALiBi, DistanceBias or Bias that it is."),
    "softcap": ("terms", "Pass terms=Softcap(softcap)."),
    "softmax_scale": ("scale", "Pass scale=softmax_scale."),
    "window_size": (_AS_PATTERN, "Pass SlidingWindow(left, right) as the pattern."),
}


def refuse_unknown(function: str, names: Mapping[str, object]) -> NoReturn:
    """Raise TypeError for unknown keyword arguments, with the remedy for those of other libraries."""
    name = next((each for each in names if each in _OTHERS), next(iter(names)))
    if name not in _OTHERS:
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    wanted, remedy = _OTHERS[name]
    got = f"an argument that {function}() does not have"
    raise TypeError(message(name, got, wanted, f'{remedy} See "Coming from other libraries", docs/migration.md.'))
