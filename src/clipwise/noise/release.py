"""The one function through which anything computed from private data leaves with Gaussian noise.

Sum and noise meet in float64, the scale is applied, the result is rounded to a public grid, and only then it is cast:

    released = grid * round((sum + std * z) * scale / grid),    grid = 2^floor(log2(std * scale)) / 1024

The grid is a power of two that depends on the plan alone, and all after the addition is a function of its exact result.
So this is post-processing of the Gaussian mechanism on real numbers, and what is written has no bits below the grid
in which a record could leave a trace. A float32 gradient that needs more than 24 bits of the grid is rounded again,
which is post-processing as well.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipwise.entropy import Entropy
from clipwise.errors import CheckFailed, ClipwiseError, InvalidPlan
from clipwise.hashing import joined
from clipwise.noise.chain import NoiseChain
from clipwise.noise.normals import DefaultNormals, Normals, check_source
from clipwise.noise.pieces import Piece, cut

__all__ = ["DESCRIPTION", "GRID_POINTS", "GaussianNoise", "grid_of"]

GRID_POINTS = 1024
"""Points of the grid in one standard deviation, rounded down to a power of two."""

DESCRIPTION = "float64 ziggurat or Box-Muller on a grid of about std/1024"
"""How a run's record names the noise."""

Floats: TypeAlias = npt.NDArray[np.floating[Any]]

_MOST_LANES = 16
_SMALLEST, _LARGEST = 2.0**-900, 2.0**900


def grid_of(std: float) -> float:
    """The grid of a release with this standard deviation: 2^floor(log2(std)) / 1024.

    >>> grid_of(1.0) == grid_of(1.99) == 1 / 1024, grid_of(2.0) == 2 / 1024
    (True, True)
    """
    return math.ldexp(1.0, math.frexp(std)[1] - 1) / GRID_POINTS


