"""A schedule of noise: how much of it from which step on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from clipwise._validate import MOST_NOISE, is_count, is_noise
from clipwise.errors import InvalidPlan

__all__ = ["Steps"]


@dataclass(frozen=True, repr=False)
class Steps:
    """Noise multipliers by the step (from 0) at which each begins, for `Plan(noise_multiplier=...)` and `cw.epsilon`.

    `calibrate` scales the whole schedule. Two ways to write one schedule are equal: `Steps({0: 2.0, 9: 2.0})` is
    `Steps({0: 2.0})`.

    Guarantees: every step is charged with the noise that `at` gives for its own number, after a crash as well.

    >>> noise = Steps({0: 2.0, 500: 1.0})
    >>> noise.at(499), noise.at(500), list(noise.stretches(498, 503))
    (2.0, 1.0, [(2.0, 2), (1.0, 3)])
    """

    noise: Mapping[int, float]

    def __post_init__(self) -> None:
        given = self.noise
        if not isinstance(given, Mapping) or 0 not in given:
            raise InvalidPlan(
                f"Steps needs a mapping from step to noise multiplier that begins with step 0, such as "
                f"Steps({{0: 2.0, 500: 1.0}}), got {given!r}."
            )
        for step, noise in given.items():
            if not is_count(step, least=0):
                raise InvalidPlan(f"the keys of Steps are step numbers, integers of at least 0, got {step!r}.")
            if not is_noise(noise):
                raise InvalidPlan(
                    f"the noise multiplier of step {step} must be a number from 0 to {MOST_NOISE:g}, got {noise!r}."
                )
        if min(given.values()) == 0 < max(given.values()):
            raise InvalidPlan(
                f"{given!r} has steps without noise, which leave nothing private, whatever noise the others have. Give "
                "every step some, or noise_multiplier=0 for a run that is not private."
            )
        kept: dict[int, float] = {}
        for step in sorted(given):
            if not kept or given[step] != kept[max(kept)]:
                kept[step] = float(given[step])
        object.__setattr__(self, "noise", MappingProxyType(kept))  # a copy: nobody can change it any more

    def check(self, steps: int) -> None:
        """Refuse a run of so few steps that a switch comes after its end."""
        if max(self.noise) >= steps:
            raise InvalidPlan(f"{self!r} switches after the end: the plan has only {steps} steps.")

    def at(self, step: int) -> float:
        """The noise multiplier of step `step` (from 0)."""
        return self.noise[max(begin for begin in self.noise if begin <= step)]

    def stretches(self, first: int, stop: int) -> Iterator[tuple[float, int]]:
        """Noise multiplier and number of steps of each stretch between step `first` and, not included, `stop`."""
        ends = [first, *(begin for begin in self.noise if first < begin < stop), stop]
        return ((self.at(begin), end - begin) for begin, end in pairwise(ends))

    def scaled(self, factor: float) -> Steps:
        """The same schedule with all its noise multiplied."""
        return Steps({step: noise * factor for step, noise in self.noise.items()})

    def __repr__(self) -> str:
        return f"Steps({dict(self.noise)!r})"

    def __hash__(self) -> int:
        return hash(tuple(self.noise.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return Steps, (dict(self.noise),)
