"""Correlated noise: it is C^-1 Z in units of each step's own deviation, and what a record moves is what is charged."""

from __future__ import annotations

import itertools
import json
import math
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

import clipwise as cw
from clipwise.accounting import account
from clipwise.correlation import CORRELATIONS, Correlation, Independent
from clipwise.entropy import Entropy
from clipwise.errors import AccountingError, CheckpointError, InvalidPlan, InvalidSampling, LedgerError
from clipwise.mechanisms import ProjectedNorms
from clipwise.noise import GaussianNoise, chain_of
from clipwise.sampling import Draws, Sampling

from .common import data, losses_of, mlp, plan, sgd

Matrix = npt.NDArray[np.float64]
T = 12
CYCLIC, ORDERED, SHUFFLED = cw.CyclicPoisson(40, 5, 4), cw.Shuffled(40, 10, reshuffle=False), cw.Shuffled(40, 10)


@dataclass(frozen=True)
class Row:
    """A correlation, a sampling that it is accounted with, and others that it is not."""

    correlation: Correlation
    sampling: Sampling
    refused: tuple[Sampling, ...]
    written: dict[str, Any]
    wrong: tuple[dict[str, Any], ...] = ()


OTHERS = (
    cw.Poisson(40, 5),
    cw.Poisson(rate=0.1, batch_size=5),
    cw.FullBatch(40),
    cw.FixedSize(40, 5),
    cw.BallsInBins(40, 5),
)
ROWS = [
    Row(cw.Independent(), OTHERS[0], (), {}),
    Row(
        cw.Banded(4, momentum=0.5),
        CYCLIC,
        (*OTHERS, SHUFFLED, cw.CyclicPoisson(40, 5, 3), cw.Shuffled(40, 14, reshuffle=False)),
        {"kind": "banded", "bands": 4, "momentum": 0.5, "learning_rates": None},
        ({"bands": 0}, {"bands": 2.0}, {"bands": 2_000}, {"momentum": 1.0}, {"momentum": -0.1}, {"learning_rates": ()}),
    ),
    Row(
        cw.SquareRoot(4),
        ORDERED,
        (*OTHERS, SHUFFLED, cw.CyclicPoisson(40, 5, 3), cw.Shuffled(40, 14, reshuffle=False)),
        {"kind": "square_root", "bands": 4},
        ({"bands": True}, {"bands": -1}),
    ),
    Row(cw.Tree(), SHUFFLED, (*OTHERS, CYCLIC), {"kind": "tree"}),
]
CORRELATED = ROWS[1:]
each = pytest.mark.parametrize("row", ROWS, ids=lambda row: type(row.correlation).__name__)
each_correlated = pytest.mark.parametrize("row", CORRELATED, ids=lambda row: type(row.correlation).__name__)


def of(row: Row, **changes: Any) -> cw.Plan:
    return plan(**{"sampling": row.sampling, "steps": T, "correlation": row.correlation, **changes})


# The values ---------------------------------------------------------------------------------------------------------


def test_every_correlation_has_a_row() -> None:
    assert {type(row.correlation) for row in ROWS} == set(CORRELATIONS.values())


@each
def test_a_plan_and_its_ledger_are_written_down_and_read_again(row: Row) -> None:
    planned = of(row)
    assert cw.Plan.from_dict(json.loads(json.dumps(planned.to_dict()))) == planned
    (event,) = planned.events
    assert cw.Ledger.from_json(cw.Ledger(planned.events).to_json()).events == (event,)
    written = json.loads(cw.Ledger(planned.events).to_json())["events"][0].get("correlation", {})
    assert written == row.written
    assert ("correlation" in planned.to_dict()) == bool(row.written)


@each_correlated
def test_samplings_in_which_a_record_meets_its_own_noise_are_refused(row: Row) -> None:
    for sampling in row.refused:
        with pytest.raises(InvalidPlan, match="is not accounted for"):
            of(row, sampling=sampling)
        with pytest.raises(AccountingError, match="is not accounted for"):
            cw.GaussianSteps(sampling, 1.0, correlation=row.correlation)


@each
def test_arguments_that_make_no_sense_are_refused(row: Row) -> None:
    for wrong in row.wrong:
        with pytest.raises(InvalidPlan):
            replace(row.correlation, **wrong)  # type: ignore[type-var]


