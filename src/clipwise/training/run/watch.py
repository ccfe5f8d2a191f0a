"""What a caller sees while a run trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Progress", "Watch", "silent"]


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a step."""

    step: int
    steps: int
    first: int
    """The step that this process began with: not 0 after a resume."""
    epsilon: Callable[[], float | None]
    """What has been spent; asking takes milliseconds."""
    test: Mapping[str, float] | None
    """What was measured on held-out records, when it was after this step."""


Watch: TypeAlias = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """Look on and say nothing."""
