"""Checksums of memory: every byte, every place, every type; against sums in Python's whole numbers."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from torch import Tensor

from clipwise.private.evidence import memory as module
from clipwise.private.evidence.memory import checksum, content

ROW = module._ROW
DTYPES = (torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.float64,
          torch.complex64, torch.complex128)  # fmt: skip


def of(tensor: Tensor) -> bytes:
    return checksum(tensor.untyped_storage())


def by_hand(data: bytes) -> bytes:
    """The same in whole numbers of any size, row by row; of no more than a row the hash of its bytes."""
    numbers = [[[int(n) for n in sequence] for sequence in half] for half in module._drawn()]
    words = np.frombuffer(data + bytes(-len(data) % 8), dtype=np.int64).tolist()
    whole = len(data) // module._PIECE * module._PIECE // 8
    found = hashlib.blake2b(len(data).to_bytes(8, "little"), digest_size=16)
    if len(data) <= 8 * ROW:
        found.update(data)
        return found.digest()
    for piece in (words[:whole], words[whole:]):
        whole_rows = len(piece) // ROW * ROW
        for block in (piece[:whole_rows], piece[whole_rows:]):
            rows = [block[k : k + ROW] for k in range(0, len(block), ROW)]
            for shift, half in zip((0, 32), numbers, strict=True):
                for sequence in half:
                    for row in rows:
                        total = sum((w >> shift) * n for w, n in zip(row, sequence, strict=False))
                        found.update((total % 2**64).to_bytes(8, "little"))
    return found.digest()


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 8 * ROW - 1, 8 * ROW, 8 * ROW + 3, (1 << 20) + 8 * ROW + 5])
def test_sums_are_those_of_whole_numbers(size: int) -> None:
    memory = torch.randint(256, (size,), dtype=torch.uint8)
    assert of(memory) == of(memory.clone()) == by_hand(memory.numpy().tobytes())


def test_the_other_way_to_the_products_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of whole numbers and vectors have a kernel on the CPU only."""
    words = torch.randint(-(2**62), 2**62, (3, ROW))
    ours = list(module._sums(words))
    assert len(ours) == 4
    numbers = module._numbers(words.device).flatten(0, 1)
    halves = [words, words, words >> 32, words >> 32]
    assert all(torch.equal(a, (h * n).sum(1)) for a, h, n in zip(ours, halves, numbers, strict=True))


@pytest.mark.parametrize("size", [1, 7, 8, 9, 16, 19, 8 * ROW + 1])
def test_every_bit_counts(size: int) -> None:
    memory = torch.zeros(size, dtype=torch.uint8)
    seen = {of(memory)}
    for byte in {*range(min(size, 20)), size - 1}:
        for bit in range(8):
            memory[byte] = 1 << bit
            seen.add(of(memory))
        memory[byte] = 0
    assert len(seen) == 1 + 8 * len({*range(min(size, 20)), size - 1}) and of(memory) in seen
    assert of(torch.zeros(size + 1, dtype=torch.uint8)) not in seen, "the length counts"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_exchange_of_two_entries_is_seen(dtype: torch.dtype) -> None:
    for first, second in ((0, 1), (0, 8), (3, 1029), (1024, 5000), (17, 262_150)):
        memory = torch.zeros(max(second + 1, 20), dtype=dtype)
        memory[first] = 1
        before = of(memory)
        memory[first], memory[second] = 0, 1
        assert of(memory) != before


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [2, 6, 8, 64])
def test_signs_that_change_in_pairs_are_seen(dtype: torch.dtype, size: int) -> None:
    """Bits that no odd multiple moves: they cancel in a sum of words, whatever these are multiplied with."""
    top = {torch.int32: -(2**31), torch.int64: -(2**63)}.get(dtype, -0.0)
    memory = torch.zeros(size, dtype=dtype)
    before = of(memory)
    for places in ([0, 1], [0, size - 1], list(range(size))):
        memory[places] = top
        assert of(memory) != before
        memory[places] = 0
    assert of(memory) == before


def test_permutations_and_rows_that_are_exchanged_are_seen() -> None:
    order = torch.arange(3000)
    assert len({of(order[torch.randperm(3000)]) for _ in range(50)}) == 50
    table = torch.randn(40, 700)
    before = of(table)
    table[[3, 30]] = table[[30, 3]]
    assert of(table) != before
    table[[3, 30]] = table[[30, 3]]
    assert of(table) == before


def test_numbers_are_odd_and_all_different() -> None:
    numbers = module._drawn()
    assert numbers.shape == (2, 2, ROW) and bool((numbers & 1).all())
    assert len(np.unique(numbers % (1 << 33))) == numbers.size


def test_all_of_a_storage_counts_wherever_a_tensor_begins() -> None:
    whole = torch.arange(10.0)
    assert content(whole[4:]) == content(whole) != content(whole[4:].clone())


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr], ids=str)
def test_the_places_of_sparse_values_count(layout: torch.layout) -> None:
    def sparse(dense: Tensor) -> Tensor:
        return dense.to_sparse(layout=layout, blocksize=(2, 2) if layout is torch.sparse_bsr else None)

    one = torch.zeros(4, 4)
    one[0, 0] = 1
    seen = {content(sparse(one)), content(sparse(one.roll(2, 0))), content(sparse(one.roll(2, 1)))}
    assert len(seen) == 3 and content(sparse(one)) in seen


def test_of_memory_that_cannot_be_read_the_writes_are_counted() -> None:
    nowhere = torch.ones(3, device="meta")
    before = content(nowhere)
    nowhere += 1
    assert content(nowhere) != before
