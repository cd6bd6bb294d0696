"""Read a mask function of transformers by its trace.

transformers builds a mask as a function of four indices from nested closures. The function is traced, also while
torch.compile traces. The result depends on the computation and not on names, so functions of models and users are read
too. A function that reads the same as an earlier one is not traced again.

A graph does not have four facts about masks of models. The position of a step over a static cache is a tensor, which
must not be read. All steps of a generation share one pattern. Chunks begin at the first token of each sequence. And
positions restart in each packed document.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_scalar, has_static_value

from ...cache import PATTERNS
from ...checks import INTEGERS
from ...patterns import Documents, Pattern
from ...patterns.traced import of_keys, of_relation
from ...torch_compat import constant_in_traces, dispatched, outside_transforms, require, transforming
from ...trace.comparison import Reads, codes, disagreement, reads
from ...trace.graph import MASK_ARGUMENTS, Graph, H, Node, UntraceableError, deps_of, filled_in
from ...trace.relation import Runs, as_relation, distances_of, operands
from ...trace.symbols import graph_of, trace
from ...trace.values import Values
from ...types import Place
from .positions import Chunks, MisreadError, Positions

MaskFunction = Callable[..., Any]

# estimated size of a graph's key and its distances
_BYTES = 2 * 2**10
# bounds on the tokens for which a function of distances is compared with its graph
_LEAST, _LONGEST = 64, 2**20
# origins of chunks up to which a difference of positions does not overflow
_FAR = 2**31
_UNCOUNTED = "a packed mask: got positions that do not rise by one in each document; wanted those of the documents"


def read(function: MaskFunction, positions: Positions) -> tuple[Pattern, Documents | None]:
    """Return the pattern of a mask function, and the packed documents to which it is restricted.

    Args:
        function: ``function(batch, head, query, key)``.
        positions: Positions of the call's queries and keys.
    Raises:
        UntraceableError: The function cannot be traced, its pairs have no pattern, or it depends on the head.
    """
    # what a function reads while torch.compile traces is not known later
    inputs = None if torch.compiler.is_compiling() else reads(function)
    if inputs is not None:
        known: _Pairs | None = PATTERNS.get(("pairs", inputs.key))
        pattern = None if known is None else known.at(positions)
        if pattern is not None:
            return pattern, None
    graph = trace(function, transforms=True)
    if deps_of(graph.result) & H:
        raise UntraceableError("it depends on the head")
    packed = _packed(graph) if graph.tensors else None
    runs = _distances(function, graph, positions, packed)
    pairs = _Pairs(runs, None) if runs is not None and packed is None else None
    if inputs is not None:
        pairs = _in_chunks(graph) if pairs is None else pairs
        if pairs is not None and _comparable(graph, positions) and inputs.kept(function):
            PATTERNS.put(("pairs", inputs.key), pairs._replace(inputs=inputs), _BYTES)
    pattern = None if pairs is None else pairs.at(positions)
    if pattern is not None or (pairs is not None and pairs.chunks is None):
        # a step of a generation does not call another function to check it
        return _found(pattern), None
    if positions.row is not None:
        return of_keys(_allowed(graph, positions, positions.row)), None
    place = positions.place(_device(graph))
    _check_lengths(graph, place)
    if packed is None or positions.first < 0 or positions.first + positions.nq > positions.nk:
        # documents are those of the keys, so every query must be one of them
        return _found(of_relation(as_relation(graph, place), place)), None
    documents, rises = positions.documents(packed.numbers), packed.rises()
    if runs is not None and rises:
        return _found(positions.at_distances(runs)) & documents, documents
    relation = as_relation(graph, place, packed.counted if rises else ())
    return _found(of_relation(relation, place)), documents


def _found(pattern: Pattern | None) -> Pattern:
    if pattern is None:
        raise UntraceableError("no pattern has its pairs")
    return pattern


def _distances(function: MaskFunction, graph: Graph, positions: Positions, packed: _Packed | None) -> Runs | None:
    """Return the distances that a mask allows in every call, or None, and compare the function with its graph.

    In a packed mask they are those in each document.
    A function is compared in the first call with its code and graph. It is not in transforms, and if it reads tables,
    not where the query's position is a tensor.
    """
    within = () if packed is None else (packed.counted, packed.equal)
    constant = packed is None and not graph.tensors and torch.compiler.is_dynamo_compiling()
    key = _constant(graph.key) if constant else None
    if key is not None:
        read, *ends = _text_of_distances(key).split() or [""]
        if read == _ANY_CALL:
            numbers = [_OPEN[end] if end in _OPEN else int(end) for end in ends]
            return tuple(zip(numbers[::2], numbers[1::2], strict=True))
        if read == _ONE_CALL:
            return None
    if torch.compiler.is_compiling() or transforming() or dispatched():
        return distances_of(graph, *within)
    key = "mask", codes(function), graph.key
    known: tuple[Runs | None] | None = PATTERNS.get(key)
    if known is None:
        known = (distances_of(graph, *within),)
        if _comparable(graph, positions):
            _compare(function, graph, positions, known[0])
            PATTERNS.put(key, known, _BYTES)
    return known[0]


_ANY_CALL, _ONE_CALL, _OPEN = "distances", "none", {"inf": math.inf, "-inf": -math.inf}


def _constant(key: Any) -> Any:
    """Return a graph's key as constants of torch.compile, or None if its graph has other parts than whole numbers."""
    steps: list[Any] = []
    for name, *given in key[len(MASK_ARGUMENTS) : -2]:
        if type(name) is not str:
            return None
        for place, x in enumerate(given):
            kind = type(x)
            if kind is tuple:
                # the trace has guarded numbers, also symbolic ones, by their values
                if len(x) != 2 or x[0] is not int or not has_static_value(x[1]):
                    return None
                given[place] = int, guard_scalar(x[1])
            elif kind is not int and kind is not torch.dtype:
                return None
        steps.append((name, *given))
    return (*key[: len(MASK_ARGUMENTS)], *steps, *key[-2:]) if type(key[-2]) is int else None


