"""The cost model: how to form the clipped sum.

Book-keeping is one backward pass in all; a second backward pass costs about half as much time again, but holds no
gradients of layer outputs between norms and sum. So book-keeping is chosen unless what it holds would not fit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

import torch

from clipwise.engine.graph import Edge, Graph
from clipwise.engine.plan import GraphPlan
from clipwise.engine.precision import HALF

Way: TypeAlias = Literal["bookkeeping", "second_backward"]
_MEMORY = Path("/proc/meminfo")
_NEVER_MIND = 1 << 26  # bytes that always fit
_MOVED = 110  # multiplications in the time that one number is written and read twice; more than one core alone needs
_SHARE = 0.1  # of what a plain step holds, by default, for gradients of samples beyond what is held anyway


def held_bytes(graph: Graph, plan: GraphPlan) -> int:
    """Bytes of the output gradients at all meetings: what book-keeping holds between norms and sum, at most."""
    outputs = (graph.meta((meeting.node, 0)) for meeting in plan.meetings)
    return sum(int(torch.Size(output.shape).numel()) * int(output.dtype.itemsize) for output in outputs)


def reduced_precision(graph: Graph, plan: GraphPlan) -> bool:
    """Whether some gradient is in half precision, where autograd's own sum is rounded."""
    return any(graph.meta((meeting.node, 0)).dtype in HALF for meeting in plan.meetings)


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        for line in _MEMORY.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    return 1 << 62  # unknown on this system


def default_memory(graph: Graph, plan: GraphPlan) -> int:
    """Bytes that per-sample gradients may take where the user does not say: a part of what a plain step holds."""
    parameters = sum(p.numel() * p.itemsize for p in graph.parameters)
    return int(_SHARE * (parameters + 2 * held_bytes(graph, plan)))


def kept(graph: Graph, plan: GraphPlan, batch_size: int, memory: int | None) -> frozenset[Edge]:
    """The linear maps whose per-sample gradients are formed at once and kept until the factors are known.

    Their norms then cost no Gram matrices, and their weighted sum no second product, only the way through memory. What
    they take beyond the operands, which would be held instead, is bounded by `memory`; the rest has Gram matrices. A
    function of sizes alone: a run that is repeated or resumed computes with the same roundings.
    """
    candidates: list[tuple[float, int, Edge]] = []
    for meeting in plan.meetings:
        output = graph.meta((meeting.node, 0))
        edges = (graph.edges[meeting.node][position] for position in meeting.operands)
        for edge in edges:
            shape = plan.shapes.get(edge, ())
            if edge not in plan.solo or len(shape) != 2 or not output.shape:
                continue
            rows = torch.Size(output.shape[:-1]).numel() // batch_size
            gradient, operands = shape[0] * shape[1], rows * (shape[0] + shape[1])
            saved = rows * operands - _MOVED * gradient
            if saved > 0 and rows > 1:
                extra = batch_size * max(gradient - operands, 0) * int(output.dtype.itemsize)
                candidates.append((saved * batch_size / max(extra, 1), extra, edge))
    left = default_memory(graph, plan) if memory is None else memory
    chosen = []
    for _, extra, edge in sorted(candidates, key=lambda each: each[0], reverse=True):
        if extra <= left:
            left -= extra
            chosen.append(edge)
    return frozenset(chosen)


def choose_way(graph: Graph, plan: GraphPlan, device: torch.device) -> Way:
    """Second backward where what book-keeping holds would not fit."""
    held = held_bytes(graph, plan) if plan.streaming else 0
    return "bookkeeping" if held <= _NEVER_MIND or 2 * held <= free_bytes(device) else "second_backward"
