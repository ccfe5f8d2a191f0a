"""Settings of the whole suite: one thread per process, and the warnings of other packages that we cannot act on."""

from __future__ import annotations

import html
import io
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

HANG = 900.0
"""Seconds. What a test has waited for so long hangs; a busy machine takes long, and no test is about that."""

# Properties are tried with the same examples every time, and none is too slow.
settings.register_profile("seeded", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("seeded")

NOT_OURS = [
    "ignore:TF32 acceleration on top of oneDNN:UserWarning",  # torch, on any use of torch.backends.mkldnn.flags
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning",  # transformers, on importing DeBERTa
    "ignore:enable_nested_tensor is True:UserWarning",  # torch, on building nn.Transformer(norm_first=True)
]


def pytest_configure(config: pytest.Config) -> None:
    """Warnings are errors, except these."""
    for line in NOT_OURS:
        config.addinivalue_line("filterwarnings", line)


def pytest_collectstart() -> None:
    """One thread, so that runs are reproducible and several test processes do not fight for the cores."""
    import torch

    torch.set_num_threads(1)


def words_of(drawn: Any, name: str = "figure") -> str:
    """The words of a figure as an SVG element; to draw its lines would take most of the time of a page.

    To ask its axes for all they hold would make their ticks, which have no words before they are drawn.
    """
    texts = [*drawn.texts, *(text for legend in drawn.legends for text in legend.get_texts())]
    for axes in drawn.axes:
        legend = axes.get_legend()
        texts += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts, *(legend.get_texts() if legend else ())]
    words = (html.escape(each.get_text()) for each in texts)
    return f'<svg id="{name}">{"".join(f"<text>{word}</text>" for word in words if word)}</svg>'


@cache
def curve_of(events: Any, count: int) -> Any:
    """The pages of many tests show the curves of few ledgers."""
    from clipwise.accounting import privacy_curve

    return privacy_curve(events, count=count)


def without_drawing(patch: pytest.MonkeyPatch) -> None:
    """What `figures_in_words` does, for fixtures that many tests share; nor is there a choice of bins."""
    patch.setattr("clipwise.report.figures.svg", words_of)
    patch.setattr("clipwise.report.figures.privacy_curve", curve_of)
    patch.setattr("clipwise.report.figures.BIN_CHOICES", (15,))


@pytest.fixture
def figures_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages hold the words of their figures only: for tests of what else stands on a page, or beside it."""
    without_drawing(monkeypatch)


@pytest.fixture
def fine_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases are rounded, but hardly: for tests that compare a step with a formula, which has no grid."""
    monkeypatch.setattr("clipwise.noise.release.GRID_POINTS", 1 << 46)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True

    @property
    def screen(self) -> list[str]:
        """The lines that a person sees in the end."""
        return [line.split("\r\033[K")[-1] for line in self.getvalue().split("\n")]


@pytest.fixture
def open_mask() -> Iterator[None]:
    """Without a mask every file has the mode that its writer chose."""
    before = os.umask(0)
    yield
    os.umask(before)