@constant_in_traces
def _text_of_distances(key: Any) -> str:
    """Return the distances of a graph of constants as text, for code that torch.compile traces.

    The constants determine the result. The trace takes a text as a constant, but not a tuple. The text is empty for a
    graph without a reading.
    """
    known: str | None = PATTERNS.get(("text", key))
    if known is None:
        known = ""
        with outside_transforms():
            graph = graph_of(key)
            if graph is not None:
                with suppress(UntraceableError):
                    runs = distances_of(graph)
                    ends = () if runs is None else [end for run in runs for end in run]
                    words = [str(int(end)) if math.isfinite(end) else str(end) for end in ends]
                    known = " ".join([_ONE_CALL if runs is None else _ANY_CALL, *words])
        PATTERNS.put(("text", key), known, _BYTES)
    return known


def _comparable(graph: Graph, positions: Positions) -> bool:
    """Return whether a function is compared with its graph, in this call or an earlier one."""
    return (positions.row is None or not graph.tensors) and not (transforming() or dispatched())


def _compare(function: MaskFunction, graph: Graph, positions: Positions, runs: Runs | None) -> None:
    """Raise MisreadError unless a function computes its graph at some pairs, of earlier positions too."""
    n = positions.kv_offset + positions.nk
    if runs is not None and not graph.tensors:
        # all its distances occur
        ends = [abs(int(end)) for run in runs for end in run if math.isfinite(end)]
        n = min(2 * max(ends, default=0) + _LEAST, _LONGEST)
    if how := disagreement(function, graph, Place(positions.batch, 1, n, n).lengths()):
        raise MisreadError(how)


def _device(graph: Graph) -> torch.device:
    """Return the device on which a mask is computed: while torch.compile traces, that of its tables."""
    return graph.tensors[0].device if graph.tensors and torch.compiler.is_compiling() else torch.device("cpu")


