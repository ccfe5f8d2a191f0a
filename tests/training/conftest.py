"""Fixtures for runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from clipwise.report import Run
from clipwise.training.run import train

from .common import config, exact_panel


@pytest.fixture
def exact_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other accountants take seconds, and are tested where they are made."""
    monkeypatch.setattr(train, "guarantees_of", exact_panel)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """The tiny run and its folder, without a page; who writes to it takes a copy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "guarantees_of", exact_panel)
        return train.train(config(), output=tmp_path_factory.mktemp("finished") / "run", page=False)
