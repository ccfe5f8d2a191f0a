"""What is trained: the arms of the paper's table and figures, several levels of noise, fine-tuning, and the grid."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from clipwise.experiments import Arm, Study
from papers.cifar10.grid import Cell

FOLDER = Path(__file__).parent
DEFAULT = "efficientnet_lite0"
SEEDS, LONG_SEEDS = 5, 3

SMALL, LARGE = 0.1, 10.0
RATE = 3.0
"""The learning rate is this over R in the private arms, so that the noise in a step is the same for all."""
LONG = 750
"""Steps of 15 epochs: the paper's epsilon is theirs, not that of the single epoch in its text."""
SIDE = 128
"""Pixels a side for which EfficientNet-Lite0 sees an image; its own 224 take three times as long."""

NOISE_R, NOISE_RATES = 1.0, (0.1, 1.0)
SIGMAS = (0.0, 0.5, 1.3, 4.0)

NORMS = (0.01, 0.1, 1.0, 10.0, 100.0)
RATES = (0.03, 0.3, 3.0, 30.0, 300.0)
GRID_SEEDS = 3

TUNED_SMALL, TUNED_LARGE, TUNED_RATE, TUNED_SIDE = 1.0, 100.0, 0.2, 64
NOT_PRIVATE = ("privacy={private=false}", "clip={rule='NoClip'}")
TUNED = "fine-tuned"


def arm(R: float | None, kind: str = "") -> str:
    """The name of an arm."""
    return ("not private" if R is None else f"R = {R:g}") + (f", {kind}" if kind else "")


def noise_arm(sigma: float | None, rate: float) -> str:
    """The name of an arm of the noise study."""
    return ("no noise, no clipping" if sigma is None else f"noise {sigma:g}") + f", rate {rate:g}"


def head_settings(network: str, quick: bool) -> tuple[str, ...]:
    """Of every run on features: the network that made them, and few steps when it is to be quick."""
    side = (f"data.options.side={SIDE}",) if network == DEFAULT else ()
    named = (f"data.options.network={json.dumps(network)}", *side)
    scaled = ("data.options.synthetic=true", "batch_size=60", "evaluation.resamples=0", "steps=4", "evaluation.every=2")
    return (*named, *scaled) if quick else named


def study(network: str = DEFAULT, quick: bool = False, whole: bool = False) -> Study:
    """Every run that is kept in a folder of its own; those of the grid are not."""
    head = head_settings(network, quick)
    long = () if quick else (f"steps={LONG}", f"evaluation.every={LONG // 15}")
    heads = [*_arms("", (), SEEDS), *_arms("15 epochs", long, LONG_SEEDS), *_noises(SIGMAS[::2] if quick else SIGMAS)]
    arms = [Arm(each.name, (*head, *each.overrides), each.seeds) for each in heads]
    return Study(FOLDER / "config.toml", (*arms, *_fine_tuned(network, quick, whole)), SEEDS, FOLDER)


def _arms(kind: str, settings: tuple[str, ...], seeds: int) -> Iterator[Arm]:
    """Without privacy, with a small R and with a large one."""
    yield Arm(arm(None, kind), (*NOT_PRIVATE, f"optimizer.learning_rate={RATE / LARGE}", *settings), seeds)
    for R in (SMALL, LARGE):
        yield Arm(arm(R, kind), (f"clip.R={R}", f'optimizer.learning_rate="{RATE} / R"', *settings), seeds)


def _noises(sigmas: Sequence[float]) -> Iterator[Arm]:
    """The same seed, so the same initial weights, and small learning rates."""
    for rate in NOISE_RATES:
        settings = (f"optimizer.learning_rate={rate}", "evaluation.every=1", "evaluation.resamples=0")
        yield Arm(noise_arm(None, rate), (*NOT_PRIVATE, *settings), seeds=1)
        for sigma in sigmas:
            noise = f"privacy.noise_multiplier={sigma}" if sigma else "privacy={private=false}"
            yield Arm(noise_arm(sigma, rate), (f"clip.R={NOISE_R}", noise, *settings), seeds=1)


def _fine_tuned(network: str, quick: bool, whole: bool) -> Iterator[Arm]:
    """All parameters: on a subset of small images, or on everything as the paper does."""
    if quick:
        data, model = "synthetic=true", f"network={json.dumps(network)}"
        sizes = ("batch_size=60", "steps=2", "evaluation.every=2", "evaluation.resamples=0")
    elif whole:
        data, model = "", f"network={json.dumps(network)}"
        sizes = ("batch_size=1000", "steps=50", "physical_batch_size=50", "evaluation.every=25")
    else:
        side = f",side={TUNED_SIDE}" if network == DEFAULT else ""
        data, model = "records=10000,test_records=2000", f"network={json.dumps(network)}{side}"
        sizes = ("batch_size=500", "steps=200", "physical_batch_size=100", "evaluation.every=20")
    settings = (
        f'data={{source="papers.cifar10.features:images",options={{{data}}}}}',
        f'model={{source="papers.cifar10.networks:classifier",options={{{model}}}}}',
        "evaluation.batch_size=100",
        *sizes,
    )
    for R in (TUNED_SMALL, TUNED_LARGE):
        yield Arm(arm(R, TUNED), (f"clip.R={R}", f'optimizer.learning_rate="{TUNED_RATE} / R"', *settings), seeds=1)


def cells(quick: bool, seeds: int | None) -> list[Cell]:
    """The grid: flat and layerwise clipping, every R with every learning rate; seed by seed."""
    norms, rates = (NORMS[1:3], RATES[1:3]) if quick else (NORMS, RATES)
    count = 1 if quick else GRID_SEEDS if seeds is None else min(seeds, GRID_SEEDS)
    return [
        Cell(style, 4 if quick else 50, R, rate, seed)
        for seed in range(count)
        for style in ("flat", "layerwise")
        for R in norms
        for rate in rates
    ]
