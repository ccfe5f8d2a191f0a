"""Fixtures for runs."""

from __future__ import annotations

import pytest

from clipwise.training import train

from .common import exact_panel


@pytest.fixture
def exact_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other accountants take seconds, and are tested where they are made."""
    monkeypatch.setattr(train, "panel_of", exact_panel)
