"""Fits of many processes on one ledger: charges that were lost, races past a total, files that were tampered with.

A fit that read the ledger, trained, and wrote it in the end lost its charge when it was killed, when another fit wrote
in between, or when the file was reached by a link. A ledger that had been removed began again with nothing on it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipwise as cw
from clipwise.accounting import FederatedRounds, PrivateCalibration
from clipwise.data import PrivateSchema
from clipwise.errors import AccountingError, BudgetSpent, LedgerError
from clipwise.noise import GaussianNoise
from clipwise.sklearn import PrivateClassifier, PrivateRegressor
from clipwise.training import proposal
from tests.conftest import HANG

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(40, 2))
Y = (X[:, 0] > 0).astype(int)
STEP = cw.GaussianSteps(cw.Poisson(100, 10), 2.0)


def classifier(**changes: Any) -> PrivateClassifier:
    options = {"epsilon": 2.0, "steps": 2, "classes": [0, 1], "bounds": (-4, 4), "learning_rate": 0.1, **changes}
    return PrivateClassifier(**options)


def regressor(**changes: Any) -> PrivateRegressor:
    options = {"steps": 2, "target_bounds": (0, 1), "bounds": (-4, 4), "learning_rate": 0.1, **changes}
    return PrivateRegressor(**options)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    cw.Ledger().save(tmp_path / "budget.ledger")
    return tmp_path / "budget.ledger"


def reasons(path: Path) -> set[str]:
    return {event.reason for event in cw.Ledger.load(path).events}


CHARGE = """
import sys
from clipwise.accounting import GaussianSteps, Ledger
from clipwise.errors import BudgetSpent
from clipwise.sampling import Poisson
path, name, count, total = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
print("ready", flush=True)
sys.stdin.readline()
for number in range(count):
    try:
        Ledger.charge(path, [GaussianSteps(Poisson(100, 10), 2.0, reason=f"{name} {number}")], 1e-3, epsilon=total)
        print(f"{name} {number}")
    except BudgetSpent:
        print("spent")
"""


def test_processes_that_race_lose_no_charge_and_do_not_pass_the_total(path: Path) -> None:
    """Four of forty fit into the total."""
    total = cw.epsilon(2.0, STEP.sampling, 4, 1e-3)
    command = [sys.executable, "-c", CHARGE, os.fspath(path)]
    racers = [
        subprocess.Popen(
            [*command, name, "20", repr(total * (1 + 1e-9))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in "ab"
    ]
    for racer in racers:
        assert racer.stdout is not None and racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    printed = [line for racer in racers for line in racer.communicate(timeout=HANG)[0].splitlines()]
    assert reasons(path) == {line for line in printed if line != "spent"} and len(reasons(path)) == 4
    assert printed.count("spent") == 36 and cw.Ledger.load(path).steps == 4


def test_threads_lose_no_charge(path: Path) -> None:
    """A lock of this process is taken over by a later one of the same process."""
    names = [f"fit {number}" for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: cw.Ledger.charge(path, [STEP.changed(reason=name)], 1e-3), names))
    assert reasons(path) == set(names)


def test_the_charge_is_in_the_file_before_any_noise_is_drawn(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    release = GaussianNoise.release

    def watched(*arguments: Any) -> Any:
        seen.append([(event.count, event.noise_multiplier) for event in cw.Ledger.load(path).events])
        return release(*arguments)

    monkeypatch.setattr(GaussianNoise, "release", watched)
    model = classifier(ledger=path, recalibrate=True).fit(X, Y)
    assert len(seen) == 2 + 8 and all(each == seen[0] for each in seen)
    assert seen[0] == [(event.count, event.noise_multiplier) for event in model.ledger_.events]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fit_that_is_killed_stays_charged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cw.Private, "step", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    child = os.fork()
    if not child:
        try:
            classifier(ledger=path).fit(X, Y)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert cw.Ledger.load(path).steps == 2
    monkeypatch.undo()
    classifier(ledger=path).fit(X, Y)  # its lock is gone with it
    assert cw.Ledger.load(path).steps == 4


def test_a_link_is_the_ledger_that_it_points_to(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    for each in (path, link, path):
        classifier(ledger=each).fit(X, Y)
    assert link.is_symlink() and cw.Ledger.load(path).steps == 6


def test_a_saved_ledger_goes_where_its_link_leads(path: Path, tmp_path: Path) -> None:
    """A private schema that was charged to a link left a file in its place, and nothing where the fits charge."""
    link = tmp_path / "link"
    link.symlink_to(path)
    table = tmp_path / "table.csv"
    table.write_text("a,y\n" + "".join(f"{k % 9},{k % 2}\n" for k in range(2_000)))
    proposal(str(table), "y", task="classification", spend=PrivateSchema(1.0), ledger=str(link))
    assert link.is_symlink() and reasons(path) == {"statistics"}


def test_a_private_schema_waits_for_its_turn(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its look at the file and its writing, another charge was lost."""
    table = tmp_path / "table.csv"
    table.write_text("a,y\n" + "".join(f"{k % 9},{k % 2}\n" for k in range(2_000)))
    held: list[bool] = []
    proposed = PrivateSchema.proposed

    def look(self: PrivateSchema, *rest: Any) -> Any:
        held.append(path.with_name(f".{path.name}.lock").exists())
        return proposed(self, *rest)

    monkeypatch.setattr(PrivateSchema, "proposed", look)
    proposal(str(table), "y", task="classification", spend=PrivateSchema(1.0), ledger=str(path))
    assert held == [True]


