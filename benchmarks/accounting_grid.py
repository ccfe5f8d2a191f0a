"""The exact accountant at the corners of its range: `python -m benchmarks.accounting_grid` (a few minutes).

Every combination of noise, rate, steps and delta is accounted once; every answer must be finite and not negative, and
must grow with steps and rate and fall with noise and delta. Writes accounting_grid.json and its table in
docs/accounting.md.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any, TypeAlias

from clipwise.accounting import GaussianSteps, account
from clipwise.sampling import Poisson
from papers.pages import DOCS, put

NOISES = (0.1, 0.2, 0.45, 1.0, 3.0, 10.0, 100.0)
RATES = ((1, 10**7), (1, 10**5), (1, 1000), (3, 100), (1, 2), (999, 1000), (1, 1))
STEPS = (1, 2, 10, 60, 1000, 30_000, 10**6)
DELTAS = (1e-15, 1e-10, 1e-5, 1e-2, 0.1)
_GROWS = (-1, 1, 1, -1)  # epsilon along each of the four axes

Place: TypeAlias = tuple[int, ...]
Answers: TypeAlias = dict[Place, tuple[float, str, float]]


def measure() -> Answers:
    """Epsilon, who answered and CPU seconds, at every point of the grid."""
    answers: Answers = {}
    axes = enumerate(NOISES), enumerate(RATES), enumerate(STEPS), enumerate(DELTAS)
    for (i, noise), (j, (batch, size)), (k, steps), (n, delta) in itertools.product(*axes):
        begin = time.process_time()
        guarantee = account((GaussianSteps(Poisson(size, batch), noise, steps),), delta)
        answers[i, j, k, n] = (guarantee.epsilon, guarantee.accountant, time.process_time() - begin)
    return answers


def falls(answers: Answers) -> int:
    """Pairs of neighbours where epsilon goes the wrong way, beyond 1e-6 of its value."""
    wrong = 0
    for place, (epsilon, *_) in answers.items():
        for axis, sign in enumerate(_GROWS):
            neighbour = answers.get((*place[:axis], place[axis] + 1, *place[axis + 1 :]))
            if neighbour is not None:
                low, high = (epsilon, neighbour[0])[::sign]
                wrong += low > high * (1 + 1e-6) + 1e-12
    return wrong


def summary(answers: Answers) -> dict[str, Any]:
    """What the grid shows."""
    return {
        "points": len(answers),
        "not finite or negative": sum(not 0 <= epsilon < math.inf for epsilon, *_ in answers.values()),
        "not monotone": falls(answers),
        "answered by": dict(Counter(name for _, name, _ in answers.values())),
        "slowest, CPU s": max(seconds for *_, seconds in answers.values()),
    }


def markdown(found: dict[str, Any]) -> str:
    """One row."""
    shown = {**found, "answered by": ", ".join(f"{name} {count}" for name, count in found["answered by"].items())}
    shown["slowest, CPU s"] = f"{found['slowest, CPU s']:.2f}"
    lines = [list(shown), ["---"] * len(shown), [str(value) for value in shown.values()]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    found = summary(measure())
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    put(DOCS / "accounting.md", "grid", markdown(found))
    print(markdown(found))


if __name__ == "__main__":
    main()
