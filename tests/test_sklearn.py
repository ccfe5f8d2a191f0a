"""The estimators: what scikit-learn expects of them, and what they say of privacy."""

from __future__ import annotations

import importlib
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import make_blobs, make_regression
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.utils.estimator_checks import estimator_checks_generator

import clipwise as cw
from clipwise.accounting import GaussianSteps, PrivateCalibration
from clipwise.errors import BudgetSpent, DataError, InvalidPlan, LedgerError, MissingExtra
from clipwise.sklearn import NotCoveredWarning, PrivateClassifier, PrivateRegressor, defaults

X, NUMBERS = make_blobs(60, centers=[[-2.0, 0.0], [2.0, 1.0]], random_state=0)
Y = np.array(["no", "yes"])[NUMBERS]
PUBLIC: dict[str, Any] = {"classes": ["no", "yes"], "bounds": (-6.0, 6.0)}
QUICK: dict[str, Any] = {"epsilon": 8.0, "steps": 3, "learning_rate": 0.5}


def classifier(**changes: Any) -> PrivateClassifier:
    return PrivateClassifier(**{**QUICK, **PUBLIC, **changes})


def regressor(**changes: Any) -> PrivateRegressor:
    options = {**QUICK, "bounds": (-6.0, 6.0), "target_bounds": (-10.0, 10.0)}
    return PrivateRegressor(**{**options, **changes})


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "budget.ledger"
    cw.Ledger().save(path)
    return path


# scikit-learn's own checks, without public classes and bounds

CHECKED = [PrivateClassifier(epsilon=50.0, steps=5), PrivateRegressor(epsilon=50.0, steps=20)]


def checks() -> Iterator[Any]:
    """All of a classifier. Those of them that a regressor has too are with the slow tests: most of it is the same."""
    seen: set[str] = set()
    for estimator in CHECKED:
        found = [(check.func.__name__, made, check) for made, check in estimator_checks_generator(estimator)]
        for name, made, check in found:
            marks = [pytest.mark.slow] if name in seen else []
            yield pytest.param(made, check, id=f"{type(estimator).__name__}-{name}", marks=marks)
        seen |= {name for name, *_ in found}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("estimator", "check"), list(checks()))
def test_scikit_learn_checks(estimator: Any, check: Callable[[Any], None]) -> None:
    check(estimator)


# What an estimator does


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_columns_of_a_table_have_their_names(package: str) -> None:
    frames = pytest.importorskip(package)
    table = frames.DataFrame({"a": X[:, 0], "b": X[:, 1]})
    model = classifier().fit(table, frames.Series(Y))
    assert model.feature_names_in_.tolist() == ["a", "b"] and model.n_features_in_ == 2
    assert set(model.predict(table)) <= {"no", "yes"}
    with pytest.raises(ValueError, match="feature names"):
        model.predict(table[["b", "a"]])


def test_a_fitted_estimator_survives_clone_and_pickle() -> None:
    model = classifier(recalibrate=True, hidden_sizes=(4,)).fit(X, Y)
    again = pickle.loads(pickle.dumps(model))
    assert (again.predict_proba(X) == model.predict_proba(X)).all()
    assert again.guarantee_ == model.guarantee_ and again.ledger_ == model.ledger_
    fresh = clone(model).set_params(hidden_sizes=())
    assert fresh.recalibrate and len(fresh.fit(X, Y).coefs_) == 1
    with pytest.raises(NotFittedError):
        _ = clone(model).epsilon_


def test_public_classes_may_be_absent_from_the_records() -> None:
    model = classifier(classes=["yes", "no", "maybe"]).fit(X, Y)
    assert model.classes_.tolist() == ["maybe", "no", "yes"] and model.predict_proba(X).shape == (60, 3)
    with pytest.raises(DataError, match=r"30 of 60 labels .* classes=\[\.\.\.\], as it stands in y: labels are str"):
        classifier(classes=["no", "maybe"]).fit(X, Y)


