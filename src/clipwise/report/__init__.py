"""Runs and their report: one folder per run, one self-contained page per run or comparison."""

from clipwise.report.arms import ArmResults, arms_of
from clipwise.report.card import card
from clipwise.report.render import write
from clipwise.report.run import Run

__all__ = ["ArmResults", "Run", "arms_of", "card", "write"]
