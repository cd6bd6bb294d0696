"""Find the program of a call by a cheap key of its arguments.

An equal call skips validation, planning and the preparation of kernel arguments, which take longer than the computation
of a small call. The key of a decoding step leaves its length out: once a step of its kind was checked and prepared,
further steps need neither, since the kernel finds the keys of each in the call.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .backends import forks, tuning
from .cache import PROGRAMS
from .call import Arguments, Call, Operands
from .environment import CPU_VARIANT, setting
from .errors import PatternError
from .patterns import Pattern
from .patterns.alignment import END
from .patterns.base import names_in
from .patterns.lists import Listed
from .plan.cuda_sync import capturing
from .precision import NATIVE, Precision
from .program import Program, is_whole
from .terms import Term
from .terms.dropout import threshold_of
from .torch_compat import are_plain_cpu, are_plain_gpu, is_plain_cpu, no_interception
from .types import NotGiven, Place

if TYPE_CHECKING:
    from .kv_cache import PagedCache

# approximate bytes of a cached program, and of its prepared kernel arguments for each row and tile
_PROGRAM_BYTES, _ROW_BYTES, _TILE_BYTES = 16 * 2**10, 64, 16
# To compare contents up to this size takes less time than a call that is checked again. The other number is the most
# that a key with such contents takes.
_MOST_CONTENTS, _MARK_BYTES = 2**13, 2**14
# in place of a program, after the first call of a pattern with such contents
_CALLED = object()


class CallKey(NamedTuple):
    """The arguments of a call on which its program depends, besides the pattern.

    An argument has its name here. A call with an argument that has no field here has no key, unless it is the default.

    Attributes:
        q: Shape of q.
        scale: The factor of the scores.
        q_offset: The position; in a step over pages, the most keys of a sequence.
        terms: Text of each term, with the shape and dtype of its tables and whether they learn.
        dropout: The threshold: see :class:`ringweave.call.Call`.
        fewest: Fewest keys of a sequence in a step over pages, else 0.
        pages: Tokens for which a row of the page table has room, and the layouts of table, lengths and scales; None
            without pages.
        grad: Whether an input requires gradients.
        dtypes: Dtypes of q, k and v.
        place: Number of threads, or the GPU.
        variant: Name of the native kernel's variant that the environment asks for.
    """

    q: torch.Size
    k: torch.Size
    v: torch.Size
    scale: float | None
    q_offset: int | str
    backend: str
    k_offset: int
    terms: tuple[tuple[str, tuple[Any, ...]], ...]
    dropout: int
    on_oom: str
    fewest: int
    pages: tuple[int, Hashable] | None
    grad: bool
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    place: int | torch.device
    variant: str

    @property
    def plain(self) -> bool:
        """Whether the call has no k_offset, terms or dropout."""
        return not (self.k_offset or self.terms or self.dropout)


# The arguments that a key does not hold: (place among the arguments, default). The pattern is a key beside this one,
# and learned sinks join after the program has run.
_UNKEYED = [
    (Arguments._fields.index(name), default)
    for name, default in Arguments._field_defaults.items()
    if name not in (*CallKey._fields, "pattern", "sink_logits")
]
# takes the arguments that a key holds, besides the tensors, in the order of its fields
_held = operator.itemgetter(
    *[Arguments._fields.index(name) for name in CallKey._fields[3:] if name in Arguments._fields]
)
# the fields that are equal in all decoding steps of a kind
_of_kind = operator.itemgetter(
    *[i for i, name in enumerate(CallKey._fields) if name not in ("k", "v", "q_offset", "fewest")]
)


class StepKey(NamedTuple):
    """The key of a decoding step.

    Attributes:
        kind: Everything about it except lengths.
        keys: Fewest and most keys of a sequence.
    """

    kind: tuple[Hashable, ...]
    keys: tuple[int, int]


class ListsKey(NamedTuple):
    """The key of a call over lists of keys, which has everything about it except what the lists contain.

    Attributes:
        spec: Text of the pattern.
        call: The other arguments.
        tables: Shapes of the lists, and the identities of other patterns with tensors.
    """

    spec: str
    call: CallKey
    tables: tuple[Hashable, ...]


class Found(NamedTuple):
    """The result of a look-up.

    Attributes:
        key: Key of a new call, to be passed to :func:`keep`; None for a known call, or if a key cannot hold it.
        program: Program of a known call. A step over pages takes the general path if its program has no prepared
            arguments.
        lists: Lists of keys that the program's ``over_lists`` reads; None if it reads none.
        pairs: The pattern of the key if the call's own has functions. The call must go on with it: another thread may
            write to what a function reads, which then has other pairs.
    """

    key: Hashable | None
    program: Program | None
    lists: Tensor | None = None
    pairs: Pattern | None = None


_NOTHING = Found(None, None)
_CPU = torch.device("cpu")
_new: Any = tuple.__new__
# "end" is a function of the other parts of a key: sizes, the first key, and paddings in the pattern's text
_OFFSETS = (int, NotGiven, str)
# The last program of each pattern object, since the layers of a model repeat a call. Comparing its arguments touches
# less memory than a look-up by key.
_last: dict[int, tuple[Pattern, CallKey, weakref.ref[Program]]] = PROGRAMS.front
_MOST_LAST = 16


def find(given: Arguments, cache: PagedCache | None = None, fewest: int = 0) -> Found:
    """Look up a program by the arguments of a call, or of a step over the pages of a cache.

    With a cache, its sequences have from ``fewest`` to ``q_offset`` keys. Nothing is found where a mode, transform or
    profiler watches operators, or an argument cannot be part of a key.
    """
    q, k, v, pattern = given[:4]
    scale, q_offset, backend, k_offset, terms, dropout, on_oom = _held(given)
    gpu: torch.device | None = None
    if not is_plain_cpu(q, k, v):
        # pages need the lengths, which are read in the call
        if cache is not None or not are_plain_gpu((q, k, v)):
            return _NOTHING
        gpu = q.device
    if not (no_interception() and type(backend) is str):
        return _NOTHING
    features = _features(given, k_offset, terms, dropout, on_oom)
    if type(q_offset) not in _OFFSETS or not (scale is None or type(scale) is float) or features is None:
        usual = _with_usual_numbers(given)
        return _NOTHING if usual is given else find(usual, cache, fewest)
    written, threshold = features
    version = tuning.current()
    # inlined: between the layers of a model a separate function costs a microsecond
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    pages: tuple[int, Hashable] | None = None
    if cache is not None:
        pages = _layouts(cache)
        if grad or written or k_offset or threshold or version.answers or q.ndim != 4 or q.shape[2] != 1:
            return _NOTHING
        if pages is None or not 1 <= fewest <= int(q_offset) <= pages[0]:
            return _NOTHING
    # the constructor of a named tuple takes a microsecond more
    key: CallKey = _new(
        CallKey,
        (
            q.shape, k.shape, v.shape, scale, q_offset, backend, k_offset, written, threshold, on_oom, fewest, pages,
            grad, (q.dtype, k.dtype, v.dtype), gpu or torch.get_num_threads(), setting(CPU_VARIANT),
        ),
    )  # fmt: skip
    last = _last.get(id(pattern))
    if last is not None and last[0] is pattern and last[1] == key:
        known = last[2]()
        if known is not None and known.tuning_version is version:
            return Found(None, known)
    if not isinstance(pattern, Pattern):
        return _NOTHING
    if pattern.has_function:
        pairs = None if cache is not None else _without_functions(given, key)
        return _NOTHING if pairs is None else find(given._replace(pattern=pairs))._replace(pairs=pairs)
    if not pattern.fixed:
        return _of_object(pattern, key, version)
    spec = pattern._spec
    # on a GPU no step is prepared, and each length has its plan
    step = None if gpu is not None else _step_key(spec, key, version.answers)
    if step is None:
        program: Program | None = PROGRAMS.get((spec, key))
        if program is not None and program.tuning_version is not version:
            program = None
    else:
        program = _step(step, cache is not None, version)
    if program is None:
        return Found(step or (spec, key), None)
    _remember_last(pattern, key, program)
    return Found(None, program)


def _without_functions(given: Arguments, key: CallKey) -> Pattern | None:
    """Return the pattern of a call with patterns in place of its functions; None if some of them are evaluated."""
    q, k = given.q, given.k
    if given.pattern.__dict__.get("_called") == key:
        # it was evaluated in the call before, and tracing it takes as long as finding a program saves
        return None
    first = 0 if type(given.q_offset) is NotGiven else given.q_offset
    if type(first) is not int or first < 0 or given.k_offset != 0 or q.ndim != 4 or k.ndim != 4:
        return None
    pattern = given.pattern._for_call()._recognised(Place(q.shape[0], q.shape[1], q.shape[2], k.shape[2], first))
    if pattern.has_function:
        object.__setattr__(given.pattern, "_called", key)
        return None
    return pattern


class _Object:
    """A pattern as a key that equals no other pattern's, and keeps it alive."""

    __slots__ = ("pattern",)

    def __init__(self, pattern: Pattern):
        self.pattern = pattern

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and self.pattern is other.pattern

    def __hash__(self) -> int:
        return id(self.pattern)


