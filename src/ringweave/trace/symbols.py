"""Trace a function of (b, h, q, k), or of (score, b, h, q, k), into a graph.

The function is called once, with symbols in place of 0-dim tensors. Each operation on a symbol becomes a node.
Operations on captured tensors alone run as usual and become nodes too, so that their results have an identity. Numbers
are part of the graph by value. A function can influence its result by operations, constants, tensors and control flow
only, so the graph of this call, with the contents of its tensors, is what the function computes now.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import first_line
from ..torch_compat import function_modes, version, without_function_modes, wrapped
from .graph import (
    ARGUMENTS,
    BITS,
    MASK_ARGUMENTS,
    Graph,
    Kind,
    Node,
    UntraceableError,
    deps_of,
    example,
    kind_of,
    nodes_in,
)
from .operations import (
    CASTS,
    FRESH,
    FUNCTIONS,
    OPERATORS,
    SPELLINGS,
    UNARY,
    UNDETERMINED,
    Function,
    is_torchs,
    name_of,
    special,
    writes,
)

_CPU = torch.device("cpu")


class Symbol:
    """The value of a node while a function is traced: a 0-dim tensor, or a row of a captured tensor.

    It has every attribute of a tensor: one that records an operation, or one that refuses the function. A function that
    asks for its type learns that it is no tensor, so a graph is compared with its function before it is trusted.
    """

    __slots__ = ("node", "trace")
    # numpy leaves operators with an array to the symbol
    __array_ufunc__ = None
    # a comparison is recorded, so symbols are told apart by identity
    __hash__ = object.__hash__

    def __init__(self, trace: Trace, node: Node):
        self.trace, self.node = trace, node

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise UntraceableError("a symbol outlives its trace")

    def __getitem__(self, at: Any) -> Symbol:
        return self.trace.index(self, at)

    def __repr__(self) -> str:
        return f"Symbol({self.node!r})"


def _give_attributes() -> None:
    """Give symbols the operators of Python and the attributes of tensors."""

    def operator(name: str, swap: bool) -> Callable[..., Symbol]:
        if name in UNARY:
            return lambda self: self.trace.record(name, None, (self,))
        if swap:
            return lambda self, other: self.trace.record(name, None, (other, self))
        return lambda self, other: self.trace.record(name, None, (self, other))

    def in_place(name: str) -> Callable[..., Symbol]:
        return lambda self, other: self.trace.assign(self, self.trace.record(name, None, (self, other)))

    for name, (_, reverses) in OPERATORS.items():
        if name != "index":
            setattr(Symbol, f"__{special(name)}__", operator(name, False))
        if reverses:
            setattr(Symbol, f"__r{special(name)}__", operator(name, True))
            setattr(Symbol, f"__i{special(name)}__", in_place(name))

    def value(self: Symbol, *_: object) -> NoReturn:
        self.trace.refuse("it needs the value of a score or an index as a number, as `if` and int() do")

    for name in _VALUES:
        setattr(Symbol, f"__{name}__", value)

    def write(self: Symbol, *_: object) -> NoReturn:
        self.trace.refuse("it writes to a tensor")

    for name in ("setitem", "delitem"):
        setattr(Symbol, f"__{name}__", write)

    def method(function: Function) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: self.trace.call(function, (self, *args), kwargs)

    def attribute(name: str) -> property:
        def change(self: Symbol, _: object) -> NoReturn:
            self.trace.refuse(f"it sets .{name} of a score or an index")

        return property(lambda self: self.trace.attribute(self, name), change)

    for name in dir(Tensor):
        if not name.startswith("__") and name not in Symbol.__dict__:
            function = getattr(Tensor, name)
            records = callable(function) and name not in _READS
            setattr(Symbol, name, method(function) if records else attribute(name))


# methods of Python that need a value
_VALUES = (
    "bool", "int", "float", "index", "complex", "len", "iter", "contains", "round", "array",
    "copy", "deepcopy", "reduce_ex",
)  # fmt: skip
# methods that need a value, or a tensor with memory
_READS = frozenset({
    "item", "tolist", "numpy", "stride", "backward", "register_hook", "data_ptr", "storage", "requires_grad_", "apply_",
    "map_",
})  # fmt: skip
_give_attributes()

_SIZES = frozenset({"dim", "ndimension", "size", "numel", "nelement", "is_floating_point", "is_complex"})
_MAKERS: dict[str, Callable[..., Tensor]] = {
    "new_ones": torch.ones,
    "new_zeros": torch.zeros,
    "new_full": torch.full,
    "new_tensor": torch.tensor,
}
_NUMBERS = {"new_ones": "one", "new_zeros": "zero"}
_MADE = {name: method for method, name in _NUMBERS.items()}
_CONSTANTS = frozenset(
    {int, bool, type(None), str, type(...), torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout}
)
_TENSORS = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})


class Trace(TorchFunctionMode):
    """Records the operations of a function; see :func:`trace`.

    Args:
        dtype: Dtype of the score.
        transforms: Whether captured tensors may be those of a transform of ``torch.func``.
    Attributes:
        nodes: The operations.
        tensors: The captured tensors.
        refusal: The first thing that a graph cannot record. The function may have caught the error.
    """

    def __init__(self, dtype: torch.dtype, transforms: bool):
        super().__init__()
        self.dtype, self.transforms = dtype, transforms
        self.nodes: list[Node] = []
        self.tensors: list[Tensor] = []
        self.refusal = ""
        self._keys: list[Hashable] = []
        self._known: dict[Hashable, Node] = {}
        self._versions: list[Hashable] = []
        # nodes of tensors by id; the tensors are kept, so that no id is used again
        self._of_tensor: dict[int, Node] = {}
        self._kept: list[Tensor] = []

    def refuse(self, why: str) -> NoReturn:
        """Raise UntraceableError, and note why."""
        self.refusal = self.refusal or why
        raise UntraceableError(why)

    def graph(self, result: Any) -> Graph:
        """Return the graph of a function that returned ``result``."""
        value, key = self.given(result)
        if self.refusal:
            raise UntraceableError(self.refusal)
        if self._versions != [_version(x) for x in self.tensors]:
            raise UntraceableError("it writes to a captured tensor")
        return Graph(self.nodes, value, self.tensors, (*self._keys, key, torch.get_default_dtype()))

    # ---- nodes

    def argument(self, name: str) -> Symbol:
        """Return the symbol of an argument of the function."""
        dtype = self.dtype if name == "score" else torch.int64
        node = Node("argument", None, (name,), {}, BITS[name], len(self.nodes))
        node.kind = dtype, ()
        self.nodes.append(node)
        # terms depend on the dtype in which a function rounds
        self._keys.append((name, dtype) if name == "score" else name)
        return Symbol(self, node)

    def _added(
        self,
        name: str,
        function: Function | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: Hashable,
        deps: int,
    ) -> Node:
        node = self._known.get(key)
        if node is None:
            node = self._known[key] = Node(name, function, args, kwargs, deps, len(self.nodes))
            self.nodes.append(node)
            self._keys.append(key)
        return node

    def _tensor(self, x: Tensor) -> Node:
        """Return the node of a tensor: a captured one, unless an operation of this trace returned it."""
        node = self._of_tensor.get(id(x))
        if node is None:
            self._check(x)
            key = "tensor", len(self.tensors), x.dtype, tuple(x.shape), str(x.device), x.requires_grad
            node = self._of_tensor[id(x)] = self._added("tensor", None, (), {}, key, 0)
            node.value = x
            self.tensors.append(x)
            self._versions.append(_version(x))
        return node

    def _check(self, x: Tensor) -> None:
        strange = type(x) not in _TENSORS or x.layout != torch.strided or x.is_quantized
        if strange or not (self.transforms or torch.compiler.is_compiling() or not wrapped(x)):
            self.refuse(f"it uses a {type(x).__name__} that is not an ordinary tensor")

    def given(self, x: Any) -> tuple[Any, Hashable]:
        """Return an argument of an operation with nodes in place of symbols and tensors, and its key."""
        kind = type(x)
        if kind is Symbol:
            if x.trace is not self:
                x.trace.refusal = x.trace.refusal or "its value is used later"
                self.refuse("it uses a value of an earlier call")
            return x.node, x.node.number
        if kind in _CONSTANTS:
            return x, (kind, x)
        if kind is float or kind is complex:
            # -0.0 equals 0.0, and nan does not equal nan
            return x, (kind, repr(x))
        if kind is tuple or kind is list:
            parts = [self.given(each) for each in x]
            return kind([value for value, _ in parts]), (kind, *[key for _, key in parts])
        if kind is slice:
            (a, i), (b, j), (c, k) = map(self.given, (x.start, x.stop, x.step))
            return slice(a, b, c), (slice, i, j, k)
        if kind is dict:
            named = {name: self.given(each) for name, each in x.items()}
            return {name: value for name, (value, _) in named.items()}, (
                dict,
                *[(name, key) for name, (_, key) in named.items()],
            )
        if isinstance(x, Tensor):
            node = self._tensor(x)
            return node, node.number
        if isinstance(x, np.generic) and x.dtype.kind in "biuf":
            return self.given(x.item())
        if isinstance(x, int):
            return self.given(int(x))
        return self.refuse(f"it uses a {kind.__qualname__} in an operation")

    def record(
        self, name: str, function: Function | None, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Symbol:
        """Record an operation that has a symbol among its arguments.

        Args:
            name: Name of the operation.
            function: The operation; None for an operator of Python.
            args: Its arguments.
            kwargs: Its named arguments.
        """
        if not torch.is_grad_enabled():
            # inside an autograd.Function too: a graph would not have its backward
            self.refuse("it computes without gradients: no_grad or an autograd.Function")
        if (name == "call" or name == "matmul") and torch.is_autocast_enabled("cpu"):
            self.refuse("it computes in autocast")
        key: list[Hashable] = [name if name != "call" else function]
        deps = 0
        values: list[Any] = []
        for x in args:
            if type(x) is Symbol and x.trace is self:
                # the most frequent argument
                values.append(x.node)
                key.append(x.node.number)
                deps |= x.node.deps
                continue
            value, of = self.given(x)
            values.append(value)
            key.append(of)
            kind = type(value)
            if kind is Node:
                deps |= value.deps
            elif kind is tuple or kind is list or kind is slice:
                deps |= deps_of(value)
        named: dict[str, Any] = {}
        if kwargs:
            named, of = self.given(kwargs)
            # spellings of one name may name their arguments in different ways
            key += [function, of]
            deps |= deps_of(named)
        return Symbol(self, self._added(name, function, tuple(values), named, tuple(key), deps))

    def index(self, of: Any, at: Any) -> Symbol:
        """Record a look-up; one in a row of a tensor becomes one in the tensor, so that no row is computed."""
        at = at if type(at) is tuple else (at,)
        if type(of) is Symbol and of.node.name == "index":
            table, inner = of.node.args
            if all(type(part) is Node or type(part) is int for part in inner):
                places = [Symbol(self, part) if type(part) is Node else part for part in inner]
                return self.index(table.value if table.value is not None else Symbol(self, table), (*places, *at))
        if type(of) is not Symbol and any(part is Ellipsis for part in at):
            at = _without_ellipsis(at, of.ndim)
        return self.record("index", None, (of, at))

    # ---- attributes and methods of symbols

    def kind(self, of: Symbol) -> Kind:
        """Return dtype and shape of a symbol."""
        try:
            return kind_of(of.node)
        except UntraceableError as error:
            self.refuse(str(error))

    def attribute(self, of: Symbol, name: str) -> Any:
        """Return an attribute of a symbol that is not a method."""
        if name == "device":
            return _CPU
        if name == "dtype":
            return self.kind(of)[0]
        if name == "shape":
            return torch.Size(self.kind(of)[1])
        if name == "ndim":
            return len(self.kind(of)[1])
        return self.refuse(f"it uses .{name} of a score or an index")

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Record a function of torch that was called with a symbol."""
        kwargs, name = kwargs or {}, name_of(func)
        if writes(func, name, args, kwargs):
            return self._written(name, args, kwargs)
        known = SPELLINGS.get(func)
        if known is not None:
            name, function, swap = known
            if kwargs:
                args, kwargs = _by_position(args, kwargs)
            if name == "to":
                return self._converted(args, kwargs)
            if not kwargs:
                if name == "index":
                    return self.index(*args)
                given = (args[1], args[0], *args[2:]) if swap else args
                return self.record(name, None if name in OPERATORS else function, given)
            # an operator of Python takes no named arguments, such as rounding_mode
            return self.record("call" if swap or name == "index" else name, func, args, kwargs)
        if name in CASTS:
            return self._converted((args[0], CASTS[name]), kwargs)
        if name == "type_as" or (name == "type" and (len(args) > 1 or kwargs)):
            return self._converted(args, kwargs)
        if name in ("__get__", "__delete__", "type"):
            self.refuse("it uses an attribute of a score or an index")
        if name in UNDETERMINED:
            self.refuse("it draws random numbers, or reads memory that is no value of its arguments")
        if name in _SIZES:
            return self._size(name, args, kwargs)
        if name in _MAKERS and type(args[0]) is Symbol:
            return self._made(name, args, kwargs)
        if not is_torchs(func):
            self.refuse("it calls code that may read other tensors, as TorchScript does")
        return self.record("call", func, args, kwargs)

    def _converted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a conversion by its dtype: values of pairs are on one device."""
        of, dtype, copies = args[0], None, False
        for x in (*args[1:], *kwargs.values()):
            if type(x) is torch.dtype:
                dtype = x
            elif type(x) is Symbol:
                dtype = self.kind(x)[0]
            elif isinstance(x, Tensor):
                dtype = x.dtype
                self._stays(x.device)
            elif isinstance(x, torch.device):
                self._stays(x)
            elif isinstance(x, str) and not x.startswith("torch."):
                self._stays(torch.device(x))
            elif type(x) is bool:
                # a copy may be asked for; another one is harmless
                copies = copies or x
            elif x is not None and type(x) is not torch.memory_format:
                self.refuse(f"it converts to {x!r}")
        if type(of) is not Symbol:
            # a captured tensor, in the dtype of a score or an index
            return self.once(Tensor.to, (of, dtype), {})
        if dtype is not None and dtype != self.kind(of)[0]:
            return self.record("to", Tensor.to, (of, dtype))
        # torch returns the tensor itself
        return self.record("clone", torch.clone, (of,)) if copies else of

    def _stays(self, device: torch.device) -> None:
        if device.type != "cpu":
            self.refuse("it moves values to another device")

    def _size(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = self.kind(args[0])
        with without_function_modes():
            return getattr(example(kind), name)(*args[1:], **kwargs)

    def _written(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Symbol:
        """Record a write to a symbol as an operation without one."""
        method = getattr(Tensor, name[:-1], None)
        if not name.endswith("_") or name.endswith("__") or method is None or not args or type(args[0]) is not Symbol:
            self.refuse("it writes to a tensor")
        return self.assign(args[0], self.call(method, args, kwargs))

    def assign(self, target: Symbol, result: Any) -> Symbol:
        """Give a symbol the value of another, as a write in place does, unless a view may share its memory."""
        before = target.node
        for node in self.nodes:
            if _may_share(node) and (node is before or before in nodes_in((node.args, node.kwargs))):
                self.refuse("it writes to a tensor that may share its memory with another")
        (dtype, shape), (found, sides) = self.kind(target), self.kind(result)
        with without_function_modes():
            fits = shape == sides and torch.can_cast(found, dtype)
        if not fits:
            self.refuse("it writes values of another kind to a tensor")
        target.node = (result if dtype == found else self.record("to", Tensor.to, (result, dtype))).node
        return target

    def _made(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a constant with the dtype of a symbol."""
        alone = len(args) == 2 and type(args[1]) is tuple and not args[1] and kwargs.keys() <= {"dtype"}
        if alone and name in _NUMBERS:
            return self._number(name, kwargs.get("dtype") or self.kind(args[0])[0])
        if _has_symbols((*args[1:], kwargs)):
            self.refuse("it fills a tensor with a score or an index")
        return self.once(_MAKERS[name], args[1:], {"dtype": self.kind(args[0])[0], "device": _CPU, **kwargs})

    def _number(self, name: str, dtype: torch.dtype) -> Tensor:
        """Make one or zero, which are known also while torch.compile traces."""
        with without_function_modes():
            made: Tensor = _MAKERS[name]((), dtype=dtype, device=_CPU)
        known, kwargs = _NUMBERS[name], {"dtype": dtype, "device": _CPU}
        node = self._of_tensor[id(made)] = self._added(known, _MAKERS[name], ((),), kwargs, (known, dtype), 0)
        node.value = made if node.value is None else node.value
        self._kept.append(made)
        return made

    # ---- the mode: every function of torch that the traced function calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a function with a symbol among its arguments; run and record any other."""
        for x in args:
            if type(x) is Symbol or (type(x) in _NESTS and _has_symbols(x)):
                return self.call(func, args, kwargs)
        if kwargs and _has_symbols(kwargs):
            return self.call(func, args, kwargs)
        return self.once(func, args, kwargs or {})

    def once(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function of captured tensors alone, and record it."""
        name = name_of(func)
        if name == "__get__":
            # the result has a node of its own once it is used
            return func(*args)
        if name in UNDETERMINED:
            self.refuse("it draws random numbers, or reads memory that is no value of its arguments")
        if writes(func, name, args, kwargs):
            self.refuse("it writes to a tensor")
        result = func(*args, **kwargs)
        parts = result if isinstance(result, (tuple, list)) else (result,)
        made = [x for x in parts if isinstance(x, Tensor)]
        if not made or any(isinstance(x, np.ndarray) for x in args) or not is_torchs(func):
            # a number is a constant; a tensor of an array, or of other code, is known by its contents once it is used
            return result
        values, key = self.given(tuple(args))
        named, of = self.given(kwargs)
        kinds = tuple([(x.dtype, str(x.device), x.requires_grad) for x in made])
        node = self._added("call", func, values, named, (func, key, of, kinds), 0)
        if node.value is None:
            node.value = result
        for place, x in enumerate(parts):
            if isinstance(x, Tensor) and id(x) not in self._of_tensor:
                self._check(x)
                own = node
                if x is not result:
                    own = self._added("part", None, (node, place), {}, ("part", node.number, place), 0)
                    own.value = x if own.value is None else own.value
                self._of_tensor[id(x)] = own
                self._kept.append(x)
        return result


_NESTS = frozenset({tuple, list, slice, dict})


def _may_share(node: Node) -> bool:
    """Whether the result of an operation may share memory with an operand, as a view does."""
    return bool(node.deps) and node.name not in FRESH and node.name != "argument"


def _version(x: Tensor) -> Hashable:
    # compiled code records the writes to its tensors itself
    return 0 if torch.compiler.is_compiling() else version(x)


def _by_position(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of a known operation with named operands in their places, so that both spellings are equal."""
    operands = [kwargs[name] for name in _OPERANDS if name in kwargs]
    return (*args, *operands), {name: x for name, x in kwargs.items() if name not in _OPERANDS}


# in the order of ``torch.where``
_OPERANDS = ("condition", "input", "other")


def _has_symbols(x: Any) -> bool:
    kind = type(x)
    if kind is Symbol:
        return True
    if kind is tuple or kind is list:
        return any(_has_symbols(each) for each in x)
    if kind is dict:
        return any(_has_symbols(each) for each in x.values())
    if kind is slice:
        return _has_symbols((x.start, x.stop, x.step))
    return False


def _without_ellipsis(at: tuple[Any, ...], ndim: int) -> tuple[Any, ...]:
    """Return an index with slices in place of its first ``...``, and none of the whole at its end."""
    place = [part is Ellipsis for part in at].index(True)
    used = sum(part is not None and part is not Ellipsis for part in at)
    at = (*at[:place], *[slice(None)] * (ndim - used), *at[place + 1 :])
    while type(at[-1]) is slice and at[-1] == slice(None):
        at = at[:-1]
    return at


def trace(function: Callable[..., Any], dtype: torch.dtype | None = None, *, transforms: bool = False) -> Graph:
    """Trace a function of (b, h, q, k), or of (score, b, h, q, k) for scores of a dtype.

    Args:
        function: The function.
        dtype: Dtype of the scores; None for a function of indices alone, as a mask is.
        transforms: Whether to record tensors of a transform of ``torch.func``, which have no contents to compare.
    Raises:
        UntraceableError: The function cannot be recorded.
    """
    this = Trace(torch.float32 if dtype is None else dtype, transforms)
    if dtype is not None and not torch.compiler.is_compiling() and function_modes():
        # its caller's mode would see no operation on a score; operations on indices are not those of the call
        raise UntraceableError("a function mode is active")
    arguments = [this.argument(name) for name in (MASK_ARGUMENTS if dtype is None else ARGUMENTS)]
    enabled = torch.is_grad_enabled()
    try:
        if not enabled:
            torch.set_grad_enabled(True)
        with this:
            result = function(*arguments)
        return this.graph(result)
    except UntraceableError:
        raise
    except Exception as error:
        # whatever a user's function raises for symbols
        raise UntraceableError(f"it raises {type(error).__name__} when it is traced: {first_line(error)}") from error
    finally:
        # a function that was refused may not have restored the mode either
        if torch.is_grad_enabled() != enabled:
            torch.set_grad_enabled(enabled)


def graph_of(key: tuple[Any, ...]) -> Graph | None:
    """Return the graph of a mask function that has a key, if it consists of operations on indices and numbers.

    Args:
        key: The key of a graph of :func:`trace`.
    """
    steps, result = key[len(MASK_ARGUMENTS) : -2], key[-2]

    def function(*indices: Any) -> Any:
        values = [*indices]
        for name, *operands in steps:
            if name in _MADE:
                values.append(getattr(values[0], _MADE[name])((), dtype=operands[0]))
            else:
                values.append(FUNCTIONS[name](*[values[x] if type(x) is int else x[1] for x in operands]))
        return values[result]

    try:
        graph = trace(function)
    except UntraceableError:
        return None
    return graph if graph.key == key else None