# ---- the same pairs in every call ------------------------------------------------------------------------------------


class _Pairs(NamedTuple):
    """The pairs of a mask in any call.

    Attributes:
        runs: Distances of these pairs.
        chunks: The chunks in which they are, or None.
        inputs: Everything that the function reads.
    """

    runs: Runs
    chunks: Chunks | None
    inputs: Reads | None = None

    def at(self, positions: Positions) -> Pattern | None:
        """Return the pattern at the positions of a call; None if it needs the graph."""
        if self.chunks is None:
            return positions.at_distances(self.runs)
        return positions.in_chunks(self.runs, self.chunks)


def _in_chunks(graph: Graph) -> _Pairs | None:
    """Return the pairs of a mask that allows some distances in chunks of tokens; None for another mask."""
    for part in operands(graph.result, "and"):
        if type(part) is Node and part.name == "eq":
            (one, at), (other, to) = map(_chunks, part.args)
            if one is not None and one == other and {at, to} == {"q", "k"}:
                runs = distances_of(graph, (), part)
                return None if runs is None else _Pairs(runs, one)
    return None


def _chunks(x: Any) -> tuple[Chunks | None, str]:
    """Return the chunks of a number ``(position - origin) // length``, and the name of the position's argument."""
    if type(x) is not Node or x.name != "floordiv" or x.kwargs or type(x.args[1]) is not int or x.args[1] < 1:
        return None, ""
    at, origins = x.args[0], None
    if at.name == "sub" and not at.kwargs and type(at.args[1]) is Node and _is_padding(at.args[1]):
        at, table = at.args[0], at.args[1].args[0]
        origins = tuple(table.value.tolist())
        if table.dtype not in INTEGERS or any(abs(each) >= _FAR for each in origins):
            return None, ""
    if type(at) is not Node or at.args not in (("q",), ("k",)):
        return None, ""
    return Chunks(x.args[1], origins), at.args[0]


# ---- a position that is a tensor -------------------------------------------------------------------------------------


def _allowed(graph: Graph, positions: Positions, row: Tensor) -> Tensor:
    """Return the keys (B or 1, keys) that one query at a row of the keys may attend."""
    place = positions.place(row.device)
    lengths = {**place.lengths(), "q": (row + positions.kv_offset).view(1)}
    _check_lengths(graph, place)
    return Values(graph, place).computed(graph.result, lengths)[:, 0, 0].expand(-1, positions.nk)


def _check_lengths(graph: Graph, place: Place) -> None:
    """Raise UntraceableError if a table has no entries of the last key."""
    stop = place.k0 + place.nk
    for table, at in _looked_up(graph):
        if at.args == ("k",) and table.value.shape[1] < stop:
            raise UntraceableError(f"numbers of {table.value.shape[1]} tokens for {stop}")


# ---- packed documents ------------------------------------------------------------------------------------------------


