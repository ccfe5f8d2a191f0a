"""A recurrent layer over packed sequences as one node, however long they are.

Without a fused kernel such a layer is a chain of small operations for every time: as many products with its weight as
there are times, and a structure that differs with the lengths of every batch. Here the whole chain becomes one node:
the products of all times are one product with a row for each, beside that of what the layer reads, and the plan of one
batch serves the next.

Nothing is assumed about the cell. A chain is folded if its products share weight and bias, if only operations that
take no parameters lie between them, if it reads the parts of one product from outside, and if what leaves it are joined
rows or last states. Whose row is whose is read by colours at every step, as it is where the chain is not folded. Where
rows are proven to keep their slots (`slots.py`), colours are read where rows leave and need not pass the chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from clipwise.engine.graph import NO_EDGE, Edge, Graph, leaf_entry, node_entry
from clipwise.engine.node import IN_PLACE_WRITE, LEAF, RECURRENCE, Recurrence, Slots, saved, saved_int
from clipwise.engine.ops import INSIDE, JOINED, PART, PARTS, PRODUCTS, TURNED, VIEW
from clipwise.engine.slots import slots_of

_FEWEST = 3  # times
_STATES = 2  # of an LSTM


class _Chain(NamedTuple):
    products: list[int]
    entry: int  # the product of all rows that are read
    parts: list[int]  # of it, one for each time
    nodes: set[int]
    edges: tuple[Edge, ...]  # what the entry reads, bias and weight of the products, and of the entry
    left: list[int]  # joined rows and states that are read from outside
    slots: Slots | None


def folded(graph: Graph) -> Graph:
    """The graph with a node in place of every chain of products with one weight; the same graph where there is none."""
    groups = _groups(graph)
    if not groups:
        return graph
    chains = [chain for group in groups if (chain := _chain(graph, group)) is not None]
    taken: set[int] = set()
    apart = []
    for chain in chains:
        if not taken & chain.nodes:
            apart.append(chain)
            taken |= chain.nodes
    return _contracted(graph, apart) if apart else graph


def _groups(graph: Graph) -> list[list[int]]:
    """Products with one weight and one bias."""
    products = [(k, name) for k, name in enumerate(graph.names) if name in PRODUCTS]
    if len(products) < _FEWEST:
        return []
    found: dict[tuple[str, Edge, Edge], list[int]] = {}
    for k, name in products:
        bias, _, weight = PRODUCTS[name]
        turned = graph.edges[k][weight][0]
        if turned >= 0 and graph.names[turned] == TURNED:
            of_bias = NO_EDGE if bias is None else graph.edges[k][bias]
            found.setdefault((name, of_bias, graph.edges[turned][0]), []).append(k)
    return [group for group in found.values() if len(group) >= _FEWEST]


def _chain(graph: Graph, group: Sequence[int]) -> _Chain | None:
    """All between some products, up to where rows of several times are joined; None where it is not only that."""
    nodes = _between(graph, set(group))
    closed = None if nodes is None else _closed(graph, nodes)
    if nodes is None or closed is None:
        return None
    ends, last = closed
    inner, left = nodes.copy(), sorted(ends | last)
    nodes.update(*(_padding(graph, k) for k in ends))
    own = _own_operands(graph, group, nodes)
    order = _in_order_of_rows(graph, group)
    if own is None or order is None:
        return None
    nodes |= _turned(graph, group)
    inputs = {edge for k in nodes for edge in graph.edges[k] if edge[0] >= 0 and edge[0] not in nodes}.difference(own)
    entry = next(iter(inputs))[0] if len(inputs) == 1 else None
    if entry is None or graph.names[entry] != graph.names[group[0]]:
        return None
    parts = _parts(graph, entry, nodes, order)
    below = _own_operands(graph, [entry], nodes | {entry})
    if parts is None or below is None or set(own) & set(below) - {NO_EDGE}:
        return None
    read = graph.edges[entry][PRODUCTS[graph.names[entry]][1]]
    if read[0] >= 0 and not _reaches_parameters(graph, read[0]):  # data with a gradient of its own
        return None
    nodes |= {entry, *_turned(graph, [entry])}
    times = [(product, part, graph.shape((product, 0))[0]) for product, part in zip(order, parts, strict=True)]
    slots = slots_of(graph, sorted(inner, key=graph.place.__getitem__), times, left)
    return _Chain(order, entry, parts, nodes, (read, *own, *below), left, slots)


def _parts(graph: Graph, entry: int, nodes: set[int], order: Sequence[int]) -> list[int] | None:
    """The parts of a product that a chain reads, in the order of rows; None unless they are those of all times."""
    parts = list(graph.readers[entry])
    if any(k not in nodes or graph.names[k] != PART for k in parts):
        return None
    parts.sort(key=lambda k: saved_int(graph.nodes[k], "start"))
    shapes = [graph.shape((k, 0)) for k in parts]
    if shapes != [graph.shape((k, 0)) for k in order] or sum(s[0] for s in shapes) != graph.shape((entry, 0))[0]:
        return None
    start = 0
    for k, shape in zip(parts, shapes, strict=True):
        node = graph.nodes[k]
        if saved_int(node, "dim") != 0 or saved_int(node, "step") != 1 or saved_int(node, "start") != start:
            return None
        start += shape[0]
    return parts


def _reaches_parameters(graph: Graph, k: int) -> bool:
    seen, todo = {k}, [k]
    while todo:
        k = todo.pop()
        if graph.leaf_parameter.get(k, -1) >= 0:
            return True
        more = [child for child, _ in graph.edges[k] if child >= 0 and child not in seen]
        seen.update(more)
        todo += more
    return False


def _turned(graph: Graph, group: Sequence[int]) -> set[int]:
    """The transposed weights of some products."""
    weight = PRODUCTS[graph.names[group[0]]][2]
    return {graph.edges[k][weight][0] for k in group}


def _own_operands(graph: Graph, group: Sequence[int], nodes: set[int]) -> tuple[Edge, ...] | None:
    """Bias, if there is one, and weight; None where they are used in any other way than by a plain product."""
    bias, _, weight = PRODUCTS[graph.names[group[0]]]
    first = graph.edges[group[0]][weight][0]
    if first < 0 or graph.names[first] != TURNED:  # frozen, or not a plain weight
        return None
    of_weight = graph.edges[first][0]
    of_bias = NO_EDGE if bias is None else graph.edges[group[0]][bias]
    members, turned, own = set(group), _turned(graph, group), {of_weight, of_bias} - {NO_EDGE}
    touched = turned.union(k for k, _ in own)
    for k in nodes.union(*(graph.readers[k] for k in turned)):
        for position, edge in enumerate(graph.edges[k]):
            if edge[0] not in touched or (k in members and position in (bias, weight)):
                continue
            if edge[0] in turned or (k in nodes and edge in own):
                return None
    if any(k in nodes for k, _ in own):
        return None
    if bias is None:
        return (of_weight,)
    width = graph.shape((group[0], 0))[1:]
    plain = all(saved(graph.nodes[k], "alpha") == 1 and saved(graph.nodes[k], "beta") == 1 for k in group)
    wide = of_bias == NO_EDGE or graph.shape(of_bias) == width
    return (of_bias, of_weight) if plain and wide else None


def _in_order_of_rows(graph: Graph, group: Sequence[int]) -> list[int] | None:
    """The products from the longest to the shortest, which is the order of packed rows, read from either end."""
    members = set(group)
    order = sorted(members, key=graph.place.__getitem__)
    sizes = [graph.shape((k, 0))[0] for k in order]
    if sizes[0] < sizes[-1]:
        order, sizes = order[::-1], sizes[::-1]
    return None if any(a < b for a, b in pairwise(sizes)) else order


def _between(graph: Graph, members: set[int]) -> set[int] | None:
    """The products and all on the ways from one to another; None where something else lies there."""
    places = [graph.place[k] for k in members]
    between = graph.leaves_first[min(places) : max(places) + 1]
    above, below = set[int](), set[int]()
    for k in between:
        for child, _ in graph.edges[k]:
            if child in members or child in above:
                above.add(k)
                break
    for k in reversed(between):
        if k in members or k in below:
            below.update([child for child, _ in graph.edges[k]])
    nodes = (above & below) | members
    return nodes if all(k in members or graph.names[k] in INSIDE for k in nodes) else None


def _closed(graph: Graph, nodes: set[int]) -> tuple[set[int], set[int]] | None:
    """Add what follows up to joined rows, and the parts of what is read; None where more leaves than is expected.

    What leaves is returned: rows of several times joined, and states of the last time as they are (read from the end).
    """
    ends, last = set[int](), set[int]()
    joins = [k for k in nodes if graph.names[k] == JOINED]
    todo = list(nodes)
    while todo:
        k = todo.pop()
        for reader in graph.readers[k]:
            if reader in nodes or reader in ends:
                continue
            if graph.names[reader] == JOINED:
                ends.add(reader)
            elif graph.names[reader] in INSIDE:
                nodes.add(reader)
                todo.append(reader)
            else:
                last.add(k)
                if any(child == k and output for child, output in graph.edges[reader]):
                    return None
    if len(last) > _STATES or any(saved_int(graph.nodes[k], "dim") != 0 for k in (*joins, *ends)):
        return None
    if any(child >= 0 and child not in nodes for k in ends for child, _ in graph.edges[k]):
        return None
    nodes |= _parts_of_read(graph, nodes) | ends
    return ends, last


def _parts_of_read(graph: Graph, nodes: set[int]) -> set[int]:
    """Parts that only the chain reads, and parts of what only they read."""
    found, todo = set[int](), list(nodes)
    while todo:
        for child, _ in graph.edges[todo.pop()]:
            if child < 0 or child in nodes or child in found or graph.names[child] not in PARTS:
                continue
            if all(reader in nodes or reader in found for reader in graph.readers[child]):
                found.add(child)
                todo.append(child)
    return found


def _padding(graph: Graph, joined: int) -> set[int]:
    """What writes joined rows into a padded tensor (`pad_packed_sequence`), if nothing else reads them."""
    rows, views = _readers(graph, {joined}, PART), set[int]()
    if rows:
        views = _readers(graph, rows, VIEW)
    writes = _readers(graph, views, IN_PLACE_WRITE) if views else set()
    into = [graph.edges[k][0] for k in writes]
    in_chain = all(edge == NO_EDGE or edge[0] in writes for edge in into) and len(set(into)) == len(into)
    inner = writes.intersection(k for k, _ in into)
    if not writes or not in_chain or _readers(graph, inner, IN_PLACE_WRITE) - writes or len(inner) != len(writes) - 1:
        return set()
    return rows | views | writes


def _readers(graph: Graph, read: set[int], name: str) -> set[int]:
    """The nodes that read some others, if all are of one kind; else none."""
    found = {reader for k in read for reader in graph.readers[k]}
    return found if all(graph.names[k] == name for k in found) else set()


def _contracted(graph: Graph, chains: Sequence[_Chain]) -> Graph:
    """The graph with one node for every chain, numbered in breadth-first order again."""
    owner = {k: number for number, chain in enumerate(chains) for k in chain.nodes}
    ends: list[list[int]] = [[] for _ in chains]  # in the order in which they are met
    place: dict[tuple[bool, int], int] = {}  # of nodes, and of chains
    met: list[tuple[bool, int]] = []

    def moved(edge: Edge) -> Edge:
        k, output = edge
        if k < 0:
            return edge
        number = owner.get(k)
        key = (False, k) if number is None else (True, number)
        if key not in place:
            place[key] = len(met)
            met.append(key)
        if number is None:
            return place[key], output
        if k not in ends[number]:
            ends[number].append(k)
        return place[key], 1 + ends[number].index(k)

    moved((0, 0))
    edges = [tuple(map(moved, chains[k].edges if folds else graph.edges[k])) for folds, k in met]  # grows meanwhile
    nodes = [_steps(graph, chains[k], ends[k]) if folds else graph.nodes[k] for folds, k in met]
    names = [RECURRENCE if folds else graph.names[k] for folds, k in met]
    leaves = {place[False, k]: parameter for k, parameter in graph.leaf_parameter.items() if (False, k) in place}
    signature = tuple(
        leaf_entry(node, leaves[k]) if name == LEAF else node_entry(node, name, row)
        for k, (node, name, row) in enumerate(zip(nodes, names, edges, strict=True))
    )
    return Graph(nodes, names, edges, leaves, graph.parameters, signature)


def _steps(graph: Graph, chain: _Chain, ends: Sequence[int]) -> Recurrence:
    several = (chain.products, chain.parts, chain.nodes, ends, chain.left)
    products, parts, inner, seen, left = ([graph.nodes[k] for k in some] for some in several)
    return Recurrence(products, graph.nodes[chain.entry], parts, inner, seen, left, chain.slots)
