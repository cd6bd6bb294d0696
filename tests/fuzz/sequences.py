"""Random sequences of calls that share parts: each answer is that of the values at its call.

A world has tensors, patterns that follow tensors, terms with tables, and a page cache. A sequence calls attention with
parts of the world, writes to tensors between calls, gives them other storages, replaces caches and returns to earlier
parts. A definition of each part in plain torch, read at the call, judges every answer in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

import ringweave as rw

from ..oracle import attention
from .calls import Find

STEPS = 40
_MOST = 420  # keys of the longest call
_BATCH, _HEADS, _KV = 2, 4, 2
#: Error of float32 sums over some hundred keys, and of inputs that are rounded to 16 bits.
_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
#: Of gradients in 16 bits, for which the output was rounded: PyTorch's own attention was seen to err by 0.042.
_ROUNDED = 0.084

Mask = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Part:
    """A pattern and its definition: (B, H, Nq, Nk) of positions (Nq, 1) and (Nk,), by the values at present."""

    pattern: rw.patterns.Pattern
    mask: Mask
    #: positions of keys from which on the pattern fits
    least: int = 1
    most: int = 2**30
    pages: bool = True


@dataclass
class World:
    """Everything that the calls of a sequence share."""

    r: Random
    backend: str
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        r = self.r
        self.dtype = torch.bfloat16 if r.random() < 0.25 else torch.float32
        self.dim = r.choice([8, 16, 24, 40])
        self.q, self.k, self.v = (
            torch.randn(_BATCH, heads, _MOST, dim).to(self.dtype)
            for heads, dim in ((_HEADS, self.dim), (_KV, self.dim), (_KV, r.choice([8, 16])))
        )
        # equal bounds in two tensors, a small table, and one above 1 MiB, which is identified by its version
        self.stops = [torch.tensor([300, 250]), torch.tensor([300, 250])]
        self.small, self.large = torch.arange(_MOST) // 7, torch.arange(2**18) // 5
        self.shift = torch.tensor(3)
        self.slopes = torch.rand(_HEADS)
        self.by_distance, self.bias = torch.randn(_HEADS, 21), torch.randn(1, _HEADS, 1, _MOST)
        self.parts = self._parts()
        self.new_cache()

    # ---- patterns ----------------------------------------------------------------------------------------------------

    def _parts(self) -> list[Part]:
        b = torch.arange(_BATCH)[:, None, None, None]

        def bounds(which: int) -> Part:
            return Part(
                rw.KeyPadding(self.stops[which]), lambda q, k: k < self.stops[which][b], least=_MOST, pages=False
            )

        causal = Part(rw.Causal(), lambda q, k: k <= q)
        window = Part(rw.SlidingWindow(37), lambda q, k: (k <= q) & (q - k <= 37))
        sinks = Part(rw.Sinks(3), lambda q, k: k < 3)
        rate, width = self.r.choice([(2, 9), (3, 5), (5, 7), (13, 1), (16, 4)])
        dilated = Part(
            rw.Dilated(width, rate),
            lambda q, k: ((q - k).abs() <= width * rate) & ((q - k) % rate == 0),
        )
        strided = Part(rw.Strided(rate), lambda q, k: (q - k) % rate == 0)
        # variables that the functions read, so that each value is followed
        small, large, shift = self.small, self.large, self.shift

        def bind(name: str, value: Tensor) -> None:
            nonlocal small, large, shift
            small, large, shift = (
                value if name == each else x for each, x in (("small", small), ("large", large), ("shift", shift))
            )
            setattr(self, name, value)

        self.bind = bind
        by_small = Part(
            rw.from_mask_mod(lambda b, h, q, k: small[q] >= small[k]), lambda q, k: small[q] >= small[k], pages=False
        )
        by_large = Part(
            rw.from_mask_mod(lambda b, h, q, k: large[q] >= large[k]), lambda q, k: large[q] >= large[k], pages=False
        )
        shifted = Part(rw.from_mask_mod(lambda b, h, q, k: k <= q + shift), lambda q, k: k <= q + shift, pages=False)
        heads = Part(
            rw.PerHead([rw.Causal(), rw.SlidingWindow(11), rw.Dilated(width, rate) & rw.Causal(), rw.Full()]),
            lambda q, k: torch.stack(
                [k <= q, (k <= q) & (q - k <= 11), dilated.mask(q, k) & (k <= q), torch.ones_like(k <= q)]
            ),
        )
        constant = Part(rw.KeyPadding(60), lambda q, k: (k < 60) & (q > -1), least=60, pages=False)
        self.kept = {False: list[Part](), True: list[Part]()}
        functions = [by_small, by_large, shifted]
        # operands that are equal now, and may differ later
        one, other = bounds(0), bounds(1)
        both = Part(
            one.pattern & rw.Causal() & other.pattern,
            lambda q, k: one.mask(q, k) & (k <= q) & other.mask(q, k),
            least=_MOST,
            pages=False,
        )
        return [causal, window, sinks, dilated, strided, *functions, heads, constant, one, other, both]

    def pattern(self, pages: bool = False) -> Part:
        """Combine parts, or return to an earlier combination."""
        if self.kept[pages] and self.r.random() < 0.6:
            return self.r.choice(self.kept[pages])
        parts = [part for part in self.parts if part.pages or not pages]
        one = self.r.choice(parts)
        for _ in range(self.r.choice([0, 1, 1, 2])):
            a, b = one, self.r.choice(parts)
            both, least = self.r.random() < 0.6, max(a.least, b.least)
            if both:
                one = Part(a.pattern & b.pattern, lambda q, k, a=a, b=b: a.mask(q, k) & b.mask(q, k), least)
            else:
                one = Part(a.pattern | b.pattern, lambda q, k, a=a, b=b: a.mask(q, k) | b.mask(q, k), least)
        # the last few, so that each returns often
        self.kept[pages] = [*self.kept[pages][-3:], one]
        return one

    # ---- terms: each as (term, its formula on scores and positions) ---------------------------------------------------

    def terms(self, nq: int, nk: int, first: int) -> list[tuple[Any, Callable[[Tensor, Tensor, Tensor], Tensor]]]:
        def near(q: Tensor, k: Tensor) -> Tensor:
            return self.by_distance.double()[:, (k - q).clamp(-10, 10) + 10]

        known = [
            (rw.Softcap(4.0), lambda t, q, k: 4 * torch.tanh(t / 4)),
            (rw.ALiBi(self.slopes), lambda t, q, k: t - self.slopes.double()[:, None, None] * (q - k).abs()),
            (rw.DistanceBias(self.by_distance), lambda t, q, k: t + near(q, k)),
        ]
        if nq == 1:
            bias = self.bias[..., :nk]
            known.append((rw.Bias(bias), lambda t, q, k: t + self.bias[..., :nk].double()))
        if self.r.random() < 0.6:
            return []
        return self.r.sample(known, self.r.choice([1, 1, 2]))

    # ---- calls --------------------------------------------------------------------------------------------------------

    def call(self) -> None:
        """Call attention: a decoding step or a few queries, a chunk, or the whole; with gradients or without."""
        r = self.r
        part = self.pattern()
        nq = r.choice([1, 1, 1, 1, 2, 3, 17, 64, 130])
        nk = max(part.least, nq, r.choice([r.randrange(1, _MOST), 128, 129, 256, _MOST]))
        first = nk - nq if r.random() < 0.8 else r.randrange(min(nk, _MOST - nq + 1))
        terms = self.terms(nq, nk, first)
        grad = r.random() < 0.3
        leaves = [x.detach().clone().requires_grad_() if grad else x for x in self._tensors(nq, nk, first)]
        options: dict[str, Any] = {"backend": self.backend, "terms": [term for term, _ in terms]}
        if r.random() < 0.3:
            options["scale"] = r.choice([0.25, 1, 0.5])
        self.said.append(f"attention of {nq} over {nk} at {first}, {part.pattern!r}, {options}, grad={grad}")
        with torch.set_grad_enabled(grad):
            try:
                out, lse = rw.attention_with_lse(*leaves, part.pattern, q_offset=first, **options)
            except rw.UnsupportedError:
                return
        self._judge(part, leaves, [formula for _, formula in terms], first, options.get("scale"), out, lse)

    def _tensors(self, nq: int, nk: int, first: int) -> list[Tensor]:
        q, k, v = self.q[:, :, :nq], self.k[:, :, :nk], self.v[:, :, :nk]
        if self.r.random() < 0.3:
            k = k.transpose(1, 2).contiguous().transpose(1, 2)
        if self.r.random() < 0.2:
            q = q.mT.contiguous().mT
        return [q, k, v]

    def step_over_pages(self) -> None:
        """Append a token to the cache, and attend from the last ones."""
        r = self.r
        if int(self.lengths.max()) + 1 > _MOST - 20:
            return self.new_cache()
        at = int(self.lengths[0])
        k, v = (x[:, :, at : at + 1] for x in (self.k, self.v))
        self.cache.append(k, v)
        for held, x in zip(self.held, (k, v), strict=True):
            held.append(x.clone())
        self.lengths += 1
        nq = r.choice([1, 1, 1, 2])
        part = self.pattern(pages=True)
        if part.least > at:
            return None
        self.said.append(f"pages: {nq} over {at + 1}, {part.pattern!r}")
        q = self.q[:, :, :nq]
        with torch.no_grad():
            out = rw.paged_attention(q, self.cache, part.pattern, backend=self.backend)
        k, v = (torch.cat(held, 2) for held in self.held)
        return self._judge(part, [q, k, v], [], at + 1 - nq, None, out, None)

    def new_cache(self) -> None:
        """Replace the page cache by another one, and fill it with the first tokens of the world."""
        self.cache = rw.PagedCache.empty(
            _BATCH, _MOST, _KV, self.dim, value_dim=self.v.shape[3], page=self.r.choice([16, 32, 64]), dtype=self.dtype
        )
        n = self.r.choice([1, 30, 127, 200])
        self.cache.append(self.k[:, :, :n], self.v[:, :, :n])
        self.held = [[self.k[:, :, :n].clone()], [self.v[:, :, :n].clone()]]
        self.lengths = torch.full((_BATCH,), n)
        self.said.append(f"a new cache of {n} tokens")

    def _judge(
        self, part: Part, given: list[Tensor], formulas: list[Any], first: int, scale: float | None, out: Tensor,
        lse: Tensor | None,
    ) -> None:  # fmt: skip
        q, k, v = (x.detach().double().requires_grad_(x.requires_grad) for x in given)
        rows, columns = torch.arange(q.shape[2])[:, None] + first, torch.arange(k.shape[2])
        with torch.set_grad_enabled(q.requires_grad):

            def scored(t: Tensor) -> Tensor:
                for formula in formulas:
                    t = formula(t, rows, columns)
                # float32 rounds a score by its size, and a weight by as much as its score
                self.rounding = max(1.0, float(t.detach().abs().max()) / 16)
                return t

            wanted, wanted_lse = attention(q, k, v, part.mask(rows, columns), scale, scored=scored)
        self._same("out", out, wanted)
        if lse is not None:
            self._same("lse", lse.nan_to_num(neginf=-9.0), wanted_lse.nan_to_num(neginf=-9.0))
        if q.requires_grad:
            slope = torch.randn_like(out)
            got = torch.autograd.grad(out, given, slope)
            want = torch.autograd.grad(wanted, (q, k, v), slope.double())
            for name, x, y in zip(("dq", "dk", "dv"), got, want, strict=True):
                self._same(name, x, y)

    def _same(self, name: str, got: Tensor, want: Tensor) -> None:
        rounded = self.dtype == torch.bfloat16 and name in ("dq", "dk", "dv")
        bound = _ROUNDED if rounded else _TOLERANCE[self.dtype]
        most = bound * self.rounding * max(1.0, float(want.detach().abs().max()))
        error = (got.detach().double() - want.detach()).abs().max()
        if not error <= most:
            raise Find("sequence", f"{name} differs by {float(error):.3g}, more than {most:.3g}")

    # ---- changes between calls ----------------------------------------------------------------------------------------

    def write(self) -> None:
        """Write to a tensor that a pattern or a term follows, or give it another storage."""
        r = self.r
        name = r.choice(["stops", "small", "large", "shift", "slopes", "by_distance", "bias", "k"])
        x = self.stops[r.randrange(2)] if name == "stops" else getattr(self, name)
        new = x.clone()
        if name == "stops":
            # equal bounds in two tensors now and then
            new[r.randrange(_BATCH)] = r.choice([0, 1, 200, 250, 300, _MOST])
            new = self.stops[0].clone() if r.random() < 0.4 else new
        elif name == "shift":
            new.fill_(r.randrange(-2, 6))
        elif name in ("small", "large"):
            new[r.randrange(300) :] += r.choice([-1, 1, 2])
        else:
            new.copy_(torch.randn_like(new))
        # a write through `.data` changes no version, so a large table is not written that way
        how = r.choice(["copy_", "data", "set_", "again"] + ["data.copy_"] * (name != "large"))
        self.said.append(f"{name}: {how}")
        if how == "copy_":
            x.copy_(new)
        elif how == "data":
            x.data = new
        elif how == "set_":
            x.set_(new)
        elif how == "data.copy_":
            x.data.copy_(new)
        elif name == "large":
            # the name is bound to another tensor, which may get the memory that the old one has freed
            x.set_(torch.zeros(1, dtype=x.dtype))
            del new
            self.bind(name, torch.arange(2**18) // r.randrange(2, 9))
        elif name in ("small", "shift"):
            self.bind(name, new)
        elif name not in ("stops", "k"):
            setattr(self, name, new)


def run(backend: str, r: Random) -> None:
    """Run one sequence.

    Raises:
        Find: An answer is wrong, or a call raised.
    """
    torch.manual_seed(r.randrange(2**31))
    torch.set_num_threads(r.choice([1, 1, 2]))
    world = World(r, backend)
    try:
        for _ in range(STEPS):
            r.choices([world.call, world.step_over_pages, world.write, world.new_cache], [10, 6, 5, 0.5])[0]()
    except Find as find:
        raise Find(find.kind, find.what, "\n".join(world.said[-12:])) from None
    except (rw.RingweaveError, RuntimeError, ValueError, TypeError, AssertionError) as error:
        said = "\n".join(world.said[-12:])
        raise Find(f"raised {type(error).__name__}", f"{error}"[:600], said) from error