def test_values_beyond_the_bounds_count_as_the_bounds() -> None:
    model = classifier(bounds=([-6.0, -6.0], [6.0, 6.0])).fit(X, Y)
    assert (model.predict_proba([[1e300, 0.0]]) == model.predict_proba([[6.0, 0.0]])).all()
    with pytest.raises(InvalidPlan, match="sequences of 2 numbers"):
        classifier(bounds=([0, 0, 0], [1, 1, 1])).fit(X, Y)
    with pytest.raises(InvalidPlan, match=r"in the order of X, got a sequence of the shape \(3,\)\. After a transf"):
        classifier(bounds=([0, 0, 0], [1, 1, 1])).fit(X, Y)
    with pytest.raises(InvalidPlan, match="no low over its high"):
        classifier(bounds=(1, 0)).fit(X, Y)


def test_bounds_may_be_given_by_the_names_of_the_columns() -> None:
    frames = pytest.importorskip("pandas")
    table = frames.DataFrame({"b": X[:, 1], "a": X[:, 0]})
    named = {"a": (-6.0, 5.0), "b": (-4.0, 3.0)}
    model = clone(classifier(bounds=named)).fit(table, Y)
    assert [each.tolist() for each in model.bounds_] == [[-4.0, -6.0], [3.0, 5.0]]
    for bounds, data, message in (
        (named, X, r"set_output\(transform=\"pandas\"\)"),
        ({"a": (0, 1), "c": (0, 1)}, table, r"not given for \['b'\], not a column \['c'\]"),
        ({"a": (0, 1), "b": 3.0}, table, r"bounds of 'b' must be \(low, high\), got 3.0"),
    ):
        with pytest.raises(InvalidPlan, match=message):
            classifier(bounds=bounds).fit(data, Y)


def test_a_regression_predicts_within_its_bounds() -> None:
    inputs, target = make_regression(200, 2, random_state=0)
    model = regressor(epsilon=20.0, steps=60, target_bounds=(-50.0, 50.0)).fit(inputs, target)
    assert abs(model.predict(100 * inputs)).max() <= 50.0
    result = model.evaluate(inputs, target.clip(-50, 50))
    assert result is model.calibration_ and result.r2 > 0.5
    assert "calibration_" not in vars(model.fit(inputs, target))


def test_evaluation_takes_labels_as_they_are() -> None:
    model = classifier(steps=20).fit(X, Y)
    result = model.evaluate(X, Y, bins=5)
    assert result is model.calibration_ and result.accuracy == pytest.approx(model.score(X, Y))
    with pytest.raises(DataError, match="1 of 1 labels"):
        model.evaluate(X[:1], ["perhaps"])


def test_global_generators_stay_as_they_were() -> None:
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    expected = torch.rand(1), np.random.rand()  # noqa: NPY002
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    classifier(random_state=0).fit(X, Y)
    assert (torch.rand(1), np.random.rand()) == expected  # noqa: NPY002


def test_a_seed_repeats_a_fit_and_its_absence_does_not() -> None:
    seeded = [classifier(random_state=0, recalibrate=True).fit(X, Y).predict_proba(X) for _ in range(2)]
    assert (seeded[0] == seeded[1]).all()
    torch.manual_seed(0)
    first = classifier().fit(X, Y).coefs_[0]
    torch.manual_seed(0)
    assert (classifier().fit(X, Y).coefs_[0] != first).all()


def test_without_scikit_learn_the_import_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    monkeypatch.delitem(sys.modules, "clipwise.sklearn")
    with pytest.raises(MissingExtra, match=r"pip install 'clipwise\[sklearn\]'"):
        importlib.import_module("clipwise.sklearn")


# The examples of docs/sklearn.md


