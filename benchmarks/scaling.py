"""How the cost grows on a small BERT: with batch size, sequence length, width, depth and vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.measure import CannotRun, Json, interleaved, peak_between_steps, prepare
from benchmarks.methods import Method
from benchmarks.workloads import Workload, bert_workload

METHODS_MEASURED = ("plain", "clipwise", "opacus_hooks", "opacus_ghost")
VOCABULARY = 1_000


@dataclass(frozen=True)
class Point:
    """One size of one study."""

    study: str
    factor: int
    workload: Workload

    @property
    def key(self) -> str:
        """How the point is named in the results."""
        return f"{self.study} x{self.factor}"


def small_bert(
    length: int = 64, batch_size: int = 4, width: int = 128, layers: int = 2, vocabulary: int = VOCABULARY
) -> Workload:
    """The study's model at one size."""
    return bert_workload(length, batch_size, width, layers, vocabulary)


STUDIES: dict[str, tuple[tuple[int, ...], Callable[[int], Workload]]] = {
    "batch": ((1, 2, 4, 8, 16), lambda factor: small_bert(batch_size=4 * factor)),
    "length": ((1, 2, 4, 8, 16, 32), lambda factor: small_bert(length=64 * factor)),
    "width": ((1, 2, 4), lambda factor: small_bert(width=128 * factor)),
    "depth": ((1, 2, 4), lambda factor: small_bert(layers=2 * factor)),
    "vocabulary": ((1, 8, 64), lambda factor: small_bert(vocabulary=VOCABULARY * factor)),
}


def points() -> Iterator[Point]:
    """Every size of every study, smallest first."""
    for study, (factors, workload) in STUDIES.items():
        for factor in factors:
            yield Point(study, factor, workload(factor))


def _methods(point: Point) -> dict[str, Method]:
    found: dict[str, Method] = {}
    for name in METHODS_MEASURED:
        try:
            found[name] = prepare(point.workload, name).method
        except CannotRun:
            continue
    return found


def times(point: Point, seconds: float = 4.0) -> Json:
    """CPU and wall milliseconds and ratios of a point, per method."""
    return interleaved(_methods(point), seconds=seconds, most=15)


def memories(point: Point) -> Json:
    """Peak memory of a step over the state between steps, in bytes, per method."""
    return {name: peak_between_steps(method, method.workload.batch()) for name, method in _methods(point).items()}
