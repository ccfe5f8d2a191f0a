"""The autograd graph behind a vector of losses: its nodes, edges and structural signature.

The graph is read, never changed: no hook is registered and nothing is written on a node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, wraps
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from clipwise.errors import UnsupportedNode

LEAF = "torch::autograd::AccumulateGrad"
NO_EDGE = (-1, 0)

_AUTOCASTING = ("cpu", "cuda", "mps", "xpu")

Node: TypeAlias = Any  # torch's node classes are generated; there is no useful static type
Edge: TypeAlias = tuple[int, int]  # (position of the child node, which of its outputs)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def unrecorded(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Run without a graph of its own and without autocast, under which norms would be rounded and could read low."""

    @wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        for device in _AUTOCASTING:
            if torch.is_autocast_enabled(device):
                with torch.autocast(device, enabled=False):
                    return run(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return run


def _padded(values: Sequence[int]) -> tuple[bool, ...]:
    """Which ends of which axes are padded; by how much is a size."""
    return tuple(value != 0 for value in values)


def _repeated(values: Sequence[int]) -> tuple[bool, ...]:
    """Which axes are repeated; how often is a size."""
    return tuple(value != 1 for value in values)


def _number(value: object) -> object:
    """Integers are structure, floats only scale: they are read at every step, and may be annealed."""
    return None if isinstance(value, float) else value


_SIZES = frozenset({
    "C", "H", "HxW", "N", "W", "batch_sizes", "end", "hidden_size", "index", "input_lengths", "length", "max_k",
    "max_q", "max_seqlen_batch_k", "max_seqlen_batch_q", "output_size", "split_size", "split_sizes", "start",
    "storage_offset", "target_lengths",
})  # fmt: skip
_SCALES = frozenset({
    "alpha", "beta", "delta", "dropout", "dropout_p", "eps", "epsilon", "grad_factor", "initial", "input_scale",
    "lambd", "lower", "margin", "max", "max_val", "maxnorm", "min", "min_val", "negative_slope", "other", "scalar",
    "scalars", "scale", "scales", "scales_d", "scales_h", "scales_w", "self", "threshold", "upper", "value", "weight",
})  # fmt: skip
_READERS: dict[str, Callable[[Any], object]] = {
    "exponent": _number, "normalized_shape": len, "pad": _padded, "repeats": _repeated,
}  # fmt: skip


@cache
def _static_attributes(kind: type) -> tuple[tuple[str, Callable[[Any], object] | None], ...]:
    """Attributes of a node that are structure: every number, flag, word or list that is not known to be a size.

    Sizes may change from step to step, and so may numbers that only scale. Tensors also have a `_raw_saved_` twin.
    """
    members = set(dir(kind))
    found = []
    for member in sorted(members):
        name = member.removeprefix("_saved_")
        if name == member or "_raw" + member in members or "_sym_" in name or name in _SIZES | _SCALES:
            continue
        if kind.__name__.startswith("AsStrided") or (name == "p" and "Dropout" in kind.__name__):
            continue
        found.append((member, _READERS.get(name)))
    return tuple(found)


def static_names(kind: type) -> list[str]:
    """The names of the attributes in a node's part of the signature, in order."""
    return [name.removeprefix("_saved_") for name, _ in _static_attributes(kind)]


@dataclass(frozen=True, eq=False)
class Graph:
    """Nodes in breadth-first order from the losses, with their edges towards the leaves.

    `leaf_parameter[k]` is the position in `parameters` of leaf node k; -1 for any other leaf.
    """

    nodes: list[Node]
    names: list[str]
    edges: list[tuple[Edge, ...]]
    leaf_parameter: dict[int, int]
    parameters: Sequence[Tensor]
    signature: tuple[object, ...]

    def shape(self, edge: Edge) -> torch.Size:
        """The shape of the value that flows along an edge."""
        k, output = edge
        if self.names[k] == LEAF:
            return self.nodes[k].variable.shape  # type: ignore[no-any-return]
        return torch.Size(self.nodes[k]._input_metadata[output].shape)

    def gradient_edge(self, edge: Edge) -> GradientEdge | Tensor:
        """What `torch.autograd.grad` takes for this edge, as an input or an output."""
        k, output = edge
        return self.nodes[k].variable if self.names[k] == LEAF else GradientEdge(self.nodes[k], output)

    def computes_in(self, dtype: torch.dtype) -> bool:
        """Whether some value of the graph has this dtype."""
        pairs = zip(self.nodes, self.names, strict=True)
        return any(output.dtype == dtype for node, name in pairs if name != LEAF for output in node._input_metadata)

    @cached_property
    def leaves_first(self) -> list[int]:
        """Node positions ordered so that every node comes after all it was computed from."""
        order: list[int] = []
        done = [False] * len(self.nodes)
        stack = [(0, False)]
        while stack:
            k, expanded = stack.pop()
            if expanded:
                order.append(k)
            elif not done[k]:
                done[k] = True
                stack.append((k, True))
                stack.extend((child, False) for child, _ in self.edges[k] if child >= 0 and not done[child])
        return order


@cache
def _saved_attributes(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_saved_"))


def saved_tensors(node: Node) -> list[Tensor]:
    """The floating-point tensors that the forward pass saved on a node."""
    values = (getattr(node, name, None) for name in _saved_attributes(node.__class__))
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]


def refuse_nested(graph: Graph) -> None:
    """Nested and jagged tensors have no axes to look for the batch on."""
    for node, name in zip(graph.nodes, graph.names, strict=True):
        if name != LEAF and any(output.is_nested_tensor for output in node._input_metadata):
            raise UnsupportedNode(
                f"{name} works on a nested (jagged) tensor, whose samples have no common shape. Pad the sequences and "
                "mask the padding (torch.nested.to_padded_tensor), or concatenate the rows of all samples."
            )


def differentiate(
    outputs: Sequence[GradientEdge | Tensor] | Tensor,
    inputs: Sequence[GradientEdge | Tensor],
    cotangents: Sequence[Tensor] | Tensor,
    *,
    keep: bool,
    batched: bool = False,
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad` for any mix of tensors and edges; None for an input that nothing reaches."""
    call: Any = torch.autograd.grad
    found: tuple[Tensor | None, ...] = call(
        outputs, inputs, cotangents, retain_graph=keep, allow_unused=True, is_grads_batched=batched
    )
    return found


def walk(losses: Tensor, position: Mapping[int, int], parameters: Sequence[Tensor]) -> Graph:
    """Read the graph of `losses`; `position` maps `id(parameter)` to its place in `parameters`."""
    root = losses.grad_fn
    nodes: list[Node] = [root]
    index: dict[Node, int] = {root: 0}
    names: list[str] = []
    edges: list[tuple[Edge, ...]] = []
    leaf_parameter: dict[int, int] = {}
    signature: list[object] = []
    for node in nodes:  # grows while it is walked
        name = node.name()
        names.append(name)
        if name == LEAF:
            place = position.get(id(node.variable), -1)
            leaf_parameter[len(edges)] = place
            edges.append(())
            signature.append((place, True) if node.variable._backward_hooks else place)
            continue
        row: list[Edge] = []
        for child, output in node.next_functions:
            if child is None:
                row.append(NO_EDGE)
                continue
            k = index.get(child)
            if k is None:
                k = index[child] = len(nodes)
                nodes.append(child)
            row.append((k, output))
        entry = tuple(row)
        edges.append(entry)
        attributes = _static_attributes(node.__class__)
        if not attributes:
            signature.append((name, entry))
            continue
        values = (getattr(node, a) if read is None else read(getattr(node, a)) for a, read in attributes)
        signature.append((name, entry, *values))
    return Graph(nodes, names, edges, leaf_parameter, parameters, tuple(signature))