def _of_object(pattern: Pattern, key: CallKey, version: object) -> Found:
    """Look up the program of a pattern with tensors of its own: by small contents, or by the object.

    A program is kept from the second call on, since a model that makes a pattern for each step may call it once.
    """
    # a step has a plan for each length, calls over pages read their lengths, and lists of keys have plans of their own
    if key.pages is not None:
        return _NOTHING
    if key.q[2] == 1 or "Selected" in names_in(pattern._spec):
        return _of_lists(pattern, key, version)
    contents = _contents(pattern)
    name = contents or _Object(pattern), key
    known, again = PROGRAMS.get(name), pattern.__dict__.get("_called") == key
    if isinstance(known, Program) and known.tuning_version is version:
        if again:
            _remember_last(pattern, key, known)
        else:
            object.__setattr__(pattern, "_called", key)
        return Found(None, known)
    if again or known is not None:
        return Found(name, None)
    if pattern._constant and all(table.device in (_CPU, key.place) for table in pattern.tables):
        object.__setattr__(pattern, "_called", key)
        if contents is not None:
            PROGRAMS.put(name, _CALLED, _MARK_BYTES)
    return _NOTHING


def _contents(pattern: Pattern) -> Hashable | None:
    """Return a pattern's text and the contents of its tensors; None if these are large, or may change."""
    tables = pattern.tables
    small = sum([table.nbytes for table in tables]) <= _MOST_CONTENTS
    return pattern.value() if small and pattern._constant and are_plain_cpu(tables) else None


