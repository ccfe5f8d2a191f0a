"""A configuration that takes no time, and runs without processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from clipwise.experiments import Standing, Trial, Watch

CONFIG = """
batch_size = 64
steps = 3

[data]
source = "digits"

[model]
source = "mlp"
hidden = [4]

[clip]
rule = "NoClip"

[optimizer]
name = "SGD"
learning_rate = 0.5

[privacy]
private = false

[evaluation]
resamples = 0
"""


def one_by_one(
    work: Callable[[Trial], Any], todo: Sequence[Trial], jobs: int | None, watch: Watch
) -> Iterator[tuple[Trial, Any]]:
    """What `side_by_side` does, in this process: to start another one takes longer than these runs do."""
    for done, trial in enumerate(todo, start=1):
        run = work(trial)
        watch(Standing(done, len(todo), trial, run))
        yield trial, run
