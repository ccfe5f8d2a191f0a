"""Noise: its law, its independence, and where its bits come from."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import clipwise.noise as noise
from clipwise.errors import ClipwiseError, InvalidPlan, MissingExtra
from clipwise.noise import Entropy, GaussianNoise, SecureNormals, TorchNormals

LEVEL = 1e-4
SHAPES = [(64, 8), (64,), (), (5, 1, 3), (0, 4), (3000,)]


@pytest.fixture(params=["torch", "secure"])
def source(request: pytest.FixtureRequest) -> noise.Normals:
    if request.param == "torch":
        return TorchNormals()
    pytest.importorskip("cryptography")
    return SecureNormals()


def draw(source: noise.Normals, n: int, seed: int | None = 0, step: int = 0, piece: int = 0) -> Tensor:
    numbers = torch.empty(n)
    source.fill_(numbers, Entropy(seed), step, piece)
    return numbers


def test_the_numbers_are_standard_normal(source: noise.Normals) -> None:
    numbers = draw(source, 50_001).double().numpy()
    assert stats.kstest(numbers, "norm").pvalue > LEVEL
    assert stats.chi2(len(numbers)).sf((numbers**2).sum()) > LEVEL
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 4 / np.sqrt(len(numbers))


def test_a_stream_is_a_function_of_seed_and_step(source: noise.Normals) -> None:
    first = draw(source, 1000, seed=5, step=2)
    assert torch.equal(first, draw(source, 1000, seed=5, step=2))
    others = [dict(seed=5, step=3), dict(seed=6, step=2), dict(seed=5, step=2, piece=1)]
    for other in (draw(source, 1000, **changed) for changed in others):
        assert abs(torch.corrcoef(torch.stack([first, other]))[0, 1]) < 0.15


def test_without_a_seed_nothing_repeats(source: noise.Normals) -> None:
    one, two = draw(source, 1000, seed=None), draw(source, 1000, seed=None)
    assert abs(torch.corrcoef(torch.stack([one, two]))[0, 1]) < 0.15


def test_seeds_that_agree_in_32_bits_give_other_noise() -> None:
    # torch.Generator().manual_seed keeps 32 bits on CPU, so these two would be the same stream.
    plain = [torch.randn(4, generator=torch.Generator().manual_seed(s)) for s in (1, 1 + 2**32)]
    assert torch.equal(*plain)
    assert not torch.equal(draw(TorchNormals(), 4, seed=1), draw(TorchNormals(), 4, seed=1 + 2**32))


def test_the_global_generators_are_neither_read_nor_moved() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    numbers = draw(TorchNormals(), 100, seed=None)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(0)
    assert not torch.equal(numbers, draw(TorchNormals(), 100, seed=None))


def test_the_whole_state_is_filled_from_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = os.urandom
    monkeypatch.setattr(os, "urandom", lambda n: asked.append(n) or real(n))  # type: ignore[func-returns-value]
    source = TorchNormals()
    for step in range(3):
        source.fill_(torch.empty(4), Entropy(None), step, 0)
    assert asked == [4 * 624] * 3


def test_an_unknown_generator_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    noise._check_mt_layout.cache_clear()
    monkeypatch.setattr(noise, "_MT_HEADER", np.array([0, (1 << 32) | 7, 0], dtype=np.uint64))
    try:
        with pytest.raises(ClipwiseError, match="layout"):
            TorchNormals()
    finally:
        noise._check_mt_layout.cache_clear()


def test_secure_noise_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(MissingExtra, match="secure"):
        SecureNormals()


def test_secure_noise_has_no_infinite_radius(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")

    source = SecureNormals()
    monkeypatch.setattr(source, "_keystream", lambda key, size: bytes(size))
    numbers = torch.empty(4, dtype=torch.float64)
    source.fill_(numbers, Entropy(0), 0, 0)
    assert torch.isfinite(numbers).all() and 8.5 < numbers.max() < 8.6


def adder_for(sums: list[Tensor]) -> GaussianNoise:
    return GaussianNoise(sums, [s.dtype for s in sums], Entropy(0))


@pytest.fixture(params=[1 << 21, 1000, 16])
def buffer_elements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(noise, "BUFFER_ELEMENTS", request.param)
    return int(request.param)


def test_every_tensor_gets_its_own_standard_deviation(buffer_elements: int) -> None:
    stds = [1.0, 2.0, 3.0, 4.0, 5.0, 0.5]
    totals = [torch.zeros(shape) for shape in SHAPES]
    adder = adder_for(totals)
    chi2 = [0.0] * len(SHAPES)
    for step in range(40):
        sums = [torch.full(shape, 7.0) for shape in SHAPES]
        sums = adder.scaled(sums, stds, 1.0, step)
        for i, (s, std) in enumerate(zip(sums, stds, strict=True)):
            chi2[i] += float(((s - 7.0).double() / std).square().sum())
    for value, shape in zip(chi2, SHAPES, strict=True):
        n = 40 * int(np.prod(shape))
        if n:
            assert 2 * min(stats.chi2(n).sf(value), stats.chi2(n).cdf(value)) > LEVEL


@pytest.mark.parametrize("stds", [[2.0] * 6, [1.0, 2.0, 3.0, 4.0, 5.0, 0.5]], ids=["one std", "several"])
def test_the_scaled_sum_is_the_sum_with_noise_times_the_scale(stds: list[float], buffer_elements: int) -> None:
    shapes = [shape if 0 not in shape else (2, 2) for shape in SHAPES]
    plain = [torch.full(shape, 7.0) for shape in shapes]
    adder = adder_for(plain)
    plain = adder.scaled(plain, stds, 1.0, step=3)
    fused = adder.scaled([torch.full(shape, 7.0) for shape in shapes], stds, 0.25, step=3)
    again = adder.scaled([torch.full(shape, 7.0) for shape in shapes], stds, 0.25, step=4)
    for a, b, c in zip(plain, fused, again, strict=True):
        torch.testing.assert_close(a * 0.25, b)
        assert not torch.equal(b, c) and b.data_ptr() != c.data_ptr()


def test_no_number_is_used_twice(buffer_elements: int) -> None:
    sums = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    adder = adder_for(sums)
    for step in range(3):
        sums = adder.scaled(sums, [1.0] * len(sums), 1.0, step)
        for s in sums:
            assert s.numel() == 0 or (s != 0).all()
    values = torch.cat([s.reshape(-1) for s in sums])
    assert len(values.unique()) == len(values)


def test_noise_reaches_tensors_of_any_layout_and_precision() -> None:
    sums = [torch.zeros(40, 30).t(), torch.zeros(20, 20, dtype=torch.float64), torch.zeros(4, 3, 5, 5)]
    sums[2] = sums[2].to(memory_format=torch.channels_last)
    for s in adder_for(sums).scaled(sums, [2.0, 2.0, 2.0], 1.0, 0):
        assert (s != 0).all() and 1.5 < float(s.std()) < 2.5


def test_the_numbers_do_not_depend_on_the_threads(buffer_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for threads in (1, 2, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        sums = [torch.zeros(shape) for shape in SHAPES]
        found.append(adder_for(sums).scaled(sums, [1.0, 2.0, 3.0, 4.0, 5.0, 0.5], 0.5, 9))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_an_error_in_a_thread_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "BUFFER_ELEMENTS", 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    sums = [torch.zeros(100, 3)]
    adder = adder_for(sums)
    monkeypatch.setattr(TorchNormals, "fill_", lambda *a: (_ for _ in ()).throw(OSError("no entropy")))
    with pytest.raises(OSError, match="no entropy"):
        adder.scaled(sums, [1.0], 1.0, 0)


def test_standard_deviations_must_be_positive() -> None:
    sums = [torch.zeros(3)]
    with pytest.raises(InvalidPlan):
        adder_for(sums).scaled(sums, [0.0], 1.0, 0)
    assert (sums[0] == 0).all()


@pytest.mark.parametrize("seed", [-1, 1.0, "1", True])
def test_a_seed_is_a_non_negative_integer(seed: object) -> None:
    with pytest.raises(InvalidPlan, match="seed"):
        Entropy(seed)  # type: ignore[arg-type]


def test_entropy_keeps_purposes_apart_and_hides_its_seed() -> None:
    entropy = Entropy(11)
    assert len({entropy.take(8, p, c) for p in ("a", "b") for c in (0, 1)}) == 4
    assert entropy.take(8, "a", 1, 1) != entropy.take(8, "a", 11)
    assert "11" not in repr(entropy)
    assert entropy.child("x") != entropy and entropy.child("x") == Entropy(11).child("x")
    assert Entropy(None).child("x").seed is None


def test_seeding_the_globals_repeats_all_three() -> None:
    def numbers() -> tuple[float, float, float]:
        return float(torch.rand(())), float(np.random.rand()), random.random()  # noqa: NPY002

    Entropy(1).seed_globals("model", 3)
    first = numbers()
    Entropy(1).seed_globals("model", 3)
    assert numbers() == first
    state = torch.get_rng_state()
    Entropy(None).seed_globals("model", 3)
    assert torch.equal(state, torch.get_rng_state())