def _of_lists(pattern: Pattern, key: CallKey, version: Any) -> Found:
    """Look up a call over lists of keys by everything but their contents, which each call reads."""
    if "Selected" not in names_in(pattern._spec):
        # a step of another pattern has a plan for each length
        return _NOTHING
    given = pattern.tables
    # measurements may prefer another backend for other lists, and k_offset changes the pattern
    if type(key.place) is not int or version.answers or key.k_offset:
        return _NOTHING
    tables = _layout(pattern) if are_plain_cpu(given) else None
    if tables is None:
        return _NOTHING
    alone = len(given) == 1 and key.plain and given[0].shape[-2] == 1 and given[0].is_contiguous()
    step = _step_key(pattern._spec, key, version.answers) if alone else None
    if step is not None:
        step = StepKey((*step.kind, tables), step.keys)
    kind = ListsKey(pattern._spec, key, tables) if step is None else step.kind
    program: Program | None = PROGRAMS.get(kind)
    if program is None or program.tuning_version is not version:
        return Found(step or kind, None)
    if step is None:
        return Found(None, program.for_lists(pattern))
    return _NOTHING if program.over_lists is None else Found(None, program, given[0])


def _layout(pattern: Pattern) -> tuple[Hashable, ...] | None:
    """Return the shapes of a pattern's lists and the keys of its other parts; None if one of these may change."""
    parts = pattern.parts_within()
    if not parts:
        if not pattern._constant:
            return None
        return (pattern.tables[0].shape if isinstance(pattern, Listed) else pattern.key().value,)
    found: list[Hashable] = []
    for part in parts:
        if part.tables:
            of_part = _layout(part)
            if of_part is None:
                return None
            found += of_part
    return tuple(found)


