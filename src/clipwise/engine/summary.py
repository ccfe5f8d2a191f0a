"""Look before training: which rules serve the model, what memory will it take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from clipwise._show import mebibytes
from clipwise.engine.cache import Engine
from clipwise.engine.cost import held_bytes
from clipwise.engine.graph import Graph
from clipwise.engine.ops import rule_of
from clipwise.engine.origin import Evidence
from clipwise.engine.parameters import Parameters
from clipwise.engine.plan import GraphPlan, Meeting
from clipwise.engine.run import Backward
from clipwise.errors import InvalidLosses


@dataclass(frozen=True)
class NodeSummary:
    """One node where parameters meet the batch.

    `norm` says how the norms are found: "instantiated" (gradients are formed), "ghost" (from Gram matrices), "lengths"
    (one position per sample), "rows" (of a table), "by expert"; empty when nothing reached the node in this batch.
    """

    name: str
    rule: str
    parameters: tuple[str, ...]
    layout: str
    norm: str


@dataclass(frozen=True)
class Summary:
    """What `check` found: the batch size, the nodes that meet parameters, and a memory estimate.

    `unreached` names the parameters that no sample of this batch uses; their gradient is zero (and noised like every
    other). `unseen` names operations that combine parameters with a value that is taken for a constant, though the
    graph does not show where it comes from (what `add`, `sub`, `cat` and `stack` do not save, or memory that was not
    declared with `constants=`): if it is computed from the batch, samples mix there. `Private` watches the forward
    pass and knows. `bytes` estimates what a step needs beyond the forward pass, for each way of forming the clipped
    sum.
    """

    batch_size: int
    nodes: tuple[NodeSummary, ...]
    unreached: tuple[str, ...]
    unseen: tuple[str, ...]
    bytes: Mapping[str, int]

    def __str__(self) -> str:
        lines = [f"separable: {self.batch_size} samples, {_meet(len(self.nodes))} parameters"]
        for node in self.nodes:
            how = "; ".join(filter(None, (node.rule, node.layout, node.norm)))
            lines.append(f"  {node.name} ({how}): {', '.join(node.parameters)}")
        if self.unreached:
            lines.append(f"  reached by no sample: {', '.join(self.unreached)}")
        lines += [f"  taken for a constant, not seen: the other operand of {name}" for name in self.unseen]
        ways = {way.replace("_", " "): n for way, n in self.bytes.items()}
        lines += [f"  memory beyond the forward pass, {way}: {mebibytes(n)}" for way, n in ways.items()]
        return "\n".join(lines)


def _meet(count: int) -> str:
    return "1 node meets" if count == 1 else f"{count} nodes meet"


def summarize(engine: Engine, losses: Tensor, parameters: Parameters, evidence: Evidence) -> Summary:
    """Plan, run and check once; describe what was found."""
    if losses.shape[0] < 2:
        raise InvalidLosses(
            f"a batch of {losses.shape[0]} cannot show whether samples mix; pass at least two different samples."
        )
    backward = engine.backward(losses, parameters, evidence, keep=True)
    graph, plan = backward.graph, backward.plan
    nodes = tuple(_node_summary(backward, meeting, parameters) for meeting in plan.meetings)
    unreached = tuple(parameters.describe(p) for p in range(len(parameters.tensors)) if p not in plan.roots)
    unseen = tuple(
        f"{graph.names[k]} ({', '.join(map(parameters.describe, sorted(places)))})" for k, places in plan.unseen.items()
    )
    return Summary(losses.shape[0], nodes, unreached, unseen, _bytes(graph, plan, parameters))


def _node_summary(backward: Backward, meeting: Meeting, parameters: Parameters) -> NodeSummary:
    graph, plan = backward.graph, backward.plan
    edges = dict.fromkeys(graph.edges[meeting.node][position] for position in meeting.operands)
    reached = [p for p, roots in plan.roots.items() if edges.keys() & set(roots)]
    ways = dict.fromkeys(use.how for edge in edges for use in backward.uses.get(edge, []))
    name = graph.names[meeting.node]
    rule = rule_of(graph, meeting.node)
    assert rule is not None
    layout = str(meeting.layouts[0]) if meeting.layouts else "no gradient in this batch"
    return NodeSummary(
        name, rule.__module__.rpartition(".")[2], tuple(map(parameters.describe, reached)), layout, ", ".join(ways)
    )


def _bytes(graph: Graph, plan: GraphPlan, parameters: Parameters) -> dict[str, int]:
    held = held_bytes(graph, plan)
    sums = sum(p.numel() * p.element_size() for p in parameters.tensors)
    return {"bookkeeping": held + sums, "second_backward": sums}
