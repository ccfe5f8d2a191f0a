"""Numbers of any type that a loop takes out of one batch and multiplies into the losses of the next."""

from __future__ import annotations

from typing import Any

import pytest

import clipwise as cw

from .test_second_look import N, losses_of, mlp, points, private_of

TEXT = "numbers that change from step to step, after others were taken out of earlier batches"

TAKES: dict[str, Any] = {
    "int": lambda x, y: int(y.sum()),
    "float": lambda x, y: float(x.sum()),
    "count": lambda x, y: (y > 0).sum().item(),
    "bool": lambda x, y: 1 + bool(x.abs().max() > 5),
    "list": lambda x, y: sum(y.tolist()),
    "array": lambda x, y: y.numpy().sum(),
}


def carrying(take: Any, in_the_losses: bool) -> cw.Private:
    model = mlp()
    private, taken = private_of(model, 5, cw.FixedSize(N, 16)), 8
    for x, y in private.loader(points()):
        weight = 0.3 + 0.1 * taken if in_the_losses else 0.7
        losses = weight * losses_of(model, (x, y))
        taken = take(x, y)
        private.step(losses)
    return private


@pytest.mark.parametrize("take", TAKES.values(), ids=TAKES)
def test_a_number_of_any_type_that_is_carried_on_is_noted(take: Any) -> None:
    assert TEXT in carrying(take, in_the_losses=True).checked.unclear


@pytest.mark.parametrize("take", TAKES.values(), ids=TAKES)
def test_a_log_of_counts_is_honest(take: Any) -> None:
    private = carrying(take, in_the_losses=False)
    assert private.checked.steps == (0, 1, 2) and not private.checked.unclear


def test_a_number_of_a_pass_that_was_refused_is_carried_on_too() -> None:
    model = mlp()
    private, taken = private_of(model), 0
    for step, (x, y) in enumerate(private.loader(points())):
        losses = (0.3 + 0.1 * step) * losses_of(model, (x, y))
        if not step:
            taken = int(y.sum())
            with pytest.raises(cw.NotSeparable):
                private.step(losses - x.mean() * losses)
            with private.watch((x, y)):
                losses = losses_of(model, (x, y))
        private.step(losses)
    assert taken and TEXT in private.checked.unclear