def keep(key: Hashable, call: Call, operands: Operands) -> Program:
    """Compile a checked call of a constant pattern and cache its program by its key.

    A step over pages or over lists of keys is cached as the kind of further steps, and keeps no plan.
    """
    # before any copy, since a forked process may lack the threads that a copy needs
    forks.check(operands.q.device)
    if isinstance(key, StepKey) and call.pattern.tables:
        program = Program(call)
        program.prepare_steps(operands)
        PROGRAMS.put(key.kind, program, _PROGRAM_BYTES + sum(table.nbytes for table in call.pattern.tables))
        return program
    if isinstance(key, ListsKey):
        program = Program(call)
        if not all(is_whole(each.branch, call) for each in program.steps):
            return program
        PROGRAMS.put(key, program, _PROGRAM_BYTES + sum(table.nbytes for table in call.pattern.tables))
        return program.for_lists(call.pattern)
    program = Program(call, constant=True)
    if call.backend == "auto" and capturing(operands.q.device):
        # no backend can be checked in a graph, so that further calls may have a better one
        return program
    if isinstance(key, StepKey):
        program.prepare_steps(operands)
        PROGRAMS.put(key.kind, program, _PROGRAM_BYTES)
        if call.paged or program.prepared is not None:
            return program
        program = program.at_length(call.nk)
    else:
        program.prepare(operands)
    _put(key, program)
    return program


def _remember_last(pattern: Pattern, key: CallKey, program: Program) -> None:
    if len(_last) >= _MOST_LAST:
        _last.clear()
    _last[id(pattern)] = pattern, key, weakref.ref(program)


def _put(key: Hashable, program: Program) -> None:
    """Cache a program by its key."""
    size, prepared = _PROGRAM_BYTES + sum([table.nbytes for table in program.tables]), program.prepared
    if prepared is not None:
        heads = program.call.batch * program.call.heads
        for plan in prepared.plans:
            size += plan.nbytes + _ROW_BYTES * plan.q_tiles * heads + _TILE_BYTES * plan.capacity
    elif isinstance(key, StepKey):
        size += sum(step.branch.cached_plan.nbytes for step in program.steps if step.branch.cached_plan is not None)
    PROGRAMS.put(key, program, size)


# ---- decoding steps --------------------------------------------------------------------------------------------------


def _step_key(spec: str, key: CallKey, measured: object) -> StepKey | None:
    """Return the key of a decoding step, which has one query at the position of the last key; None for other calls."""
    q, k, v, first = key.q, key.k, key.v, key.q_offset
    if key.pages is not None:
        return StepKey((spec, _of_kind(key), k, v), (key.fewest, int(first)))
    if key.grad or measured or not len(q) == len(k) == len(v) == 4 or q[2] != 1 or k[2] != v[2]:
        return None
    at_end = first == k[2] - 1 or (first == END and "KeyPadding" not in names_in(spec))
    if not at_end or not _differ_in_plan_only(key):
        return None
    return StepKey((spec, _of_kind(key), k[:2], k[3], v[:2], v[3]), (k[2], k[2]))


