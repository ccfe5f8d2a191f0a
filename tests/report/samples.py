"""Runs made up from seeded numbers: the shape of a real comparison, in milliseconds."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

import clipwise as cw
from clipwise.accounting import GaussianSteps, Guarantee, Ledger, privacy_panel
from clipwise.calibration import CalibrationResult, RegressionResult, evaluate
from clipwise.report import Choices, Run

SAMPLING = cw.Poisson(sample_size=60_000, batch_size=512)
STEPS = 1_500
DELTA = 1e-5
CLASSES = 10
SIGNAL = 2.2
HOSTILE = "<script>window.hacked = 1</script> $\\frac{$ & \"R' _x"


def scores(seed: int, sharpness: float, count: int = 1_500) -> tuple[Any, Any]:
    """Logits whose probabilities are right at sharpness 1 and over-confident above."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    logits = rng.normal(size=(count, CLASSES))
    logits[np.arange(count), labels] += SIGNAL
    return logits * SIGNAL * sharpness, labels


@cache
def judged(seed: int, sharpness: float, resamples: int = 0, count: int = 1_500) -> CalibrationResult:
    logits, labels = scores(seed, sharpness, count)
    return evaluate(logits=logits, labels=labels, resamples=resamples)


def curves(seed: int, sharpness: float, clip_norm: float | None) -> tuple[dict[str, Any], ...]:
    rng = np.random.default_rng([seed, 7])
    rows = []
    for step in range(0, STEPS + 1, 75):
        learnt = 1 - np.exp(-step / 300)
        jitter = 0.004 * rng.normal(size=4)
        clipped = 0.0 if clip_norm is None else float(np.clip(1.1 * np.exp(-clip_norm / 8) + jitter[0], 0, 1))
        norm = 6 * (1 - 0.8 * learnt)
        rows.append(
            {
                "step": step,
                "epoch": step * 512 / 60_000,
                "epsilon": None if clip_norm is None else 1.6 * (step / STEPS) ** 0.5,
                "test": {
                    "accuracy": 0.1 + 0.7 * learnt + jitter[1],
                    "nll": 2.3 - 1.7 * learnt + 0.2 * (sharpness - 1) * learnt + jitter[2],
                    "ece": abs(0.05 * (sharpness - 1)) * learnt + 0.03 * np.exp(-step / 200) + abs(jitter[3]),
                },
                "private": {
                    "loss": 2.3 - 1.75 * learnt + 5 * jitter[2],
                    "fraction_clipped": clipped,
                    "norm_median": norm,
                    "batch_size": int(rng.poisson(512)),
                    "bad_samples": 0,
                    "layers": {
                        "hidden": {"fraction_clipped": clipped, "norm_median": 0.8 * norm},
                        "output": {"fraction_clipped": 0.5 * clipped, "norm_median": 0.3 * norm},
                    },
                },
            }
        )
    return tuple(rows)


def ledger(noise_multiplier: float = 1.1) -> Ledger:
    return Ledger([GaussianSteps(SAMPLING, noise_multiplier, STEPS)])


@cache
def panel() -> dict[str, Guarantee]:
    return privacy_panel(ledger(), DELTA)


def plan(clip_norm: float | None) -> cw.Plan:
    clip = cw.NoClip() if clip_norm is None else cw.Abadi(clip_norm)
    return cw.Plan(sampling=SAMPLING, steps=STEPS, clip=clip, noise_multiplier=0.0 if clip_norm is None else 1.1)


def made_run(
    name: str = "R = 1", clip_norm: float | None = 1.0, sharpness: float = 1.8, seed: int = 0, **changes: Any
) -> Run:
    """One run; `clip_norm=None` is one without privacy."""
    private = clip_norm is not None
    rate = changes.pop("learning_rate", 0.1 if clip_norm is None else 1 / clip_norm)
    values: dict[str, Any] = {
        "name": name,
        "test": judged(seed, sharpness, resamples=changes.pop("resamples", 0)),
        "plan": plan(clip_norm),
        "choices": Choices(rate, "SGD(momentum=0)"),
        "seed": seed,
        "curves": curves(seed, sharpness, clip_norm),
        "ledger": ledger() if private else None,
        "delta": DELTA if private else None,
        "guarantees": panel() if private else {},
        "provenance": {
            "command": ["clipwise", "train", "config.toml", "--seed", str(seed)],
            "seconds": 3.2,
            "seeds": [seed],
            "data": {
                "name": "made-up digits",
                "records": 60_000,
                "held_out": 1_500,
                "since_the_start": "unchanged",
            },
            "arm": name,
            "model": "mlp 196-64-10",
            "parameters": 13_258,
            "versions": {"clipwise": cw.__version__, "torch": "2.13.0", "python": "3.11.7"},
        },
        "config": f"seed = {seed}\n[model]\nkind = 'mlp'\n",
        "fingerprint": "sha256:5ec2e7",
    }
    return Run(**{**values, **changes})


ARMS: tuple[tuple[str, float | None, float], ...] = (
    ("not private", None, 1.25),
    ("R = 1", 1.0, 1.9),
    ("R = 10", 10.0, 1.05),
)


def comparison(seeds: int = 3) -> list[Run]:
    """Three arms as in the paper's figures: not private, small R, large R."""
    return [made_run(name, norm, sharp, seed) for name, norm, sharp in ARMS for seed in range(seeds)]


def regression_run(name: str = "R = 1", width: float = 0.8) -> Run:
    coverage = {level: level * width for level in (0.5, 0.8, 0.9, 0.95)}
    test = RegressionResult(count=400, mse=0.25, rmse=0.5, r2=0.61, nll=0.9, coverage=coverage)
    return made_run(name, test=test, curves=())
