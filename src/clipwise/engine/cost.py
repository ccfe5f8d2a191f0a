"""The cost model: how to form the clipped sum.

Book-keeping is one backward pass in all; a second backward pass costs about half as much time again, but holds no
gradients of layer outputs between norms and sum. So book-keeping is chosen unless what it holds would not fit.
"""

from __future__ import annotations

import os
from typing import Literal, TypeAlias

import torch

from clipwise.engine.graph import Graph
from clipwise.engine.node import output_meta
from clipwise.engine.plan import GraphPlan
from clipwise.engine.precision import HALF

Way: TypeAlias = Literal["bookkeeping", "second_backward"]
_NEVER_MIND = 1 << 26  # bytes that always fit


def held_bytes(graph: Graph, plan: GraphPlan) -> int:
    """Bytes of the output gradients at all meetings: what book-keeping holds between norms and sum, at most."""
    outputs = (output_meta(graph.nodes[meeting.node]) for meeting in plan.meetings)
    return sum(int(torch.Size(output.shape).numel()) * int(output.dtype.itemsize) for output in outputs)


def reduced_precision(graph: Graph, plan: GraphPlan) -> bool:
    """Whether some gradient is in half precision, where autograd would round a sum that must keep to its bound."""
    return any(output_meta(graph.nodes[meeting.node]).dtype in HALF for meeting in plan.meetings)


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # unknown on this system
        return 1 << 62


def choose_way(graph: Graph, plan: GraphPlan, groups: int, device: torch.device) -> Way:
    """Second backward where book-keeping would not fit; not for several groups (a pass each), nor in half precision."""
    if not plan.streaming or groups > 1:
        return "bookkeeping"
    held = held_bytes(graph, plan)
    if held <= _NEVER_MIND or reduced_precision(graph, plan) or 2 * held <= free_bytes(device):
        return "bookkeeping"
    return "second_backward"
