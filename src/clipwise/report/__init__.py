"""Runs and their report: one folder per run, one self-contained page per run or comparison.

`Run`, `write`, `card` and the results of arms are for users. The other names are what training and the command line
write and print.
"""

from clipwise.report.arms import ArmResults, arms_of
from clipwise.report.card import card
from clipwise.report.content import headline, table_rows
from clipwise.report.folder import RunFolder, plain, runs_below, write_text
from clipwise.report.plans import Choices, WrittenPlan, WrittenValue, has_rule
from clipwise.report.reading import Advice, advice_of
from clipwise.report.reading import read as reading_of
from clipwise.report.render import write
from clipwise.report.run import NEW_WEIGHTS, SEEDED, Run, guarantees_of, not_checked, provenance_of
from clipwise.report.saved import lost_steps
from clipwise.report.warnings import cost_of, joint_of, warnings_of
from clipwise.report.wording import clip_norm, describe, epsilon_text, interval_text, value_text

__all__ = [
    "NEW_WEIGHTS",
    "SEEDED",
    "Advice",
    "ArmResults",
    "Choices",
    "Run",
    "RunFolder",
    "WrittenPlan",
    "WrittenValue",
    "advice_of",
    "arms_of",
    "card",
    "clip_norm",
    "cost_of",
    "describe",
    "epsilon_text",
    "guarantees_of",
    "has_rule",
    "headline",
    "interval_text",
    "joint_of",
    "lost_steps",
    "not_checked",
    "plain",
    "provenance_of",
    "reading_of",
    "runs_below",
    "table_rows",
    "value_text",
    "warnings_of",
    "write",
    "write_text",
]