class _Lane:
    """A buffer and the pieces that one thread serves through it, each with its part of the buffer in two forms."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.buffer = torch.zeros(max(piece.size for piece in pieces), dtype=torch.float64, device="cpu")
        parts = {size: self.buffer[:size] for size in {piece.size for piece in pieces}}
        self.pieces = [(piece, parts[piece.size], parts[piece.size].numpy()) for piece in pieces]


class GaussianNoise:
    """Adds N(0, std_r^2) to a list of tensors and releases them on a grid, on as many threads as torch uses.

    Guarantees: the numbers are a function of entropy, step and what they are added to, not of the threads; every
    element of every tensor has a number of its own; the noise of a step serves one release, and after an error none.
    With a seed, another sum, deviation, source, chain or past gets independent noise: no two releases of a seed cancel.
    A sum that is not finite is refused.
    It serves one caller at a time: a second one, in another thread, is refused. `chain` makes the noise depend on that
    of earlier steps, given the number of pieces; after an error it begins again.

    >>> sums = [torch.zeros(1000), torch.zeros(1000)]
    >>> noise = GaussianNoise(sums, Entropy(seed=0))
    >>> released = noise.release(sums, stds=[1.0, 5.0], scale=0.5, step=0)
    >>> [0.9 < float(part.std()) / std < 1.1 for part, std in zip(released, (0.5, 2.5))]
    [True, True]
    >>> bool((released[0] * 2048 == (released[0] * 2048).round()).all())
    True
    """

    def __init__(
        self,
        like: Sequence[Tensor],
        entropy: Entropy,
        source: Normals | None = None,
        chain: Callable[[int], NoiseChain | None] = lambda pieces: None,
    ) -> None:
        self._source = DefaultNormals() if source is None else source
        check_source(self._source, entropy)
        self._entropy = entropy
        self._kind = () if entropy.seed is None else _kind_of(self._source)
        self._sizes = [tensor.numel() for tensor in like]
        pieces = cut(self._sizes, [(tensor.device, tensor.dtype) for tensor in like])
        self._piece_sizes = [piece.size for piece in pieces]
        self._chain = chain(len(pieces))
        lanes = min(torch.get_num_threads(), _MOST_LANES, len(pieces))
        self._lanes = [_Lane(pieces[first::lanes]) for first in range(lanes)]
        self._pool = ThreadPoolExecutor(lanes, "noise") if lanes > 1 else None
        self._served = -1
        self._busy = threading.Lock()  # the lanes' buffers serve one call

    def release(
        self,
        sums: Sequence[Tensor],
        stds: Sequence[float],
        scale: float,
        step: int,
        label: bytes = b"",
        before: Callable[[bytes], None] | None = None,
    ) -> list[Tensor]:
        """(sums + noise) * scale on the grid, with the noise of step `step` and one standard deviation per tensor.

        `sums` are used up. Steps must grow: the noise of one serves once. `label` is what else tells this release from
        others of the seed. With a seed, `before` gets a digest of the release (private data) before anything is drawn.
        """
        with self._alone():
            self._check(sums, stds, scale, step)
            self._served = step
            try:
                return self._release(sums, stds, scale, step, label, before)
            except BaseException:
                if self._chain is not None:
                    self._chain.begin()
                raise

    def _release(
        self,
        sums: Sequence[Tensor],
        stds: Sequence[float],
        scale: float,
        step: int,
        label: bytes,
        before: Callable[[bytes], None] | None,
    ) -> list[Tensor]:
        whole = [total.detach().contiguous() for total in sums]
        here = [total.cpu() for total in whole]  # themselves, unless they are elsewhere
        flat = [total.numpy().reshape(-1) for total in here]
        entropy, chain = self._entropy, self._chain
        if chain is not None:
            chain.follow(step)
        if entropy.seed is not None:
            past = () if chain is None else (chain.kind, chain.trace)
            entropy = entropy.labelled(label, repr((*stds, scale)).encode(), _digest(flat), *self._kind, *past)
            mark = entropy.take(16, "release", step)
            if before is not None:
                before(mark)
            if chain is not None:
                chain.trace_on(mark)

        def serve(lane: _Lane) -> None:
            with np.errstate(all="ignore"):  # a sum that is not finite is refused
                for piece, numbers, drawn in lane.pieces:
                    self._source.fill_(numbers, entropy, step, piece.number)
                    if chain is not None:
                        chain.correlate(piece.number, drawn, partial(self._further, entropy, step, piece))
                    targets = [flat[part.tensor][part.start : part.stop] for part in piece.parts]
                    _add_and_round(drawn, targets, [stds[part.tensor] for part in piece.parts], scale)
                    _demand_finite(drawn)

        self._on_all_lanes(serve)
        for target, done in zip(whole, here, strict=True):
            if done is not target:
                target.copy_(done)
        return whole

    def _further(self, entropy: Entropy, step: int, piece: Piece, number: int) -> npt.NDArray[np.float64]:
        """Further normal numbers for a piece of a step, from a stream of their own."""
        drawn = torch.empty(piece.size, dtype=torch.float64, device="cpu")
        self._source.fill_(drawn, entropy, step, piece.number + number * len(self._piece_sizes))
        found: npt.NDArray[np.float64] = drawn.numpy()
        return found

    def past(self) -> dict[str, Any] | None:
        """The noise that coming steps depend on, for a checkpoint of a seeded run; None: they depend on none."""
        return None if self._chain is None else self._chain.capture()

    def continue_from(self, past: Mapping[str, Any]) -> None:
        """Continue as when `past` was called."""
        if self._chain is not None:
            self._chain.restore(past, self._piece_sizes)

    def directions(self, like: Sequence[Tensor], entropy: Entropy, number: int) -> list[Tensor]:
        """Standard normal tensors, not a release: neither on a grid nor served only once."""
        made = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in like]

        def serve(lane: _Lane) -> None:
            for piece, numbers, _ in lane.pieces:
                self._source.fill_(numbers, entropy, number, piece.number)
                for part, own in zip(piece.parts, numbers.split([part.size for part in piece.parts]), strict=True):
                    target = made[part.tensor].view(-1)[part.start : part.stop]
                    target.copy_(own.to(target.dtype))

        with self._alone():
            self._on_all_lanes(serve)
        return made

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise ClipwiseError("another thread is drawing this noise: two releases at once would share it.")
        try:
            yield
        finally:
            self._busy.release()

    def _check(self, sums: Sequence[Tensor], stds: Sequence[float], scale: float, step: int) -> None:
        for total, std in zip(sums, stds, strict=True):
            if not _SMALLEST < std * scale < _LARGEST or not _SMALLEST < std < _LARGEST:
                raise InvalidPlan(f"noise needs positive finite standard deviations, got {std!r} times {scale!r}.")
            if total.dtype not in (torch.float32, torch.float64):
                raise InvalidPlan(f"noise is added to float32 or float64, got {total.dtype}.")
        if [total.numel() for total in sums] != self._sizes:
            raise InvalidPlan("the tensors differ in size from those that the noise was made for.")
        if step <= self._served:
            raise ClipwiseError(f"the noise of step {step} was used already: it serves one release only.")

    def _on_all_lanes(self, serve: Callable[[_Lane], None]) -> None:
        """Run `serve` on every lane, wait for all of them whatever happens, and leave no noise behind on an error."""
        try:
            if self._pool is None:
                for lane in self._lanes:
                    serve(lane)
                return
            running = [self._pool.submit(serve, lane) for lane in self._lanes]
            try:
                wait(running)
            finally:
                wait(running)  # also when interrupted: no thread may write on
            for done in running:
                done.result()
        except BaseException:
            for lane in self._lanes:
                lane.buffer.zero_()
            raise


def _kind_of(source: Normals) -> tuple[bytes, ...]:
    """What tells a source from others, for the label of a seeded run: the same sum with other noise is another release.

    The default has no mark.
    """
    kind = type(source)
    return () if kind is DefaultNormals else (f"{kind.__module__}.{kind.__qualname__}".encode(),)


def _digest(flat: Sequence[Floats]) -> bytes:
    """Every bit of these tensors: 2.6 ns a float32 number, in seeded runs only."""
    return joined([hashlib.sha256(total.data).digest() for total in flat])


def _demand_finite(released: Floats) -> None:
    """Noise hides no NaN. Records whose gradients are not finite were left out of the sum, or the bound is broken."""
    if not math.isfinite(released.sum()):
        raise CheckFailed(
            "a sum that was to be released is not finite, as no clipped record makes it. Nothing was released; the "
            "step is charged. Look for NaN or infinity in the weights and the data, and report the model."
        )


def _add_and_round(drawn: Floats, targets: Sequence[Floats], stds: Sequence[float], scale: float) -> None:
    """The release of one piece: `drawn` are its normal numbers, `targets` what they serve, one after the other."""
    if len(targets) == 1:
        _on_grid(drawn, targets[0], stds[0], scale)
        targets[0][:] = drawn
        return
    sums, end = np.concatenate(targets), 0
    for std, together in itertools.groupby(zip(stds, targets, strict=True), key=lambda pair: pair[0]):
        start, end = end, end + sum(target.size for _, target in together)
        _on_grid(drawn[start:end], sums[start:end], std, scale)
    start = 0
    for target in targets:
        target[:] = drawn[start : start + target.size]
        start += target.size


def _on_grid(z: Floats, total: Floats, std: float, scale: float) -> None:
    """From normal numbers to what is released, in place and in float64."""
    grid = grid_of(std * scale)
    np.multiply(z, std, out=z)
    np.add(z, total, out=z)
    np.multiply(z, scale / grid, out=z)
    np.rint(z, out=z)
    np.multiply(z, grid, out=z)
