"""What figures over training and over settings are drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clipwise.calibration import Estimate

__all__ = ["Curve", "Point"]


@dataclass(frozen=True)
class Curve:
    """A quantity over the steps of training: mean over the seeds, and one deviation to both sides when several."""

    step: tuple[float, ...]
    mean: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The curve as a JSON object."""
        return {name: list(getattr(self, name)) for name in ("step", "mean", "low", "high")}


@dataclass(frozen=True)
class Point:
    """Where an arm lies among others: what was chosen, and what came out."""

    name: str
    clip_norm: float | None
    learning_rate: float | None
    metrics: Mapping[str, Estimate]

    def to_dict(self) -> dict[str, Any]:
        """The point as a JSON object."""
        chosen = {"name": self.name, "clip_norm": self.clip_norm, "learning_rate": self.learning_rate}
        return {**chosen, "metrics": {name: value.to_dict() for name, value in self.metrics.items()}}
