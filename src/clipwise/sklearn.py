"""Private classification and regression of tables with the interface of scikit-learn (extra `sklearn`).

An estimator is a small network, trained with DP-SGD by the same `Plan` and `Private` as any other run. Nothing else of
the records is used, if what describes them is public: `classes` and `bounds`. docs/sklearn.md has examples.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import issparse
from torch import Tensor, nn
from torch.nn import functional as F

from clipwise import calibration
from clipwise._validate import is_count, is_positive
from clipwise.accounting import FIT, Guarantee, Ledger, PrivateCalibration, default_delta, noise_scale
from clipwise.calibration import CalibrationResult, PrivateTemperatureScaling, RegressionResult
from clipwise.clipping import Abadi, Clip, Rule
from clipwise.data import TensorRecords
from clipwise.errors import DataError, InvalidPlan, MissingExtra
from clipwise.plan import Plan
from clipwise.private import Private
from clipwise.sampling import Poisson

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise MissingExtra("clipwise.sklearn needs scikit-learn 1.6 or newer: pip install 'clipwise[sklearn]'.") from error

__all__ = ["Defaults", "NotCoveredWarning", "PrivateClassifier", "PrivateRegressor", "defaults"]

Floats: TypeAlias = NDArray[np.float64]
Bounds: TypeAlias = tuple[Any, Any] | Mapping[str, tuple[float, float]]
"""The least and the largest value: two numbers for all columns, two sequences with one for each, or (low, high) by name
of the column."""

_ELSEWHERE = (
    "Not covered: what else was computed from the records, such as a transformer of a pipeline that was fitted to "
    "them, scores on private records by which parameters were chosen, or `calibration_` on private records."
)
_ALONE = "This is about this fit alone. Other fits on the same records add to it: ledger=PATH adds them up."
_TOGETHER = (
    "This is about every fit that the ledger had when this one began, each as if every record were in it. Later fits "
    "add to it."
)
_READ_OFF = ", read off the records: "
"""In the reason of an event: what its fit read off."""
_SEEDED = (
    "The noise was drawn with random_state: there is no privacy from anyone who knows it or guesses it, and it is a "
    "parameter of this estimator. Omit it for a real release."
)


class NotCoveredWarning(UserWarning):
    """Something was read off the private records for a fit, and no epsilon covers it. `strict=True` refuses."""


@dataclass(frozen=True)
class Defaults:
    """What an estimator uses where nothing is said."""

    hidden_sizes: Sequence[int]
    batch_size: float
    """Expected, so it may be a fraction; at most the number of records."""
    steps: int
    clip: Clip | Rule
    learning_rate: float
    recalibration: float
    """The epsilon that a private temperature alone would have, as a share of the whole."""


def defaults(records: int, features: int, outputs: int, epsilon: float) -> Defaults:
    """The choices that follow from public numbers: records, features, outputs (classes, or 1) and epsilon.

    They are provisional: rules of thumb that are reasonable on a handful of tables, and may change. Where there are
    records enough, R is the largest norm of a scaled record, for the sake of calibration; with few, noise matters more.

    >>> defaults(32_561, 108, 2, 1.0)
    Defaults(hidden_sizes=(), batch_size=2035, steps=150, clip=Abadi(R=10.44...), learning_rate=0.038..., ...)
    """
    many = records * epsilon >= 10_000 * (outputs - 1 or 1)
    R = math.sqrt(features + 1) if many else 1.0
    batch_size = min(records, 4_096, max(256, records // 16))
    return Defaults((), batch_size, 150 if many else 60, Abadi(R), 0.4 / R, recalibration=0.25)


@dataclass(eq=False, repr=False)  # scikit-learn's own are by identity, and short
class _PrivateEstimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """What both estimators share: parameters, the charge, training, and the outputs of the network."""

    epsilon: float = 1.0
    delta: float | None = None
    _: KW_ONLY
    bounds: Bounds | None = None
    strict: bool = False
    hidden_sizes: Sequence[int] | None = None
    batch_size: float | None = None
    steps: int | None = None
    clip: Clip | Rule | None = None
    learning_rate: float | None = None
    ledger: str | os.PathLike[str] | None = None
    epsilon_total: float | None = None
    random_state: Any = None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    # Fitting

    def _records(self, X: Any, y: Any = "no_validation", *, fitting: bool = False, **checks: Any) -> tuple[Any, Any]:
        """X as dense float64 numbers, and y if it is given, as scikit-learn checks them."""
        checks |= {"accept_sparse": "csr", "dtype": np.float64, "ensure_min_samples": 1 + fitting}
        found = validate_data(self, X, y, reset=fitting, **checks)
        table, labels = found if isinstance(found, tuple) else (found, None)
        return table.toarray() if issparse(table) else table, labels

    def _fit(
        self, X_NF: Floats, target_N: Tensor, outputs: int, read_off: Sequence[str], recalibrate: bool, **fitted: Any
    ) -> None:
        """Plan, charge, train. What is refused is refused before the charge; from then on the fit is spent.

        Attributes are set at once, `fitted` too: no interruption leaves weights with the guarantee of an earlier fit.
        """
        given = self.bounds
        if isinstance(given, Mapping):
            given = _by_name(given, getattr(self, "feature_names_in_", None))
        bounds, found = _bounds("bounds", given, X_NF, "each feature")
        delta, fit_id, ledger = self._delta(len(X_NF)), secrets.token_hex(8), None
        read_off = [*read_off, *found]
        self._refuse_or_warn(read_off)
        chosen = self._chosen(len(X_NF), X_NF.shape[1], outputs)
        plan = Plan(Poisson(len(X_NF), chosen.batch_size), chosen.steps, chosen.clip)
        scaling: list[PrivateTemperatureScaling] = []
        if recalibrate:
            noise = noise_scale([PrivateCalibration(1.0)], chosen.recalibration * self.epsilon, delta)
            scaling.append(PrivateTemperatureScaling(noise))
        further = [each.event for each in scaling]
        plan = plan.calibrate(self.epsilon, delta, fixed=further)
        if self.ledger is not None:  # the whole fit, before its first noise is drawn
            reason = f"{FIT} {fit_id}{_READ_OFF * bool(read_off)}{', '.join(read_off)}"
            events = [event.changed(reason=reason) for event in (*plan.events, *further)]
            ledger = Ledger.charge(self.ledger, events, delta, epsilon=self.epsilon_total)
        x_NF = torch.from_numpy(_to_unit(X_NF, *bounds)).float()
        with _own_randomness(self.random_state) as seed:
            model = _network([X_NF.shape[1], *chosen.hidden_sizes, outputs])
            optimizer = torch.optim.SGD(model.parameters(), lr=chosen.learning_rate, momentum=0.9)
            private = _trained(Private(plan, model, optimizer, seed=seed), x_NF, target_N)
            with torch.no_grad():
                maps = [replace(each, seed=seed).fit(model(x_NF), target_N, private.ledger) for each in scaling]
        ledger = private.ledger.kept() if ledger is None else ledger
        fitted |= {"plan_": plan, "fit_id_": fit_id, "bounds_": bounds, "ledger_": ledger}
        fitted["coefs_"], fitted["intercepts_"] = _weights(model)
        fitted["temperature_"] = maps[0].temperature if maps else 1.0
        fitted["guarantee_"] = self._guarantee(ledger, fit_id, delta, read_off)
        self.__dict__.pop("calibration_", None)  # of an earlier fit
        self.__dict__.update(fitted)

    def _chosen(self, records: int, features: int, outputs: int) -> Defaults:
        """The defaults, with what the parameters say in their place."""
        given = {name: getattr(self, name) for name in ("hidden_sizes", "batch_size", "steps", "clip", "learning_rate")}
        # A grid of parameters has numbers of NumPy.
        plain = {name: each.item() if isinstance(each, np.generic) else each for name, each in given.items()}
        said = {name: each for name, each in plain.items() if each is not None}
        chosen = replace(defaults(records, features, outputs, self.epsilon), **said)
        rate, sizes, batch = chosen.learning_rate, chosen.hidden_sizes, chosen.batch_size
        if not (is_positive(rate) and is_positive(batch) and all(map(is_count, sizes))):
            raise InvalidPlan(f"learning_rate, batch_size, hidden_sizes must be positive, got {rate, batch, sizes!r}.")
        return replace(chosen, batch_size=min(batch, records))

    def _refuse_or_warn(self, read_off: Sequence[str]) -> None:
        """What is not covered by epsilon is refused with `strict`, and warned about without."""
        if self.strict and self.random_state is not None:
            raise InvalidPlan(f"strict=True with random_state={self.random_state!r}. {_SEEDED}")
        if not read_off:
            return
        found = (
            f"read off the private records, which epsilon does not cover: {', '.join(read_off)}. Give what is public"
        )
        if self.strict:
            raise InvalidPlan(f"strict=True, and this would be {found}.")
        warnings.warn(f"This is {found}; strict=True refuses the rest.", NotCoveredWarning, stacklevel=4)

    def _delta(self, records: int) -> float:
        """The delta of the fit; refuses what cannot be promised."""
        if not is_positive(self.epsilon):
            raise InvalidPlan(f"epsilon must be a positive number, got {self.epsilon!r}.")
        if self.epsilon_total is not None and (self.ledger is None or self.delta is None):
            raise InvalidPlan("epsilon_total is that of all fits on one ledger at one delta: give ledger= and delta=.")
        if self.ledger is not None and self.random_state is not None:
            raise InvalidPlan(
                "ledger= adds up fits that draw independently: omit random_state, which they would share."
            )
        delta = default_delta(records) if self.delta is None else self.delta
        if delta > 1 / records:
            raise InvalidPlan(
                f"delta = {delta:g} is over 1/n = {1 / records:.3g}: such a promise allows publishing a whole record. "
                "Use a delta below 1/n."
            )
        return delta

    def _guarantee(self, ledger: Ledger, fit_id: str, delta: float, read_off: Sequence[str]) -> Guarantee:
        known = ledger.guarantee(delta)
        others = [event.reason for event in ledger.events if not event.reason.startswith(f"{FIT} {fit_id}")]
        theirs = dict.fromkeys(what for reason in others if (what := reason.partition(_READ_OFF)[2]))
        notes = [_ALONE if self.ledger is None else _TOGETHER]
        notes += [f"Not covered: {each}, read off the records." for each in read_off]
        notes += [f"Not covered: {each}, read off the records by another fit on the ledger." for each in theirs]
        notes += [_ELSEWHERE, *([] if self.random_state is None else [_SEEDED])]
        return replace(known, warnings=(*known.warnings, *notes))

    @property
    def epsilon_(self) -> float:
        """The epsilon of `guarantee_`."""
        check_is_fitted(self)
        guarantee: Guarantee = self.guarantee_
        return guarantee.epsilon

    # Predicting

    def _outputs(self, X: Any) -> Floats:
        """What the last layer gives, in double precision: a row does not depend on the rows beside it."""
        check_is_fitted(self)
        hidden = _to_unit(self._records(X)[0], *self.bounds_)
        for coef, intercept in zip(self.coefs_[:-1], self.intercepts_[:-1], strict=True):
            hidden = np.tanh(hidden @ coef + intercept)
        outputs: Floats = hidden @ self.coefs_[-1] + self.intercepts_[-1]
        return outputs


@dataclass(eq=False, repr=False)
class PrivateClassifier(ClassifierMixin, _PrivateEstimator):  # type: ignore[misc]
    """A classifier whose weights are (epsilon, delta)-differentially private.

    `classes` are all labels that there can be, and `bounds=(low, high)` the range of the features, two numbers or two
    sequences in the order of the columns; of a data frame also `bounds={"age": (18, 100), ...}`. Columns are scaled
    from it to [-1, 1], and values beyond are clipped. Both must be public. Without them they are read off the records,
    with a `NotCoveredWarning` that `guarantee_` repeats; `strict=True` refuses.
    `recalibrate=True` spends a part of the same epsilon on a private temperature. None elsewhere means `defaults`.

    `ledger` is a file that all fits with it charge, in whatever process: begin it once with `cw.Ledger().save(path)`.
    A fit that would take it beyond `epsilon_total` at `delta` raises `BudgetSpent`. `random_state` makes a fit
    repeatable, for experiments only: anyone who knows it can remove the noise.

    Fitted: `classes_`, `coefs_`, `intercepts_`, `temperature_`, `bounds_`, `plan_`, `ledger_`, `guarantee_`,
    `epsilon_`, `fit_id_`, and `calibration_` after `evaluate`.

    Guarantees: the whole fit is on the ledger's file before its noise is drawn, and stays there if the fit fails. With
    `strict=True` nothing of X and y is in the fitted estimator but what `guarantee_` covers.

    >>> from sklearn.datasets import load_digits
    >>> X, y = load_digits(return_X_y=True)
    >>> model = PrivateClassifier(epsilon=3.0, classes=range(10), bounds=(0, 16), random_state=0).fit(X, y)
    >>> round(model.epsilon_, 2), model.score(X, y) > 0.9
    (3.0, True)
    """

    _: KW_ONLY
    classes: Sequence[Any] | None = None
    recalibrate: bool = False

    def fit(self, X: Any, y: Any) -> PrivateClassifier:
        """Train on n records; n is public."""
        X_NF, y_N = self._records(X, y, fitting=True)
        check_classification_targets(y_N)
        classes = np.unique(y_N if self.classes is None else np.asarray(self.classes))
        if len(classes) < 2:
            raise DataError("A classifier needs two classes, and there is 1 class: give all there can be as classes=.")
        read_off = ["the classes"] if self.classes is None else []
        self._fit(X_NF, _places(y_N, classes), len(classes), read_off, self.recalibrate, classes_=classes)
        return self

    def decision_function(self, X: Any) -> Floats:
        """The recalibrated logits; of two classes, that of the second minus that of the first."""
        logits: Floats = self._outputs(X) / self.temperature_
        return logits if len(self.classes_) > 2 else logits[:, 1] - logits[:, 0]

    def predict_proba(self, X: Any) -> Floats:
        """The probabilities of the classes, in the order of `classes_`."""
        logits = torch.from_numpy(self._outputs(X) / self.temperature_)
        probabilities: Floats = torch.softmax(logits, dim=1).numpy()
        return probabilities

    def predict(self, X: Any) -> NDArray[Any]:
        """The most probable class of each record."""
        most = self._outputs(X).argmax(axis=1)
        labels: NDArray[Any] = self.classes_[most]
        return labels

    def evaluate(self, X: Any, y: Any, *, bins: int = 15, resamples: int = 0) -> CalibrationResult:
        """Accuracy and calibration on held-out records, as `cw.calibration.evaluate` gives it; also `calibration_`.

        These are exact statistics of X and y: **not covered by epsilon** if they are private.
        """
        check_is_fitted(self)
        _, y_N = self._records(X, y)
        self.calibration_ = calibration.evaluate(
            self.predict_proba(X), _places(y_N, self.classes_), bins=bins, resamples=resamples
        )
        return self.calibration_


@dataclass(eq=False, repr=False)
class PrivateRegressor(RegressorMixin, _PrivateEstimator):  # type: ignore[misc]
    """A regressor of one number whose weights are (epsilon, delta)-differentially private.

    `target_bounds=(low, high)` is the public range of y: targets are clipped to it, and no prediction is outside. All
    else, the guarantee included, is as with `PrivateClassifier`, without classes and recalibration.

    >>> from sklearn.datasets import make_regression
    >>> X, y = make_regression(500, 5, random_state=0)
    >>> model = PrivateRegressor(epsilon=3.0, bounds=(-4, 4), target_bounds=(-500, 500), random_state=0).fit(X, y)
    >>> round(model.epsilon_, 2), model.score(X, y) > 0.5
    (3.0, True)
    """

    _: KW_ONLY
    target_bounds: Bounds | None = None

    def fit(self, X: Any, y: Any) -> PrivateRegressor:
        """Train on n records; n is public."""
        X_NF, y_N = self._records(X, y, fitting=True, y_numeric=True)
        y_N1 = y_N.astype(np.float64).reshape(-1, 1)
        bounds, read_off = _bounds("target_bounds", self.target_bounds, y_N1, "the target")
        target_N = torch.from_numpy(_to_unit(y_N1, *bounds)).float().squeeze(1)
        self._fit(X_NF, target_N, 1, read_off, recalibrate=False, target_bounds_=bounds)
        return self

    def predict(self, X: Any) -> Floats:
        """The prediction for each record."""
        share_N = (self._outputs(X)[:, 0].clip(-1.0, 1.0) + 1.0) / 2.0
        low, high = self.target_bounds_
        predictions: Floats = low * (1.0 - share_N) + high * share_N
        return predictions

    def evaluate(self, X: Any, y: Any, *, resamples: int = 0) -> RegressionResult:
        """Errors on held-out records, as `cw.calibration.evaluate_regression` gives them; also `calibration_`.

        These are exact statistics of X and y: **not covered by epsilon** if they are private.
        """
        check_is_fitted(self)
        _, y_N = self._records(X, y, y_numeric=True)
        self.calibration_ = calibration.evaluate_regression(self.predict(X), y_N, resamples=resamples)
        return self.calibration_


# Tables


def _places(y_N: NDArray[Any], classes: NDArray[Any]) -> Tensor:
    """The place of every label among the classes."""
    place = {label: number for number, label in enumerate(classes.tolist())}
    found = torch.tensor([place.get(label, -1) for label in y_N.tolist()], device="cpu")
    if (found < 0).any():
        kinds = [" and ".join(sorted({type(each).__name__ for each in some})) for some in (y_N.tolist(), place)]
        raise DataError(
            f"{int((found < 0).sum())} of {len(found)} labels are not among the classes. Give every label that there "
            f"can be as classes=[...], as it stands in y: labels are {kinds[0]}, the classes {kinds[1]}."
        )
    return found


def _bounds(name: str, given: Bounds | None, X_NF: Floats, of: str) -> tuple[tuple[Floats, Floats], list[str]]:
    """The bounds of every column, and what to say of them if they are read off the data."""
    if given is None:
        return (X_NF.min(axis=0), X_NF.max(axis=0)), [f"the bounds of {of}"]
    needed = f"{name} must be (low, high), two numbers or two sequences of {X_NF.shape[1]} numbers in the order of X"
    try:
        low, high = (np.asarray(each, np.float64) for each in given)
    except (TypeError, ValueError) as problem:
        raise InvalidPlan(f"{needed}, got {given!r:.200}.") from problem
    wrong = [each.shape for each in (low, high) if each.shape not in ((), X_NF.shape[1:])]
    if wrong:
        raise InvalidPlan(
            f"{needed}, got a sequence of the shape {wrong[0]}. After a transformer the columns are those that it "
            "gives, in its order (get_feature_names_out()); of a data frame they may be named: {'age': (18, 100), ...}."
        )
    low, high = (np.broadcast_to(each, X_NF.shape[1:]).copy() for each in (low, high))
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low <= high).all()):
        raise InvalidPlan(f"{name} must be finite, and no low over its high.")
    return (low, high), []


def _by_name(given: Mapping[str, Any], names: Sequence[str] | None) -> tuple[list[Any], list[Any]]:
    """Bounds by the name of the column as two sequences, in the order of the columns."""
    if names is None:
        raise InvalidPlan(
            "bounds by name need a data frame, whose columns have names; a transformer before gives one after "
            'set_output(transform="pandas").'
        )
    missing, unknown = sorted(set(names) - set(given)), sorted(map(str, set(given) - set(names)))
    if missing or unknown:
        raise InvalidPlan(
            f"bounds by name must be those of every column: not given for {missing[:20]}, not a column {unknown[:20]}."
        )
    wrong = next((name for name in names if not (isinstance(given[name], Sequence) and len(given[name]) == 2)), None)
    if wrong is not None:
        raise InvalidPlan(f"bounds of {wrong!r} must be (low, high), got {given[wrong]!r:.200}.")
    return [given[name][0] for name in names], [given[name][1] for name in names]


def _to_unit(X_NF: Floats, low: Floats, high: Floats) -> Floats:
    """From [low, high] to [-1, 1], clipped; a column that cannot vary is 0.

    >>> _to_unit(np.array([[5.0, 1.0], [-2.0, 1.0]]), np.array([0.0, 1.0]), np.array([4.0, 1.0]))
    array([[ 1.,  0.],
           [-1.,  0.]])
    """
    middle, half = low / 2 + high / 2, high / 2 - low / 2  # no sum or difference that a float cannot hold
    scaled: Floats = (X_NF.clip(low, high) - middle) / np.where(half > 0, half, 1.0)
    return scaled


# Training


@contextlib.contextmanager
def _own_randomness(random_state: Any) -> Iterator[int | None]:
    """The seed, by which initial weights are drawn (or the operating system); global generators stay as they were."""
    seed = None if random_state is None else int(check_random_state(random_state).randint(2**31 - 1))
    of_numpy, of_python = np.random.get_state(), random.getstate()  # noqa: NPY002 - a seeded loader sets them
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(secrets.randbits(63) if seed is None else seed)
            yield seed
    finally:
        np.random.set_state(of_numpy)  # noqa: NPY002
        random.setstate(of_python)


def _network(sizes: Sequence[int]) -> nn.Sequential:
    """Linear layers with tanh between them; the last one begins at 0, so that no class is preferred."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    model = nn.Sequential(*layers[:-1])
    for parameter in model[-1].parameters():
        nn.init.zeros_(parameter)
    return model


def _trained(private: Private, x_NF: Tensor, target_N: Tensor) -> Private:
    """All steps of the plan: cross-entropy for class numbers, the squared error for others."""
    model = private.model
    for x, target in private.loader(TensorRecords(x_NF, target_N), collate_fn=TensorRecords.collate):
        outputs = model(x)
        if target.is_floating_point():
            private.step((outputs.squeeze(1) - target).square())
        else:
            private.step(F.cross_entropy(outputs, target, reduction="none"))
    return private


def _weights(model: nn.Module) -> tuple[list[Floats], list[Floats]]:
    """Of every layer the matrix (inputs x outputs) and what is added, as scikit-learn's own networks have them."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    coefs = [layer.weight.detach().double().numpy().T.copy() for layer in layers]
    return coefs, [layer.bias.detach().double().numpy().copy() for layer in layers]
