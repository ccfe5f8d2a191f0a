"""Pages and cards of made-up runs as text: `python -m tests.report.expected` writes what they are compared with."""

from __future__ import annotations

import html
import json
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipwise as cw
from clipwise import report
from clipwise.accounting import Event, FederatedRounds, GaussianSteps, Ledger, PrivateCalibration, account
from clipwise.calibration import CalibrationResult, RegressionResult, evaluate
from clipwise.mechanisms import Rounds
from clipwise.report import Choices, Run
from tests.conftest import without_drawing

PAGES = Path(__file__).with_name("pages")
EVERYONE = cw.FullBatch(1_000)
ACCOUNTANTS = ("exact", "rdp", "gdp")


def judged(seed: int, sharpness: float, resamples: int = 0) -> CalibrationResult:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, 400)
    logits = rng.normal(size=(400, 3))
    logits[np.arange(400), labels] += 1.5
    return evaluate(logits=1.5 * sharpness * logits, labels=labels, bins=5, resamples=resamples)


def curves(seed: int, last: int = 100) -> tuple[dict[str, Any], ...]:
    """Three rows, with numbers that are easily told apart."""
    rows = []
    for k, step in enumerate((0, last // 2, last)):
        layers = {
            "first": {"fraction_clipped": 0.125 * (k + 1 + seed), "norm_median": 2.0 - 0.5 * k},
            "last": {"fraction_clipped": None, "norm_median": 10.0**k},
        }
        private = {"loss": 2.0 - 0.25 * k - 0.1 * seed, "fraction_clipped": 0.5 + 0.125 * k, "layers": layers}
        test = {"accuracy": 0.25 * (k + 1) + 0.01 * seed, "nll": 1.5 - 0.5 * k, "ece": 0.01 * (3 - k) + 0.01 * seed}
        rows.append({"step": step, "test": test, "private": private})
    return tuple(rows)


def made(name: str, events: tuple[Event, ...], clip: Any, noise: float, **changes: Any) -> Run:
    seed = changes.get("seed")
    private = all(event.noise_multiplier for event in events)
    values: dict[str, Any] = {
        "test": judged(seed or 0, 1.6),
        "plan": cw.Plan(EVERYONE, 100, clip, noise),
        "choices": Choices(0.5, "SGD(lr=0.5)", algorithm="dp-sgd"),
        "seed": None,
        "curves": curves(seed or 0),
        "ledger": Ledger(events),
        "delta": 1e-4 if private else None,
        "guarantees": {each: account(events, 1e-4, each) for each in ACCOUNTANTS} if private else {},
        "provenance": {
            "command": ["clipwise", "train", "run.toml", "--output", "runs/one", "--resume", "--set", "a=b c"],
            "seconds": 61.25,
            "seeds": [seed],
            "arm": name,
            "data": {
                "name": "made-up *records*",
                "records": 1_000,
                "held_out": 400,
                "since_the_start": "unchanged",
            },
            "model": "mlp 4-8-3",
            "parameters": 67,
            "noise": "made up",
            "versions": {"torch": "2.0", "python": "3.0"},
            "other_samples": "looked at in 3 of 100 steps",
        },
        "config": "steps = 100\n",
        "fingerprint": "sha256:0",
    }
    return Run(name=name, **{**values, **changes})


def steps(noise: float, count: int = 100, reason: str = "training") -> GaussianSteps:
    return GaussianSteps(EVERYONE, noise, count, reason)


def one() -> list[Run]:
    """Over-confident, recalibrated, ended early, with a seed and warnings of its own."""
    events = (steps(30.0, 90), steps(20.0, 5, "interrupted"), PrivateCalibration(50.0, releases=8))
    return [
        made(
            *("R = 2", events, cw.Abadi(2.0), 30.0),
            seed=7,
            test=judged(0, 3.0, resamples=100),
            recalibrated={"private-temperature": judged(0, 1.0)},
            curves=curves(0, last=120),
            warnings=("The learning rate was chosen on these records.",),
        )
    ]


def advised() -> list[Run]:
    """A run that could be better calibrated, made by a program and not by a command."""
    events = (GaussianSteps(EVERYONE, 30.0, 100, own_batches=True),)
    run = made("mine", events, cw.Abadi(0.5), 30.0, test=judged(0, 3.0), choices=Choices(0.25), curves=())
    return [replace(run, provenance={"data": "mine"}, config=None)]


def arms() -> list[Run]:
    """Two seeds each of small and large norm, one run without privacy, and a schedule of norms and noise."""
    mixed = cw.MixUp(cw.Abadi(2.0), cw.Layerwise(cw.Automatic(20.0)), switch_at=0.75)
    found = [
        made(f"R = {norm:g}", (steps(30.0),), cw.Abadi(norm), 30.0, seed=seed, test=judged(seed, sharpness))
        for norm, sharpness in ((2.0, 2.5), (20.0, 1.1))
        for seed in (1, 2)
    ]
    open_run = made("open", (steps(0.0),), cw.NoClip(), 0.0, choices=Choices(0.5, "SGD(lr=0.5)"), curves=())
    events, choices = (steps(40.0, 60), steps(20.0, 40)), Choices("0.5, scheduled")
    schedule = made("mixed", events, mixed, 40.0, choices=choices, curves=())
    plan = cw.Plan(EVERYONE, 100, mixed, cw.Steps({0: 40.0, 60: 20.0}))
    runs = [*found, open_run, replace(schedule, plan=plan)]
    return [replace(run, config=None, provenance={"data": "made up", "arm": run.name, "seconds": 1.5}) for run in runs]


def users() -> list[Run]:
    """Rounds of users at two noises, of which one arm is of seeds that were charged differently."""
    sampling = cw.FullBatch(50)
    found = []
    for name, noise, count, seed in (("few", 30.0, 20, None), ("more", 20.0, 20, None), ("more", 20.0, 25, 3)):
        events = (FederatedRounds(sampling, noise, count),)
        plan = cw.Plan(sampling, 20, cw.Abadi(0.5), noise, mechanism=Rounds(weight_cap=4.0))
        choices = Choices(0.1, "SGD(lr=0.1)", algorithm="dp-fedavg", federated={"local_epochs": 2, "weight_cap": 4.0})
        run = made(name, events, cw.Abadi(0.5), noise, choices=choices, seed=seed, curves=curves(0, last=20))
        found.append(replace(run, plan=plan))
    return found


def regressions() -> list[Run]:
    """Intervals that are too narrow, and a model without any."""
    coverage = {level: 0.75 * level for level in (0.5, 0.9)}
    narrow = RegressionResult(count=400, mse=0.25, rmse=0.5, r2=0.625, nll=0.875, coverage=coverage)
    rows = tuple({"step": step, "test": {"rmse": 1.0 - 0.005 * step, "r2": 0.25}} for step in (0, 100))
    runs = [made("R = 2", (steps(30.0),), cw.Abadi(2.0), 30.0, test=narrow, curves=rows)]
    plain = RegressionResult(count=400, mse=0.0625, rmse=0.25, r2=0.875)
    other = {"data": {"name": "others"}, "model": "linear"}
    return [*runs, made("R = 4", (steps(30.0),), cw.Abadi(4.0), 30.0, test=plain, curves=rows, provenance=other)]


def correlated() -> list[Run]:
    """Noise in bands and in trees."""
    found = []
    for name, sampling, correlation in (
        ("bands", cw.CyclicPoisson(1_000, 50, 4), cw.Banded(4)),
        ("trees", cw.Shuffled(1_000, 200), cw.Tree()),
    ):
        plan = cw.Plan(sampling, 12, cw.Abadi(2.0), 3.0, correlation=correlation)
        algorithm = "dp-ftrl" if name == "trees" else "dp-sgd"
        choices = Choices(0.5, "SGD(lr=0.5)", algorithm=algorithm)
        run = made(name, plan.events, cw.Abadi(2.0), 3.0, choices=choices, curves=(), config=None)
        found.append(replace(run, plan=plan, provenance={"data": "made up", "arm": name}))
    return found


SCENES: dict[str, Callable[[], list[Run]]] = {
    "one": one, "advised": advised, "arms": arms, "users": users, "regressions": regressions,
    "correlated": correlated,
}  # fmt: skip
PUBLISHABLE = ("users",)
FIGURES = ("arms", "regressions", "correlated")
"""The pages whose figures are looked at as well: what they are drawn from, and what stands below them."""

_BLOCK = (
    "h1|h2|h3|h4|p|tr|table|section|div|li|ul|ol|details|summary|figure|figcaption|svg|pre|header|main|footer|dl|dt"
)


def text_of(page: str) -> str:
    """The words of a page in their order, a line for each paragraph or row, with the lengths of its bars."""
    page = re.sub(r"<(style|script)\b.*?</\1>", "", page, flags=re.DOTALL)
    page = re.sub(r'<[^>]*\bstyle="([^"]*)"[^>]*>', lambda found: f"{found[0]}[{found[1]}] ", re.sub(r"\s+", " ", page))
    page = re.sub(rf"</?(?:{_BLOCK})\b[^>]*>", "\n", page)
    page = re.sub(r"</(?:td|th|dd|text)>", " | ", page)
    lines = (re.sub(r"\s+", " ", line).strip() for line in html.unescape(re.sub(r"<[^>]*>", "", page)).split("\n"))
    return "\n".join(line for line in lines if line)


def rounded(value: Any) -> Any:
    """Numbers to four digits: the last ones may differ between machines."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def shown(scene: str, folder: Path) -> str:
    """The page, the cards and the values of the figures."""
    written = report.write(SCENES[scene](), folder, publishable=scene in PUBLISHABLE)
    page, card = (path.read_text(encoding="utf-8") for path in (written, folder / "card.md"))
    page, figures = re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL), []
    if scene in FIGURES:
        files = [path for path in sorted((folder / "figures").glob("*.json")) if "privacy" not in path.stem]
        values = {path.stem: rounded(json.loads(path.read_text(encoding="utf-8"))) for path in files}
        figures = ["=== figures", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
    else:
        page = re.sub(r"<figure.*?</figure>", "", page, flags=re.DOTALL)
    parts = [text_of(page), "=== card.md", card, *figures]
    lines = "\n".join(parts).replace(cw.__version__, "VERSION").split("\n")
    wrapped = (textwrap.wrap(line, 118, subsequent_indent="  ", break_on_hyphens=False) or [""] for line in lines)
    return "\n".join(line for each in wrapped for line in each).strip() + "\n"


def main() -> int:
    """Write every expected text anew."""
    PAGES.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        without_drawing(patch)
        for scene in SCENES:
            (PAGES / f"{scene}.txt").write_text(shown(scene, Path(folder, scene)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
