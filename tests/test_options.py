"""Every option of every attention function and module is used or refused.

Options are enumerated from signatures. For each one, a call with another value of the option has another result and
other gradients, or the effect that the documentation names, or raises a typed error. A new option, function or module
without a case fails.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringweave as rw
from ringweave.call import PER_HEAD, Arguments, pack
from ringweave.errors import RingweaveError

from .memory.test_oom_retry import short_of
from .operators import Watching
from .options import BATCH, DIM, HEADS, KINDS, TOKENS, VALUES, ScoreFunction, learned
from .parallel.threads import run

CHANNELS = HEADS * DIM


# ---- calls -------------------------------------------------------------------------------------------------------


def drawn(name: str, *shape: int) -> Tensor:
    """Return the random tensor of a name."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def qkv(*sizes: int) -> dict[str, Any]:
    return {name: drawn(name, *(sizes or (BATCH, HEADS, TOKENS, DIM))).requires_grad_() for name in "qkv"}


def cache(name: str = "k") -> rw.PagedCache:
    pages = rw.PagedCache.empty(BATCH, TOKENS, HEADS, DIM, page=16)
    pages.append(drawn(name, BATCH, HEADS, TOKENS, DIM), drawn("v", BATCH, HEADS, TOKENS, DIM))
    return pages


LISTS = {"segments": [16, 64], "rates": [1, 2]}
MEANS = {"pool": 8, "top_k": 1, "window": 0}
#: The arguments of a call for each attention function.
FUNCTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "attention": lambda: qkv() | {"pattern": rw.Causal()},
    "attention_with_lse": lambda: qkv() | {"pattern": rw.Causal()},
    "attention_weights": lambda: {"q": qkv()["q"], "k": qkv()["k"], "pattern": rw.Causal()},
    "varlen_attention": lambda: qkv(TOKENS, HEADS, DIM) | {"cu_seqlens_q": [0, 20, TOKENS]},
    "paged_attention": lambda: {"q": drawn("q", BATCH, HEADS, 3, DIM), "cache": cache()},
    "longnet_attention": lambda: qkv() | LISTS,
    "hierarchical_attention": lambda: qkv() | MEANS,
    "neighborhood_attention": lambda: qkv(BATCH, HEADS, 8, 8, DIM) | {"window": 3},
}


def whole(**options: Any) -> dict[str, Any]:
    x = drawn("x", BATCH, TOKENS, CHANNELS).requires_grad_()
    made = {"embed_dim": CHANNELS, "num_heads": HEADS, "batch_first": True, **options}
    return {"query": x, "key": x, "value": x, **made}


BLOCKS = {"block_size": 8, "top_k": 3}
BRANCHES = BLOCKS | {"top_k": 4, "compress_block": 8, "compress_stride": 4, "window": 8}


def choosing(**options: Any) -> dict[str, Any]:
    x = drawn("x", BATCH, TOKENS, CHANNELS).requires_grad_()
    return {"embed_dim": CHANNELS, "num_heads": HEADS, "x": x, **options}


#: The arguments of the constructor and of a call for each module.
MODULES: dict[str, Callable[[], dict[str, Any]]] = {
    "MultiheadAttention": lambda: whole(pattern=rw.Causal()),
    "LongNetAttention": lambda: whole(**LISTS),
    "HierarchicalAttention": lambda: whole(**MEANS),
    "MixtureOfBlockAttention": lambda: choosing(**BLOCKS),
    "NativeSparseAttention": lambda: choosing(**BRANCHES),
    "NeighborhoodAttention": lambda: {
        "embed_dim": CHANNELS, "num_heads": HEADS, "window": 3, "x": drawn("x", BATCH, 8, 8, CHANNELS).requires_grad_()
    },
}  # fmt: skip
CALLS = FUNCTIONS | MODULES
#: Input tensors, which are no options.
INPUTS = {"q", "k", "v", "x", "query", "key", "value"}