@each_correlated
def test_what_has_no_proof_is_refused(row: Row) -> None:
    with pytest.raises(InvalidPlan, match="has no proof"):
        of(row, noise_multiplier=cw.Steps({0: 2.0, 3: 1.0}))
    assert of(row, noise_multiplier=cw.Steps({0: 2.0, 3: 2.0})).noise_multiplier == 2.0
    with pytest.raises(InvalidPlan, match=r"no proof for|not for ProjectedNorms"):
        of(row, mechanism=ProjectedNorms(60))
    with pytest.raises(InvalidPlan, match="correlation must be Independent, Banded, SquareRoot or Tree"):
        of(row, correlation=4)


def test_a_class_of_ones_own_is_refused() -> None:
    class Larger(cw.Banded):
        def coefficients(self, steps: int) -> Matrix:
            return 10.0 * super().coefficients(steps)

    with pytest.raises(InvalidPlan):
        of(CORRELATED[0], correlation=Larger(4))
    with pytest.raises(AccountingError):
        cw.GaussianSteps(CYCLIC, 1.0, correlation=Larger(4))


# The matrices -------------------------------------------------------------------------------------------------------


def band_matrix(column: Sequence[float], steps: int) -> Matrix:
    C = np.zeros((steps, steps))
    for j in range(steps):
        for k, value in enumerate(column[: steps - j]):
            C[j + k, j] = value
    return C


def tree_sums(steps: int) -> Matrix:
    """One row for each finished sum of a binary tree over the steps, those that end first coming first."""
    rows = []
    for end in range(1, steps + 1):
        size = 1
        while end % size == 0:
            row = np.zeros(steps)
            row[end - size : end] = 1.0
            rows.append(row)
            size *= 2
    return np.array(rows)


def matrix(row: Row, steps: int) -> Matrix:
    """C of a chain of so many steps, scaled as it is used; of a tree the matrix of its sums."""
    if isinstance(row.correlation, cw.Tree):
        return tree_sums(steps) / math.sqrt(row.correlation.height(4))
    return band_matrix(row.correlation.coefficients(T), steps)  # type: ignore[attr-defined]


def lengths(row: Row) -> list[int]:
    """Steps of the chains of a run."""
    return [4, 4, 4] if isinstance(row.correlation, cw.Tree) else [T]


@each_correlated
def test_no_participation_moves_more_than_is_charged(row: Row) -> None:
    """Brute force: every pattern that the sampling allows, all contributions in one direction or in any."""
    first = 0
    worst = 0.0
    for pattern in patterns(row.sampling):
        square, first = 0.0, 0
        for length in lengths(row):
            joined = np.array(pattern[first : first + length], dtype=float)
            C = matrix(row, length)
            # The most over directions of the contributions of norm 1: entries of C'C in absolute value.
            square += float(joined @ np.abs(C.T @ C) @ joined)
            first += length
        worst = max(worst, square)
    (event,) = of(row).events
    charged = account([event], 1e-5).epsilon
    uses = 3  # of each record, in twelve steps of groups or epochs of four
    gaussian = account([cw.GaussianSteps(cw.FullBatch(40), 1.0, uses)], 1e-5).epsilon
    assert worst <= uses + 1e-9
    if isinstance(row.sampling, cw.CyclicPoisson):
        poisson = cw.GaussianSteps(cw.Poisson(10, 5), 1.0, uses)
        assert charged == pytest.approx(account([poisson], 1e-5).epsilon, rel=1e-9)
    else:
        assert charged == pytest.approx(gaussian, rel=1e-9)


def patterns(sampling: Sampling) -> list[tuple[bool, ...]]:
    """In which of the steps a record may be."""
    if isinstance(sampling, cw.CyclicPoisson):
        groups = [[t for t in range(T) if t % sampling.bands == g] for g in range(sampling.bands)]
        chosen = {c for group in groups for k in range(len(group) + 1) for c in itertools.combinations(group, k)}
    else:
        epochs = [range(first, first + 4) for first in range(0, T, 4)]
        chosen = set(itertools.product(*epochs))
        if not sampling.reshuffle:  # type: ignore[union-attr]
            chosen = {c for c in chosen if c[1] - c[0] == c[2] - c[1] == 4}
    return [tuple(t in c for t in range(T)) for c in chosen]


