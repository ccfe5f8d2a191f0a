"""A table of training programs that mix samples, and of honest relatives of the same shapes."""

from __future__ import annotations

from importlib import import_module

from .programs import PROGRAMS as BY_NAME
from .programs import Program

__all__ = ["BY_NAME", "HONEST", "MIXING", "UNSEEN", "Program"]

FAMILIES = (
    "contrast",
    "statistics",
    "weights",
    "augment",
    "ragged",
    "state",
    "structure",
    "hidden",
)
for family in FAMILIES:
    import_module(f"{__name__}.programs_{family}")

HONEST = [program for program in BY_NAME.values() if not program.mixes]
UNSEEN = [program for program in BY_NAME.values() if program.only_with_loss_fn]
MIXING = [program for program in BY_NAME.values() if program.mixes and not program.only_with_loss_fn]
