"""The epsilons that the paper reports, with the settings behind them.

The paper is Bu, Wang, Dai, Long: On the Convergence and Calibration of Deep Learning with Differential Privacy (TMLR
2023). Its settings are its own; where the text leaves the number of steps open, the one that fits its claim is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from clipwise.accounting import Event, GaussianSteps, Guarantee
from clipwise.sampling import FullBatch, Poisson, Sampling

__all__ = ["PUBLISHED", "Published", "published_for"]


@dataclass(frozen=True)
class Published:
    """A run whose epsilon was published."""

    title: str
    claim: float
    sampling: Sampling
    noise_multiplier: float
    steps: int
    delta: float

    @property
    def events(self) -> tuple[Event, ...]:
        """What the run releases."""
        return (GaussianSteps(self.sampling, self.noise_multiplier, self.steps),)

    def sentence(self, exact: Guarantee) -> str:
        """The claim beside the exact value of the same run, and why they differ."""
        if isinstance(self.sampling, FullBatch):
            return f"The paper reports {self.claim:.2f}; its central limit theorem is exact for full batches."
        return (
            f"The paper reports {self.claim:.2f} for this run, {self.claim / exact.epsilon:.2f} of the exact value: by "
            "the central limit theorem, which sees only the variance of the privacy loss, while rare large losses "
            "decide at this delta."
        )


PUBLISHED = {
    "cifar10": Published("CIFAR10, 15 epochs", 1.96, Poisson(50_000, 1_000), 1.3, 750, 1e-5),
    "mnist": Published("MNIST, 60 epochs", 2.32, Poisson(60_000, 256), 1.1, 14_040, 1e-5),
    "snli": Published("SNLI, 3 epochs", 1.25, Poisson(550_152, 32), 0.4, 51_576, 1 / 550_152),
    "snli-as-run": Published("SNLI, as run", 1.25, Poisson(550_152, 32), 0.4, 54_076, 1 / 550_152),
    "california": Published("California, 50 epochs", 4.41, Poisson(18_576, 256), 1.0, 3_650, 1 / (1.1 * 18_576)),
    "wine": Published("Wine, full batch", 4.40, FullBatch(1_279), 35.0, 2_000, 1 / (1.1 * 1_279)),
}
"""The runs of the paper, by a short name."""


def published_for(events: Iterable[Event], delta: float) -> Published | None:
    """The published run with these very settings (its delta up to 2 %), if there is one.

    >>> found = published_for([GaussianSteps(Poisson(60_000, 256), 1.1, 14_040)], delta=1e-5)
    >>> found is not None and found.claim
    2.32
    """
    events = tuple(events)
    for run in PUBLISHED.values():
        if events == run.events and math.isclose(delta, run.delta, rel_tol=0.02):
            return run
    return None