def test_the_first_column_has_length_one_and_the_others_no_more() -> None:
    for correlation in (cw.Banded(5), cw.Banded(3, 0.9), cw.SquareRoot(6), cw.Banded(40), cw.SquareRoot(40)):
        norms = np.linalg.norm(band_matrix(correlation.coefficients(30), 30), axis=0)
        assert norms[0] == pytest.approx(min(1.0, norms[0])) and norms.max() <= 1 + 1e-12


def test_square_root_is_the_series_of_one_over_the_root() -> None:
    column = cw.SquareRoot(10).coefficients(10)
    square = np.convolve(column, column)[:10] / column[0] ** 2
    np.testing.assert_allclose(square, 1.0, rtol=1e-12)


def workload(steps: int, momentum: float, rates: Sequence[float]) -> Matrix:
    A = np.zeros((steps, steps))
    for t in range(steps):
        for i in range(t + 1):
            A[t, i] = sum(rates[s] * momentum ** (s - i) for s in range(i, t + 1))
    return A


@pytest.mark.parametrize("rates", [None, tuple(1.0 / (t + 1) for t in range(20))])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_error_is_that_of_the_dense_matrices(momentum: float, rates: tuple[float, ...] | None) -> None:
    correlation = cw.Banded(4, momentum, rates)
    C = band_matrix(correlation.coefficients(20), 20)
    A = workload(20, momentum, [rate / max(rates) for rate in rates] if rates else [1.0] * 20)
    assert correlation.error(20) == pytest.approx(np.linalg.norm(A @ np.linalg.inv(C)) / math.sqrt(20), rel=1e-9)
    assert Independent().error(20, correlation) == pytest.approx(np.linalg.norm(A) / math.sqrt(20), rel=1e-9)


@pytest.mark.parametrize(
    "correlation", [cw.Banded(2), cw.Banded(6), cw.Banded(5, 0.9), cw.Banded(3, 0.5, (2.0, *[1.0] * 29))]
)
def test_no_nearby_coefficients_leave_less_noise(correlation: cw.Banded) -> None:
    column = correlation.coefficients(30)
    rates = [rate / max(correlation.learning_rates) for rate in correlation.learning_rates or ()] or [1.0] * 30
    A = workload(30, correlation.momentum, rates)

    def error(column: Matrix) -> float:
        return float(np.linalg.norm(A @ np.linalg.inv(band_matrix(column, 30))) * np.linalg.norm(column))

    assert error(column) <= min(error(cw.SquareRoot(correlation.bands).coefficients(30)), error(np.ones(1))) + 1e-9
    for k, change in itertools.product(range(1, correlation.bands), (-1e-3, 1e-3)):
        near = column.copy()
        near[k] += change
        assert error(near) >= error(column) * (1 - 1e-7)


def test_learning_rates_are_one_for_every_step() -> None:
    with pytest.raises(InvalidPlan, match="has 3 entries, but the run has 9 steps"):
        cw.Banded(2, 0.0, (1.0, 0.5, 0.1)).coefficients(9)


def test_best_is_never_worse_than_independent_noise() -> None:
    wide = cw.Plan(cw.Poisson(60_000, 256), 2_344, cw.Abadi(1.0))
    rare = cw.Plan(cw.Poisson(1_000, 10), 100, cw.Abadi(1.0))
    assert [cw.Banded.best(wide, e, 1e-5).bands for e in (1.0, 8.0)] == [8, 64]
    assert cw.Banded.best(rare, 0.1, 1e-5).bands == 1
    once = cw.Plan(cw.Shuffled(100, 10, reshuffle=False), 20, cw.Abadi(1.0))
    assert cw.Banded.best(once, 1.0, 1e-3).bands == 8  # no amplification is lost: as many as fit
    with pytest.raises(InvalidPlan, match="bands can be chosen for"):
        cw.Banded.best(cw.Plan(cw.FullBatch(10), 5, cw.Abadi(1.0)), 1.0, 1e-3)


# The noise ----------------------------------------------------------------------------------------------------------


class Kept:
    """Normal numbers that a test can look at."""

    def __init__(self) -> None:
        self.drawn: dict[tuple[int, int], Matrix] = {}

    def fill_(self, buffer: Tensor, entropy: Entropy, step: int, piece: int) -> None:
        numbers = np.random.default_rng((step, piece)).standard_normal(buffer.numel())
        self.drawn[step, piece] = numbers
        buffer.copy_(torch.from_numpy(numbers))