def _looked_up(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Iterate over the tables (B, tokens) in which a mask looks up the query or the key of a batch element."""
    for node in graph.nodes:
        found = _entry(node)
        if found is not None:
            yield found


def _entry(x: Any) -> tuple[Node, Node] | None:
    """Return the table and the argument of a look-up ``table[b, q]`` or ``table[b, k]``; None for another value."""
    if type(x) is not Node or x.name != "index" or x.args[0].deps or type(x.args[1]) is not tuple:
        return None
    table, at = x.args
    plain = table.value.ndim == len(at) == 2 and all(type(each) is Node and each.name == "argument" for each in at)
    if not plain or at[0].args[0] != "b" or at[1].args[0] not in ("q", "k"):
        return None
    return table, at[1]


class _Packed(NamedTuple):
    """The packed documents in which all pairs of a mask are.

    Attributes:
        equal: The comparison of their numbers.
        numbers: The table of their numbers, (B, tokens).
        counted: Tables of positions. A table with entries that a mask compares for equality has numbers of documents.
    """

    equal: Node
    numbers: Tensor
    counted: list[Node]

    def rises(self) -> bool:
        """Whether positions rise by one in each document; in compiled code, an error is raised otherwise.

        transformers packs documents where positions do not rise by one.
        """
        if not self.counted:
            return True
        document, steps = self.numbers.diff(dim=-1), [table.value.diff(dim=-1) for table in self.counted]
        one = torch.stack([step == 1 for step in steps]).all(0)
        rises = ((document > 0) | ((document == 0) & one)).all()
        if torch.compiler.is_compiling():
            require(rises, _UNCOUNTED)
            return True
        return bool(rises)


def _packed(graph: Graph) -> _Packed | None:
    """Return the documents in which all pairs of a mask are, or None."""
    for part in operands(graph.result, "and"):
        if type(part) is Node and part.name == "eq":
            one, other = map(_entry, part.args)
            if one is None or other is None or one[0] is not other[0] or one[1] is other[1]:
                continue
            if one[0].dtype in INTEGERS:
                return _Packed(part, one[0].value, _counted(graph))
    return None


def _counted(graph: Graph) -> list[Node]:
    numbers: list[Node] = []
    for node in graph.nodes:
        if node.name in ("eq", "ne"):
            numbers += [found[0] for found in map(_entry, node.args) if found is not None]
    counted: list[Node] = []
    for table, _ in _looked_up(graph):
        if table not in numbers and table not in counted and table.dtype in INTEGERS:
            counted.append(table)
    return counted


# ---- sequences that ranks share --------------------------------------------------------------------------------------


def read_sharded(
    function: MaskFunction,
    shard: Positions,
    whole: Positions,
    padding: Tensor | None,
    packed: Tensor | None,
    positions: Tensor | None,
) -> tuple[Pattern, Documents | None]:
    """Return the pattern of a mask function over a whole sequence, and its documents, given that of a rank's tokens.

    Args:
        function: The mask function of the rank's tokens.
        shard: Positions of the rank's tokens.
        whole: Positions of the whole sequence.
        padding: (B or 1, N) bool, whether each token exists, or None.
        packed: (B, N), the number of each token's packed document, or None.
        positions: (B, N), positions that restart in each packed document, or None.
    Raises:
        UntraceableError: As of :func:`read`, or the function reads more of the rank's tokens than their padding.
    """
    graph = trace(function, transforms=True)
    if not torch.compiler.is_compiling():
        # only to compare the function with its graph, which compiled code does not
        _distances(function, graph, shard, None)
    paddings = {node for node in graph.nodes if _is_padding(node)}
    if len(graph.tensors) > len({node.args[0] for node in paddings}):
        raise UntraceableError("it reads a table of the rank's tokens")
    origin = None if padding is None else (padding.cumsum(-1) == 0).sum(-1)

    def of_whole(b: Any, h: Any, q: Any, k: Any) -> Any:
        at = {"b": b, "h": h, "q": q, "k": k}
        if packed is not None and positions is not None:
            at |= {"q": positions[b, q], "k": positions[b, k]}
        values: dict[Node, Any] = {}
        for node in graph.nodes:
            if node.name == "argument":
                values[node] = at[node.args[0]]
            elif node in paddings:
                values[node] = 0 if origin is None else origin[b]
            elif not node.deps:
                values[node] = node.value
            else:
                values[node] = node.function(*filled_in(node.args, values), **filled_in(node.kwargs, values))
        allowed = filled_in(graph.result, values)
        return allowed if packed is None else allowed & (packed[b, q] == packed[b, k])

    return read(of_whole, whole)


def _is_padding(node: Node) -> bool:
    """Return whether a value is an entry of a table with one number for each batch element, as of padding."""
    if node.name != "index" or node.args[0].deps or node.args[0].value.ndim != 1:
        return False
    at = node.args[1]
    return len(at) == 1 and type(at[0]) is Node and at[0].args == ("b",)
