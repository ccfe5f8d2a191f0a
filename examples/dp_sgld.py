"""Sample from a private posterior, and compare the average of its predictions with those of the last weights.

`python examples/dp_sgld.py` takes a few seconds on scikit-learn's digits.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import clipwise as cw

EPSILON, DELTA = 3.0, 1e-4


def main() -> None:
    digits = cw.data.load("digits")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    chain = cw.optim.Langevin(
        sampling=cw.Poisson(len(digits.train), batch_size=256),
        steps=600,
        clip=cw.Abadi(1.0),
        prior=cw.optim.GaussianPrior(std=1.0),
    ).calibrate(EPSILON, DELTA)
    optimizer = cw.optim.LangevinOptimizer(model, chain)
    private = cw.Private(chain.plan(), model, optimizer, seed=0)
    for x, y in private.loader(digits.train):
        private.step(F.cross_entropy(model(x), y, reduction="none"))

    print(f"epsilon {private.epsilon(DELTA):.2f}, learning rate {chain.learning_rate:.3g}")
    x, y = digits.test.tensors
    found = optimizer.posterior.evaluate(model, x, y)
    for name, result in (("last weights", found.point), (f"average of {found.samples} samples", found.average)):
        print(f"{name:<22} accuracy {100 * result.accuracy:.1f} %, ECE {result.ece:.3f}, loss {result.nll:.3f}")


if __name__ == "__main__":
    main()