SIZES = (70_000, 5)  # two pieces, of which one has parts of both tensors
R = [1.0, 1.0, 8.0, 8.0, 0.5, 0.25, 2.0, 2.0, 2.0, 30.0, 1.0, 0.1]


def released(row: Row, source: Kept, steps: Sequence[int] = range(T), lanes: int = 1) -> Matrix:
    """What is added to sums of zero, one row for each step, in units of nothing."""
    torch.set_num_threads(lanes)
    try:
        like = [torch.zeros(size, dtype=torch.float64) for size in SIZES]
        noise = GaussianNoise(like, Entropy(), source, partial(chain_of, row.correlation, row.sampling, T))
    finally:
        torch.set_num_threads(1)
    made = [noise.release([t.clone() for t in like], [2.0 * R[step]] * 2, 1.0, step) for step in steps]
    return np.stack([np.concatenate([part.numpy() for part in parts]) for parts in made])


def expected(row: Row, source: Kept, chains: Sequence[range], pieces: int = 2) -> Matrix:
    """diag(R) C^-1 Z with dense matrices, chain by chain."""
    parts = []
    for chain in chains:
        rows = []
        for piece in range(pieces):
            C = matrix(row, len(chain))
            Z = np.stack([source.drawn[step, piece] for step in chain])
            rows.append(np.linalg.solve(C, Z))
        parts.append(np.diag([2.0 * R[step] for step in chain]) @ np.concatenate(rows, axis=1))
    return np.concatenate(parts)


