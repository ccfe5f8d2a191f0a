"""A posterior: priors on the weights, which are public and cost no privacy; samples, and what they predict together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from clipwise._validate import is_positive
from clipwise.calibration import CalibrationResult, evaluate
from clipwise.engine import Substitute
from clipwise.errors import DataError, InvalidPlan

__all__ = ["AveragedCalibration", "FlatPrior", "GaussianPrior", "LaplacePrior", "Posterior", "Prior"]


@runtime_checkable
class Prior(Protocol):
    """A density over every weight, the same for all; write your own as a frozen value with this one method."""

    def log_density_gradient(self, weights: Tensor) -> Tensor:
        """The gradient of log p at these weights, of their shape."""
        ...


class _Scaled:
    """A frozen value whose numbers are scales."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not is_positive(value):
                raise InvalidPlan(f"{type(self).__name__}({name}=...) must be a positive finite number, got {value!r}.")


@dataclass(frozen=True)
class FlatPrior:
    """No preference for any weights.

    >>> FlatPrior().log_density_gradient(torch.ones(2))
    tensor([0., 0.])
    """

    def log_density_gradient(self, weights: Tensor) -> Tensor:
        return torch.zeros_like(weights)


@dataclass(frozen=True)
class GaussianPrior(_Scaled):
    """Every weight is N(0, std^2) before the data are seen: weight decay of 1/(n std^2).

    >>> GaussianPrior(std=0.5).log_density_gradient(torch.tensor([1.0, -2.0]))
    tensor([-4.,  8.])
    """

    std: float

    def log_density_gradient(self, weights: Tensor) -> Tensor:
        return weights / -(self.std**2)


@dataclass(frozen=True)
class LaplacePrior(_Scaled):
    """Every weight has density exp(-abs(w)/scale)/(2 scale): a lasso.

    >>> LaplacePrior(scale=0.5).log_density_gradient(torch.tensor([1.0, -2.0]))
    tensor([-2.,  2.])
    """

    scale: float

    def log_density_gradient(self, weights: Tensor) -> Tensor:
        return torch.sign(weights) / -self.scale


Forward: TypeAlias = Callable[..., Tensor]
"""`forward(model, *inputs)` -> outputs, one row per input; left out, the model itself is called."""


@dataclass(frozen=True)
class AveragedCalibration:
    """How well calibrated the average over the posterior is, beside the point estimate (the last weights)."""

    average: CalibrationResult
    point: CalibrationResult
    samples: int


@dataclass(frozen=True, eq=False)
class Posterior:
    """Weights that were visited, each a mapping from names to tensors.

    All of them are functions of what was released in training: the epsilon of the run covers them together, and
    however they are used.

    >>> posterior = Posterior(({"weight": torch.zeros(2, 1)}, {"weight": torch.tensor([[9.0], [-9.0]])}))
    >>> model = nn.Linear(1, 2, bias=False)
    >>> posterior.probabilities(model, torch.ones(1, 1))
    tensor([[0.7500, 0.2500]])
    """

    samples: tuple[Mapping[str, Tensor], ...]

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Mapping[str, Tensor]]:
        return iter(self.samples)

    def matrix(self) -> Tensor:
        """All samples as rows, shape (samples, parameters): for their mean, covariance and traces."""
        self._check()
        return torch.stack([torch.cat([w.reshape(-1) for w in sample.values()]) for sample in self.samples])

    def outputs(self, model: nn.Module, *inputs: Tensor, forward: Forward | None = None) -> Tensor:
        """The outputs of every sample, shape (samples, batch, ...), without dropout. The model is left as it is."""
        self._check()
        called = Substitute(model, forward or _call)
        with torch.no_grad(), _evaluating(model):
            return torch.stack([called.with_weights(sample, *inputs) for sample in self.samples])

    def probabilities(self, model: nn.Module, *inputs: Tensor, forward: Forward | None = None) -> Tensor:
        """Bayesian model averaging: the mean over all samples of the softmax of their logits, (batch, classes)."""
        return self.outputs(model, *inputs, forward=forward).softmax(-1).mean(0)

    def evaluate(
        self,
        model: nn.Module,
        inputs: Tensor | Sequence[Tensor],
        labels: Tensor,
        *,
        bins: int = 15,
        resamples: int = 0,
        forward: Forward | None = None,
        batch_size: int = 1_000,
    ) -> AveragedCalibration:
        """Calibration of the averaged probabilities, and of the model's own weights, on held-out records."""
        columns = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        own = Posterior(({name: p.detach() for name, p in model.named_parameters()},))
        average, point = (
            torch.cat(
                [
                    each.probabilities(model, *(x[k : k + batch_size] for x in columns), forward=forward)
                    for k in range(0, len(labels), batch_size)
                ]
            )
            for each in (self, own)
        )
        found = [evaluate(each, labels, bins=bins, resamples=resamples) for each in (average, point)]
        return AveragedCalibration(found[0], found[1], len(self))

    def _check(self) -> None:
        if not self.samples:
            raise DataError("the posterior has no sample yet: the chain is still within its burn_in.")


def _call(model: nn.Module, *inputs: Tensor) -> Tensor:
    outputs: Tensor = model(*inputs)
    return outputs


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout; every module goes back to the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training
