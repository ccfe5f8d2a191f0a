"""Noise: its law, its independence, and where its bits come from."""

from __future__ import annotations

import gc
import hashlib
import math
import os
import random
import threading
import time
from concurrent.futures import wait
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

import clipwise as cw
from clipwise.entropy import Entropy, arm_seed
from clipwise.errors import ClipwiseError, InvalidPlan, MissingExtra
from clipwise.noise import (
    DefaultNormals,
    GaussianNoise,
    Normals,
    SecureNormals,
    grid_of,
    normals,
    pieces,
    polar,
    release,
    ziggurat,
)
from clipwise.noise.polar import PolarNormals
from clipwise.noise.stream import Stream
from clipwise.noise.ziggurat import ZigguratNormals
from tests.conftest import HANG
from tests.core.doubles import Unlabelled

LEVEL = 1e-4
SHAPES = [(64, 8), (64,), (), (5, 1, 3), (0, 4), (3000,)]


@pytest.fixture(params=[ZigguratNormals, PolarNormals, DefaultNormals])
def seeded(request: pytest.FixtureRequest) -> Normals:
    source: Normals = request.param()
    return source


@pytest.fixture(params=[ZigguratNormals, PolarNormals, SecureNormals])
def source(request: pytest.FixtureRequest) -> Normals:
    if request.param is SecureNormals:
        pytest.importorskip("cryptography")
    found: Normals = request.param()
    return found


def draw(source: Normals, n: int, seed: int | None = 0, step: int = 0, piece: int = 0) -> Tensor:
    numbers = torch.empty(n, dtype=torch.float64)
    source.fill_(numbers, Entropy(seed), step, piece)
    return numbers


def test_the_numbers_are_standard_normal(source: Normals) -> None:
    numbers = draw(source, 50_001, seed=None if isinstance(source, SecureNormals) else 0).numpy()
    assert stats.kstest(numbers, "norm").pvalue > LEVEL
    assert stats.chi2(len(numbers)).sf((numbers**2).sum()) > LEVEL
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 4 / np.sqrt(len(numbers))


def test_pairs_have_the_joint_law_of_two_normal_numbers(source: Normals) -> None:
    """Distance and direction are independent, the direction is uniform also between two points of the table."""
    x, y = draw(source, 200_000, seed=None if isinstance(source, SecureNormals) else 3).numpy().reshape(-1, 2).T
    height, turns = np.exp(-(x * x + y * y) / 2), np.arctan2(y, x) / (2 * np.pi) + 0.5
    for uniform in (height, turns, turns * 8192 % 1, (turns * 8192 + 0.5) % 1, (turns + height) % 1):
        assert stats.kstest(uniform, "uniform").pvalue > LEVEL
    counts = np.histogram2d(height, turns, bins=20, range=[[0, 1], [0, 1]])[0]
    assert stats.chisquare(counts.ravel()).pvalue > LEVEL


def test_short_pieces_come_from_the_ziggurat_and_long_ones_in_pairs() -> None:
    for size, own in ((normals.LONG_PIECE - 1, ZigguratNormals()), (normals.LONG_PIECE, PolarNormals())):
        assert torch.equal(draw(DefaultNormals(), size), draw(own, size))


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 8, 9, 10, 17])
def test_pairs_fill_blocks_of_any_size(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polar, "_BLOCK", 4)
    around = torch.zeros(size + 2, dtype=torch.float64)
    PolarNormals().fill_(around[1:-1], Entropy(0), 0, 0)
    assert not around[0] and not around[-1] and len(around[1:-1].unique()) == size and around[1:-1].all()


def test_a_stream_is_a_function_of_seed_and_step(seeded: Normals) -> None:
    first = draw(seeded, 1000, seed=5, step=2)
    assert torch.equal(first, draw(seeded, 1000, seed=5, step=2))
    others = [dict(seed=5, step=3), dict(seed=6, step=2), dict(seed=5, step=2, piece=1)]
    for other in (draw(seeded, 1000, **changed) for changed in others):
        assert abs(torch.corrcoef(torch.stack([first, other]))[0, 1]) < 0.15


