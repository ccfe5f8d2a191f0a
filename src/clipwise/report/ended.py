"""What is kept of a loop that has ended: the same for one's own loop and for that of `clipwise train`."""

from __future__ import annotations

import inspect
import platform
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch.optim import Optimizer

import clipwise
from clipwise.accounting import Event, Guarantee, privacy_panel
from clipwise.noise import DESCRIPTION
from clipwise.private import Checked, Looked
from clipwise.report.plans import Choices

__all__ = ["choices_of", "guarantees_of", "not_checked", "provenance_of"]

_PACKAGES = ("torch", "numpy", "scipy", "transformers")


@lru_cache(maxsize=16)
def guarantees_of(events: tuple[Event, ...], delta: float) -> Mapping[str, Guarantee]:
    """What every accountant says; the seeds of an experiment share it."""
    return privacy_panel(events, delta)


def not_checked(checked: Checked | None) -> tuple[str, ...]:
    """The warning of a run in which no forward pass was watched; None: samples are not clipped one by one there."""
    if checked is None or checked.steps:
        return ()
    return (f"Whether a sample's loss depends on other samples was {checked}. See docs/soundness.md.",)


def provenance_of(
    *,
    seed: int | None,
    arm: str | None,
    data: Mapping[str, Any],
    looked: Looked,
    checked: Checked | None,
    model: str,
    parameters: int,
) -> dict[str, Any]:
    """Seeds, data, model, versions, and whether a sample's gradient was seen to depend on that sample alone."""
    return {
        "seeds": [seed],
        "arm": arm,
        "data": {**data, "while_training": looked.state},
        "model": model,
        "parameters": parameters,
        "noise": DESCRIPTION,
        "versions": _versions(),
        **({} if checked is None else {"other_samples": str(checked)}),
    }


def _versions() -> dict[str, str]:
    found = {"clipwise": clipwise.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        if name in sys.modules:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                continue
    return found


def choices_of(optimizer: Optimizer) -> Choices:
    """Learning rate and optimizer of a loop; of a rate that a scheduler moves, the one it began with.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
    >>> choices_of(optimizer)
    Choices(learning_rate=0.1, optimizer='SGD(lr=0.1, momentum=0.9)', ...)
    """
    groups = optimizer.param_groups
    begun = list(dict.fromkeys(float(group.get("initial_lr", group["lr"])) for group in groups if "lr" in group))
    scheduled = any("initial_lr" in group for group in groups)
    rate = " and ".join(f"{each:g}" for each in begun) + (", scheduled" if scheduled else "")
    usual = {name: parameter.default for name, parameter in inspect.signature(type(optimizer)).parameters.items()}
    others = {k: v for k, v in groups[0].items() if k in usual and k not in ("params", "lr") and v != usual[k]}
    words = ", ".join(f"{name}={value}" for name, value in ({"lr": rate} | others if begun else others).items())
    return Choices(
        learning_rate=begun[0] if len(begun) == 1 and not scheduled else rate or None,
        optimizer=f"{type(optimizer).__name__}({words})",
    )