@pytest.mark.parametrize("row", CORRELATED[:2], ids=lambda row: type(row.correlation).__name__)
@pytest.mark.parametrize("lanes", [1, 2])
def test_noise_is_the_inverse_matrix_times_normals_in_units_of_the_step(row: Row, lanes: int, fine_grid: None) -> None:
    source = Kept()
    np.testing.assert_allclose(
        released(row, source, lanes=lanes), expected(row, source, [range(T)]), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("row", CORRELATED[:2], ids=lambda row: type(row.correlation).__name__)
def test_a_step_that_does_not_follow_begins_a_new_chain(row: Row, fine_grid: None) -> None:
    source = Kept()
    made = released(row, source, [0, 1, 2, 5, 6, 7, 8, 9])
    np.testing.assert_allclose(made, expected(row, source, [range(3), range(5, 10)]), rtol=1e-9, atol=1e-9)


def test_a_release_that_fails_begins_a_new_chain(fine_grid: None) -> None:
    row, source = CORRELATED[0], Kept()
    like = [torch.zeros(5, dtype=torch.float64)]
    noise = GaussianNoise(like, Entropy(seed=1), source, partial(chain_of, row.correlation, row.sampling, T))

    def refused(_: bytes) -> None:
        raise RuntimeError("no")

    made = [noise.release([torch.zeros(5, dtype=torch.float64)], [1.0], 1.0, step) for step in (0, 1)]
    with pytest.raises(RuntimeError):
        noise.release([torch.zeros(5, dtype=torch.float64)], [1.0], 1.0, 2, before=refused)
    made += [noise.release([torch.zeros(5, dtype=torch.float64)], [1.0], 1.0, step) for step in (3, 4)]
    for chain in (range(2), range(3, 5)):
        Z = np.stack([source.drawn[step, 0] for step in chain])
        got = np.stack([made[step if step < 2 else step - 1][0].numpy() for step in chain])
        np.testing.assert_allclose(got, np.linalg.solve(matrix(row, 2), Z), rtol=1e-9)


def tree_noise(source: Kept, chain: range, piece: int, pieces: int) -> Matrix:
    """The noise of prefixes of a tree, by recursion over its sums."""

    def estimate(first: int, height: int) -> tuple[Matrix, float]:
        end = first + 2**height - 1  # the step at which the sum is finished
        own = source.drawn[chain[end], piece + height * pieces]
        if height == 0:
            return own, 1.0
        (left, v), (right, _) = estimate(first, height - 1), estimate(first + 2 ** (height - 1), height - 1)
        weight = 2 * v / (1 + 2 * v)  # of its own noise, whose variance is 1
        return weight * own + (1 - weight) * (left + right), weight

    rows = [np.zeros_like(source.drawn[chain[0], piece])]
    for t in range(1, len(chain) + 1):
        total, first = 0.0, 0
        for height in reversed(range(t.bit_length())):
            if t >> height & 1:
                total = total + estimate(first, height)[0]
                first += 2**height
        rows.append(np.asarray(total))
    return np.diff(np.stack(rows), axis=0)


@pytest.mark.parametrize("batch", [10, 6, 40])
def test_noise_of_a_tree_is_that_of_its_sums_and_begins_with_each_epoch(batch: int, fine_grid: None) -> None:
    sampling = cw.Shuffled(40, batch)
    length = sampling.batches_per_epoch
    row, source = replace(CORRELATED[2], sampling=sampling), Kept()
    made = released(row, source)
    for first in range(0, T, length):
        chain = range(first, min(first + length, T))
        noise = np.concatenate([tree_noise(source, chain, piece, 2) for piece in (0, 1)], axis=1)
        wanted = math.sqrt(length.bit_length()) * np.diag([2.0 * R[step] for step in chain]) @ noise
        np.testing.assert_allclose(made[chain.start : chain.stop], wanted, rtol=1e-9, atol=1e-9)


@each_correlated
def test_the_covariance_over_many_runs(row: Row) -> None:
    """70,003 numbers of each step are as many short runs; prefixes of a tree have less noise than plain sums."""
    source = Kept()
    made = released(row, source) / (2.0 * np.array(R)[:, None])
    found = made @ made.T / made.shape[1]
    if isinstance(row.correlation, cw.Tree):
        prefix = np.cumsum(made[:4], axis=0)
        variances = (prefix**2).mean(axis=1) / 3  # 3 is the square of the sensitivity
        # One sum; the sum of two, from itself and its halves; that and one more; the sum of four.
        np.testing.assert_allclose(variances, [1.0, 2 / 3, 5 / 3, 4 / 7], rtol=0.03)
        assert np.abs(found[:4, 4:]).max() < 0.1  # epochs are independent
        return
    inverse = np.linalg.inv(matrix(row, T))
    np.testing.assert_allclose(found, inverse @ inverse.T, atol=0.06)


# Runs ---------------------------------------------------------------------------------------------------------------


def run(private: cw.Private, model: torch.nn.Module, until: int = T, scale: float = 1.0) -> list[Tensor]:
    for x, y in private.loader(data(), physical_batch_size=4):
        private.step(scale * losses_of(model, x, y))
        if private.steps_done >= until:
            break
    return [p.detach().clone() for p in model.parameters()]


@each_correlated
def test_a_seeded_run_resumes_bit_for_bit(row: Row, tmp_path: Path) -> None:
    planned = of(row, clip=cw.MixUp(cw.Abadi(0.1), cw.Abadi(5.0), switch_at=0.5))
    whole_model, model = mlp(), mlp()
    whole = run(cw.Private(planned, whole_model, sgd(whole_model), seed=3), whole_model)
    private = cw.Private(planned, model, sgd(model), seed=3)
    run(private, model, until=7)
    private.save(tmp_path / "run")
    again = mlp(seed=1)
    resumed = cw.Private.resume(tmp_path / "run", again, sgd(again))
    assert all(torch.equal(a, b) for a, b in zip(whole, run(resumed, again), strict=True))
    assert resumed.ledger.events == planned.events


@each_correlated
def test_of_an_unseeded_run_no_noise_is_written(row: Row, tmp_path: Path) -> None:
    model = mlp()
    private = cw.Private(of(row), model, sgd(model))
    run(private, model, until=6)
    private.save(tmp_path / "run")
    with open(tmp_path / "run", "rb") as file:
        assert file.readline() and file.readline()
        with zipfile.ZipFile(file) as archive:
            manifest = json.loads(archive.read("manifest.json"))
    assert private.state_dict()["noise"] is None
    assert all(spec["dtype"] != "float64" for spec in manifest["tensors"])  # past noise is; the model is not
    again = mlp(seed=1)
    resumed = cw.Private.resume(tmp_path / "run", again, sgd(again))
    run(resumed, again)
    assert resumed.ledger.events == of(row).events  # a chain that begins again costs nothing more


@each_correlated
def test_past_noise_that_was_damaged_is_refused(row: Row) -> None:
    model = mlp()
    private = cw.Private(of(row), model, sgd(model), seed=3)
    run(private, model, until=7)
    state = private.state_dict()
    for change in ({"made": 2}, {"made": -1}, {"last": -5}, {"kept": []}, {"trace": "x"}, {"kept": [[torch.zeros(2)]]}):
        other = mlp()
        with pytest.raises(CheckpointError, match="no past noise that makes sense"):
            cw.Private(of(row), other, sgd(other), seed=3).load_state_dict(
                {**state, "noise": {**state["noise"], **change}}
            )


@each_correlated
def test_a_seeded_step_on_other_sums_is_refused(row: Row, tmp_path: Path) -> None:
    model = mlp()
    private = cw.Private(of(row), model, sgd(model), seed=3)
    run(private, model, until=5)
    private.save(tmp_path / "run")
    run(private, model, until=8)
    again = mlp(seed=1)
    resumed = cw.Private.resume(tmp_path / "run", again, sgd(again))
    with pytest.raises(CheckpointError, match="shares its past"):
        run(resumed, again, scale=2.0)


# Samplings ----------------------------------------------------------------------------------------------------------


def test_cyclic_groups_are_dealt_once_and_drawn_from_in_turns() -> None:
    sampling = cw.CyclicPoisson(43, 5, bands=4)
    draws = Draws(sampling, Entropy(seed=1))
    seen: dict[int, set[int]] = {}
    sizes = []
    for step in range(400):
        batch = draws.batch(step)
        assert (np.diff(batch) > 0).all()
        sizes.append(len(batch))
        for record in batch.tolist():
            seen.setdefault(record, set()).add(step % 4)
    assert len(seen) == 43 and all(len(turns) == 1 for turns in seen.values())
    assert sorted(sum(turns == {g} for turns in seen.values()) for g in range(4)) == [10, 11, 11, 11]
    assert np.mean(sizes) == pytest.approx(5, abs=0.3)
    assert sampling.rate == 20 / 43 and sampling.largest_batch == 11


def test_records_keep_their_group_over_an_unseeded_resume(tmp_path: Path) -> None:
    row, model = CORRELATED[0], mlp()
    private = cw.Private(of(row), model, sgd(model))
    run(private, model, until=5)
    private.save(tmp_path / "run")
    again = mlp()
    resumed = cw.Private.resume(tmp_path / "run", again, sgd(again))

    def groups(run: cw.Private) -> list[set[int]]:
        draws = run._position.draws()
        return [{int(i) for step in range(g, 400, 4) for i in draws.batch(step)} for g in range(4)]

    assert groups(private) == groups(resumed) and sum(map(len, groups(private))) == 40


def test_one_order_for_all_epochs() -> None:
    fixed, fresh = (Draws(cw.Shuffled(10, 4, reshuffle=r), Entropy(seed=1)) for r in (False, True))
    for step in range(9):
        assert (fixed.batch(step) == fixed.batch(step % 3)).all()
    assert any((fresh.batch(step) != fresh.batch(step % 3)).any() for step in range(9))
    with pytest.raises(InvalidSampling, match="reshuffle must be True or False"):
        cw.Shuffled(10, 4, reshuffle=1)  # type: ignore[arg-type]


def test_groups_that_are_too_small_are_refused() -> None:
    assert cw.CyclicPoisson(40, 10, 4).rate == 1.0 and cw.CyclicPoisson(40, 2.5, 4).rate == 0.25
    for size in (0, -1.0, float("nan"), "5", True):
        with pytest.raises(InvalidSampling, match="batch_size must be"):
            cw.CyclicPoisson(40, size, 2)  # type: ignore[arg-type]
    with pytest.raises(InvalidSampling, match="there can be at most 4"):
        cw.CyclicPoisson(40, 10, 5)


@pytest.mark.parametrize("sampling", [CYCLIC, ORDERED, SHUFFLED])
def test_two_runs_of_an_order_are_not_one_sequence_of_epochs(sampling: Sampling, tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    cw.Ledger().save(path)
    cw.Ledger.charge(path, [cw.GaussianSteps(sampling, 1.0, 2)], delta=1e-5)
    with pytest.raises(LedgerError, match="one sequence of epochs"):
        cw.Ledger.charge(path, [cw.GaussianSteps(sampling, 1.0, 2)], delta=1e-5)
    assert cw.Ledger.load(path).steps == 2