def test_without_a_seed_nothing_repeats(source: Normals) -> None:
    one, two = draw(source, 1000, seed=None), draw(source, 1000, seed=None)
    assert abs(torch.corrcoef(torch.stack([one, two]))[0, 1]) < 0.15


def test_seeds_that_agree_in_32_bits_give_other_noise(seeded: Normals) -> None:
    assert not torch.equal(draw(seeded, 4, seed=1), draw(seeded, 4, seed=1 + 2**32))


def test_the_global_generators_are_neither_read_nor_moved(seeded: Normals) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    numbers = draw(seeded, 100, seed=None)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(0)
    assert not torch.equal(numbers, draw(seeded, 100, seed=None))


def test_every_piece_has_a_key_of_192_bits_from_the_operating_system(
    seeded: Normals, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    real = os.urandom
    monkeypatch.setattr(os, "urandom", lambda n: asked.append(n) or real(n))  # type: ignore[func-returns-value]
    for step in range(3):
        seeded.fill_(torch.empty(4, dtype=torch.float64), Entropy(None), step, 0)
    assert asked == [24] * 3


def test_the_bits_are_those_of_sfc64_and_the_key_is_not_kept() -> None:
    stream = Stream()
    a, b, c = (int.from_bytes(bytes(range(8 * i, 8 * i + 8)), "little") for i in range(3))
    drawn = stream.start(bytes(range(24))).bit_generator.random_raw(50)
    mask, w = (1 << 64) - 1, 1
    for got in drawn.tolist():
        out = (a + b + w) & mask
        a, b, c, w = b ^ (b >> 11), (c + (c << 3)) & mask, (((c << 24) | (c >> 40)) + out) & mask, w + 1
        assert got == out
    assert not stream._words[:3].any()


@pytest.mark.parametrize(("module", "place"), [(ziggurat, 9), (polar, 57)])
def test_a_numpy_that_draws_in_another_way_is_refused(module: Any, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module._check.cache_clear()
    key, known = module._KNOWN
    monkeypatch.setattr(module, "_KNOWN", (key, {**known, place: known[place] * (1 + 5e-12)}))
    try:
        with pytest.raises(ClipwiseError, match="numpy"):
            DefaultNormals()
    finally:
        module._check.cache_clear()


def test_secure_noise_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(MissingExtra, match="secure"):
        SecureNormals()


def test_secure_noise_takes_no_seed() -> None:
    pytest.importorskip("cryptography")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = cw.Plan(cw.Poisson(10, 2), steps=1, clip=cw.Abadi(1.0), noise_multiplier=1.0)
    cw.Private(plan, model, optimizer, noise=SecureNormals())
    with pytest.raises(InvalidPlan, match="no seed"):
        cw.Private(plan, model, optimizer, noise=SecureNormals(), seed=1)
    ledger = cw.Ledger()
    with pytest.raises(InvalidPlan, match="no seed"):
        cw.calibration.PrivateTemperatureScaling(1.0, seed=1, noise=SecureNormals()).fit([[0.0, 1.0]], [1], ledger)
    assert not ledger.events
    rounds = cw.Plan(cw.FullBatch(2), 1, cw.Abadi(1.0), 1.0, mechanism=cw.mechanisms.Rounds())
    with pytest.raises(InvalidPlan, match="no seed"):
        cw.federated.Server(rounds, model, seed=1, noise=SecureNormals())
    with pytest.raises(InvalidPlan, match="no seed"):
        draw(SecureNormals(), 3, seed=1)


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_secure_numbers_are_those_of_box_and_muller(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """First all cosines, then the sines; the radius is made of 128 bits, the angle of 53."""
    pytest.importorskip("cryptography")
    source, pairs = SecureNormals(), -(-size // 2)
    stream = b"".join(Entropy(4).take(8, "words", k) for k in range(3 * pairs))
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(source, "_keystream", lambda key, n: asked.append((len(key), n)) or stream)  # type: ignore[func-returns-value]
    words = [int.from_bytes(stream[k : k + 8], "little") for k in range(0, len(stream), 8)]
    cosines, sines = [], []
    for high, low, turn in zip(words[:pairs], words[pairs : 2 * pairs], words[2 * pairs :], strict=True):
        radius = math.sqrt(-2 * math.log(Fraction(2 * (high * 2**64 + low) + 1, 2**129)))
        angle = 2 * math.pi * (turn >> 11) / 2**53
        cosines.append(radius * math.cos(angle))
        sines.append(radius * math.sin(angle))
    around = torch.zeros(size + 1, dtype=torch.float64)
    source.fill_(around[:-1], Entropy(), 0, 0)
    assert around.tolist() == pytest.approx([*cosines, *sines[: size - pairs], 0.0], rel=1e-13)
    assert asked == [(32, 24 * pairs)]


def test_secure_bytes_are_those_of_aes_256_in_counter_mode() -> None:
    """The counters from 0 on, each encrypted."""
    ciphers = pytest.importorskip("cryptography.hazmat.primitives.ciphers")
    key = bytes(range(32))
    blocks = ciphers.Cipher(ciphers.algorithms.AES(key), ciphers.modes.ECB()).encryptor()
    counters = b"".join(number.to_bytes(16, "big") for number in range(3))
    assert SecureNormals()._keystream(key, 48) == blocks.update(counters)


def test_small_tensors_share_a_piece_and_large_ones_are_cut() -> None:
    def parts(sizes: list[int], kinds: str) -> list[list[tuple[int, int, int]]]:
        found = pieces.cut(sizes, kinds)
        assert [piece.number for piece in found] == list(range(len(found)))
        assert [piece.size for piece in found] == [sum(part.size for part in piece.parts) for piece in found]
        return [[(part.tensor, part.start, part.stop) for part in piece.parts] for piece in found]

    assert parts([65_531, 5], "aa") == [[(0, 0, 65_531), (1, 0, 5)]]  # just room enough
    assert parts([65_531, 6], "aa") == [[(0, 0, 65_531)], [(1, 0, 6)]]
    assert parts([1, 2, 3], "aab") == [[(0, 0, 1), (1, 0, 2)], [(2, 0, 3)]]
    assert parts([0, 131_073, 0], "aaa") == [[(1, 0, 65_536)], [(1, 65_536, 131_072)], [(1, 131_072, 131_073)]]
    assert parts([], "") == parts([0], "a") == []


def adder_for(sums: list[Tensor], source: Normals | None = None) -> GaussianNoise:
    return GaussianNoise(sums, Entropy(0), source)


@pytest.fixture(params=[1 << 21, 1000, 16])
def piece_elements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(pieces, "PIECE_ELEMENTS", request.param)
    return int(request.param)


def test_every_tensor_gets_its_own_standard_deviation(piece_elements: int) -> None:
    stds = [1.0, 2.0, 3.0, 4.0, 5.0, 0.5]
    totals = [torch.zeros(shape) for shape in SHAPES]
    adder = adder_for(totals)
    chi2 = [0.0] * len(SHAPES)
    for step in range(40):
        sums = [torch.full(shape, 7.0) for shape in SHAPES]
        sums = adder.release(sums, stds, 1.0, step)
        for i, (s, std) in enumerate(zip(sums, stds, strict=True)):
            chi2[i] += float(((s - 7.0).double() / std).square().sum())
    for value, shape in zip(chi2, SHAPES, strict=True):
        n = 40 * int(np.prod(shape))
        if n:
            assert 2 * min(stats.chi2(n).sf(value), stats.chi2(n).cdf(value)) > LEVEL


@pytest.mark.parametrize("stds", [[2.0] * 6, [1.0, 2.0, 3.0, 4.0, 5.0, 0.5]], ids=["one std", "several"])
def test_the_scaled_sum_is_the_sum_with_noise_times_the_scale(stds: list[float], piece_elements: int) -> None:
    shapes = [shape if 0 not in shape else (2, 2) for shape in SHAPES]
    plain = [torch.full(shape, 7.0) for shape in shapes]
    adder = adder_for(plain, Unlabelled())
    plain = adder_for(plain, Unlabelled()).release(plain, stds, 1.0, step=3)
    fused = adder.release([torch.full(shape, 7.0) for shape in shapes], stds, 0.25, step=3)
    again = adder.release([torch.full(shape, 7.0) for shape in shapes], stds, 0.25, step=4)
    for a, b, c in zip(plain, fused, again, strict=True):
        assert torch.equal(a * 0.25, b)  # the grid is scaled by the same power of two
        assert not torch.equal(b, c) and b.data_ptr() != c.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("std", "scale"), [(1.0, 1.0), (1.3, 0.01), (35.0, 1 / 256), (0.4, 1 / 3), (1e-30, 1e-6)])
def test_what_is_released_is_the_exact_sum_on_the_grid(std: float, scale: float, dtype: torch.dtype) -> None:
    """Recomputed with fractions: sum + noise in float64, times the scale, to the nearest point of the grid."""
    sums = torch.linspace(-20 * std, 20 * std, 400, dtype=torch.float64).to(dtype)
    drawn = draw(DefaultNormals(), 400, seed=0, step=2)
    (got,) = adder_for([sums], Unlabelled()).release([sums.clone()], [std], scale, 2)
    grid = grid_of(std * scale)
    assert math.frexp(grid)[0] == 0.5 and std * scale / 2048 < grid <= std * scale / 1024
    exact = [
        Fraction(float(s) + std * float(z)) * Fraction(scale) / Fraction(grid) for s, z in zip(sums, drawn, strict=True)
    ]
    points = [Fraction(float(value)) / Fraction(grid) for value in got]
    assert all(point.denominator == 1 for point in points)
    assert all(abs(point - e) <= Fraction(1, 2) + Fraction(1, 10**9) for point, e in zip(points, exact, strict=True))


def test_a_large_sum_is_cast_after_it_was_rounded() -> None:
    sums = [torch.full((1000,), 2.0**30, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    single, double = (adder_for([total]).release([total.clone()], [1.0], 1.0, 0)[0] for total in sums)
    assert torch.equal(double * 1024, (double * 1024).round()) and 0.9 < float(double.std()) < 1.1
    assert torch.equal(single, double.float())


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_leaves_no_noise_behind_and_stops_every_thread(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_ELEMENTS", 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    class Failing(DefaultNormals):
        def fill_(self, buffer: Tensor, entropy: Entropy, step: int, piece: int) -> None:
            super().fill_(buffer, entropy, step, piece)
            if piece == 3:
                raise OSError("no entropy")

    sums = [torch.zeros(300)]
    adder = adder_for(sums, Failing())
    with pytest.raises(OSError, match="no entropy"):
        adder.release(sums, [1.0], 1.0, 5)
    assert all(not lane.buffer.any() for lane in adder._lanes)
    before = sums[0].clone()
    time.sleep(0.05)
    assert torch.equal(before, sums[0])
    with pytest.raises(ClipwiseError, match="used already"):
        adder.release(sums, [1.0], 1.0, 5)


def test_the_noise_of_a_step_serves_one_release() -> None:
    sums = [torch.zeros(3)]
    adder = adder_for(sums)
    adder.release([torch.zeros(3)], [1.0], 1.0, 4)
    for step in (4, 3):
        with pytest.raises(ClipwiseError, match="used already"):
            adder.release([torch.zeros(3)], [1.0], 1.0, step)
    adder.release([torch.zeros(3)], [1.0], 1.0, 5)


def test_sources_fill_float64_on_the_cpu_whatever_is_released() -> None:
    class Looking(DefaultNormals):
        def fill_(self, buffer: Tensor, entropy: Entropy, step: int, piece: int) -> None:
            assert buffer.dtype == torch.float64 and buffer.device.type == "cpu" and buffer.dim() == 1
            super().fill_(buffer, entropy, step, piece)

    sums = [torch.zeros(3), torch.zeros(2, 2, dtype=torch.float64)]
    assert [s.dtype for s in adder_for(sums, Looking()).release(sums, [1.0, 1.0], 1.0, 0)] == [s.dtype for s in sums]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.int64])
def test_sums_of_another_kind_are_refused(dtype: torch.dtype) -> None:
    sums = [torch.zeros(3, dtype=dtype)]
    with pytest.raises(InvalidPlan, match="float32 or float64"):
        adder_for(sums).release(sums, [1.0], 1.0, 0)


def test_directions_are_normal_and_on_no_grid() -> None:
    like = [torch.zeros(20_000, dtype=torch.float64), torch.zeros(3, 2)]
    first, second = adder_for(like).directions(like, Entropy(0), 1)
    assert stats.kstest(first.numpy(), "norm").pvalue > LEVEL and second.shape == (3, 2)
    assert (first * 2**20 != (first * 2**20).round()).all()
    assert torch.equal(first, adder_for(like).directions(like, Entropy(0), 1)[0])


def test_no_number_is_used_twice(piece_elements: int) -> None:
    sums = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    adder = adder_for(sums)
    for step in range(3):
        values = torch.cat([s.reshape(-1) for s in adder.directions(sums, Entropy(0), step)])
        assert len(values.unique()) == len(values)


def test_noise_reaches_tensors_of_any_layout_and_precision() -> None:
    sums = [torch.zeros(40, 30).t(), torch.zeros(20, 20, dtype=torch.float64), torch.zeros(4, 3, 5, 5)]
    sums[2] = sums[2].to(memory_format=torch.channels_last)
    for s in adder_for(sums).release(sums, [2.0, 2.0, 2.0], 1.0, 0):
        assert (s != 0).float().mean() > 0.98 and 1.5 < float(s.std()) < 2.5


def test_sums_on_another_device_get_the_noise_that_is_made_for_them_here(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, sums = ([torch.ones(40), torch.ones(7, dtype=torch.float64)] for _ in range(2))
    wanted = adder_for(wanted).release(wanted, [1.0, 2.0], 0.5, 3)
    monkeypatch.setattr(Tensor, "cpu", Tensor.clone)  # as of a tensor that is elsewhere
    found = adder_for(sums).release(sums, [1.0, 2.0], 0.5, 3)
    assert all(map(torch.equal, found, wanted)) and float((found[0] - 0.5).abs().min()) > 0


def test_an_interrupted_release_waits_for_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_ELEMENTS", 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    waited = []

    def interrupted_once(running: Any) -> None:
        waited.append(running)
        if len(waited) == 1:
            raise KeyboardInterrupt
        wait(running)

    monkeypatch.setattr(release, "wait", interrupted_once)
    sums = [torch.zeros(100, 3)]
    with pytest.raises(KeyboardInterrupt):
        adder_for(sums).release(sums, [1.0], 1.0, 0)
    assert len(waited) == 2 and all(done.done() for done in waited[1])


def test_the_numbers_do_not_depend_on_the_threads(piece_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for threads in (1, 2, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        sums = [torch.zeros(shape) for shape in SHAPES]
        found.append(adder_for(sums).release(sums, [1.0, 2.0, 3.0, 4.0, 5.0, 0.5], 0.5, 9))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_an_error_in_a_thread_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_ELEMENTS", 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    sums = [torch.zeros(100, 3)]
    adder = adder_for(sums)
    monkeypatch.setattr(DefaultNormals, "fill_", lambda *a: (_ for _ in ()).throw(OSError("no entropy")))
    with pytest.raises(OSError, match="no entropy"):
        adder.release(sums, [1.0], 1.0, 0)


def test_standard_deviations_must_be_positive() -> None:
    sums = [torch.zeros(3)]
    for std in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(InvalidPlan):
            adder_for(sums).release(sums, [std], 1.0, 0)
    assert (sums[0] == 0).all()


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    ("std", "scale"),
    [
        *((0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (2.0**-950, 2.0**100), (2.0**-800, 2.0**-200)),
        *((2.0**-950, 1.0), (2.0**950, 1.0), (2.0**950, 2.0**-100)),
    ],
)
def test_no_tensor_of_several_goes_without_noise(std: float, scale: float, place: int) -> None:
    sums = [torch.ones(3) for _ in range(3)]
    adder, stds = adder_for(sums), [1.0, 1.0, 1.0]
    stds[place] = std
    with pytest.raises(InvalidPlan, match="positive finite standard deviations"):
        adder.release(sums, stds, scale, 0)
    assert all((total == 1).all() for total in sums)  # refused before anything was added


@pytest.mark.parametrize("power", [-900, 900])
def test_standard_deviations_end_where_the_grid_would_leave_the_range_of_numbers(power: int) -> None:
    sums = [torch.zeros(1000, dtype=torch.float64)]
    last = 2.0 ** (power - 1 if power > 0 else power + 1)
    for std, scale in ((last, 1.0), (1.0, last)):
        released = adder_for(sums).release([sums[0].clone()], [std], scale, 0)[0]
        assert 0.9 < float((released / last).std()) < 1.1
    for std, scale in ((2.0**power, 1.0), (1.0, 2.0**power), (2.0**power, 2.0 ** (-power / 2))):
        with pytest.raises(InvalidPlan, match="positive finite standard deviations"):
            adder_for(sums).release([sums[0].clone()], [std], scale, 0)


@pytest.mark.parametrize("stds", [[1.0], [1.0, 1.0, 1.0]])
def test_there_is_one_standard_deviation_for_each_tensor(stds: list[float]) -> None:
    sums = [torch.ones(3), torch.ones(2)]
    adder = adder_for(sums)
    with pytest.raises(ValueError, match="argument"):
        adder.release(sums, stds, 1.0, 0)
    assert all((total == 1).all() for total in sums)
    adder.release(sums, [1.0, 1.0], 1.0, 0)  # nothing was used up


def test_tensors_of_another_size_are_refused() -> None:
    adder = adder_for([torch.zeros(3), torch.zeros(2)])
    for sizes in ((2, 3), (3,), (3, 2, 1)):
        sums = [torch.ones(size) for size in sizes]
        with pytest.raises(InvalidPlan, match="differ in size"):
            adder.release(sums, [1.0] * len(sizes), 1.0, 0)


def test_a_seeded_release_tells_its_digest_before_anything_is_drawn() -> None:
    told: list[bytes] = []

    class Counting(DefaultNormals):
        def fill_(self, buffer: Tensor, entropy: Entropy, step: int, piece: int) -> None:
            assert len(told[-1]) == 16
            super().fill_(buffer, entropy, step, piece)

    def release_of(value: float, std: float = 1.0, scale: float = 1.0, step: int = 0, label: bytes = b"") -> bytes:
        sums = [torch.full((3,), value)]
        adder_for(sums, Counting()).release(sums, [std], scale, step, label, told.append)
        return told[-1]

    first = release_of(7.0)
    assert first == release_of(7.0)
    others = [release_of(8.0), release_of(7.0, std=2.0), release_of(7.0, scale=0.5), release_of(7.0, step=1)]
    assert len({first, *others, release_of(7.0, label=b"other")}) == 6
    sums = [torch.zeros(3)]
    GaussianNoise(sums, Entropy()).release(sums, [1.0], 1.0, 0, before=lambda digest: pytest.fail("without a seed"))


@pytest.mark.parametrize("seed", [-1, 1.0, "1", True])
def test_a_seed_is_a_non_negative_integer(seed: object) -> None:
    with pytest.raises(InvalidPlan, match="seed"):
        Entropy(seed)  # type: ignore[arg-type]


def test_entropy_keeps_purposes_apart_and_hides_its_seed() -> None:
    entropy = Entropy(11)
    assert len({entropy.take(8, p, c) for p in ("a", "b") for c in (0, 1)}) == 4
    assert entropy.take(8, "a", 1, 1) != entropy.take(8, "a", 11)
    assert "11" not in repr(entropy)
    assert repr(entropy.labelled(b"data")) == "Entropy()"
    assert entropy.child("x") != entropy and entropy.child("x") == Entropy(11).child("x")
    assert Entropy(None).child("x").seed is None


asked = st.tuples(
    st.integers(0, 2**70), st.lists(st.binary(max_size=3), max_size=2).map(tuple), st.text("ab 1", max_size=3),
    st.lists(st.integers(0, 120), max_size=3).map(tuple),
)  # fmt: skip


@settings(max_examples=200)
@given(asked, asked)
def test_only_equal_questions_get_equal_bytes(one: Any, other: Any) -> None:
    def taken(seed: int | None, label: tuple[bytes, ...], purpose: str, counters: tuple[int, ...]) -> bytes:
        entropy = Entropy(seed).labelled(*label) if label else Entropy(seed)
        return entropy.take(16, purpose, *counters)

    assert taken(*one) == taken(*one)
    for changed in [other, *((*one[:i], other[i], *one[i + 1 :]) for i in range(4))]:
        assert (taken(*one) == taken(*changed)) == (one == changed)
    assert taken(None, *one[1:]) != taken(None, *one[1:])


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


def test_a_seed_gives_the_same_bytes_for_ever() -> None:
    """Results that were published with a seed can be made again: recomputed from SHAKE-256 and SHA-256."""
    asked = b"clipwise/7/noise/3/1"
    assert Entropy(7).take(40, "noise", 3, 1) == hashlib.shake_256(asked).digest(40)
    label = hashlib.sha256(b"0:4:data").digest()
    labelled = Entropy(7).labelled(b"data")
    assert labelled.take(40, "noise", 3, 1) == hashlib.shake_256(asked + b"/" + label).digest(40)
    key = int.from_bytes(hashlib.shake_256(b"clipwise/7/x").digest(16), "little")
    assert Entropy(7).child("x") == Entropy(key)
    theirs = np.random.Generator(np.random.Philox(key=key))
    assert Entropy(7).generator("x").random(5).tolist() == theirs.random(5).tolist()
    arm = hashlib.sha256(b"12:clipwise arm1:77:R = 0.1").digest()
    assert arm_seed(7, "R = 0.1") == int.from_bytes(arm[:16], "little") and arm_seed(None, "R = 0.1") is None
    with pytest.raises(InvalidPlan, match="seed"):
        arm_seed(-1, "R = 0.1")


def test_every_global_generator_has_a_seed_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    on_devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", on_devices.append)
    Entropy(1).seed_globals("model", 3)
    words = np.frombuffer(Entropy(1).take(16, "model", 3), np.uint32)
    assert torch.initial_seed() == words[0] and on_devices == [int(words[0])]
    own = np.random.RandomState(words[1])
    assert np.random.rand() == own.rand() and random.random() == random.Random(words[2:].tobytes()).random()  # noqa: NPY002
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    Entropy(1).seed_globals("model", 4)
    assert len(on_devices) == 1


def test_threads_of_a_dropped_run_end() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        before = set(threading.enumerate())
        for _ in range(3):
            model = torch.nn.Linear(300, 300)
            plan = cw.Plan(cw.FullBatch(4), steps=2, clip=cw.Abadi(1.0), noise_multiplier=1.0)
            private = cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=0.1))
            for (x,) in private.loader(torch.utils.data.TensorDataset(torch.randn(4, 300))):
                private.step(model(x).square().sum(dim=1))
                break
        drawing = set(threading.enumerate()) - before
        assert drawing, "noise is drawn in threads"
        del private
        gc.collect()
        for thread in drawing:
            thread.join(HANG)
        assert not any(thread.is_alive() for thread in drawing)
    finally:
        torch.set_num_threads(threads)
