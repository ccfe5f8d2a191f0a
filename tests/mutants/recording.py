"""A plugin of the coverage run: lines are noted for the test that ran them, fixtures included; and files in shards."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Only the files of this shard: `SHARD=0/2` is the first of two."""
    number, count = map(int, os.environ["SHARD"].split("/"))
    items[:] = [item for item in items if zlib.crc32(str(item.location[0]).encode()) % count == number]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """What runs from here on, runs for this test."""
    from coverage import Coverage

    coverage = Coverage.current()
    assert coverage is not None
    coverage.switch_context(item.nodeid.partition("[")[0])
    return (yield)
