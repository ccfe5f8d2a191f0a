"""Correlated noise against numbers that others computed, and against formulas that are published.

- `PEER`, `SQUARE_ROOT`: jax_privacy at commit 8967688 (`matrix_factorization.toeplitz`, float64, at most 500 steps of
  L-BFGS for `optimize_banded_toeplitz`, whose `loss` is the mean square over the steps).
- `CYCLIC`, `ORDERED`: dp-accounting 0.6.0, privacy loss distributions of the Gaussian mechanism with the sampling rate
  and the number of steps of Choquette-Choo et al. (2023, arXiv 2306.08153, theorem 4), on a grid of 2e-5, rounded up;
  and its RDP accountant. For the tree: its `SingleEpochTreeAggregationDpEvent`, which knows the tree itself.
- Closed forms: Fichtenberger, Henzinger and Upadhyay (2023) for the square root, Watson (1930) for its
  error, Honaker (2015) for the tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch

import clipwise as cw
from clipwise.correlation import Correlation
from clipwise.entropy import Entropy
from clipwise.errors import InvalidPlan
from clipwise.noise import GaussianNoise, chain_of

from .test_correlation import band_matrix

PEER = {
    (100, 2): ([0.7955966, 0.6058267], 26.848108527700926),
    (100, 8): (
        [0.6441417, 0.3971482, 0.3319262, 0.2956951, 0.2697520, 0.2483273, 0.2285292, 0.2075716],
        9.76766273499948,
    ),
    (1_000, 4): ([0.5870188, 0.5035111, 0.4681882, 0.4274170], 130.66778132914848),
    (2_344, 8): (
        [0.4632622, 0.3815853, 0.3591702, 0.3453110, 0.3338384, 0.3223339, 0.3082542, 0.2849035],
        156.0816370115844,
    ),
}
SQUARE_ROOT = {(100, 100): 5.62002033582539, (100, 8): 10.528882354012406, (2_344, 8): 205.8175522488819}
LARGEST = {100: 6.40774351814456, 2_344: 12.504737332273756}
CYCLIC = [  # noise multiplier, records, batch, bands, steps, delta; epsilon by distributions and by RDP
    (1.0, 60_000, 256, 8, 2_344, 1e-5, 3.8127272376386765, 4.304957685473692),
    (2.0, 50_000, 500, 16, 2_000, 1e-5, 4.4158385905855235, 4.8347646013299155),
    (4.0, 10_000, 100, 4, 1_001, 1e-6, 0.6823402054094401, 0.7406134254661094),
    (1.275127965719891, 60_000, 256, 64, 2_344, 1e-5, 7.9991988655014605, 8.858573998486579),
]
ORDERED = [  # noise multiplier, records, batch, steps, epochs; the same
    (5.0, 50_000, 500, 1_500, 15, 3.2645499933679782, 3.5344670587196036),
    (2.0, 51_200, 256, 2_000, 10, 7.5112759024816995, 8.079406222420491),
]


# Coefficients and errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "bands"), PEER)
def test_the_best_coefficients_are_those_of_jax_privacy(steps: int, bands: int) -> None:
    coefficients, error = PEER[steps, bands]
    np.testing.assert_allclose(cw.Banded(bands).coefficients(steps), coefficients, atol=2e-5)
    assert cw.Banded(bands).error(steps) ** 2 == pytest.approx(error, rel=1e-9)


@pytest.mark.parametrize(("steps", "bands"), SQUARE_ROOT)
def test_the_error_of_the_square_root_is_that_of_jax_privacy(steps: int, bands: int) -> None:
    assert cw.SquareRoot(bands).error(steps) ** 2 == pytest.approx(SQUARE_ROOT[steps, bands], rel=1e-12)


def test_the_square_root_has_the_coefficients_of_fichtenberger_et_al() -> None:
    exact = [math.comb(2 * k, k) / 4**k for k in range(40)]
    column = cw.SquareRoot(40).coefficients(40)
    np.testing.assert_allclose(column / column[0], exact, rtol=1e-12)
    inverse = np.linalg.inv(band_matrix(column / column[0], 40))[:5, 0]
    np.testing.assert_allclose(inverse, [1, -1 / 2, -1 / 8, -1 / 16, -5 / 128], rtol=1e-12)


@pytest.mark.parametrize("steps", LARGEST)
def test_the_largest_error_of_the_square_root_is_the_constant_of_landau(steps: int) -> None:
    """The sum of the squares of its coefficients, which is near (ln(n - 1/4) + gamma + 4 ln 2) / pi (Watson, 1930)."""
    landau = (math.log(steps - 0.25) + np.euler_gamma + 4 * math.log(2)) / math.pi
    assert math.sqrt(LARGEST[steps]) == pytest.approx(landau, rel=1e-5)
    if steps == 100:  # more bands than 1,024 are refused
        assert cw.SquareRoot(steps).left(steps)[-1] ** 2 == pytest.approx(LARGEST[steps], rel=1e-12)


# Noise that is left ---------------------------------------------------------------------------------------------------


class Impulses:
    """Instead of normal numbers, the n-th draw is the n-th unit vector: a release then is a row of the matrix."""

    def __init__(self) -> None:
        self.drawn = 0

    def fill_(self, buffer: torch.Tensor, entropy: Entropy, step: int, piece: int) -> None:
        buffer.zero_()
        buffer[self.drawn] = 1.0
        self.drawn += 1


def left(correlation: Correlation, sampling: cw.Sampling, steps: int) -> Sequence[float]:
    """What a run leaves in the sum of its steps, from the noise that is really added."""
    source, like = Impulses(), [torch.zeros(400, dtype=torch.float64)]
    noise = GaussianNoise(like, Entropy(), source, partial(chain_of, correlation, sampling, steps))
    rows = [noise.release([like[0].clone()], [1.0], 1.0, step)[0].numpy() for step in range(steps)]
    assert source.drawn < 400
    return np.linalg.norm(np.cumsum(rows, axis=0), axis=1).tolist()


@pytest.mark.parametrize(
    ("correlation", "sampling"),
    [
        (cw.Independent(), cw.Poisson(1_000, 10)),
        (cw.Banded(6), cw.CyclicPoisson(1_000, 10, 6)),
        (cw.Banded(4, momentum=0.5), cw.CyclicPoisson(1_000, 10, 6)),
        (cw.SquareRoot(5), cw.Shuffled(1_000, 10, reshuffle=False)),
        (cw.Tree(), cw.Shuffled(1_000, 10)),
        (cw.Tree(), cw.Shuffled(130, 10)),
        (cw.Tree(), cw.Shuffled(160, 10)),
        (cw.Tree(), cw.Shuffled(10, 10)),
    ],
    ids=str,
)
def test_what_is_left_is_what_the_noise_of_a_run_adds_up_to(
    correlation: Correlation, sampling: cw.Sampling, fine_grid: None
) -> None:
    np.testing.assert_allclose(correlation.left(50, sampling), left(correlation, sampling, 50), rtol=1e-9)


@pytest.mark.parametrize("correlation", [cw.Independent(), cw.Banded(6), cw.SquareRoot(5)])
def test_the_error_is_the_mean_of_what_is_left(correlation: Correlation) -> None:
    assert correlation.error(50) == pytest.approx(math.sqrt(np.mean(correlation.left(50) ** 2)), rel=1e-12)


def test_a_finished_tree_has_the_variance_of_honaker() -> None:
    """The sum of 2^h records, known from the levels of its tree: 1 / (2 (1 - 2^-levels)), times the levels here."""
    for h in range(8):
        sampling, levels = cw.Shuffled(10 * 2**h, 10), h + 1
        assert cw.Tree().height(2**h) == levels == math.floor(math.log2(2**h)) + 1
        found = cw.Tree().left(2**h, sampling)[-1] ** 2
        assert found == pytest.approx(levels / (2 * (1 - 2.0**-levels)), rel=1e-12)


def test_a_tree_needs_its_epochs() -> None:
    with pytest.raises(InvalidPlan, match="give its Shuffled sampling"):
        cw.Tree().left(10)


# Epsilons -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sigma", "records", "batch", "bands", "steps", "delta", "pld", "rdp"), CYCLIC)
def test_epsilon_of_bands_is_that_of_dp_accounting(
    sigma: float, records: int, batch: int, bands: int, steps: int, delta: float, pld: float, rdp: float
) -> None:
    plan = cw.Plan(cw.CyclicPoisson(records, batch, bands), steps, cw.Abadi(1.0), sigma, correlation=cw.Banded(bands))
    assert pld * (1 - 1e-6) <= plan.epsilon(delta) <= pld < rdp


@pytest.mark.parametrize(("sigma", "records", "batch", "steps", "epochs", "pld", "rdp"), ORDERED)
@pytest.mark.parametrize("correlation", [cw.Tree(), cw.Banded(8), cw.SquareRoot(8)], ids=lambda c: type(c).__name__)
def test_epsilon_of_an_order_is_that_of_dp_accounting(
    correlation: Correlation, sigma: float, records: int, batch: int, steps: int, epochs: int, pld: float, rdp: float
) -> None:
    sampling = cw.Shuffled(records, batch, reshuffle=correlation == cw.Tree())
    plan = cw.Plan(sampling, steps, cw.Abadi(1.0), sigma, correlation=correlation)
    assert pld * (1 - 1e-6) <= plan.epsilon(1e-5) <= pld < rdp
    assert epochs * sampling.batches_per_epoch == steps


@pytest.mark.parametrize(("sigma", "records", "batch", "steps", "epochs", "pld", "rdp"), ORDERED)
def test_the_known_epsilons_are_those_of_the_installed_dp_accounting(
    sigma: float, records: int, batch: int, steps: int, epochs: int, pld: float, rdp: float
) -> None:
    """The tree with its levels, as an event of its own: scaled by their root it costs what a Gaussian step does."""
    dp = pytest.importorskip("dp_accounting")
    length = records // batch
    tree = dp.SingleEpochTreeAggregationDpEvent(sigma * math.sqrt(cw.Tree().height(length)), step_counts=length)
    accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_SPECIAL)
    assert accountant.compose(tree, epochs).get_epsilon(1e-5) == pytest.approx(rdp, rel=1e-9)
