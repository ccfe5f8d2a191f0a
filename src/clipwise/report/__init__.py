"""Runs and their report: one folder per run, one self-contained page per run or comparison."""

from clipwise.report.arms import ArmResults, arms_of
from clipwise.report.card import card
from clipwise.report.ended import guarantees_of, not_checked, provenance_of
from clipwise.report.folder import RunFolder
from clipwise.report.plans import Choices, WrittenPlan, WrittenValue
from clipwise.report.render import write
from clipwise.report.run import Run

__all__ = [
    "ArmResults",
    "Choices",
    "Run",
    "RunFolder",
    "WrittenPlan",
    "WrittenValue",
    "arms_of",
    "card",
    "guarantees_of",
    "not_checked",
    "provenance_of",
    "write",
]
