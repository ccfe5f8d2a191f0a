"""Rare operations, differentiated by autograd itself: one small backward pass through one node per sample.

Exact for any node whose output has a known layout, and slow; it serves the operations listed here. A sample with NaN in
its data spoils the gradients of others at such a node, which is refused: dropping the others would break the bound.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.engine.graph import Graph
from clipwise.engine.node import output_meta, output_metas
from clipwise.engine.rules.base import Finish, Operand, Samples, carries_batch, unsupported
from clipwise.engine.uses import Dense, Use


def by_autograd(operand: Operand, samples: Samples) -> Finish:
    """Back-propagate each sample's part of the gradient through this node alone."""

    def finish(gradient: Tensor) -> Use:
        owners = samples.owners(gradient.shape[samples.axis]).to(gradient.device)
        shape = [1] * gradient.dim()
        shape[samples.axis] = -1
        rows = []
        for sample in range(samples.batch_size):
            part = torch.where((owners == sample).view(shape), gradient, 0)
            row = _through(operand, part)
            rows.append(gradient.new_zeros(operand.shape) if row is None else row)
        stacked = torch.stack(rows)
        spoilt = ~torch.isfinite(stacked).reshape(samples.batch_size, -1).all(1)
        own = torch.zeros_like(spoilt).index_put_((owners,), ~finite_rows(gradient, samples.axis), accumulate=True)
        if bool((spoilt & ~own).any()):
            raise unsupported(
                operand, "a sample that is not finite spoils the gradients of others here; remove it from the data"
            )
        return Dense(stacked, operand.shape)

    return finish


def _through(operand: Operand, gradient: Tensor) -> Tensor | None:
    """The operand's gradient by this node alone: other paths from it to the same parameter are other uses."""
    node = operand.node
    others: list[Tensor | None] = [None] * (len(output_metas(node)) - 1)
    call = node
    if isinstance(node, torch.autograd.function.BackwardCFunction):  # autograd gives it zeros, not None
        others = [gradient.new_zeros(tuple(meta.shape), dtype=meta.dtype) for meta in output_metas(node)[1:]]
        call = node.apply
    edges = operand.graph.edges[operand.k]
    try:
        found = call(gradient, *others)
        found = found if isinstance(found, tuple) else (found,)
        mine = (row for row, edge in zip(found, edges, strict=False) if edge == edges[operand.position])
        rows = [row for row in mine if row is not None]
        if not rows:
            return None
        total: Tensor = sum(rows[1:], rows[0]).sum_to_size(operand.shape)  # as autograd does between nodes
    except RuntimeError as error:
        raise unsupported(operand, f"its own backward does not take one sample at a time ({error})") from error
    return total.real if total.is_complex() and not operand.is_complex else total


def is_opaque(graph: Graph, k: int) -> bool:
    """Whether only autograd knows how to differentiate a node: the user's own functions, complex numbers.

    Each needs its gradient at the first output only; what a second output receives would be lost.
    """
    node = graph.nodes[k]
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        opaque = not graph.names[k].startswith(("Checkpoint", "Compiled"))
    else:
        opaque = graph.meta((k, 0)).dtype.is_complex
    return opaque and not any(edge[0] == k and edge[1] for edges in graph.edges for edge in edges)


def finite_rows(tensor: Tensor, axis: int) -> Tensor:
    """Which positions along an axis hold finite numbers only."""
    return torch.isfinite(tensor).movedim(axis, 0).reshape(tensor.shape[axis], -1).all(1)


def broadcast_by_autograd(operand: Operand, samples: Samples) -> Finish:
    """The same for operations that broadcast: the operand must not have the batch axis itself."""
    out = output_meta(operand.node).shape
    padded = [1] * (len(out) - len(operand.shape)) + list(operand.shape)
    if padded[samples.axis] != 1:
        raise carries_batch(operand, f"an operand of shape {operand.shape} carries the batch axis")
    return by_autograd(operand, samples)
