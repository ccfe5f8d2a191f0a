"""Recalibration on public data: a map from logits to better probabilities, fitted on samples that were not trained on.

`fit` of a method returns the fitted map, a value with `predict(logits)`; `to_dict` writes it, and `map_of` reads it.
On private data use `PrivateTemperatureScaling`: whatever these here return has seen every calibration record without
noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import optimize
from torch import Tensor

from clipwise._json import Fields
from clipwise._validate import is_finite
from clipwise.calibration.inputs import ArrayLike, checked_labels, matrix
from clipwise.errors import DataError, NotConverged

__all__ = [
    "Isotonic",
    "IsotonicScaling",
    "RecalibrationMap",
    "Temperature",
    "TemperatureScaling",
    "Vector",
    "VectorScaling",
    "calibration_set",
    "limited",
    "map_of",
]

Floats = NDArray[np.float64]
Scores = TypeVar("Scores", Tensor, NDArray[Any])


def calibration_set(logits: ArrayLike, labels: ArrayLike) -> tuple[Tensor, Tensor]:
    """Logits (samples, classes) in float64 and labels, checked."""
    z_BK = _finite(matrix("logits", logits))
    return z_BK, checked_labels(labels, *z_BK.shape)


def _finite(logits: Tensor) -> Tensor:
    z_BK = logits.to("cpu", torch.float64)
    if not bool(torch.isfinite(z_BK).all()):
        raise DataError("logits must be finite for recalibration; remove classes that are ruled out by -inf.")
    return z_BK


def _like(logits: Scores, probabilities: Tensor) -> Scores:
    """In the form of what was given: a tensor on its device, or an array; in at least single precision."""
    if isinstance(logits, Tensor):
        return probabilities.to(logits.device, torch.promote_types(logits.dtype, torch.float32))
    given = np.asarray(logits).dtype
    return probabilities.numpy().astype(given if given in (np.float32, np.float64) else np.float32)


def _predict(logits: Scores, map_: Callable[[Tensor], Tensor], classes: int | None = None) -> Scores:
    z_BK = _finite(matrix("logits", logits))
    if classes is not None and z_BK.shape[1] != classes:
        raise DataError(f"The map was fitted on {classes} classes, the logits have {z_BK.shape[1]}.")
    return _like(logits, map_(z_BK))


class RecalibrationMap(Protocol):
    """A fitted map from logits to probabilities; a further kind is a class here and its place in `_KINDS`."""

    def predict(self, logits: Scores) -> Scores:
        """Probabilities, as a tensor or an array like `logits`."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, with its "kind"."""
        ...


