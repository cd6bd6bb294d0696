"""What a function reads besides its arguments, so that a plan made with it can tell whether it still holds.

Values are read by value: numbers, text, types of torch, containers of such, and other functions, whose own reads
follow. Tensors are listed. Modules of Python's mathematics, torch and numpy count as constant; of other modules the
attributes that the code names are read. What else is found could change unseen, and is refused.
"""

from __future__ import annotations

import dis
import functools
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import PatternError, message
from ..torch_compat import digest, wrapped
from .base import Pattern

_CONSTANT = frozenset(
    {"torch", "numpy", "math", "cmath", "operator", "builtins", "functools", "itertools", "typing", "ringweave"}
)
_VALUES = (type(None), bool, int, str, bytes, range, type(...), torch.dtype, torch.device, torch.layout)
_TENSORS = (Tensor, torch.nn.Parameter)
_CONTAINERS = (tuple, list, dict, set, frozenset)
_METHODS = (types.MethodDescriptorType, types.WrapperDescriptorType)
_OPERATORS = (type(torch.ops.aten.add.Tensor), type(torch.ops.aten.add))
# builtins through which code reads or writes what its names do not tell
_UNSEEN = frozenset({"getattr", "setattr", "delattr", "globals", "vars", "eval", "exec", "__import__", "open"})
# what a class holds besides its methods and constants
_OF_CLASSES = frozenset({"__dict__", "__weakref__", "__annotations__", "__annotate__", "__annotate_func__"})
_UNLISTED = frozenset({"__slots__", "__getattr__", "__getattribute__"})
_MOST = 10_000
#: Bytes up to which a tensor is known by what it holds, so that no write to it goes unseen.
SMALL = 2**20


class Reads(NamedTuple):
    """What a function reads at this moment.

    Attributes:
        state: All but the tensors; equal where the function computes the same from equal tensors.
        tables: The tensors, each once.
        kept: Objects whose ``id`` is in the state: whoever keeps it holds them.
    """

    state: Hashable
    tables: tuple[Tensor, ...]
    kept: tuple[object, ...]


def read(fn: Callable[..., object], named: Sequence[Tensor] | None = None) -> Reads:
    """Look what a function reads now.

    Args:
        fn: A function, a partial of one, a bound method, or an object to call.
        named: Tensors that the caller says it reads; then what cannot be looked into is taken as constant.
    Raises:
        PatternError: It reads something that could change unseen, and nothing is named.
    """
    names: frozenset[str] = frozenset()
    while True:
        walk = _Walk(named, names)
        try:
            state = (tuple(map(id, named or ())), walk.value(fn, "itself"))
        except RecursionError:
            raise _refused("values that are nested too deeply") from None
        # a module's attributes are those that any of the code names: once more, where more of it was found
        if not walk.modules or walk.names <= names:
            return Reads(state, tuple(walk.tables), (*walk.kept, *(named or ())))
        names = frozenset(walk.names)


def content_key(table: Tensor) -> Hashable | None:
    """Digest what a tensor holds; None where it is large, and only torch writes to it: its version tells then."""
    if table.device.type != "cpu" or (table.nbytes > SMALL and _ours(table)):
        return None
    return digest(table), tuple(table.shape), table.dtype


def _ours(table: Tensor) -> bool:
    # a storage that numpy or another process may write to cannot be resized
    return not table.is_inference() and table.untyped_storage().resizable() and not table.is_shared()


class _Code(NamedTuple):
    """What the code of a function, and of those inside it, names."""

    globals: tuple[str, ...]
    names: frozenset[str]
    #: outer variables, and what is imported, that it names in a way that cannot be followed
    unseen: tuple[str, ...]


_codes: weakref.WeakKeyDictionary[types.CodeType, _Code] = weakref.WeakKeyDictionary()


