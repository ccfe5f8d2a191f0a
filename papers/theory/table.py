"""Table 1 of the paper, demonstrated: ticks hold on every network tried, crosses are shown by an instance.

A tick is a property that must hold for every network, so it is looked at on many; a cross says only that a property may
fail, so one instance is enough, and the search found it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import clipwise as cw
from papers.theory.networks import Architecture, Case, Clipping, random_case
from papers.theory.search import CONDITION, SMALL_R, rise

LARGE_R = 1e6
NETWORK = Architecture("mlp", (2, 8, 1))
SAMPLES = 4
FOLLOWED = 1e-2  # how well H must be conditioned for a flow to arrive within the time it is given
COLUMNS = ("symmetric", "positive_quadratic", "positive_eigenvalues", "convergence", "monotone", "zero_loss")
TITLES = ("symmetric", "positive quadratic form", "positive eigenvalues", "loss converges", "monotone", "to zero")


@dataclass(frozen=True)
class Row:
    """A row of the table: the clippings it is about, the paper's verdicts, and the instances behind its crosses."""

    name: str
    matrix: str
    clippings: tuple[Clipping, ...]
    paper: str  # one letter per column: y or n
    instances: tuple[str, ...] = ()


ROWS = (
    Row("no clipping", "H", (Clipping("none"),), "yyyyyy"),
    Row("batch clipping", "c H", (Clipping("batch", (SMALL_R,)),), "yyyyyy"),
    Row("large R, flat", "H", (Clipping("abadi", (LARGE_R,)),), "yyyyyy"),
    Row("large R, layerwise", "H", (Clipping("abadi", (LARGE_R,), True),), "yyyyyy"),
    Row(
        "small R, flat", "H C", (Clipping("abadi", (SMALL_R,)),), "nnynny",
        ("flat_not_quadratic", "flat_not_quadratic", "", "flat_diverging_normalized", "flat_rising", ""),
    ),
    Row(
        "small R, layerwise", "sum of H_r C_r", (Clipping("abadi", (SMALL_R,), True),), "nnnnnn",
        (
            "layerwise_not_quadratic", "layerwise_not_quadratic", "layerwise_negative_eigenvalue",
            "layerwise_diverging", "layerwise_rising", "layerwise_stuck",
        ),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Look:
    """What one network shows under one clipping; None where nothing can be said (H not positive definite)."""

    symmetric: bool
    positive_quadratic: bool
    positive_eigenvalues: bool
    convergence: bool | None
    monotone: bool | None
    zero_loss: bool | None


def look_at(case: Case, follow: bool) -> Look:
    """The matrix at the start, and the flow if it is followed and H stays positive definite along it."""
    found = cw.ntk.analyse(*case.arguments())
    positive = (found.symmetric, found.positive_quadratic, found.positive_eigenvalues)
    if not follow or case.conditioning() < FOLLOWED:
        return Look(*positive, None, None, None)
    flow = case.flow(points=101, atol=1e-10)
    if min(case.conditioning(flow.weights[k]) for k in range(0, len(flow.t), 20)) < FOLLOWED:
        return Look(*positive, None, None, None)
    start, before, end = (float(flow.loss[k]) for k in (0, -11, -1))
    return Look(*positive, abs(before - end) < 1e-3 * start, rise(flow.loss) < 1e-6, end < 1e-3 * start)


def same_kernel(case: Case) -> bool:
    """Whether the matrix of a row with ticks is H up to one common factor."""
    found = cw.ntk.analyse(*case.arguments()).matrix
    H = cw.ntk.kernel(case.model(), case.data[0])
    factor = float(found.trace() / H.trace())
    return torch.allclose(found, factor * H, rtol=1e-9, atol=1e-12)


def times(clipping: Clipping) -> float:
    """How long flows are followed; batch clipping is slow, as its factor is at most R over the sum of all norms."""
    return 2000.0 if clipping.rule == "batch" else 400.0


def table(instances: dict[str, Any], networks: int, flows: int) -> list[dict[str, Any]]:
    """One entry per row: verdicts of the paper, counts on random networks, and instances."""
    rows = []
    for row in ROWS:
        looks = []
        for clipping in row.clippings:
            for seed in range(networks):
                case = random_case(10_000 + seed, NETWORK, SAMPLES, clipping, times(clipping), outliers=False)
                if case.conditioning() >= CONDITION:
                    looks.append(look_at(case, follow=seed < flows))
                    assert "n" in row.paper or same_kernel(case)
        cells = {}
        for place, column in enumerate(COLUMNS):
            seen = [getattr(look, column) for look in looks if getattr(look, column) is not None]
            instance = row.instances[place] if row.instances else ""
            cells[column] = {
                "paper": row.paper[place] == "y",
                "held": sum(seen),
                "of": len(seen),
                "instance": instance or None,
                "instance_found": bool(instance) and instances[instance]["case"] is not None,
            }
        rows.append({"row": row.name, "matrix": row.matrix, "cells": cells})
    return rows


def agrees(cell: dict[str, Any]) -> bool:
    """Whether what was seen is what the paper says."""
    return cell["held"] == cell["of"] > 0 if cell["paper"] else cell["instance_found"] or cell["held"] < cell["of"]


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table with counts: a tick shows on how many networks it held, a cross names its instance."""
    lines = [["clipping", "matrix", *TITLES], ["---"] * (len(TITLES) + 2)]
    for row in rows:
        cells = []
        for cell in row["cells"].values():
            mark = "✓" if cell["paper"] else "✗"
            shown = f"{cell['held']}/{cell['of']}"
            cells.append(f"{mark} {shown}" if cell["paper"] else f"{mark} {shown}, `{cell['instance']}`")
        lines.append([row["row"], row["matrix"], *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
