"""One training step is a straight walk: CONTRIBUTING draws it, and here it is counted."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import clipwise as cw

ROOT = Path(__file__).parents[2]
SOURCE = Path(cw.__file__).parent
MOST_FILES = 42
"""Of the package, entered by one step."""
Walk = list[tuple[str, str]]


def walks() -> list[Walk]:
    """The way to every call of clipwise in one warm step of a small network, as (file, function)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    plan = cw.Plan(cw.FullBatch(8), 10, cw.Abadi(1.0), noise_multiplier=1.0)
    private = cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), own_batches=True)
    x, y = torch.randn(8, 3), torch.randint(2, (8,))
    for _ in range(2):  # watched and planned, then checked
        with private.watch((x, y)):
            losses = F.cross_entropy(model(x), y, reduction="none")
        private.step(losses)
    losses = F.cross_entropy(model(x), y, reduction="none")
    found: list[Walk] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and Path(frame.f_code.co_filename).is_relative_to(SOURCE):
            found.append(way_to(frame))

    sys.setprofile(note)
    try:
        private.step(losses)
    finally:
        sys.setprofile(None)
    return found


def way_to(frame: FrameType | None) -> Walk:
    way: Walk = []
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(SOURCE) and not frame.f_code.co_name.endswith(("comp>", "expr>")):  # Python's own
            way.insert(0, (file.relative_to(SOURCE).as_posix(), frame.f_code.co_name))
        frame = frame.f_back
    return way


def drawn() -> list[tuple[int, str, str]]:
    """Depth, function and file of every line of the drawing."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    picture = text.partition("## One training step")[2].partition("```\n")[2].partition("```")[0]
    lines = [re.match(r"( *)(?:└ )?([\w.]+)\(.*?\) +(\S+\.py|yours)", line) for line in picture.splitlines()]
    return [(len(m[1]) // 2, m[2].rpartition(".")[2], m[3]) for m in lines if m is not None]


def test_the_drawing_of_a_step_is_true() -> None:
    found = {tuple(way) for way in walks()}
    path: Walk = []
    for depth, function, file in drawn():
        path = [*path[:depth], (file, "__init__" if function in ("Backward", "Dense") else function)]
        if file != "yours":
            assert tuple(path) in found, f"no step goes this way: {path}"
    assert max(depth for depth, _, _ in drawn()) + 1 == 10


def test_a_step_is_no_longer_than_drawn() -> None:
    found = walks()
    uses = [way for way in found if way[-1] == ("engine/uses.py", "__init__")]
    assert uses and max(map(len, uses)) <= 10
    assert max(map(len, found)) <= 12
    files = {way[-1][0] for way in found}
    assert len(files) <= MOST_FILES, sorted(files)
