"""Edges of bins, empty bins, one class, two samples, ties, half precision: against the reference by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from clipwise.calibration import evaluate
from clipwise.calibration.bins import bin_of, equal_edges
from tests.calibration.reference import bin_number, reference, samples


def two_classes(confidence: Any) -> Any:
    confidence = np.asarray(confidence, dtype=np.float64)
    return np.stack([confidence, 1 - confidence], axis=1)


CASES: dict[str, tuple[Any, Any]] = {
    "on edges of tenths": (two_classes([0.5, 0.6, 0.7, 0.8, 0.9, 1.0]), [0, 1, 0, 1, 0, 0]),
    "just above edges": (two_classes(np.nextafter([0.5, 0.6, 0.7, 0.8, 0.9], 1.0)), [0, 1, 0, 1, 0]),
    "all certain": (two_classes([1.0, 1.0, 1.0, 1.0]), [0, 0, 1, 0]),
    "one bin filled": (two_classes([0.91, 0.95, 0.97]), [0, 0, 1]),
    "one class in the model": (np.ones((3, 1)), [0, 0, 0]),
    "one class in the labels": (two_classes([0.55, 0.75, 0.95, 0.85]), [0, 0, 0, 0]),
    "two samples": (two_classes([0.7, 0.9]), [0, 1]),
    "one sample": (two_classes([0.7]), [1]),
    "ties": (np.full((4, 4), 0.25), [0, 1, 2, 3]),
    "all samples equal": (two_classes([0.8] * 5), [0, 0, 0, 0, 1]),
    "zeros": (np.array([[0.0, 0.0, 1.0], [0.0, 0.5, 0.5]]), [2, 1]),
}


@pytest.mark.parametrize("bins", [1, 2, 10, 15, 20])
@pytest.mark.parametrize("case", CASES)
def test_case_equals_the_reference(case: str, bins: int) -> None:
    probabilities, labels = CASES[case][0], np.array(CASES[case][1])
    result = evaluate(probabilities, labels, bins=bins, resamples=100)
    for name, value in reference(probabilities, labels, bins).items():
        assert getattr(result, name) == pytest.approx(value, abs=1e-12), name
    assert result.intervals is not None
    for name, (low, high) in result.intervals.items():
        assert low <= result.metrics[name] + 1e-12 and result.metrics[name] <= high + 1e-12, name


@pytest.mark.parametrize("bins", [3, 7, 10, 15, 60, 97])
def test_an_edge_belongs_to_the_bin_below_it(bins: int) -> None:
    edges = equal_edges(bins)
    values = np.concatenate([edges, np.nextafter(edges, 2.0)[:-1], np.nextafter(edges[1:], -1.0)])
    assert bin_of(values, edges).tolist() == [bin_number(v, bins) for v in values.tolist()]
    assert bin_of(edges, edges).tolist() == [0, *range(bins)]


def test_torchmetrics_closes_bins_on_the_left_and_keeps_one_for_certainty() -> None:
    """The difference that docs/calibration.md tells: on edges, and at confidence 1."""
    from torchmetrics.functional.classification import multiclass_calibration_error

    probabilities, labels = two_classes([0.8, 0.75, 1.0, 0.95]), np.array([1, 0, 0, 1])
    theirs = multiclass_calibration_error(
        torch.from_numpy(probabilities), torch.from_numpy(labels), num_classes=2, n_bins=5
    )
    # Ours: (0.6, 0.8] holds 0.8 and 0.75, (0.8, 1] the rest. Theirs: [0.6, 0.8) 0.75; [0.8, 1) 0.8 and 0.95; 1 alone.
    assert evaluate(probabilities, labels, bins=5).ece == pytest.approx((abs(1.55 - 1) + abs(1.95 - 1)) / 4)
    assert float(theirs) == pytest.approx((abs(0.75 - 1) + abs(1.75 - 0) + 0) / 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_binned_in_float64(dtype: torch.dtype) -> None:
    probabilities, labels = samples(4, 300)
    half = torch.from_numpy(probabilities).to(dtype)
    wide = half.double()
    result = evaluate(half, torch.from_numpy(labels))
    for name, value in reference(wide.numpy(), labels, 15).items():
        assert getattr(result, name) == pytest.approx(value, abs=1e-12), name


def test_a_float16_edge_is_not_the_float64_edge() -> None:
    value = torch.tensor(0.8, dtype=torch.float16)
    assert float(value) < 0.8  # so it lies inside (0.6, 0.8], where 0.8 itself is the edge
    half = torch.stack([value, 1 - value])[None]
    assert evaluate(half, torch.tensor([0]), bins=5).bins.count == (0, 0, 0, 1, 0)
    above = torch.tensor(
        [[0.60009765625, 0.39990234375]], dtype=torch.float16
    )  # above 3/5, which float16 would round to it
    assert evaluate(above, torch.tensor([0]), bins=5).bins.count == (0, 0, 0, 1, 0)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_arrays_and_tensors_give_the_same(dtype: Any) -> None:
    probabilities, labels = samples(5, 100)
    array = probabilities.astype(dtype)
    assert evaluate(array, labels) == evaluate(torch.from_numpy(array), torch.from_numpy(labels))


def test_awkward_arrays_are_read_as_they_are() -> None:
    probabilities, labels = samples(6, 50)
    expected = evaluate(probabilities, labels).metrics
    frozen = probabilities.copy()
    frozen.setflags(write=False)
    for array in (frozen, np.asfortranarray(probabilities), probabilities[::-1], probabilities.astype(">f8")):
        chosen = labels[::-1] if array.strides[0] < 0 else labels
        for name, value in evaluate(array, chosen).metrics.items():
            assert value == pytest.approx(expected[name], abs=1e-12), name
    assert evaluate(probabilities.tolist(), labels.tolist()).metrics == pytest.approx(expected)


def test_the_order_of_samples_does_not_matter() -> None:
    probabilities, labels = CASES["on edges of tenths"][0], np.array(CASES["on edges of tenths"][1])
    order = np.random.default_rng(0).permutation(len(labels))
    one, other = evaluate(probabilities, labels), evaluate(probabilities[order], labels[order])
    assert one.metrics == pytest.approx(other.metrics, abs=1e-12)
