"""Where the values on a graph come from: the batch, or memory that was there before it was drawn.

The graph alone cannot show this: `w + table` and `w + x.mean(0)` are the same node, and neither operand is saved. So
the planner asks `Evidence`, which somebody who watched the forward pass can give. Without it the engine knows only what
the nodes saved, and which memory was declared constant.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor, nn

from clipwise.engine.graph import Graph
from clipwise.engine.node import Node, saved_tensors
from clipwise.errors import InvalidLosses


class Origin(Enum):
    """Where the operands of a node come from, its parameters apart."""

    UNSEEN = 0  # nobody looked
    CONSTANT = 1  # memory that was there before the batch, or made on the way from nothing of it
    BATCH = 2  # the batch, or memory of unknown origin


class Evidence(Protocol):
    """What is known about the forward pass behind a graph."""

    @property
    def key(self) -> Hashable:
        """Plans are shared between calls with equal keys only."""
        ...

    @property
    def watched(self) -> bool:
        """Whether this very forward pass was followed."""
        ...

    @property
    def strict(self) -> bool:
        """Whether a value of unseen origin is refused where it would have to be shared."""
        ...

    def origins(self, graph: Graph) -> list[Origin]:
        """Where the operands of every node come from, in the order of the nodes."""
        ...


class Declared:
    """Evidence from declared constants alone: a node is proven where all that it saved lies in their memory."""

    watched = False
    strict = False

    def __init__(self, constants: Iterable[Tensor | nn.Module] | Tensor | nn.Module = ()) -> None:
        self._memory = frozenset(memory_of(tensor) for tensor in constant_tensors(constants))
        self.key: Hashable = self._memory

    def origins(self, graph: Graph) -> list[Origin]:
        return [self._origin(node) for node in graph.nodes]

    def _origin(self, node: Node) -> Origin:
        if not self._memory:
            return Origin.UNSEEN
        known = self._memory.union(memory_of(leaf) for leaf in _leaves(node))
        saved = [memory_of(tensor) for tensor in saved_tensors(node)]
        return Origin.CONSTANT if saved and all(memory in known for memory in saved) else Origin.UNSEEN


def constant_tensors(constants: Iterable[Tensor | nn.Module] | Tensor | nn.Module) -> Iterator[Tensor]:
    """The tensors of `constants=`: tensors as they are, of a module its buffers and parameters.

    Parameters that are trained are leaves of the graph, declared or not.
    """
    for item in (constants,) if isinstance(constants, (Tensor, nn.Module)) else constants:
        if isinstance(item, nn.Module):
            yield from item.buffers()
            yield from item.parameters()
        elif isinstance(item, Tensor):
            yield item
        else:
            raise InvalidLosses(f"constants= takes tensors and modules, got {type(item).__name__}.")


def backing(tensor: Tensor) -> Tensor:
    """The tensor that holds the numbers: of a sparse one its values."""
    if tensor.layout is torch.strided:
        return tensor
    return tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()


def memory_of(tensor: Tensor) -> int:
    """The identity of a tensor's memory, which its views share; of the tensor where it has none."""
    try:
        return int(backing(tensor).untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def _leaves(node: Node) -> Iterator[Tensor]:
    for child, _ in node.next_functions:
        variable = getattr(child, "variable", None)
        if variable is not None:
            yield variable