def example(number: int) -> str:
    text = (Path(__file__).parent.parent / "docs" / "sklearn.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[number]


def test_the_example_of_a_table_with_text_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pandas = pytest.importorskip("pandas")
    random = np.random.default_rng(0)
    pandas.DataFrame(
        {
            "age": random.integers(17, 91, 400),
            "education-num": (learnt := random.integers(1, 17, 400)),
            "capital-gain": random.integers(0, 99_999, 400),
            "hours-per-week": random.integers(1, 100, 400),
            "marital-status": random.choice(["Divorced", "Widowed"], 400),
            "occupation": random.choice(["?", "Sales"], 400),
            "sex": random.choice(["Female", "Male"], 400),
            "income-per-year": np.where(learnt > 8, ">50K", "<=50K"),
        }
    ).to_csv(tmp_path / "adult.csv", index=False)
    monkeypatch.chdir(tmp_path)
    exec(example(0), {})
    assert re.match(r"accuracy [01]\.\d+, ECE 0\.\d+, epsilon 1\.000\n\(1\.000, 0\.001\)-diff", capsys.readouterr().out)


def test_the_example_of_many_fits_prints_their_epsilon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(example(1), {})
    assert f"# {capsys.readouterr().out.strip()}" in example(1)


# What it says of privacy


def test_what_is_read_off_the_records_is_named() -> None:
    with pytest.warns(NotCoveredWarning, match="cover: the classes, the bounds of each feature"):
        model = classifier(classes=None, bounds=None).fit(X, Y)
    assert {"Not covered: the classes, read off the records."} < set(model.guarantee_.warnings)
    with pytest.warns(NotCoveredWarning, match="cover: the bounds of the target. Give"):
        assert "target" in str(regressor(target_bounds=None).fit(X, X[:, 0]).guarantee_.warnings)
    assert not any("read off" in each for each in classifier().fit(X, Y).guarantee_.warnings)


@pytest.mark.parametrize("changes", [{"classes": None}, {"bounds": None}, {"random_state": 0}])
def test_strict_refuses_what_epsilon_does_not_cover(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidPlan, match="strict=True"):
        classifier(strict=True, **changes).fit(X, Y)


def test_a_strict_fit_keeps_nothing_of_the_records_but_what_was_noised() -> None:
    """All attributes but the weights are the same for other records of the same number."""
    kept = []
    for inputs, labels in ((X, Y), (np.zeros_like(X), ["yes"] * len(X))):
        fitted = vars(classifier(strict=True).fit(inputs, labels))
        assert {"coefs_", "intercepts_", "fit_id_", "guarantee_"} <= set(fitted)
        kept.append({name: value for name, value in fitted.items() if name not in ("coefs_", "intercepts_", "fit_id_")})
        kept[-1]["guarantee_"] = replace(kept[-1]["guarantee_"], seconds=0.0)
    assert all(np.array_equal(kept[0][name], kept[1][name]) for name in kept[0]) and set(kept[0]) == set(kept[1])


def test_a_fit_spends_its_epsilon_and_says_that_it_is_alone() -> None:
    model = classifier(epsilon=1.0, delta=1e-3).fit(X, Y)
    assert 0.99 < model.epsilon_ <= 1.0 and model.guarantee_.delta == 1e-3
    assert model.guarantee_.relation == "zero_out" and model.guarantee_.warnings[0].startswith("This is about this fit")
    assert "random_state" not in str(model.guarantee_) and "random_state" in str(
        classifier(random_state=1).fit(X, Y).guarantee_.warnings
    )


def test_recalibration_is_inside_the_same_epsilon() -> None:
    plain, model = (classifier(epsilon=1.0, recalibrate=each).fit(X, Y) for each in (False, True))
    assert 0.99 < model.epsilon_ <= 1.0 and model.temperature_ != 1.0 and plain.temperature_ == 1.0
    assert [type(event) for event in model.ledger_.events] == [GaussianSteps, PrivateCalibration]
    assert 1.0 < model.plan_.noise_multiplier / plain.plan_.noise_multiplier < 1.1
    logits = model.decision_function(X)
    assert np.allclose(model.predict_proba(X)[:, 1], 1 / (1 + np.exp(-logits)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"delta": 0.5}, "over 1/n"),
        ({"epsilon": 0.0}, "epsilon must be"),
        ({"epsilon_total": 3.0}, "give ledger= and delta="),
        ({"epsilon_total": 3.0, "ledger": "x"}, "give ledger= and delta="),
        ({"ledger": "x", "random_state": 0}, "omit random_state"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"hidden_sizes": (3, 0)}, "hidden_sizes"),
        *(
            ({"batch_size": size}, "batch_size, hidden_sizes must be")
            for size in (float("nan"), float("inf"), True, "8", -0.5)
        ),
        ({"clip": cw.NoClip()}, "private"),
    ],
)
def test_what_cannot_be_promised_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidPlan, match=message):
        classifier(**changes).fit(X, Y)


