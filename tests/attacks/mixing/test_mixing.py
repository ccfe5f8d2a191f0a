"""Every program that mixes samples is refused in a plain loop, and its honest relatives are not.

Every model of the zoo is honest: it trains in a plain loop, and is checked or says why not.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode
from torch.utils.data import Dataset

import clipwise as cw
from tests.engine.reference import precision
from tests.zoo import CASES, Case
from tests.zoo.case import Data

from . import BY_NAME, HONEST, MIXING, UNSEEN
from .programs import Loop, Program
from .truth import mixes

STEPS = 3


def each(programs: Iterable[Program]) -> pytest.MarkDecorator:
    """A test for each program, by name."""
    marked = [pytest.param(p, id=p.name, marks=[pytest.mark.slow] if p.slow else []) for p in programs]
    return pytest.mark.parametrize("program", marked)


def modes() -> list[Any]:
    """The dispatch and function modes that are on in this thread."""
    return [*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()]


@pytest.fixture(autouse=True)
def _no_mode_is_left_for_other_tests() -> Iterator[None]:
    yield
    while _get_current_dispatch_mode_stack():
        _pop_mode()


def private_for(loop: Loop, **options: Any) -> cw.Private:
    """What a user makes before the loop."""
    program = loop.program
    size = len(program.records())  # type: ignore[arg-type]
    sampling = cw.FullBatch(size) if program.batch_size is None else cw.Poisson(size, program.batch_size)
    plan = cw.Plan(sampling=sampling, steps=STEPS, clip=cw.Abadi(1.0), noise_multiplier=1.0)
    trained = [p for p in loop.model.parameters() if p.requires_grad]
    return cw.Private(plan, loop.model, torch.optim.SGD(trained, lr=0.1), seed=5, **options)


def train(private: cw.Private, loop: Loop) -> None:
    """The user's loop."""
    for batch in private.loader(loop.program.records(), **loop.program.options):
        losses = loop.losses(batch)
        done = private.ledger.steps
        try:
            private.step(losses)
        except cw.ClipwiseError:
            assert private.ledger.steps == done, "a refused step was charged"
            raise
        loop.after(batch)


@each(BY_NAME.values())
def test_labels_are_true(program: Program) -> None:
    assert mixes(program) == program.mixes


@each(MIXING)
def test_a_program_that_mixes_is_refused_and_the_run_goes_on_when_mended(program: Program) -> None:
    loop = program.start()
    private = private_for(loop)
    with pytest.raises(cw.ClipwiseError) as caught:
        train(private, loop)
    assert str(caught.value)
    assert private.ledger.steps < program.refused_by
    assert not modes()
    if program.mended is not None:
        for batch in private.loader(program.records(), **program.options):
            private.step(program.mended(loop.model, batch))
        assert private.ledger.steps == STEPS
        assert not modes()


@each(HONEST)
def test_an_honest_relative_is_trained(program: Program) -> None:
    loop = program.start()
    private = private_for(loop)
    train(private, loop)
    assert private.ledger.steps == STEPS
    assert not modes()


@each(UNSEEN)
def test_mixing_outside_torch_is_found_where_the_loss_function_is_given(program: Program) -> None:
    loop = program.start()
    private = private_for(loop, loss_fn=lambda model, batch: loop.losses(batch))
    with pytest.raises(cw.ClipwiseError) as caught:
        train(private, loop)
    assert str(caught.value)
    assert private.ledger.steps < program.refused_by
    assert not modes()


@each(UNSEEN)
def test_mixing_outside_torch_is_refused_or_trained_where_no_loss_function_is_given(program: Program) -> None:
    loop = program.start()
    private = private_for(loop)
    with suppress(cw.ClipwiseError):
        train(private, loop)
        assert private.ledger.steps == STEPS
    assert not modes()


def test_leaving_the_loop_leaves_no_mode_behind() -> None:
    loop = BY_NAME["plain_network"].start()
    private = private_for(loop)
    for batch in private.loader(loop.program.records()):
        loop.losses(batch)
        break
    gc.collect()
    assert not modes()
    train(private, loop)
    assert private.ledger.steps == STEPS


def test_an_error_of_the_users_own_leaves_no_mode_behind() -> None:
    loop = BY_NAME["plain_network"].start()
    private = private_for(loop)

    def broken() -> None:
        for batch in private.loader(loop.program.records()):
            loop.losses(batch)
            raise ZeroDivisionError

    with suppress(ZeroDivisionError):
        broken()
    gc.collect()
    assert not modes()
    train(private, loop)
    assert private.ledger.steps == STEPS


class Rows(Dataset[Any]):
    """A case's data, record by record."""

    def __init__(self, data: Data) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(next(iter(self._data.values())))

    def __getitem__(self, i: int) -> Any:
        return {name: values[i] for name, values in self._data.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_model_of_the_zoo_is_trained(case: Case) -> None:
    dtype = precision(case)
    model, dataset = case.model(dtype=dtype), Rows(case.draw(24, dtype=dtype))
    plan = cw.Plan(cw.Poisson(len(dataset), 6), steps=2, clip=cw.Abadi(1.0), noise_multiplier=1.0)
    trained = [p for p in model.parameters() if p.requires_grad]
    private = cw.Private(plan, model, torch.optim.SGD(trained, lr=0.01), seed=1)
    for batch in private.loader(dataset):
        private.step(case.loss(model, **batch))
    assert private.ledger.steps == 2
    assert private.checked.steps or private.checked.unclear
    assert not modes()
