"""A plugin of the coverage run: lines are noted for the test that runs them, or for all tests of a shared fixture."""

from __future__ import annotations

import json
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SHARED = "fixture "
_tests: defaultdict[str, set[str]] = defaultdict(set)  # of each shared fixture


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Only the files of this shard: `SHARD=0/2` is the first of two."""
    number, count = map(int, os.environ["SHARD"].split("/"))
    items[:] = [item for item in items if zlib.crc32(str(item.location[0]).encode()) % count == number]


def _switch(context: str) -> None:
    from coverage import Coverage

    coverage = Coverage.current()
    assert coverage is not None
    coverage.switch_context(context)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """What runs from here on, runs for this test."""
    test = item.nodeid.partition("[")[0]
    for name in getattr(item, "fixturenames", ()):
        _tests[SHARED + name].add(test)
    _switch(test)
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
    """What a shared fixture runs, it runs for all tests that use it."""
    if fixturedef.scope == "function":
        return (yield)
    _switch(SHARED + fixturedef.argname)
    try:
        return (yield)
    finally:
        _switch(os.environ["PYTEST_CURRENT_TEST"].partition("[")[0].partition(" (")[0])


def pytest_sessionfinish() -> None:
    """Leave the tests of the shared fixtures beside the coverage."""
    Path(os.environ["FIXTURES"]).write_text(json.dumps({name: sorted(tests) for name, tests in _tests.items()}))