def test_defaults_follow_from_public_numbers() -> None:
    few, many = defaults(100, 8, 2, 1.0), defaults(100_000, 8, 2, 1.0)
    assert few.batch_size == 100 and many.batch_size == 4_096 and many.clip.R == 3.0
    with pytest.warns(NotCoveredWarning):
        model = PrivateClassifier(steps=np.int64(2), batch_size=1_000).fit(X, Y)
    assert model.plan_.steps == 2 and model.plan_.batch_size == 60
    for size in (12.5, np.float32(12.5)):
        assert classifier(batch_size=size, steps=2).fit(X, Y).plan_.sampling == cw.Poisson(60, 12.5)


# Fits on one ledger


def test_every_fit_charges_the_ledger_under_its_name(ledger: Path) -> None:
    first = classifier(ledger=ledger, recalibrate=True).fit(X, Y)
    second = clone(first).fit(X, Y)
    events = cw.Ledger.load(ledger).events
    assert [event.reason for event in events] == 2 * [f"fit {first.fit_id_}"] + 2 * [f"fit {second.fit_id_}"]
    assert first.guarantee_.kind == "numerically exact" and second.guarantee_.kind == "upper bound"
    assert cw.Ledger.load(ledger).guarantee(1e-2).kind == "upper bound", "who has the file reads the same"
    assert first.epsilon_ <= 8.0 < second.epsilon_ == cw.Ledger.load(ledger).epsilon(1e-2)
    assert second.guarantee_.warnings[0].startswith("This is about every fit that the ledger had")


def test_what_is_charged_is_what_is_released(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[cw.Private] = []
    made = cw.Private.__init__
    monkeypatch.setattr(
        cw.Private, "__init__", lambda run, *args, **more: (made(run, *args, **more), runs.append(run))[0]
    )
    model = classifier(ledger=ledger, recalibrate=True).fit(X, Y)
    charged = [event.changed(reason="") for event in model.ledger_.events]
    assert charged == [event.changed(reason="") for event in runs[0].ledger.events]


def test_cross_validation_charges_every_fit(ledger: Path) -> None:
    cross_val_score(classifier(ledger=ledger), X, Y, cv=3)
    GridSearchCV(classifier(ledger=ledger), {"learning_rate": [0.1, 1.0]}, cv=2).fit(X, Y)
    assert len(cw.Ledger.load(ledger).events) == 3 + 4 + 1


@pytest.mark.slow
def test_worker_processes_charge_the_same_ledger(ledger: Path) -> None:
    cross_val_score(classifier(ledger=ledger), X, Y, cv=6, n_jobs=2)
    assert len(cw.Ledger.load(ledger).events) == 6


def test_a_fit_beyond_the_total_is_refused_before_anything_is_released(ledger: Path) -> None:
    model = classifier(ledger=ledger, delta=1e-3, epsilon=1.0, epsilon_total=2.0)
    model.fit(X, Y)
    weights = model.coefs_[0].copy()
    clone(model).fit(X, Y)
    before = ledger.read_bytes()
    with pytest.raises(BudgetSpent, match="the total is to be 2"):
        model.set_params(epsilon=2.0).fit(X, Y)
    assert ledger.read_bytes() == before and (model.coefs_[0] == weights).all()


def test_a_ledger_that_is_not_there_is_not_begun(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="Begin one, once"):
        classifier(ledger=tmp_path / "typo.ledger").fit(X, Y)
    assert not [*tmp_path.iterdir()]