def parameters(kind: type[nn.Module]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a module's constructor; ``**options`` are those of MultiheadAttention."""
    own = dict(inspect.signature(kind).parameters)
    if own.pop("options", None) is not None:
        own = dict(inspect.signature(rw.nn.MultiheadAttention).parameters) | own
    return own


def options_of(name: str) -> list[str]:
    """Return the options of a function, or of a module's constructor and forward."""
    if name in FUNCTIONS:
        found = list(inspect.signature(getattr(rw, name)).parameters)
    else:
        kind = getattr(rw.nn, name)
        found = [*parameters(kind), *inspect.signature(kind.forward).parameters]
    return [each for each in found if each not in INPUTS | {"self"}]


@dataclass
class Measured:
    """The result of a call, and its gradients by tensor name."""

    out: Tensor
    grads: dict[str, Tensor]
    answer: Any = None
    module: nn.Module | None = None


def measured(name: str, given: Mapping[str, Any]) -> Measured:
    """Call a function, or construct and call a module, and differentiate a fixed sum of the results."""
    torch.manual_seed(0)
    module = None
    if name in FUNCTIONS:
        # pages have no backward
        with torch.no_grad() if name == "paged_attention" else nullcontext():
            answer = getattr(rw, name)(**given)
    else:
        kind = getattr(rw.nn, name)
        made = {each: value for each, value in given.items() if each in parameters(kind)}
        module = kind(**made)
        with torch.no_grad():
            for each, parameter in module.named_parameters():
                if not parameter.is_meta:
                    parameter.copy_(drawn(each, *parameter.shape) / 2)
        if any(parameter.is_meta for parameter in module.parameters()):
            return Measured(torch.zeros(()), {}, module=module)
        answer = module(**{each: value for each, value in given.items() if each not in made})
    out = answer.values if isinstance(answer, rw.BlockWeights) else answer
    out = out[0] if isinstance(out, tuple) else out
    leaves = {each: value for each, value in given.items() if isinstance(value, Tensor) and value.requires_grad}
    for each, value in given.items():
        leaves |= {f"{each}.{i}": table for i, table in enumerate(tables_of(value)) if table.requires_grad}
    leaves |= dict(module.named_parameters()) if module is not None else {}
    if not out.requires_grad:
        return Measured(out.detach(), {}, answer, module)
    loss = (out.double() * drawn("upstream", *out.shape)).sum()
    if isinstance(answer, rw.AttentionOutput):
        loss = loss + answer.lse.nan_to_num(0, 0, 0).sum()
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return Measured(out.detach(), dict(zip(leaves, found, strict=True)), answer, module)


def tables_of(value: object) -> list[Tensor]:
    """Return the tables of terms and of score functions."""
    members = value if isinstance(value, list) else [value]
    return [table for each in members if isinstance(each, (rw.terms.Term, ScoreFunction)) for table in each.tables]


def usual(name: str, option: str) -> dict[str, Any]:
    """Return the arguments of the call without the option's other value."""
    beside = BESIDE.get(option, {}) if name == "MultiheadAttention" or option == "positions" else {}
    return CALLS[name]() | beside


# ---- effects -----------------------------------------------------------------------------------------------------


def differ(one: Tensor, other: Tensor, least: float = 1e-3) -> bool:
    return one.shape != other.shape or bool((one.double() - other.double()).abs().max() > least)


def changes(name: str, option: str, value: Mapping[str, Any], least: float = 1e-3, result: bool = True) -> None:
    """The result and an input's gradient change, and every learned tensor of the option gets a gradient."""
    before, after = measured(name, usual(name, option)), measured(name, usual(name, option) | value)
    assert differ(before.out, after.out, least) == result, "the result"
    inputs = INPUTS & {*before.grads}
    assert not inputs or any(differ(before.grads[each], after.grads[each], least) for each in inputs), "the gradient"
    for each, grad in after.grads.items():
        assert grad is not None, f"no gradient of {each}"
        assert grad.abs().max() > 0, f"a gradient of zeros of {each}"


def computes(name: str, option: str, value: Mapping[str, Any]) -> None:
    """Another backend gives the same result with other rounding."""
    before, after = measured(name, usual(name, option)), measured(name, usual(name, option) | value)
    assert not torch.equal(before.out, after.out)
    torch.testing.assert_close(before.out, after.out, rtol=1e-4, atol=1e-4)
    with pytest.raises(rw.UnsupportedError, match="backend: got 'no such'"):
        measured(name, usual(name, option) | {option: "no such"})


def shares(name: str, option: str, value: Mapping[str, Any]) -> None:
    """A context of one rank gives the same result, and one for another length raises."""
    before, after = measured(name, usual(name, option)), measured(name, usual(name, option) | value)
    torch.testing.assert_close(before.out, after.out)
    for each, grad in before.grads.items():
        # a module may compute in another order under a context, and sums round relative to their largest terms
        rounding = 8 * torch.finfo(grad.dtype).eps * float(grad.abs().max())
        torch.testing.assert_close(grad, after.grads[each], rtol=1.3e-6, atol=rounding)
    with pytest.raises(rw.ShapeError):
        measured(name, usual(name, option) | {option: VALUES["context"](4 * TOKENS)})


def retries(name: str, option: str, value: Mapping[str, Any]) -> None:
    """When memory is short, the default computes in pieces and "raise" raises."""
    with short_of(TOKENS), torch.no_grad():
        measured(name, usual(name, option))
        with pytest.raises(torch.OutOfMemoryError):
            measured(name, usual(name, option) | value)


def detaches(name: str, option: str, value: Mapping[str, Any]) -> None:
    """The result stays equal, and the gradient changes."""
    changes(name, option, value, result=False)


def places(name: str, option: str, value: Mapping[str, Any]) -> None:
    """The parameters have the device or the dtype."""
    given = usual(name, option) | value
    given |= {each: x.double() for each, x in given.items() if isinstance(x, Tensor) and option == "dtype"}
    module = measured(name, given).module
    assert module is not None
    assert all(
        getattr(each, option) == torch.empty(0, **value).__getattribute__(option) for each in module.parameters()
    )


def returns_weights(name: str, option: str, value: Mapping[str, Any]) -> None:
    """The weights are returned with the output."""
    assert measured(name, usual(name, option)).answer[1] is None
    assert isinstance(measured(name, usual(name, option) | value).answer[1], rw.BlockWeights)


def is_ignored(name: str, option: str, value: Mapping[str, Any]) -> None:
    """The docstring says that the option is ignored."""
    text = inspect.getdoc(getattr(rw.nn, name).forward) or ""
    assert f"{option}: Ignored" in text
    assert torch.equal(measured(name, usual(name, option)).out, measured(name, usual(name, option) | value).out)


def is_refused(name: str, option: str, value: Mapping[str, Any]) -> None:
    """A wrong value raises a typed error that names the expected one."""
    with pytest.raises(RingweaveError, match="; wanted "):
        measured(name, usual(name, option) | value)


Check = Callable[[str, str, Mapping[str, Any]], None]
#: Effects other than a changed result.
EFFECTS: dict[str, Check] = {
    "backend": computes, "context": shares, "on_oom": retries, "detach_weights": detaches, "device": places,
    "dtype": places, "need_weights": returns_weights, "average_attn_weights": is_ignored,
}  # fmt: skip
GATES = {"combine": "gates", "gates": lambda: learned(BATCH, HEADS, TOKENS, 3)}
#: Other values of options that only some functions or modules have.
OWN: dict[str, Any] = {
    "cu_seqlens_q": [0, 30, TOKENS], "cu_seqlens_k": lambda: {"cu_seqlens_k": [0, 28, 80]} | dict(list(qkv(80, HEADS, DIM).items())[1:]),
    "cache": lambda: cache("another"),
    "segments": [8, 64], "rates": [1, 4], "causal": True, "offset": 1, "heads": "partitioned", "detach_weights": True,
    "pool": 16, "top_k": 3, "window": 5, "combine": GATES, "gates": GATES, "dilation": 2, "is_causal": True,
    "embed_dim": 2 * CHANNELS, "num_heads": 2 * HEADS, "bias": False, "add_bias_kv": True, "add_zero_attn": True,
    "kdim": 5, "vdim": 5, "batch_first": False, "device": "meta", "dtype": torch.float64, "num_kv_heads": 1,
    "qk_norm": True, "rotary_base": 100.0, "need_weights": True, "average_attn_weights": False,
    "key_padding_mask": lambda: torch.arange(TOKENS).expand(BATCH, -1) > 40,
    "attn_mask": lambda: torch.ones(TOKENS, TOKENS).tril(-5).bool(),
    "positions": lambda: torch.arange(TOKENS) ** 2, "documents": lambda: rw.Documents([20, TOKENS - 20]), "block_size": 16,
    "compress_block": 4, "compress_stride": 8, "initial_blocks": 2, "local_blocks": 1, "separate_kv": False,
}  # fmt: skip
#: Other values for one function or module, by name and option.
SPECIAL: dict[tuple[str, str], Any] = {
    ("hierarchical_attention", "window"): 16,
    ("HierarchicalAttention", "window"): 16,
    **{(name, "sink_logits"): True for name in MODULES},
    **{(name, "top_k"): 5 for name in ("MixtureOfBlockAttention", "NativeSparseAttention")},
    ("MixtureOfBlockAttention", "cache"): lambda: rw.nn.MixtureOfBlockAttention(8, 1, **BLOCKS).empty_cache(),
    ("NativeSparseAttention", "cache"): lambda: rw.nn.NativeSparseAttention(8, 1, **BRANCHES).empty_cache(),
    **{
        (name, "terms"): lambda: rw.Bias(learned(1, HEADS, TOKENS, TOKENS))
        for name in ("neighborhood_attention", "NeighborhoodAttention")
    },
}
#: Options that both calls need, with and without the other value.
BESIDE: dict[str, dict[str, Any]] = {"positions": {"rotary_base": 100.0}, "is_causal": {"pattern": rw.Full()}}
MODULES_REFUSE = {"add_bias_kv", "add_zero_attn", "embed_dim", "kdim", "vdim"}
#: Options that raise, by function or module.
REFUSED: dict[str, set[str]] = {
    "MultiheadAttention": MODULES_REFUSE,
    "LongNetAttention": MODULES_REFUSE | {"pattern", "need_weights", "is_causal"},
    "HierarchicalAttention": MODULES_REFUSE
    | {"pattern", "dropout", "terms", "sink_logits", "context", "precision"}
    | {"attn_mask", "key_padding_mask", "is_causal", "need_weights"},
    # a cache holds no gradients, and these calls have some
    "MixtureOfBlockAttention": {"embed_dim", "cache"},
    "NativeSparseAttention": {"embed_dim", "cache"},
    "NeighborhoodAttention": {"embed_dim"},
}


def value_of(name: str, option: str) -> dict[str, Any]:
    """Return the other value of an option, with options that it needs."""
    if (name, option) in SPECIAL:
        value = SPECIAL[name, option]
    elif option in OWN:
        value = OWN[option]
    else:
        value = VALUES[option](TOKENS)
    value = value() if callable(value) and not isinstance(value, nn.Module) else value
    value = dict(value) if isinstance(value, dict) else {option: value}
    value = {each: made() if each == "gates" and callable(made) else made for each, made in value.items()}
    return value if name in FUNCTIONS else {each: made for each, made in value.items() if each != "gates"}


#: Kinds of values that raise, by function or module and option.
REFUSED_KINDS: dict[tuple[str, str], set[str]] = {
    # its branches have plans of their own
    ("LongNetAttention", "terms"): {"a function in tiles", "a term and a function"},
    ("HierarchicalAttention", "terms"): {*KINDS["terms"]},
    ("paged_attention", "terms"): {*KINDS["terms"]},
}
CASES = [(name, option) for name in CALLS for option in options_of(name)]
OF_KINDS = [(name, option, kind) for name, option in CASES for kind in KINDS.get(option, ())]


def test_every_function_and_module_has_a_call() -> None:
    named = {name for name in rw.__all__ if "attention" in name and callable(getattr(rw, name))}
    assert named == {*FUNCTIONS}
    assert {*rw.nn.__all__} == {*MODULES}
    assert {*Arguments._fields} - INPUTS == {*VALUES}
    assert {*PER_HEAD} <= {*VALUES}


@pytest.mark.parametrize(("name", "option"), CASES, ids=lambda each: str(each))
def test_an_option_is_used_or_refused(name: str, option: str) -> None:
    value = value_of(name, option)
    if option in REFUSED.get(name, ()):
        is_refused(name, option, value)
    elif option in EFFECTS:
        EFFECTS[option](name, option, value)
    else:
        changes(name, option, value)


@pytest.mark.parametrize(("name", "option", "kind"), OF_KINDS, ids=lambda each: str(each))
def test_a_value_of_another_kind_is_used_or_refused(name: str, option: str, kind: str) -> None:
    value = {option: KINDS[option][kind](TOKENS)}
    (is_refused if kind in REFUSED_KINDS.get((name, option), ()) else changes)(name, option, value)


# ---- on several ranks --------------------------------------------------------------------------------------------

_LONG, _RANKS = 256, 2


def on_one(option: str, value: Any) -> dict[str, Tensor]:
    given = qkv(1, HEADS, _LONG, DIM) | {"pattern": rw.Causal()} | value
    found = measured("attention", given)
    return {"out": found.out} | found.grads


def on_ranks(option: str, make: Callable[[], dict[str, Any]]) -> dict[str, Tensor]:
    """Return the joined results of all ranks, and the summed gradients of the option's tensors."""

    def job(mesh: Any) -> tuple[Tensor, dict[str, Tensor]]:
        ctx = rw.ContextParallel(mesh, rw.Causal(), _LONG, heads=(HEADS, HEADS), placement="striped")
        given, value = qkv(1, HEADS, _LONG, DIM), make()
        local = {name: ctx.shard(x.detach(), 2).requires_grad_() for name, x in given.items()}
        out = rw.attention(**({**local, "pattern": rw.Causal(), "context": ctx} | value))
        weights = drawn("upstream", 1, HEADS, _LONG, DIM)
        leaves = dict(local) | {each: x for each, x in value.items() if isinstance(x, Tensor)}
        for each, x in value.items():
            leaves |= {f"{each}.{i}": table for i, table in enumerate(tables_of(x))}
        loss = (out.double() * ctx.shard(weights, 2)).sum()
        grads = torch.autograd.grad(loss, list(leaves.values()))
        return ctx.positions, {"out": out.detach()} | dict(zip(leaves, grads, strict=True))

    shares_of = run(_RANKS, job)
    joined: dict[str, Tensor] = {}
    for positions, found in shares_of:
        for each, x in found.items():
            if each in ("out", *"qkv"):
                total = joined.setdefault(each, x.new_zeros(1, HEADS, _LONG, DIM))
                total[:, :, positions] = x
            else:
                joined[each] = joined.get(each, 0) + x
    return joined


@pytest.fixture
def _one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the seed: ranks are threads of one random generator, so a seed drawn by rank 0 would depend on their order."""

    def fixed(*args: Any) -> list[Tensor]:
        return [torch.tensor(77) if x.dtype == torch.int64 and not x.ndim else x for x in pack(*args)]

    for module in (rw.api, rw.validate):
        monkeypatch.setattr(module, "pack", fixed)


@pytest.mark.usefixtures("_one_seed")
@pytest.mark.parametrize("option", [name for name in VALUES if name != "context"])
def test_ranks_use_or_refuse_an_option(option: str) -> None:
    """Ranks that share a sequence compute what one device computes with the option, or raise a typed error."""

    def value() -> dict[str, Any]:
        return {option: VALUES[option](_LONG)}

    if option in ("q_offset", "k_offset"):
        with pytest.raises(RingweaveError, match="; wanted "):
            on_ranks(option, value)
        return
    as_on_one(option, value, 3e-2 if option == "precision" else 1e-4)


def as_on_one(option: str, value: Callable[[], dict[str, Any]], halves: float = 1e-4) -> None:
    found = on_ranks(option, value)
    for each, x in on_one(option, value()).items():
        torch.testing.assert_close(found[each], x, rtol=halves, atol=halves * float(x.abs().max()), msg=each)


@pytest.mark.parametrize("option", VALUES)
def test_a_watched_call_uses_an_option(option: str) -> None:
    """A call that a mode watches crosses operators, as text, numbers and tensors, and loses no option there."""
    given = usual("attention", option) | value_of("attention", option)
    alone = measured("attention", given)
    with Watching():
        watched = measured("attention", given)
    assert torch.equal(watched.out, alone.out)
    for name, grad in alone.grads.items():
        torch.testing.assert_close(watched.grads[name], grad, msg=name)


@pytest.mark.parametrize(("option", "kind"), [(option, kind) for option in KINDS for kind in KINDS[option]])
def test_ranks_use_a_value_of_another_kind(option: str, kind: str) -> None:
    """Ranks that share a sequence compute every kind of value that one device computes."""
    as_on_one(option, lambda: {option: KINDS[option][kind](_LONG)})
