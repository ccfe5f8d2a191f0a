"""A run: made ready (`job`), carried out and measured, and kept in its folder; `run.train.train` does all of it."""

from __future__ import annotations

from clipwise.training.run.folder import Folder
from clipwise.training.run.job import Job, Trained, prepare
from clipwise.training.run.measure import Progress, Watch, measured_row, spent, step_statistics

__all__ = ["Folder", "Job", "Progress", "Trained", "Watch", "measured_row", "prepare", "spent", "step_statistics"]
