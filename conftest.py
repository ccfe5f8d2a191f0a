"""Settings of tests and doctests alike: each is a function of itself alone, so that any order of them will do.

What takes seconds to import is imported where it is used: the process that hands out tests to others needs none of it.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any
from weakref import ReferenceType, ref

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`pytest --order-seed 1`: the tests pass in any order."""
    parser.addoption("--order-seed", type=int, metavar="SEED", help="shuffle the files, and the tests of each file")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files stay together, so that what their tests share is made once."""
    seed = config.getoption("order_seed")
    if seed is not None:
        drawn = random.Random(seed)
        places = {path: drawn.random() for path in sorted({item.path for item in items})}
        drawn.shuffle(items)
        items.sort(key=lambda item: places[item.path])


def pytest_collectstart() -> None:
    """What the tests run on stays to the end: the garbage collector need not go through it again and again.

    Not what test modules hold: tensors that are frozen are out of sight (`Memory.look_around`).
    """
    if not gc.get_freeze_count():
        gc.freeze()


def pytest_collection_finish(session: pytest.Session) -> None:
    """So do the tests themselves, half a million objects."""
    if not session.items:  # of the process that hands out tests
        return
    from clipwise.private.evidence import memory

    of_the_process = memory._tensors_of_the_process
    memory._tensors_of_the_process = lambda: chain(remembered(), of_the_process())
    freeze_what_is_there()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """And what tests imported: every private run lists the objects of the process before its first batch."""
    if nextitem is not None and nextitem.path != item.path and len(gc.get_objects()) > _MANY:
        freeze_what_is_there()


_MANY = 50_000  # objects
_THERE: list[ReferenceType[Any]] = []


def freeze_what_is_there() -> None:
    """Nothing of it is looked through again. The tensors among it are remembered, and stay in sight."""
    from clipwise.private.evidence import memory

    gc.collect()
    _THERE[:] = [ref(tensor) for tensor in {id(t): t for t in memory._tensors_of_the_process()}.values()]
    gc.freeze()


def remembered() -> Iterator[Any]:
    """The tensors that were frozen and are still alive."""
    return filter(lambda tensor: tensor is not None, (reference() for reference in _THERE))


def start_generators(seed: int) -> None:
    """Python's, numpy's and torch's global generators.

    `torch.manual_seed` writes down where it was called from, once for each kind of device that may yet be used: this
    takes a millisecond, before every test.
    """
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)


@contextmanager
def generators_of_its_own(seed: int) -> Iterator[None]:
    """The global generators start from `seed`, and continue afterwards where they were."""
    from clipwise.private.evidence.collate import unchanged_generators

    with unchanged_generators():
        start_generators(seed)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """What a module draws while it is imported does not depend on the modules before it."""
    with generators_of_its_own(2):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
    """What tests share is the same whichever of them makes it, and changes nothing for that one."""
    if fixturedef.scope == "function":
        return (yield)
    with generators_of_its_own(1):  # other numbers than the test's own
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A test draws the same numbers whatever ran before it."""
    start_generators(0)
