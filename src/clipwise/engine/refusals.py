"""What the engine refuses, in words: samples that mix, and nodes without a rule."""

from __future__ import annotations

import torch

from clipwise.engine.graph import Graph
from clipwise.engine.node import output_meta
from clipwise.engine.ops import op_of
from clipwise.engine.rules import norm
from clipwise.errors import NotSeparable


def mixing(graph: Graph, after: str, whose: str) -> NotSeparable:
    """The refusal of samples that mix."""
    cause = ""
    norms = (graph.nodes[k] for k, name in enumerate(graph.names) if op_of(name).rule is norm.batch_norm)
    if any(norm.mixes_samples(node) for node in norms):
        return NotSeparable(
            f"samples mix in a BatchNorm that is in training mode ({whose}): the loss of one sample depends on the "
            "others, so it has no bounded per-sample gradient. Use GroupNorm or LayerNorm (model, replaced = "
            "cw.without_batchnorm(model) gives such a copy), or call .eval() on the BatchNorm."
        )
    if graph.computes_in(torch.float16):
        cause = " The graph computes in float16, where small gradients are lost and nothing is certain: use bfloat16."
    return NotSeparable(
        f"samples mix after {after} ({whose}): the loss of one sample depends on other samples, so it has no bounded "
        "per-sample gradient. Typical causes: a contrastive loss, attention or a statistic over the batch, one loss "
        f"given twice.{cause} A constant table looks the same if its length is a multiple of the batch size: then "
        "take another batch size for the first step."
    )


def no_rule(graph: Graph, k: int, parameters: str) -> str:
    """Why a node that parameters meet the batch at cannot be served, and what to do."""
    name = graph.names[k]
    refusal = op_of(name).refusal or op_of(name).hides(graph.nodes[k])
    if refusal:
        return f"{name} (parameters {parameters}) {refusal}"
    if output_meta(graph.nodes[k]).dtype.is_complex:
        return (
            f"{name} (parameters {parameters}) computes with complex numbers, for which there are no per-sample rules. "
            "Write it with real and imaginary parts."
        )
    return (
        f"{name} has no per-sample rule (parameters {parameters}). Write it with supported operations, freeze these "
        "parameters, or ask for a rule."
    )
