"""Look before training: is every loss its own sample's, which rules serve the model, what memory will it take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from clipwise.engine.core import Engine
from clipwise.engine.cost import held_bytes
from clipwise.engine.graph import Graph
from clipwise.engine.parameters import Parameters
from clipwise.engine.plan import GraphPlan, Meeting
from clipwise.engine.rules import rule_of
from clipwise.engine.run import Backward
from clipwise.errors import InvalidLosses, NotSeparable

Batch: TypeAlias = Any  # a tensor, or a tuple, list or mapping of tensors whose first axis is the batch
LossFn: TypeAlias = Callable[[nn.Module, Batch], Tensor]


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
    other). `bytes` estimates what a step needs beyond the forward pass, for each way of forming the clipped sum.
    """

    batch_size: int
    nodes: tuple[NodeSummary, ...]
    unreached: tuple[str, ...]
    bytes: Mapping[str, int]

    def __str__(self) -> str:
        lines = [f"separable: {self.batch_size} samples, {len(self.nodes)} nodes meet parameters"]
        for node in self.nodes:
            how = "; ".join(filter(None, (node.rule, node.layout, node.norm)))
            lines.append(f"  {node.name} ({how}): {', '.join(node.parameters)}")
        if self.unreached:
            lines.append(f"  reached by no sample: {', '.join(self.unreached)}")
        lines += [f"  memory beyond the forward pass, {way}: {n / 2**20:.1f} MiB" for way, n in self.bytes.items()]
        return "\n".join(lines)


def summarize(engine: Engine, losses: Tensor, parameters: Parameters) -> Summary:
    """Plan, run and check once; describe what was found."""
    if losses.shape[0] < 2:
        raise InvalidLosses(
            f"a batch of {losses.shape[0]} cannot show whether samples mix; pass at least two different samples."
        )
    backward = engine.backward(losses, parameters, keep=True)
    graph, plan = backward.graph, backward.plan
    nodes = tuple(_node_summary(backward, meeting, parameters) for meeting in plan.meetings)
    unreached = tuple(parameters.describe(p) for p in range(len(parameters.tensors)) if p not in plan.roots)
    return Summary(losses.shape[0], nodes, unreached, _bytes(graph, plan, parameters))


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


def check_model(model: nn.Module, loss_fn: LossFn, batch: Batch) -> None:
    """Rerun the forward pass with one sample changed, and with one removed: no other loss may move.

    Sees what the graph of the losses cannot: statistics of the batch on the raw input, detached statistics, a division
    by the batch size. `loss_fn(model, batch)` returns losses of shape (B,); `batch` is a tensor, or a tuple, list or
    mapping of tensors whose first axis is the batch. Buffers and random generators are left as they were. Losses that
    draw random numbers draw others for a batch of another size: then a sample is removed in evaluation mode, and not
    at all when they are random there too.

    >>> check_model(nn.Linear(3, 1), lambda model, x: model(x).squeeze(1) ** 2, torch.randn(4, 3))
    >>> check_model(nn.BatchNorm1d(3), lambda model, x: model(x).sum(1), torch.randn(4, 3))
    Traceback (most recent call last):
        ...
    clipwise.errors.NotSeparable: changing sample 3 moves another sample's loss by ...
    """
    size = batch_size(batch)
    if size < 3:
        raise InvalidLosses(f"check_model needs a batch of at least three samples, got {size}.")
    everybody = torch.arange(size)
    others = {sample: everybody[everybody != sample] for sample in (size - 1, 0)}
    with _unchanged(model) as run:

        def losses_of(samples: Tensor, draws: int = 0) -> Tensor:
            return run(partial(loss_fn, model, take(batch, samples)), draws)

        base = losses_of(everybody)
        if base.shape != (size,):
            raise InvalidLosses(f"loss_fn must return losses of shape ({size},), got {tuple(base.shape)}.")
        if not bool(torch.isfinite(base).all()):
            raise InvalidLosses("check_model needs finite losses; leave out samples whose loss is not finite.")
        for sample, rest in others.items():
            changed = torch.where(everybody == sample, rest[0], everybody)
            _demand_equal(f"changing sample {sample}", losses_of(changed)[rest], base[rest])
        if bool(_moved(losses_of(everybody, draws=1), base).any()):
            model.eval()
            base = losses_of(everybody)
            if bool(_moved(losses_of(everybody, draws=1), base).any()):
                return
        for sample, rest in others.items():
            _demand_equal(f"removing sample {sample}", losses_of(rest), base[rest])


def _moved(losses: Tensor, base: Tensor) -> Tensor:
    """Which losses differ by more than rounding, relative to themselves."""
    rounding = (1e-9 if base.dtype == torch.float64 else 1e-3) * base.abs() + 1e-6
    return ~((losses - base).abs() <= rounding)


def _demand_equal(what: str, losses: Tensor, base: Tensor) -> None:
    moved = _moved(losses, base)
    if bool(moved.any()):
        worst = float((losses - base).abs()[moved].max())
        raise NotSeparable(
            f"{what} moves another sample's loss by {worst:.3g}: samples mix, though the graph may not show it. "
            "Typical causes: BatchNorm in training mode (affine or not), statistics of the batch, a loss divided by "
            "the batch size."
        )


def batch_size(batch: Batch) -> int:
    """The length of the first axis that all tensors of a batch share."""
    if isinstance(batch, Tensor):
        if not batch.dim():
            raise InvalidLosses("a batch holds a tensor of shape (), which has no axis of samples; keep it in loss_fn.")
        return batch.shape[0]
    values = batch.values() if isinstance(batch, Mapping) else batch
    sizes = {batch_size(value) for value in values if isinstance(value, (Tensor, Mapping, tuple, list))}
    if len(sizes) != 1:
        raise InvalidLosses(f"the tensors of a batch must share their first axis, got sizes {sorted(sizes)}.")
    return sizes.pop()


def take(batch: Batch, index: Tensor) -> Batch:
    """These samples of a batch."""
    if isinstance(batch, Tensor):
        return batch[index.to(batch.device)]
    if isinstance(batch, Mapping):
        return type(batch)({key: take(value, index) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, (tuple, list)):
        taken = [take(value, index) for value in batch]
        return type(batch)(*taken) if hasattr(batch, "_fields") else type(batch)(taken)
    return batch


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[Callable[[Callable[[], Tensor], int], Tensor]]:
    """Run forward passes from the same buffers and random state each, without dropout; restore all at the end.

    The second argument of `run` is how many random numbers are drawn before: losses that move then are random.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    modes = {module: module.training for module in model.modules()}

    def restore() -> None:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])

    def run(forward: Callable[[], Tensor], draws: int) -> Tensor:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            for device in (torch.device("cpu"), *(torch.device("cuda", i) for i in devices)):
                torch.rand(draws, device=device)
            losses = forward()
            restore()
        return losses

    try:
        for module in modes:
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.training = False
        yield run
    finally:
        for module, mode in modes.items():
            module.training = mode
        restore()