def _code(code: types.CodeType) -> _Code:
    analysed = _codes.get(code)
    if analysed is None:
        read: dict[str, None] = {}
        names: set[str] = set()
        unseen: dict[str, None] = {}
        for each in _nested(code):
            names.update(each.co_names)
            for step in dis.get_instructions(each):
                if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
                    read[step.argval] = None
                elif step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                    unseen[f"the global {step.argval}, which it changes"] = None
                elif step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in code.co_freevars:
                    unseen[f"the variable {step.argval}, which it changes"] = None
                elif step.opname == "IMPORT_NAME" and str(step.argval).partition(".")[0] not in _CONSTANT:
                    unseen[f"the module {step.argval}, which it imports"] = None
        analysed = _codes[code] = _Code(tuple(read), frozenset(names), tuple(unseen))
    return analysed


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


class _Walk:
    """One look at everything that a function reads."""

    def __init__(self, named: Sequence[Tensor] | None, names: frozenset[str]):
        self.names, self.modules = set(names), False
        self.tables: list[Tensor] = []
        self.kept: list[object] = []
        self.seen: dict[int, int] = {}
        self.vouched = False
        for table in named or ():
            self.tensor(table, "a table")
        self.vouched = named is not None

    def value(self, x: Any, where: str) -> Hashable:
        kind = type(x)
        if kind in _VALUES:
            return kind, x
        if kind in (float, complex):
            return kind, repr(x)
        if kind is torch.Size:
            return kind, tuple(x)
        if isinstance(x, np.generic) and x.dtype.kind in "biufc":
            return kind, x.tobytes()
        if isinstance(x, Tensor):
            return self.tensor(x, where)
        if isinstance(x, Pattern):
            return Pattern, x.spec, tuple(self.tensor(table, where) for table in x.tables)
        if id(x) in self.seen:
            return "again", self.seen[id(x)]
        self.seen[id(x)] = len(self.seen)
        if len(self.seen) > _MOST:
            raise _refused(f"{where}, more than {_MOST} values")
        return self.compound(x, kind, where)

    def compound(self, x: Any, kind: type, where: str) -> Hashable:
        if kind in _CONTAINERS:
            return self.container(x, kind, where)
        if kind is types.FunctionType:
            return self.function(x, where)
        if kind is types.ModuleType:
            return self.module(x, where)
        if kind is functools.partial:
            parts = (x.func, x.args, x.keywords, vars(x))
            return kind, *(self.value(part, f"{where} (a partial)") for part in parts)
        if kind is types.MethodType:
            return kind, self.value(x.__func__, where), self.instance(x.__self__, where)
        if kind is types.BuiltinFunctionType and not isinstance(x.__self__, (types.ModuleType, types.NoneType)):
            # of torch, or bound to an object
            return kind, x.__name__, self.value(x.__self__, f"{where}, of")
        if kind is types.BuiltinFunctionType or kind in _METHODS or isinstance(x, _OPERATORS):
            return self.same(x)
        if isinstance(x, type):
            return self.same(x) if _constant(x.__module__) else self.opaque(x, where)
        return self.instance(x, where) if callable(x) else self.opaque(x, where)

    def same(self, x: object) -> Hashable:
        self.kept.append(x)
        return "same", id(x)

    def opaque(self, x: object, where: str) -> Hashable:
        if not self.vouched:
            raise _refused(f"{where}, a {type(x).__qualname__}")
        return self.same(x)

    def tensor(self, x: Tensor, where: str) -> Hashable:
        # one without version and contents to look at, or that stands for others, can change unseen
        kind: object = x.layout if type(x) in _TENSORS else type(x).__name__
        if x.is_inference() and x.device.type != "cpu":
            kind = "inference mode"
        if kind != torch.strided or wrapped(x):
            return self.opaque(x, f"{where} ({kind})")
        for number, table in enumerate(self.tables):
            if table is x:
                return Tensor, number
        self.tables.append(x)
        return Tensor, len(self.tables) - 1

    def container(self, x: Any, kind: type, where: str) -> Hashable:
        if kind is dict:
            # listed first: another thread may add to it
            items = [(key, f"{where}[{key!r}]", each) for key, each in list(x.items())]
            return kind, tuple((self.value(key, where), self.value(each, place)) for key, place, each in items)
        if kind in (set, frozenset):
            return kind, frozenset(self.value(each, where) for each in list(x))
        return kind, tuple(self.value(each, f"{where}[{i}]") for i, each in enumerate(list(x)))

    def function(self, fn: types.FunctionType, where: str) -> Hashable:
        code = fn.__code__
        self.kept += [fn, code]
        of = "" if where == "itself" else f" of {fn.__qualname__}"
        inside = [
            self.cell(cell, f"its variable {name}{of}")
            for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True)
        ]
        defaults, last = fn.__defaults__ or (), code.co_argcount
        positional = dict(zip(code.co_varnames[last - len(defaults) : last], defaults, strict=True))
        given: list[tuple[str, dict[str, Any]]]
        given = [("default", positional), ("default", fn.__kwdefaults__ or {}), ("attribute", vars(fn))]
        for what, held in given:
            inside += [(name, self.value(each, f"its {what} {name}{of}")) for name, each in list(held.items())]
        # what a library's function reads of its own module is constant; what it was given may not be
        if not _constant(fn.__globals__.get("__name__")):
            named = _code(code)
            self.names |= named.names
            inside += [self.opaque(fn, f"{each}{of}") for each in named.unseen]
            for name in named.globals:
                if name in fn.__globals__:
                    inside.append((name, self.value(fn.__globals__[name], f"the global {name}{of}")))
                elif name in _UNSEEN:
                    inside.append(self.opaque(fn, f"what it finds with {name}(){of}"))
        return "function", id(fn), id(code), tuple(inside)

    def cell(self, cell: types.CellType, where: str) -> Hashable:
        try:
            content = cell.cell_contents
        except ValueError:
            return "nothing yet"
        return self.value(content, where)

    def module(self, module: types.ModuleType, where: str) -> Hashable:
        if _constant(module.__name__):
            return self.same(module)
        if "__getattr__" in vars(module):
            return self.opaque(module, where)
        self.modules = True
        self.kept.append(module)
        named = [name for name in sorted(self.names) if name in vars(module)]
        return id(module), tuple((name, self.value(vars(module)[name], f"{where}.{name}")) for name in named)

    def instance(self, x: Any, where: str) -> Hashable:
        """Identify an object by what it holds, and what its class does with that."""
        kinds = type(x).__mro__[:-1] if not isinstance(x, type) else ()
        # a library's objects keep state of their own; what is slotted, or looked up, is not listed
        if not kinds or any(_constant(kind.__module__) or vars(kind).keys() & _UNLISTED for kind in kinds):
            return self.opaque(x, where)
        held = [self.container(getattr(x, "__dict__", {}), dict, where)]
        for kind in kinds:
            self.kept.append(kind)
            for name, each in list(vars(kind).items()):
                if name not in _OF_CLASSES and not name.startswith("__dataclass"):
                    inner = each.__func__ if isinstance(each, (staticmethod, classmethod)) else each
                    of_c = type(inner) in (*_METHODS, types.BuiltinFunctionType)  # so is the state that it reads
                    held.append((name, (self.opaque if of_c else self.value)(inner, f"{where}.{name}")))
        return tuple(map(id, kinds)), tuple(held)


def _constant(name: object) -> bool:
    return str(name).partition(".")[0] in _CONSTANT


def _refused(what: str) -> PatternError:
    return PatternError(
        message(
            "mask_mod",
            f"a function that reads {what}, which could change unseen",
            "numbers, strings, tensors, and functions of such",
            "Read a number or a tensor instead, pass it as a default argument, or say what it reads with tables=[...].",
        )
    )
