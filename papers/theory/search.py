"""The search for counter-examples: one small network for every cross in Table 1, or an account of what was searched.

Candidates are seeded. Those that show an effect at a single point are screened first; a flow is then followed for the
promising ones. H must stay positive definite, as the theorems assume: its smallest eigenvalue is at least `CONDITION`
of the largest wherever it is looked at. `python -m papers.theory --search` writes instances.json again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import clipwise as cw
from papers.theory.networks import Architecture, Case, Clipping, random_case

CONDITION = 1e-4
SMALL_R = 0.5
FLAT = Clipping("abadi", (SMALL_R,))
LAYERWISE = Clipping("abadi", (SMALL_R,), layerwise=True)
WIDE = Architecture("mlp", (2, 4, 1))
NARROW = Architecture("mlp", (1, 1, 1), bias=False)
SUM = Architecture("parallel", (1, 1, 1))


@dataclass
class Found:
    """What a search for one cross came to."""

    claim: str
    searched: str
    tried: int = 0
    effect: int = 0
    not_followed: int = 0  # flows that the solver gave up on
    case: Case | None = None
    values: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        case = None if self.case is None else self.case.to_dict()
        return {
            "claim": self.claim, "searched": self.searched, "tried": self.tried, "with_the_effect": self.effect,
            "not_followed": self.not_followed, "values": self.values, "case": case,
        }  # fmt: skip


def positive_definite(case: Case, flow: cw.ntk.GradientFlow | None = None, looks: int = 9) -> bool:
    """Whether H is positive definite at the start, or all along a flow."""
    if flow is None:
        return case.conditioning() >= CONDITION
    places = torch.linspace(0, len(flow.t) - 1, looks).round().int().tolist()
    return min(case.conditioning(flow.weights[k]) for k in places) >= CONDITION


def rise(loss: torch.Tensor) -> float:
    """By how much a loss climbs above what it had reached before, relative to its start."""
    return float((loss - torch.cummin(loss, 0).values).max() / loss[0])


def _candidates(count: int, *setting: Any) -> Iterator[Case]:
    for seed in range(count):
        case = random_case(seed, *setting)
        if positive_definite(case):
            yield case


def _best(found: Found, cases: Iterator[Case], score: Callable[[Case], float | None]) -> Found:
    """Keep the case with the largest score; None is no effect."""
    largest = 0.0
    for case in cases:
        found.tried += 1
        try:
            value = score(case)
        except cw.NotConverged:
            found.not_followed += 1
            continue
        if value is None:
            continue
        found.effect += 1
        if value > largest:
            largest, found.case = value, case
    return found


def _at_start(case: Case) -> cw.ntk.NTKAnalysis:
    return cw.ntk.analyse(*case.arguments())


def not_quadratic(clipping: Clipping, count: int) -> Found:
    """A point where the matrix is neither symmetric nor positive in quadratic form."""
    style = "layerwise" if clipping.layerwise else "flat"
    found = Found(f"{style}: not symmetric, not positive in quadratic form", f"{WIDE}, 4 samples, at the start")

    def score(case: Case) -> float | None:
        analysis = _at_start(case)
        if analysis.positive_quadratic or analysis.symmetric:
            return None
        return -analysis.min_quadratic / float(analysis.matrix.norm())

    _best(found, _candidates(count, WIDE, 4, clipping, 1.0), score)
    if found.case is not None:
        analysis = _at_start(found.case)
        found.values = {"min_quadratic": analysis.min_quadratic, "asymmetry": analysis.asymmetry}
    return found


def not_eigen(count: int, negative: bool) -> Found:
    """Layerwise clipping with an eigenvalue that is negative, or not real."""
    kind = "a negative eigenvalue" if negative else "eigenvalues that are not real"
    found = Found(f"layerwise: {kind}", f"{WIDE}, 4 samples, at the start")

    def score(case: Case) -> float | None:
        p = _at_start(case).properties
        if p.positive_eigenvalues:
            return None
        value = -p.min_eigenvalue if negative else p.max_imaginary if p.min_eigenvalue > 0 else 0.0
        return value if value > p.tolerance else None

    _best(found, _candidates(count, WIDE, 4, LAYERWISE, 1.0), score)
    if found.case is not None:
        p = _at_start(found.case).properties
        found.values = {"min_eigenvalue": p.min_eigenvalue, "max_imaginary": p.max_imaginary}
    return found


def rising(clipping: Clipping, count: int, t_end: float) -> Found:
    """A flow whose loss rises for a while, though H is positive definite all along."""
    style = "layerwise" if clipping.layerwise else "flat"
    found = Found(f"{style}: the loss rises for a while", f"{WIDE}, 4 samples, flows of those that rise at the start")

    def score(case: Case) -> float | None:
        if cw.ntk.loss_rate(*case.arguments()) <= 0:
            return None
        flow = case.flow(points=201)
        converged = float(flow.loss[-1]) < 0.1 * float(flow.loss[0])  # so that the picture shows the whole story
        return rise(flow.loss) if converged and positive_definite(case, flow) else 0.0

    _best(found, _candidates(count, WIDE, 4, clipping, t_end), score)
    if found.case is not None:
        flow = found.case.flow(points=401)
        found.values = {"rise": rise(flow.loss), "loss_at_the_end": float(flow.loss[-1])}
    return found


def stuck(count: int, t_end: float) -> Found:
    """A layerwise flow that comes to rest above zero; the best is the one that flat clipping brings lowest."""
    found = Found("layerwise: the flow stops at a loss above zero", f"{NARROW}, 2 samples, flows to t = {t_end:g}")

    def score(case: Case) -> float | None:
        flow = case.flow(points=21)
        still = float(flow.speed[-1]) < 1e-9 and float(flow.loss[-1]) > 1e-2
        if not (still and float(flow.loss[0] - flow.loss[-1]) > 0.1 and positive_definite(case, flow)):
            return None
        return float(flow.loss[-1] / case.flow(clipping=FLAT, points=2).loss[-1])

    _best(found, _candidates(count, NARROW, 2, LAYERWISE, t_end), score)
    if found.case is not None:
        flow = found.case.flow(points=21)
        found.values = {"loss_at_the_end": float(flow.loss[-1]), "speed_at_the_end": float(flow.speed[-1])}
    return found


def unsettled(case: Case, t_end: float) -> bool:
    """Whether the loss still rises late: by a hundredth in the second half of the flow to t_end, and to 4 t_end.

    It covers losses that grow without end and losses that go round in circles. H must stay positive definite.
    """
    for end in (t_end, 4 * t_end):
        flow = case.flow(end, points=81, max_evaluations=20_000)
        late = flow.loss[40:]
        rises = float((late - torch.cummin(late, 0).values).max() / late.max()) > 1e-2
        if not (rises and float(late[-1]) > 1e-3 * float(flow.loss[0]) and positive_definite(case, flow, looks=5)):
            return False
    return True


def not_convergent(architecture: Architecture, samples: int, clipping: Clipping, count: int, t_end: float) -> Found:
    """A flow whose loss does not converge."""
    style = "layerwise" if clipping.layerwise else "flat"
    searched = f"{architecture}, {samples} samples, flows to t = {t_end:g} and, if they rise late, {4 * t_end:g}"
    found = Found(f"{style}: the loss does not converge", searched)
    cases = _candidates(count, architecture, samples, clipping, 4 * t_end)

    def score(case: Case) -> float | None:
        return float(case.flow(points=2).loss[-1]) if unsettled(case, t_end) else None

    _best(found, cases, score)
    if found.case is not None:
        flow = found.case.flow(points=41)
        found.values = {"loss_at_the_start": float(flow.loss[0]), "loss_at_the_end": float(flow.loss[-1])}
    return found


def _constructed(claim: str, case: Case) -> Found:
    flow = case.flow(points=41)
    values = {"loss_at_the_start": float(flow.loss[0]), "loss_at_the_end": float(flow.loss[-1])}
    return Found(claim, "by construction", tried=1, effect=1, case=case, values=values)


def outvoted() -> Found:
    """Layerwise clipping whose loss grows without end, by construction.

    Three samples, three layers of one weight. In layer r, sample r has the longest gradient by far, but clipping gives
    all three the same length, and the two others outvote it: every layer moves the wrong way, and all residuals grow.
    """
    x = ((-3.0, 1.0, 1.0), (1.0, -3.0, 1.0), (1.0, 1.0, -3.0))
    case = Case(SUM, (-2.0, -2.0, -2.0), x, (0.0, 0.0, 0.0), "squared error", LAYERWISE, t_end=40.0)
    return _constructed("layerwise: the loss does not converge", case)


def logistic_normalized() -> Found:
    """Flat clipping by normalization whose loss grows without end, by construction.

    Normalized gradients of the logistic loss have length R for ever. Two samples of one class push the weights in
    nearly the direction that the third, of the other class, is pushed back from, so the third loses one to two. The
    inputs are linearly independent: H is positive definite and constant, and the data can be separated.
    """
    x = ((1.0, 0.3, 0.0), (1.0, -0.3, 0.0), (1.0, 0.0, 0.3))
    y = (1.0, 1.0, -1.0)
    case = Case(
        Architecture("parallel", (3,)), (0.0, 0.0, 0.0), x, y, "logistic", Clipping("normalize", (1.0,)), t_end=30.0
    )
    return _constructed("flat, normalized: the loss does not converge", case)


def search(quick: bool) -> dict[str, Any]:
    """Every search, with progress on the terminal."""
    few = 20 if quick else 1
    jobs: dict[str, Callable[[], Found | list[Found]]] = {
        "flat_not_quadratic": lambda: not_quadratic(FLAT, 400 // few),
        "layerwise_not_quadratic": lambda: not_quadratic(LAYERWISE, 400 // few),
        "layerwise_negative_eigenvalue": lambda: not_eigen(400 // few, negative=True),
        "layerwise_complex_eigenvalues": lambda: not_eigen(400 // few, negative=False),
        "flat_rising": lambda: rising(FLAT, 600 // few, t_end=60.0),
        "layerwise_rising": lambda: rising(LAYERWISE, 600 // few, t_end=60.0),
        "layerwise_stuck": lambda: stuck(300 // few, t_end=200.0),
        "layerwise_diverging": outvoted,
        "layerwise_diverging_found": lambda: not_convergent(SUM, 3, LAYERWISE, 200 // few, t_end=100.0),
        "flat_diverging_normalized": logistic_normalized,
        "flat_diverging_abadi": lambda: [
            not_convergent(architecture, 4, FLAT, 40 // few, t_end=200.0)
            for architecture in (WIDE, Architecture("mlp", (2, 3, 1), "sin"), Architecture("mlp", (2, 2, 2, 1)))
        ],
    }
    results: dict[str, Any] = {}
    for name, job in jobs.items():
        found = job()
        results[name] = [each.to_dict() for each in found] if isinstance(found, list) else found.to_dict()
        print(f"{name}: {_said(found)}", file=sys.stderr, flush=True)
    return results


def markdown(instances: dict[str, Any]) -> str:
    """What was searched for a loss that does not converge, and what came of it."""
    lines = [["clipping", "searched", "flows", "do not converge", "not followed to the end"], ["---"] * 5]
    rows = [*instances["flat_diverging_abadi"], instances["layerwise_diverging_found"]]
    for row in rows:
        style = row["claim"].partition(":")[0]
        counts = [str(row[name]) for name in ("tried", "with_the_effect", "not_followed")]
        lines.append([style, row["searched"], *counts])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _said(found: Found | list[Found]) -> str:
    every = found if isinstance(found, list) else [found]
    return "; ".join(f"{each.effect} of {each.tried} ({each.searched}) {each.values or ''}" for each in every)