def _layouts(cache: PagedCache) -> tuple[int, Hashable] | None:
    """Return the capacity and the layouts of a cache's tensors as a key; None if a step over it has none.

    Prepared calls pass addresses of these tensors, and ``.data`` may give a tensor another storage.
    """
    table, lengths, scales = cache.table, cache.lengths, cache.scales
    if scales and not (is_plain_cpu(*scales, cache.k) and scales.k.is_contiguous() and scales.v.is_contiguous()):
        return None
    of_scales = scales and (scales.k.shape, scales.v.shape, scales.k.dtype, scales.v.dtype)
    layouts = table.shape, table.stride(), table.dtype, lengths.shape, lengths.stride(), lengths.dtype, of_scales
    return table.shape[1] * cache.page, layouts


def _differ_in_plan_only(key: CallKey) -> bool:
    """Return whether decoding steps with these options differ only in their plan."""
    terms = key.terms
    return not (key.k_offset or key.dropout or (terms and any(learns for _, tables in terms for *_, learns in tables)))


def _step(key: StepKey, paged: bool, version: object) -> Program | None:
    """Look up the program of a decoding step; None if no step of its kind was checked, or this length does not fit."""
    of_kind: Program | None = PROGRAMS.get(key.kind)
    if of_kind is None or of_kind.tuning_version is not version:
        return None
    if of_kind.fits != key.keys:
        try:
            for n in set(key.keys):
                of_kind.call.pattern.check(1, n, n - 1)
        except PatternError:
            return None
        of_kind.fits = key.keys
    if paged or of_kind.prepared is not None:
        return of_kind
    program: Program | None = PROGRAMS.get(key)
    if program is None or program.tuning_version is not version:
        program = of_kind.at_length(key.keys[1])
        _put(key, program)
    return program


# ---- options ---------------------------------------------------------------------------------------------------------


def _features(
    given: Arguments, k_offset: object, terms: object, dropout: object, on_oom: object
) -> tuple[tuple[Hashable, ...], int] | None:
    """Return terms and dropout as a key has them, or None if a key cannot contain the arguments."""
    for place, default in _UNKEYED:
        if given[place] is not default:
            return None
    if (
        type(k_offset) is not int
        or type(on_oom) is not str
        or (on_oom != "degrade" and on_oom != "raise")
        or type(dropout) is not float
    ):
        return None
    listed = terms if isinstance(terms, (tuple, list)) else () if terms is None else (terms,)
    if not k_offset and not listed and dropout == 0.0:
        return (), 0
    if not 0 <= dropout < 1 or k_offset < 0:
        return None
    kinds, grad = [], torch.is_grad_enabled()
    for term in listed:
        if not isinstance(term, Term):
            return None
        tables = _table_kinds(term.tables, grad) if term.axes else ()
        if tables is None:
            return None
        kinds.append((term._spec, tables))
    return tuple(kinds), threshold_of(dropout) if dropout else 0


def _table_kinds(tables: tuple[Tensor, ...], grad: bool) -> tuple[Hashable, ...] | None:
    if not all(is_plain_cpu(x, x, x) for x in tables):
        return None
    return tuple([(x.shape, x.dtype, grad and x.requires_grad) for x in tables])


def _with_usual_numbers(given: Arguments) -> Arguments:
    """Return the arguments with numbers and policy in the types that a key has; the same object if nothing changes."""
    usual: dict[str, Any] = {}
    for name, kind in (("scale", float), ("q_offset", int), ("k_offset", int), ("dropout", float)):
        value = getattr(given, name)
        whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool) and abs(int(value)) < 2**53
        if type(value) is not kind and (whole or (kind is float and isinstance(value, np.floating))):
            usual[name] = kind(value)
    if isinstance(given.precision, Precision) and given.precision == NATIVE:
        usual["precision"] = None
    return given._replace(**usual) if usual else given
