"""The flows of six optimizers: to zero loss under flat clipping, and to where layerwise clipping stops."""

from __future__ import annotations

from typing import Any

import clipwise as cw
from papers.theory.networks import Architecture, Case, Clipping, random_case

NAMES = ("gd", "heavy_ball", "nesterov", "adam", "adagrad", "rmsprop")
FLAT = random_case(10_003, Architecture("mlp", (2, 8, 1)), 4, Clipping("abadi", (0.5,)), 60.0, outliers=False)


def flows(stuck: Case, points: int) -> dict[str, dict[str, cw.ntk.GradientFlow]]:
    """Every optimizer from the same start: a network with flat clipping, and the layerwise instance that stops."""
    return {
        "flat": {name: FLAT.flow(optimizer=name, points=points) for name in NAMES},
        "layerwise": {name: stuck.flow(min(stuck.t_end, 40.0), optimizer=name, points=points) for name in NAMES},
    }


def summary(found: dict[str, dict[str, cw.ntk.GradientFlow]]) -> list[dict[str, Any]]:
    """Loss at the start and at the end, and the speed at the end."""
    return [
        {
            "style": style,
            "optimizer": name,
            "loss_at_the_start": float(flow.loss[0]),
            "loss_at_the_end": float(flow.loss[-1]),
            "speed_at_the_end": float(flow.speed[-1]),
            "gradients": flow.evaluations,
        }
        for style, named in found.items()
        for name, flow in named.items()
    ]
