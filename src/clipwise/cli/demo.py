"""`clipwise demo`: what the clipping norm does to accuracy and calibration at one and the same epsilon.

A small network on scikit-learn's digits, once as they are (nearly separable) and once with noisy pixels (so that a
good model has to be unsure). The learning rate is a constant over R, as in the paper's MNIST experiment, which makes
the noise in a step the same for every R. Whatever comes out is printed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

from clipwise.cli.table import table
from clipwise.errors import MissingExtra

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import TensorDataset

    from clipwise.clipping import Rule
    from clipwise.plan import Plan

NAME = "demo"
HELP = "train privately on scikit-learn's digits, with a small and a large clipping norm at the same epsilon"

STEPS = 400
BATCH_SIZE = 128
TEST_SIZE = 500
SMALL_R = 0.1
LARGE_R = 5.0


@dataclass(frozen=True)
class Task:
    """One version of the data and its learning rates (chosen on this very data, see the note in the output)."""

    name: str
    pixel_noise: float
    learning_rate: float
    """Without privacy."""
    private_rate: float
    """With privacy, multiplied by R: the learning rate is this over R."""


TASKS = (
    Task("digits as they are", pixel_noise=0.0, learning_rate=0.1, private_rate=0.1),
    Task("digits with noisy pixels", pixel_noise=0.5, learning_rate=0.02, private_rate=0.05),
)


@dataclass(frozen=True)
class Score:
    """Metrics on held-out digits, averaged over the runs."""

    task: str
    model: str
    accuracy: float
    nll: float
    ece: float
    confidence: float


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--epsilon", type=float, default=5.0, help="privacy budget of each run (default: %(default)s)")
    parser.add_argument("--delta", type=float, default=1e-4, help="(default: %(default)s, under 1/n)")
    parser.add_argument("--runs", type=_count, default=3, help="runs to average over (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run (default: %(default)s)")
    parser.add_argument("--steps", type=_count, default=STEPS, help="optimizer steps of a run (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")


def calibration_error(confidence_B: Tensor, correct_B: Tensor, bins: int = 15) -> float:
    """Expected calibration error: mean over samples of |accuracy - confidence| of the bin ((m-1)/M, m/M] they are in.

    >>> import torch
    >>> calibration_error(torch.tensor([0.9, 0.9]), torch.tensor([True, False]))  # 90 % sure, half of it right
    0.4
    """
    bin_B = (confidence_B.double() * bins).ceil().clamp(1, bins).long() - 1
    gap_B = confidence_B.double() - correct_B.double()
    gap_sums = gap_B.new_zeros(bins).index_add(0, bin_B, gap_B)
    return round(float(gap_sums.abs().sum()) / len(confidence_B), 6)


def _digits(task: Task) -> tuple[TensorDataset, Tensor, Tensor]:
    """Training set, test images, test labels; the same split and pixel noise every time."""
    import torch
    from torch.utils.data import TensorDataset

    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingExtra("the demo's digits come with scikit-learn: pip install 'clipwise[demo]'.") from None
    images, labels = load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(20)
    x = torch.from_numpy(images).float() / 16
    x = x + task.pixel_noise * torch.randn(x.shape, generator=generator)
    order = torch.randperm(len(x), generator=generator)
    x, y = x[order], torch.from_numpy(labels)[order].long()
    return TensorDataset(x[TEST_SIZE:], y[TEST_SIZE:]), x[:TEST_SIZE], y[:TEST_SIZE]


def _train(data: TensorDataset, plan: Plan, learning_rate: float, seed: int) -> nn.Module:
    """One run: an ordinary loop with `private.loader` and `private.step` in it."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    import clipwise as cw

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    private = cw.Private(plan, model, optimizer, seed=seed)
    for x, y in private.loader(data):
        private.step(F.cross_entropy(model(x), y, reduction="none"))
    return model


def _score(task: Task, name: str, models: Sequence[nn.Module], x: Tensor, y: Tensor) -> Score:
    import torch
    from torch.nn import functional as F

    metrics = []
    for model in models:
        with torch.no_grad():
            log_probabilities = F.log_softmax(model(x).double(), dim=-1)
        confidence, predicted = log_probabilities.exp().max(dim=-1)
        correct = predicted == y
        nll = F.nll_loss(log_probabilities, y)
        metrics.append(
            (
                float(correct.double().mean()),
                float(nll),
                calibration_error(confidence, correct),
                float(confidence.mean()),
            )
        )
    accuracy, nll_mean, ece, mean_confidence = (fmean(column) for column in zip(*metrics, strict=True))
    return Score(task.name, name, accuracy, nll_mean, ece, mean_confidence)