@dataclass(frozen=True)
class Temperature:
    """softmax(logits / temperature): over 1 makes a model less sure of itself, under 1 more. Predictions stay.

    `at_limit` says that the best temperature lies beyond the limits of the search.

    >>> import torch
    >>> Temperature(2.0).predict(torch.tensor([[2.0, 0.0]]))
    tensor([[0.7311, 0.2689]])
    """

    temperature: float
    at_limit: bool = False

    def predict(self, logits: Scores) -> Scores:
        """Probabilities, as a tensor or an array like `logits`."""
        return _predict(logits, lambda z: torch.softmax(z / self.temperature, dim=1))

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; what a private one has cost is on the ledger that it was charged to, and not here."""
        return {"kind": "temperature", "temperature": self.temperature, "at_limit": self.at_limit}

    @classmethod
    def from_fields(cls, fields: Fields) -> Temperature:
        """What `to_dict` wrote."""
        temperature = fields.number("temperature", 0.0)
        if not temperature or not isinstance(fields.value["at_limit"], bool):
            fields.fail("temperature", "over 0, with at_limit true or false")
        return Temperature(temperature, fields.value["at_limit"])


@dataclass(frozen=True)
class TemperatureScaling:
    """One number for all classes (Guo et al. 2017): the temperature with the smallest NLL, found within the limits.

    >>> import torch
    >>> TemperatureScaling().fit(torch.tensor([[4.0, 0.0]] * 4), torch.tensor([0, 0, 0, 1])).predict(
    ...     torch.tensor([[4.0, 0.0]]))  # three out of four were right
    tensor([[0.7500, 0.2500]])
    """

    low: float = 0.05
    high: float = 20.0

    def __post_init__(self) -> None:
        limited(self.low, self.high)

    def fit(self, logits: ArrayLike, labels: ArrayLike) -> Temperature:
        """The fitted temperature."""
        z_BK, label_B = calibration_set(logits, labels)
        true_B = z_BK.gather(1, label_B[:, None])[:, 0]

        def slope(log_inverse: float) -> float:
            """Of the NLL as a function of b = 1/T: E z - z_true, which rises with b."""
            probability = torch.softmax(z_BK * math.exp(log_inverse), dim=1)
            return float(((probability * z_BK).sum(dim=1) - true_B).mean())

        return _solve(slope, self.low, self.high)


def limited(low: float, high: float) -> None:
    """Refuse limits of a temperature that are none."""
    if not 0 < low < high < math.inf:
        raise DataError(f"The limits of the temperature must be 0 < low < high, got {low!r} and {high!r}.")


def _solve(rising: Callable[[float], float], low: float, high: float) -> Temperature:
    """The temperature at the root of a function that rises with log(1/T), or the limit that is nearest to it."""
    first, last = -math.log(high), -math.log(low)
    if rising(first) >= 0:
        return Temperature(high, at_limit=True)
    if rising(last) <= 0:
        return Temperature(low, at_limit=True)
    return Temperature(math.exp(-float(optimize.brentq(rising, first, last, xtol=1e-12))))


@dataclass(frozen=True)
class Vector:
    """softmax(scale * logits + shift), a scale and a shift per class."""

    scale: tuple[float, ...]
    shift: tuple[float, ...]

    def predict(self, logits: Scores) -> Scores:
        """Probabilities, as a tensor or an array like `logits`."""
        scale, shift = (torch.tensor(values, dtype=torch.float64) for values in (self.scale, self.shift))
        return _predict(logits, lambda z: torch.softmax(z * scale + shift, dim=1), len(self.scale))

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"kind": "vector", "scale": list(self.scale), "shift": list(self.shift)}

    @classmethod
    def from_fields(cls, fields: Fields) -> Vector:
        """What `to_dict` wrote."""
        scale, shift = (tuple(map(float, fields.many(name, is_finite, "numbers"))) for name in ("scale", "shift"))
        if len(scale) != len(shift) or not scale:
            fields.fail("shift", "as many numbers as there are in scale")
        return cls(scale, shift)


@dataclass(frozen=True)
class VectorScaling:
    """A scale and a shift per class (Guo et al. 2017): those with the smallest NLL plus penalty.

    The penalty is `penalty` times the squared distance from scale 1, shift 0, and keeps them finite where classes are
    separated. Needs many more samples than classes.
    """

    penalty: float = 1e-4

    def fit(self, logits: ArrayLike, labels: ArrayLike) -> Vector:
        """The fitted scales and shifts (L-BFGS in float64)."""
        if not 0 < self.penalty < math.inf:
            raise DataError(f"penalty must be a positive number, got {self.penalty!r}.")
        z_BK, label_B = calibration_set(logits, labels)
        samples, classes = z_BK.shape
        start = np.concatenate([np.ones(classes), np.zeros(classes)])

        def loss(parameters: Floats) -> tuple[float, Floats]:
            scale, shift = torch.from_numpy(parameters).split(classes)
            log_probability = torch.log_softmax(z_BK * scale + shift, dim=1)
            slope_BK = log_probability.exp()
            slope_BK[torch.arange(samples), label_B] -= 1
            gradient = torch.cat([(slope_BK * z_BK).mean(dim=0), slope_BK.mean(dim=0)]).numpy()
            nll = -float(log_probability.gather(1, label_B[:, None]).mean())
            away = parameters - start
            return nll + self.penalty * float(away @ away), gradient + 2 * self.penalty * away

        found = optimize.minimize(
            loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 5_000, "ftol": 1e-14, "gtol": 1e-8}
        )
        if not found.success:
            raise NotConverged(f"Vector scaling did not converge: {found.message}. Use temperature scaling.")
        return Vector(tuple(found.x[:classes].tolist()), tuple(found.x[classes:].tolist()))


@dataclass(frozen=True, eq=False)
class Isotonic:
    """A rising, piecewise linear map of each class's probability, then rows are normalised."""

    knots: tuple[tuple[Floats, Floats], ...] = field(repr=False)

    def predict(self, logits: Scores) -> Scores:
        """Probabilities, as a tensor or an array like `logits`."""
        return _predict(logits, self._map, len(self.knots))

    def _map(self, z_BK: Tensor) -> Tensor:
        probability = torch.softmax(z_BK, dim=1).numpy()
        mapped = np.stack([np.interp(p, *knots) for p, knots in zip(probability.T, self.knots, strict=True)], axis=1)
        total = mapped.sum(axis=1, keepdims=True)
        uniform = np.full_like(mapped, 1.0 / len(self.knots))
        return torch.from_numpy(np.divide(mapped, total, out=uniform, where=total > 0))

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: for each class its probabilities, which rise, and what they are mapped to."""
        return {"kind": "isotonic", "knots": [[x.tolist(), y.tolist()] for x, y in self.knots]}

    @classmethod
    def from_fields(cls, fields: Fields) -> Isotonic:
        """What `to_dict` wrote."""
        what = "pairs of lists of probabilities of one length, the first of which rises"
        knots = fields.many("knots", _is_knots, what)
        if not knots:
            fields.fail("knots", f"a list of {what}")
        return cls(tuple((np.array(x, dtype=np.float64), np.array(y, dtype=np.float64)) for x, y in knots))


def _is_knots(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(part, list) for part in value):
        return False
    x, y = value
    shares = all(is_finite(each) and 0 <= each <= 1 for each in (*x, *y))
    return shares and len(x) == len(y) > 0 and all(a < b for a, b in pairwise(x))


_KINDS: dict[str, tuple[type[Any], tuple[str, ...]]] = {
    "temperature": (Temperature, ("kind", "temperature", "at_limit")),
    "vector": (Vector, ("kind", "scale", "shift")),
    "isotonic": (Isotonic, ("kind", "knots")),
}
"""The maps that can be read, with the fields of each."""


def map_of(record: Mapping[str, Any], where: str = "the map") -> RecalibrationMap:
    """The fitted map that `to_dict` wrote; one that was edited or cut is a `DataError` that names `where` it stands.

    A private temperature comes back as a plain one: the ledger of its run says what it has cost.

    >>> map_of(Temperature(2.0).to_dict())
    Temperature(temperature=2.0, at_limit=False)
    """
    found = Fields(record, where)
    kind = found.text("kind")
    if kind not in _KINDS:
        found.fail("kind", f"one of {', '.join(_KINDS)}")
    made, names = _KINDS[kind]
    read: RecalibrationMap = made.from_fields(found.closed(names))
    return read


@dataclass(frozen=True)
class IsotonicScaling:
    """Isotonic regression of each class against the rest (Zadrozny & Elkan 2002): any rising map, no shape assumed.

    The most flexible: it wants thousands of samples, can change predictions and can give a class the probability 0,
    which makes the NLL infinite where that class is the truth.
    """

    def fit(self, logits: ArrayLike, labels: ArrayLike) -> Isotonic:
        """The fitted maps."""
        z_BK, label_B = calibration_set(logits, labels)
        probability = torch.softmax(z_BK, dim=1).numpy()
        return Isotonic(tuple(_isotonic(p, label_B.numpy() == k) for k, p in enumerate(probability.T)))


def _isotonic(probability: Floats, positive: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """The knots of the best rising map of probability to frequency; equal probabilities are one point."""
    x, inverse, count = np.unique(probability, return_inverse=True, return_counts=True)
    frequency = np.bincount(inverse, weights=positive) / count
    y = optimize.isotonic_regression(frequency, weights=count).x
    ends = np.ones(len(x), dtype=bool)
    ends[1:-1] = (y[1:-1] != y[:-2]) | (y[1:-1] != y[2:])  # points inside a level stretch say nothing
    return x[ends], y[ends]
