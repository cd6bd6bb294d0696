"""Read a mask function of transformers by its trace.

transformers builds a mask as a function of four indices from nested closures. The function is traced, also while
torch.compile traces. The result depends on the computation and not on names, so functions of models and users are read
too. A graph does not have three facts about masks of models. The position of a step over a static cache is a tensor,
which must not be read. All steps of a generation share one pattern. And positions restart in each packed document.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...cache import PATTERNS
from ...checks import INTEGERS
from ...patterns import Documents, Pattern
from ...patterns.traced import of_keys, of_relation
from ...torch_compat import dispatched, require, transforming
from ...trace.comparison import agrees, codes
from ...trace.graph import Graph, H, Node, UntraceableError, deps_of, filled_in
from ...trace.relation import Place, Reader, Runs, as_relation, distances_of, operands
from ...trace.symbols import trace
from .positions import Positions

MaskFunction = Callable[..., Any]

# estimated size of a graph's key and its distances
_BYTES = 2 * 2**10
# bounds on the tokens for which a function of distances is compared with its graph
_LEAST, _LONGEST = 64, 2**20
_UNCOUNTED = "a packed mask: got positions that do not rise by one in each document; wanted those of the documents"


def read(function: MaskFunction, positions: Positions) -> tuple[Pattern, Documents | None]:
    """Return the pattern of a mask function, and the packed documents to which it is restricted.

    Args:
        function: ``function(batch, head, query, key)``.
        positions: Positions of the call's queries and keys.
    Raises:
        UntraceableError: The function cannot be traced, its pairs have no pattern, or it depends on the head.
    """
    graph = trace(function, transforms=True)
    if deps_of(graph.result) & H:
        raise UntraceableError("it depends on the head")
    runs = _distances(function, graph, positions)
    pattern: Pattern | None
    packing: Node | None = None
    if runs is not None:
        pattern = positions.at_distances(runs)
    elif positions.row is not None:
        pattern = of_keys(_allowed(graph, positions, positions.row))
    else:
        packing = _packing(graph)
        place = positions.place(_device(graph))
        _check_lengths(graph, place)
        pattern = of_relation(as_relation(graph, place, _counted(graph, packing)), place)
    if pattern is None:
        raise UntraceableError("no pattern has its pairs")
    return pattern, None if packing is None else positions.documents(packing.value)


def _distances(function: MaskFunction, graph: Graph, positions: Positions) -> Runs | None:
    """Return the distances that a mask allows in every call, or None, and compare the function with its graph.

    A function is compared in the first call with its code and graph. It is not in transforms, and if it reads tables,
    not where the query's position is a tensor.
    """
    if torch.compiler.is_compiling() or transforming() or dispatched():
        return distances_of(graph)
    key = "mask", codes(function), graph.key
    known: tuple[Runs | None] | None = PATTERNS.get(key)
    if known is None:
        known = (distances_of(graph),)
        if positions.row is None or not graph.tensors:
            _compare(function, graph, positions, known[0])
            PATTERNS.put(key, known, _BYTES)
    return known[0]


def _compare(function: MaskFunction, graph: Graph, positions: Positions, runs: Runs | None) -> None:
    """Raise UntraceableError unless a function computes its graph at some pairs, of earlier positions too."""
    n = positions.kv_offset + positions.nk
    if runs is not None:
        # all its distances occur
        ends = [abs(int(end)) for run in runs for end in run if math.isfinite(end)]
        n = min(2 * max(ends, default=0) + _LEAST, _LONGEST)
    if not agrees(function, graph, Place(positions.batch, 1, n, n).lengths()):
        raise UntraceableError("it computes another mask for tensors than for symbols")


def _device(graph: Graph) -> torch.device:
    """Return the device on which a mask is computed: while torch.compile traces, that of its tables."""
    return graph.tensors[0].device if graph.tensors and torch.compiler.is_compiling() else torch.device("cpu")


# ---- a position that is a tensor -------------------------------------------------------------------------------------


def _allowed(graph: Graph, positions: Positions, row: Tensor) -> Tensor:
    """Return the keys (B or 1, keys) that one query at a row of the keys may attend."""
    place = positions.place(row.device)
    lengths = {**place.lengths(), "q": (row + positions.kv_offset).view(1)}
    _check_lengths(graph, place)
    return Reader(graph, place).computed(graph.result, lengths)[:, 0, 0].expand(-1, positions.nk)


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
    plain = len(at) == 2 and all(type(each) is Node and each.name == "argument" for each in at)
    if not plain or at[0].args[0] != "b" or at[1].args[0] not in ("q", "k"):
        return None
    return table, at[1]


def _packing(graph: Graph) -> Node | None:
    """Return the table of the documents' numbers, if all pairs of a mask are inside of documents."""
    for part in operands(graph.result, "and"):
        if type(part) is Node and part.name == "eq":
            one, other = map(_entry, part.args)
            if one is not None and other is not None and one[0] is other[0] and one[1] is not other[1]:
                return one[0]
    return None


def _counted(graph: Graph, packing: Node | None) -> list[Node]:
    """Return the tables of positions of packed documents, while torch.compile traces; else their values are known.

    transformers packs documents where positions do not rise by one, so in a document they rise by one. Compiled code
    checks it. A table with entries that a mask compares for equality has numbers of documents.
    """
    if packing is None or not torch.compiler.is_compiling():
        return []
    numbers = [packing]
    for node in graph.nodes:
        if node.name in ("eq", "ne"):
            numbers += [found[0] for found in map(_entry, node.args) if found is not None]
    counted: list[Node] = []
    for table, _ in _looked_up(graph):
        if table not in numbers and table not in counted and table.dtype in INTEGERS:
            counted.append(table)
            document, step = packing.value.diff(dim=-1), table.value.diff(dim=-1)
            require(((document > 0) | ((document == 0) & (step == 1))).all(), _UNCOUNTED)
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
    _distances(function, graph, shard)
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
    at = node.args[1] if type(node.args[1]) is tuple else (node.args[1],)
    return len(at) == 1 and type(at[0]) is Node and at[0].args == ("b",)
