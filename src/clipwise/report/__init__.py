"""Runs and their report: one folder per run, one self-contained page per run or comparison."""

from clipwise.report.run import Run

__all__ = ["Run"]