def test_a_ledger_with_two_names_is_not_charged(path: Path) -> None:
    """Writing replaces the file: the other name kept the ledger without the charge, and could be charged as well."""
    other = path.with_name("other")
    os.link(path, other)
    for each in (path, other):
        with pytest.raises(LedgerError, match="hard links"):
            classifier(ledger=each).fit(X, Y)
    other.unlink()
    classifier(ledger=path).fit(X, Y)


APART = PrivateCalibration(0.5, disjoint=True)


def test_no_fit_of_others_is_known_to_be_disjoint(path: Path) -> None:
    """Of a calibration and all fits only the costlier counted, whatever records the fits were on."""
    with pytest.raises(LedgerError, match="disjoint=False"):
        cw.Ledger.charge(path, [APART], 1e-5)
    cw.Ledger([APART]).save(path)
    with pytest.raises(LedgerError, match="two ledgers"):
        classifier(ledger=path).fit(X, Y)


@pytest.mark.filterwarnings("ignore::clipwise.sklearn.NotCoveredWarning")
def test_what_another_fit_read_off_is_repeated(path: Path) -> None:
    classifier(ledger=path, bounds=None).fit(X, Y)
    warned = classifier(ledger=path, strict=True).fit(X, Y).guarantee_.warnings
    assert any("the bounds of each feature, read off the records by another fit" in warning for warning in warned)


@pytest.mark.parametrize("made", [classifier, regressor])
def test_an_interrupted_fit_leaves_no_weights_with_an_older_guarantee(
    made: Callable[..., Any], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had the weights of the second fit, and the epsilon of the first."""
    model = made(ledger=path, epsilon=0.5).fit(X, Y)
    known = dict(vars(model))

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cw.Ledger, "guarantee", interrupted)
    monkeypatch.setattr(cw.Ledger, "epsilon", lambda *_: 0.0)
    with pytest.raises(KeyboardInterrupt):
        model.set_params(epsilon=50.0).fit(X, Y)
    assert vars(model) == {**known, "epsilon": 50.0}
    assert cw.Ledger.load(path).steps == 4


def _removed(path: Path) -> None:
    path.unlink()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def _emptied(path: Path) -> None:
    path.write_bytes(b"")


def _edited(path: Path) -> None:
    path.write_text(path.read_text().replace('"steps": 2', '"steps": 1'))


@pytest.mark.parametrize("harm", [_removed, _cut, _emptied, _edited], ids=lambda harm: harm.__name__)
def test_a_ledger_that_was_harmed_between_fits_ends_them(
    path: Path, harm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = classifier(ledger=path).fit(X, Y)
    harm(path)
    monkeypatch.setattr(GaussianNoise, "release", lambda *_: pytest.fail("something was released"))
    with pytest.raises(LedgerError):
        model.fit(X, Y)


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (FederatedRounds(cw.Poisson(100, 10), 2.0), AccountingError),
        (cw.GaussianSteps(cw.Poisson(rate=0.1, batch_size=10), 2.0), LedgerError),
        (cw.GaussianSteps(cw.FixedSize(100, 10), 2.0), LedgerError),
    ],
    ids=["clients", "a public rate", "a fixed size"],
)
def test_a_ledger_about_other_neighbours_is_not_charged(path: Path, event: Any, error: type[Exception]) -> None:
    cw.Ledger([event]).save(path)
    with pytest.raises(error):
        classifier(ledger=path).fit(X, Y)
    assert cw.Ledger.load(path).events == (event,)


def test_a_refused_fit_changes_neither_the_ledger_nor_the_estimator(path: Path) -> None:
    model = classifier(ledger=path, delta=1e-3, epsilon_total=2.5).fit(X, Y)
    before, known = path.read_bytes(), dict(vars(model))
    with pytest.raises(BudgetSpent):
        model.fit(X[:30], Y[:30])
    assert path.read_bytes() == before and vars(model) == known


def test_fits_of_one_seed_do_not_cancel() -> None:
    """The weights after one step are proportional to the rate: equal noise would be taken off by a subtraction."""
    one, two = (classifier(random_state=0, steps=1, learning_rate=rate).fit(X, Y).coefs_[0] for rate in (0.1, 0.2))
    fold = classifier(random_state=0, steps=1).fit(X[:-1], Y[:-1]).coefs_[0]
    assert abs(two - 2 * one).min() > 1e-3
    assert abs(one - fold).max() > 0.005  # one record of 40 moves a weight by 0.1 / 40
