"""Draw calls: sizes, layouts, dtypes and options around a pattern; and print each call as Python."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from . import score_terms, trees
from .layouts import LAYOUTS, SHARED
from .score_terms import ScoreTerms
from .sizes import First, Sizes
from .trees import Tree

LENGTHS = [1, 2, 3, 5, 7, 15, 16, 17, 20, 31, 32, 33, 40, 63, 64, 65, 100, 127, 128, 129, 200, 257]
DIMS = [8, 8, 16, 16, 24, 32, 40, 64, 72, 96]
ODD_DIMS = [1, 2, 3, 5, 7, 12, 20, 33, 50, 90]
SCALES = [None, None, None, None, 0.3, -0.3, 1.0, 0.0, -0.0, 1e-30, 1e-6, -1e-3, 30.0, -20.0, 1e4, -1e6, 1e20, 1e30]
FILLS = [".normal_()"] * 8 + [".normal_(0, 30)", ".normal_(0, 0.001)", ".random_(-2, 3)", ".fill_(1)", ".zero_()"]
#: q and k with products that overflow before they are scaled, and a scale that brings them into range, or far up
LARGE = [(20, 19, -37), (20, 19, -10), (25, -10, -15), (-20, -17, 36), (36, 0, -30), (0, 36, -36), (18, 20, -36)]
#: ways to return saved tensors with other strides
HOOKS = (
    "torch.autograd.graph.saved_tensors_hooks(lambda x: x.mT.contiguous() if x.ndim > 1 else x, "
    "lambda x: x.mT if x.ndim > 1 else x)"
)
CALLS = ["attention", "attention", "context", "no_grad", "inference_mode", "merge", "weights"]
DTYPES = ["float32", "float32", "bfloat16", "float16", "float64"]


class Find(Exception):  # noqa: N818
    """A bug: ``kind`` in a word or two, a description, and a line that shows it."""

    def __init__(self, kind: str, what: str, line: str = ""):
        super().__init__(f"{kind}: {what}")
        self.kind, self.what, self.line = kind, what, line


@dataclass(frozen=True)
class Call:
    """One call of the library; its fields determine everything that happens."""

    backend: str
    kv_heads: int
    sizes: Sizes
    dim: int
    value_dim: int
    dtype: str
    tree: Tree
    #: of q, k, v and dout
    layouts: tuple[str, str, str, str]
    fills: tuple[str, str, str, str]
    scale: float | None
    #: which of q, k and v require gradients
    leaves: str
    #: result that the loss depends on: "out", "lse" or "both"
    loss: str
    how: str
    detach_weights: bool
    threads: int
    poisoned: bool
    #: whether keys, values and queries without pairs are NaN
    dead: bool
    seed: int
    #: (batch element, key head, key) of a NaN key that queries may attend
    broken: tuple[int, int, int] | None = None
    #: whether tensors saved for backward are packed in another layout
    packed: bool = False
    #: whether the call is made in a forked process first
    forked: bool = False
    #: positions of each batch element's first query and key, if they differ by batch element
    first: First | None = None
    score_terms: ScoreTerms = ScoreTerms()  # noqa: RUF009  (immutable)

    @property
    def nk(self) -> int:
        """Return the number of keys that are passed: those from the first position on."""
        return self.sizes.nk - (0 if self.first is None else max(self.first.k))

    @property
    def grads(self) -> list[str]:
        """Return the names of the inputs to differentiate by."""
        return [] if self.how in ("no_grad", "inference_mode") else [*self.leaves, *self.score_terms.learning]

    def shapes(self) -> list[tuple[int, int, int, int]]:
        """Return the shapes of q, k, v and dout."""
        s = self.sizes
        return [
            (s.batch, s.heads, s.nq, self.dim),
            (s.batch, self.kv_heads, self.nk, self.dim),
            (s.batch, self.kv_heads, self.nk, self.value_dim),
            (s.batch, s.heads, s.nq, self.value_dim),
        ]


def program(call: Call) -> tuple[list[str], list[str]]:
    """Return (lines that make the inputs, lines that call) as Python: the fuzzer executes the text that it prints."""
    s = call.sizes
    imports = "import torch, ringweave as rw"
    if any(tree.kind == "from_block_mask" for tree in call.tree.walk()):
        imports += ", torch.nn.attention.flex_attention"
    inputs = [imports, f"torch.manual_seed({call.seed}); torch.set_num_threads({call.threads})"]
    if call.poisoned:
        inputs[1] += "; torch.use_deterministic_algorithms(True)"
    for name, shape, layout, fill in zip("qkvd", call.shapes(), call.layouts, call.fills, strict=True):
        if name == "d":
            if call.grads and call.loss != "lse":
                inputs.append(f"dout = {LAYOUTS[layout](*shape, call.dtype, fill)}")
            continue
        leaf = ".requires_grad_()" if name in call.leaves else ""
        inputs.append(f"{name} = {LAYOUTS[layout](*shape, call.dtype, fill)}{leaf}")
    inputs += call.score_terms.inputs(s, call.nk)
    if call.grads and call.loss != "out":
        wide = ", dtype=torch.float64" if call.dtype == "float64" else ""
        inputs.append(f"dlse = torch.randn({s.batch}, {s.heads}, {s.nq}{wide})")
    options = f"backend={call.backend!r}"
    if call.first is not None:
        options += f", {call.first.options()}"
    elif s.q_offset or s.nq < s.nk:
        options += f", q_offset={s.q_offset}"
    if call.scale is not None:
        options += f", scale={call.scale!r}"
    options += call.score_terms.options()
    longnet = call.how == "longnet_attention"
    pattern = "pattern"
    if longnet:
        options = f"{trees.longnet_arguments(call.tree)}, detach_weights={call.detach_weights}, {options}"
    else:
        inputs.append(f"pattern = {trees.source(call.tree, s)}")
    if call.dead:
        asked = f"{s.nq}, {s.nk}, {s.heads}, batch={s.batch}, q_offset={s.q_offset}"
        inputs += [
            f"used = pattern.to_dense({asked}) > 0; dead = ~used.unflatten(1, ({call.kv_heads}, -1)).any(2).any(2)",
            "k.data[dead] = v.data[dead] = torch.nan; q.data[~used.any(-1)] = torch.nan",
        ]
    if call.broken is not None:
        inputs.append(f"k.data[{', '.join(map(str, call.broken))}] = torch.nan")
    if call.how == "context":
        inputs.append(f"ctx = rw.ContextParallel(None, pattern, {s.nk}, heads=({s.heads}, {call.kv_heads}))")
        lines = [
            f"out, lse = rw.attention_with_lse(*(ctx.shard(x, dim=2) for x in (q, k, v)), pattern, context=ctx, {options})",
            f"at = ctx.positions.argsort()[:{s.nk}]; out, lse = out[:, :, at], lse[:, :, at]",
        ]
    elif longnet:
        lines = [f"out = rw.longnet_attention(q, k, v, {options})"]
    elif call.how == "merge":
        lines = [
            f"parts = [rw.attention_with_lse(q, k, v, each, {options}) for each in (pattern & rw.Strided(3), pattern & ~rw.Strided(3))]",
            "out, lse = rw.merge(*zip(*parts))",
        ]
    elif call.how == "weights":
        asked = options.split(", ", 1)[1:]
        lines = [
            f"weights = rw.attention_weights(q, k, {', '.join([pattern, *asked])}).to_dense()",
            f"out = (weights @ v.to(weights.dtype).repeat_interleave({s.heads // call.kv_heads}, 1)).to(v.dtype)",
        ]
    elif call.how == "attention":
        lines = [f"out = rw.attention(q, k, v, {pattern}, {options})"]
    else:
        lines = [f"out, lse = rw.attention_with_lse(q, k, v, {pattern}, {options})"]
    around = f"torch.{call.how}()" if call.how in ("no_grad", "inference_mode") else HOOKS if call.packed else ""
    if around:
        lines = [f"with {around}:", *("    " + line for line in lines)]
    if call.grads:
        roots, slopes = {"out": ("out", "dout"), "lse": ("lse", "dlse"), "both": ("(out, lse)", "(dout, dlse)")}[
            call.loss
        ]
        wanted = "".join(f"d{name}, " for name in call.grads)
        lines.append(f"{wanted.rstrip()} = torch.autograd.grad({roots}, ({', '.join(call.grads)},), {slopes})")
    return inputs, lines


#: otherwise small calls would have one tile and one branch
FINE = (
    "import sys, ringweave; m = sys.modules; m['ringweave.plan.branches']._BRANCH_COST = -1e9; "
    "m['ringweave.plan.tile_size'].DEFAULT_TILE_SIZE = 16"
)


def text(call: Call, find: Find | None, variant: str | None, fine: bool) -> str:
    """Return the call as Python that does not need the fuzzer, and ends in a line that shows the bug."""
    inputs, lines = program(call)
    if variant is not None:
        inputs[0] = f"import os; os.environ[{'RINGWEAVE_CPU_VARIANT'!r}] = {variant!r}; {inputs[0]}"
    if fine:
        inputs.insert(1, FINE)
    if find is None:
        return "\n".join([*inputs, *lines])
    shown = [f"print({find.line.replace('  #', ')  #')}"] if find.line else []
    return "\n".join([f"# {find.kind}: {find.what}", *inputs, *lines, *shown])


def draw(r: Random, backend: str) -> Call:
    """Draw a call of a backend."""
    slow = backend == "triton"
    heads, kv_heads = r.choice(
        [(1, 1), (2, 2), (4, 4), (2, 1), (4, 2), (4, 1), (3, 1), (6, 3), (5, 5), (8, 2), (8, 8), (16, 1)]
    )
    if slow and heads > 4:
        heads, kv_heads = 2, 1
    how = r.choice(["attention_with_lse"] * 5 + CALLS)
    sizes = _sizes(r, heads, how, slow)
    dim, value_dim = _dims(r, backend)
    tree = trees.draw(r, sizes, r.choice([0, 1, 1, 2, 3]))
    detach = False
    if backend == "sdpa" and r.random() < 0.95:
        tree, sizes = Tree(r.choice(["Full", "Causal"])), replace(sizes, q_offset=0)
        value_dim = dim if r.random() < 0.95 else value_dim
    elif r.random() < (0.2 if backend in ("auto", "sdpa") else 0.05):
        tree = Tree(r.choice(["Full", "Causal"]))
    elif r.random() < 0.1:
        tree = trees.draw_mixture(r, sizes)
        if how in ("attention", "attention_with_lse") and r.random() < 0.5:
            how, detach = "longnet_attention", r.random() < 0.5
    dtype = r.choice(DTYPES)
    if dtype == "float64" and backend in ("cpu", "triton") and r.random() < 0.95:
        dtype = "float32"
    if slow and dtype == "bfloat16" and r.random() < 0.95:
        dtype = "float16"
    if (how == "merge" and tree.kind == "LongNet") or (how in ("merge", "weights") and backend == "sdpa"):
        how = "attention_with_lse"
    if how == "weights" and (tree.kind == "LongNet" or backend not in ("auto", "dense_batched")):
        how = "attention"
    plain = r.random() < 0.15
    names = list(LAYOUTS)
    layouts = tuple("contiguous" if plain or r.random() < 0.2 else r.choice(names) for _ in range(4))
    fills = tuple(r.choice(FILLS) if r.random() < 0.3 else ".normal_()" for _ in range(4))
    dead = how not in ("longnet_attention", "weights") and not set(layouts[:3]) & set(SHARED) and r.random() < 0.3
    first = None
    ways = ("attention", "attention_with_lse", "no_grad", "inference_mode", "weights", "merge")
    if how in ways and tree.kind != "LongNet" and backend != "sdpa" and r.random() < 0.2:
        first, dead = _first(r, sizes), False
        if any(below.kind == "Selected" for below in tree.walk()):
            # its indices fit the number of keys without an offset
            first = first._replace(k=(0,) * sizes.batch)
    call = Call(
        backend, kv_heads, sizes, dim, value_dim, dtype, tree, layouts, fills, r.choice(SCALES),  # type: ignore[arg-type]
        leaves=r.choice(["qkv", "qkv", "qkv", "qkv", "q", "k", "v", "qk", "kv", "qv", ""]),
        loss="out" if how in ("attention", "longnet_attention", "weights") else r.choice(["both", "both", "out", "lse"]),
        how=how, detach_weights=detach, threads=r.choice([1] * 5 + [2]), poisoned=r.random() < 0.2, dead=dead, seed=r.randint(0, 10**6), first=first,
    )  # fmt: skip
    call = _hostile(r, call)
    if (
        how in ("longnet_attention", "weights")
        or call.broken
        or "mul_" in call.fills[0]
        or r.random() > (0.03 if backend == "sdpa" else 0.35)
    ):
        return call
    whole = how != "merge"
    drawn = score_terms.draw(r, sizes, dtype, sinks=whole, dropout=whole)
    if backend == "triton":
        # its kernels refuse gradients of tables
        drawn = replace(drawn, terms=tuple(replace(term, learns=False) for term in drawn.terms))
    if tree.counts_paths:
        kept = tuple(term for term in drawn.terms if not term.of_distance)
        drawn = replace(drawn, terms=kept)
    return replace(call, score_terms=drawn)


def _hostile(r: Random, call: Call) -> Call:
    """Add a case like the bugs found by hand: large products, a broken key, saved tensors in other layouts, a fork."""
    s, choice = call.sizes, r.random()
    if choice < 0.06 and call.backend != "triton" and call.dtype != "float16":
        q, k, scale = r.choice(LARGE)
        fills = (f".normal_().clamp_(-3, 3).mul_(1e{q})", f".normal_().clamp_(-3, 3).mul_(1e{k})", *call.fills[2:])
        return replace(call, fills=fills, scale=10.0**scale)
    # after a merge, a part's gradient of out is NaN in a broken row; a scale of 0 makes that 0
    if choice < 0.14 and call.layouts[1] not in SHARED and call.how not in ("weights", "merge") and call.scale != 0:
        broken = r.randrange(s.batch), r.randrange(call.kv_heads), r.randrange(call.nk)
        # on a GPU, gradients are spoilt within a whole tile, as values are
        leaves = "" if call.backend == "triton" else call.leaves
        return replace(call, broken=broken, dead=False, leaves=leaves)
    if choice < 0.18:
        return replace(call, packed=call.how not in ("no_grad", "inference_mode"))
    return replace(call, forked=choice < 0.182 and call.backend != "triton")


def _sizes(r: Random, heads: int, how: str, slow: bool) -> Sizes:
    batch = r.choice([1, 1, 2, 3])
    lengths = LENGTHS if not slow else LENGTHS[:13]
    # most cases are small, so that many fit the time
    pairs = 2**12 if slow else r.choice([2**11] * 12 + [2**13] * 6 + [2**15, 2**17])
    while True:
        nq = r.choice(lengths) if r.random() < 0.8 else r.randint(1, lengths[-1])
        nk, q_offset = nq, 0
        if how != "context" and r.random() < 0.5:
            nk = r.choice(lengths) if r.random() < 0.8 else r.randint(1, lengths[-1])
            # decoding, a chunk of a prompt, or anywhere
            q_offset = r.choice([0, max(0, nk - nq), max(0, nk - nq), r.randint(0, nk), nk + 3])
        if batch * heads * nq * nk <= pairs:
            return Sizes(batch, heads, nq, nk, q_offset)


def _first(r: Random, s: Sizes) -> First:
    """Draw first positions that fit a pattern of these sizes; the largest one of each side is that of the sizes."""
    cut = r.choice([0, r.randint(0, s.nk - 1)])
    sides = []
    for most in (s.q_offset, cut):
        side = [most if r.random() < 0.4 else r.randint(0, most) for _ in range(s.batch)]
        side[r.randrange(s.batch)] = most
        sides.append(tuple([most] * s.batch if r.random() < 0.3 else side))
    return First(sides[0], sides[1], r.choice(["each", "one", "int"]))


def _dims(r: Random, backend: str) -> tuple[int, int]:
    odd = 0.05 if backend == "cpu" else 0.3
    large = 0.02

    def one() -> int:
        choice = r.random()
        return (
            r.choice(ODD_DIMS)
            if choice < odd
            else r.choice([128, 256, 264, 512, 576, 640, 648])
            if choice < odd + large
            else r.choice(DIMS)
        )

    dim = one()
    return dim, (dim if r.random() < 0.5 else one())
