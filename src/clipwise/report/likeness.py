"""What runs have in common: whether they are seeds of one arm, and what a difference between arms can be due to."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from clipwise.report.run import Run

__all__ = ["differing", "same_data"]

_RATE = re.compile(r"\blr=[^,)]*")


def same_data(runs: Sequence[Run]) -> bool:
    """Whether, as far as the runs tell, all were judged on the same held-out records."""
    return "data" not in differing(runs)


def differing(runs: Sequence[Run]) -> list[str]:
    """In what runs differ beside R, the learning rate and the seed; what a run does not say is not a difference.

    >>> from clipwise.calibration import RegressionResult
    >>> test = RegressionResult(count=9, mse=1.0, rmse=1.0, r2=0.0)
    >>> runs = [Run("a", "regression", test, {"steps": n, "clip": {"kind": "Abadi", "R": float(n)}}) for n in (5, 6)]
    >>> differing(runs)
    ['steps']
    """
    facts = [_facts(run) for run in runs]
    names = dict.fromkeys(name for each in facts for name in each)
    return [name for name in names if len({repr(each[name]) for each in facts if each.get(name) is not None}) > 1]


def _facts(run: Run) -> dict[str, Any]:
    data = run.provenance.get("data")
    known = data if isinstance(data, Mapping) else {"name": data}
    plan = {
        name.replace("_", " "): value for name, value in run.plan.items() if name not in ("version", "learning_rate")
    }
    if isinstance(plan.get("optimizer"), str):
        plan["optimizer"] = _RATE.sub("lr", plan["optimizer"])
    return {
        "data": None if not data else (known.get("name"), run.fingerprint, run.test.count),
        "model": run.provenance.get("model"),
        **plan,
        "clip": _without_norm(plan.get("clip")),
    }


def _without_norm(clip: Any) -> Any:
    """A clipping rule without its R; one rule for all parameters is the same with and without `Flat` around it."""
    if not isinstance(clip, Mapping):
        return clip
    if clip.get("kind") == "Flat":
        return _without_norm(clip.get("rule"))
    return {key: value for key, value in clip.items() if key != "R"}
