"""The flows of six optimizers: to zero loss under flat clipping, and to where layerwise clipping stops."""

from __future__ import annotations

from typing import Any

import clipwise as cw
from papers.theory.networks import Architecture, Case, Clipping, random_case

# Momentum goes round its end: explicit steps follow that with the fewest gradients; the others are stiff close to it.
METHODS = {"gd": "LSODA", "heavy_ball": "RK45", "nesterov": "RK45", "adam": "RK45", "adagrad": "LSODA",
           "rmsprop": "LSODA"}  # fmt: skip
FLAT = random_case(10_003, Architecture("mlp", (2, 8, 1)), 4, Clipping("abadi", (0.5,)), 60.0, outliers=False)


def flows(stuck: Case, points: int, longest: float = 60.0) -> dict[str, dict[str, cw.ntk.GradientFlow]]:
    """Every optimizer from the same start: a network with flat clipping, and the layerwise instance that stops."""
    return {
        style: {name: case.flow(end, optimizer=name, points=points, method=method) for name, method in METHODS.items()}
        for style, case, end in (("flat", FLAT, min(FLAT.t_end, longest)), ("layerwise", stuck, min(40.0, longest)))
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
