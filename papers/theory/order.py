"""Fact 4.1: DP-GD converges to one and the same flow whatever the noise, with order 1 without noise and 1/2 with it.

The discrete side is `cw.Private` itself on full batches with torch's SGD; the flow has tight error control.

The flows of six optimizers come to zero loss under flat clipping, and to where layerwise clipping stops.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.data import TensorDataset

import clipwise as cw
from papers.theory.networks import LOSSES, Architecture, Case, Clipping, random_case

T_END = 1.0
CASE = random_case(3, Architecture("mlp", (2, 4, 1)), 6, Clipping("abadi", (0.5,)), T_END)


def trained(case: Case, eta: float, noise_multiplier: float, seed: int) -> tuple[torch.Tensor, list[float]]:
    """The weights after time t_end of DP-GD with step eta, and the loss after every step."""
    model, (x, y), steps = case.model(), case.data, round(case.t_end / eta)
    plan = cw.Plan(
        sampling=cw.FullBatch(len(x)), steps=steps, clip=case.clipping.value(), noise_multiplier=noise_multiplier
    )
    private = cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=eta), seed=seed)
    losses_seen = []
    for xb, yb in private.loader(TensorDataset(x, y)):
        losses = LOSSES[case.loss](model(xb), yb)
        losses_seen.append(float(losses.mean().detach()))
        private.step(losses)
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach(), losses_seen


def slope(steps: list[float], errors: list[float]) -> float:
    """The order of convergence: the least-squares slope of log error against log step."""
    x = torch.tensor(steps, dtype=torch.float64).log()
    y = torch.tensor(errors, dtype=torch.float64).log()
    x = x - x.mean()
    return float((x * (y - y.mean())).sum() / x.square().sum())


def orders(noises: tuple[float, ...], etas: list[float], seeds: int, case: Case = CASE) -> list[dict[str, Any]]:
    """For each noise multiplier the distance to the flow at each step (root mean square over seeds) and its order."""
    end = case.flow(points=2, rtol=1e-10, atol=1e-12, method="DOP853").weights[-1]
    n, R, dimension = len(case.y), case.clipping.numbers[0], len(end)
    rows = []
    for noise in noises:
        errors = []
        for eta in etas:
            runs = [trained(case, eta, noise, seed)[0] - end for seed in range(seeds if noise else 1)]
            errors.append(math.sqrt(sum(float(run.square().sum()) for run in runs) / len(runs)))
        rows.append(
            {
                "noise_multiplier": noise,
                "eta": etas,
                "error": errors,
                "order": slope(etas, errors),
                "noise_sum": [noise * R * math.sqrt(eta * case.t_end * dimension) / n for eta in etas],
            }
        )
    return rows


def thinned(eta: float, losses: list[float], most: int = 256) -> dict[str, list[float]]:
    """Times and losses, every k-th of them if there are more than a figure can show."""
    every = max(1, len(losses) // most)
    return {"t": [eta * k for k in range(0, len(losses), every)], "loss": losses[::every]}


def pictures(noises: tuple[float, ...], etas: tuple[float, ...], case: Case = CASE) -> dict[str, Any]:
    """The loss of DP-GD over time for several noise multipliers and steps, beside the flow's."""
    flow = case.flow(points=101, rtol=1e-10, atol=1e-12, method="DOP853")
    runs = [
        {"noise_multiplier": noise, "eta": eta, **thinned(eta, trained(case, eta, noise, seed=0)[1])}
        for eta in etas
        for noise in noises
    ]
    return {"flow": {"t": flow.t.tolist(), "loss": flow.loss.tolist()}, "runs": runs}


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
