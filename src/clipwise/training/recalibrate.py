"""Recalibration after training, as `[recalibration]` asks for it."""

from __future__ import annotations

from clipwise.accounting import Ledger
from clipwise.calibration import CalibrationResult
from clipwise.errors import InvalidConfig
from clipwise.training.job import Job

__all__ = ["recalibrate"]


def recalibrate(job: Job, ledger: Ledger) -> dict[str, CalibrationResult]:
    """Metrics on the held-out records after each method."""
    if job.config.recalibration.methods:
        raise InvalidConfig("recalibration is not part of a run yet.")
    return {}