def _experiment(args: argparse.Namespace) -> tuple[list[Score], Plan]:
    import clipwise as cw

    base = cw.Plan(
        sampling=cw.Poisson(sample_size=len(_digits(TASKS[0])[0]), batch_size=BATCH_SIZE),
        steps=args.steps,
        clip=cw.Abadi(SMALL_R),
    ).calibrate(epsilon=args.epsilon, delta=args.delta)
    clips: list[tuple[str, Rule]] = [
        ("not private", cw.NoClip()),
        (f"private, R = {SMALL_R:g}", cw.Abadi(SMALL_R)),
        (f"private, R = {LARGE_R:g}", cw.Abadi(LARGE_R)),
    ]
    scores = []
    for task in TASKS:
        data, x, y = _digits(task)
        for name, clip in clips:
            private = math.isfinite(clip.sensitivity)
            plan = replace(base, clip=clip, noise_multiplier=base.noise_multiplier if private else 0.0)
            rate = task.private_rate / clip.sensitivity if private else task.learning_rate
            _progress(f"{task.name}: {name}")
            models = [_train(data, plan, rate, args.seed + run) for run in range(args.runs)]
            scores.append(_score(task, name, models, x, y))
    _progress("")
    return scores, base


def _progress(text: str) -> None:
    """What is being trained now, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _verdict(scores: Sequence[Score]) -> str:
    """The measured difference between the two clipping norms in one sentence, whichever way it went."""
    _, small, large = scores
    change = large.ece - small.ece
    chance = 2 * math.sqrt(small.accuracy * (1 - small.accuracy) / TEST_SIZE)
    if abs(change) < chance:
        outcome = f"under {100 * chance:.1f} (two standard errors), so too close to call"
    else:
        outcome = f"the {'large' if change < 0 else 'small'} clipping norm is better calibrated here"
    return (
        f"From R = {SMALL_R:g} to R = {LARGE_R:g}: accuracy {100 * (large.accuracy - small.accuracy):+.1f} points, "
        f"ECE {100 * change:+.1f} points: {outcome}."
    )


def _print(scores: Sequence[Score], plan: Plan, args: argparse.Namespace, exact: float, gdp: float) -> None:
    sampling = plan.sampling
    print(
        f"Private training on {sampling.sample_size} digits: {plan.steps} steps, Poisson batches of expected size "
        f"{sampling.batch_size},\nnoise multiplier {plan.noise_multiplier:.3f}; tested on {TEST_SIZE} others, "
        f"mean of {args.runs} run(s)."
    )
    for task in TASKS:
        chosen = [score for score in scores if score.task == task.name]
        rows = [[s.model, f"{s.accuracy:.1%}", f"{s.confidence:.1%}", f"{s.ece:.1%}", f"{s.nll:.3f}"] for s in chosen]
        print(f"\n{task.name[0].upper()}{task.name[1:]}")
        print(table(["", "accuracy", "confidence", "ECE", "NLL"], rows))
        print(f"  {_verdict(chosen)}")
    print(
        f"\nPrivacy of each private run (the clipping norm plays no part in it), delta = {args.delta:g}, "
        "add or remove one digit:"
        f"\n  epsilon = {math.ceil(exact * 1000) / 1000:.3f}  numerically exact, rounded up"
        f"\n  epsilon = {gdp:.3f}  what the central limit theorem (GDP) would have claimed: an approximation, no bound"
        "\nLearning rates were chosen on this data and the runs are seeded: this shows an effect, it is no release."
    )


def run(args: argparse.Namespace) -> int:
    """Train, measure, print."""
    import torch

    torch.set_num_threads(1)  # the network is tiny: threads only wait for each other
    start = time.perf_counter()
    scores, plan = _experiment(args)
    exact, gdp = plan.epsilon(args.delta), plan.epsilon(args.delta, accountant="gdp")
    seconds = time.perf_counter() - start
    if args.json:
        result = {
            "scores": [asdict(score) for score in scores],
            "epsilon": {"exact": exact, "gdp": gdp},
            "delta": args.delta,
            "noise_multiplier": plan.noise_multiplier,
            "steps": plan.steps,
            "runs": args.runs,
            "seed": args.seed,
            "seconds": round(seconds, 1),
        }
        print(json.dumps(result, indent=2))
    else:
        _print(scores, plan, args, exact, gdp)
        print(f"({seconds:.0f} s)")
    return 0
