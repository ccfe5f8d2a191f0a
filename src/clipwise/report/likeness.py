"""What runs have in common: whether they are seeds of one arm, and what a difference between arms can be due to."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from clipwise.report.plans import items_of, parts_of
from clipwise.report.run import Run

__all__ = ["differing", "same_data", "same_plan"]

_RATE = re.compile(r"\blr=[^,)]*")


def same_data(runs: Sequence[Run]) -> bool:
    """Whether, as far as the runs tell, all were judged on the same held-out records."""
    return "data" not in differing(runs)


def differing(runs: Sequence[Run]) -> list[str]:
    """In what runs differ beside R, the learning rate and the seed; what a run does not say is not a difference.

    >>> import clipwise as cw
    >>> test = cw.calibration.RegressionResult(count=9, mse=1.0, rmse=1.0, r2=0.0)
    >>> plans = [cw.Plan(cw.FullBatch(10), n, cw.Abadi(float(n)), 1.0) for n in (5, 6)]
    >>> differing([Run("a", test, plan) for plan in plans])
    ['steps']
    """
    facts = [_facts(run) for run in runs]
    names = dict.fromkeys(name for each in facts for name in each)
    return [name for name in names if len({repr(each[name]) for each in facts if each.get(name) is not None}) > 1]


def _facts(run: Run) -> dict[str, Any]:
    data = run.provenance.get("data")
    known = data if isinstance(data, Mapping) else {"name": data}
    chosen = {**items_of(run.plan), **run.choices.to_dict()}
    plan = {name.replace("_", " "): _form(value) for name, value in chosen.items() if name != "learning_rate"}
    if run.choices.optimizer is not None:
        plan["optimizer"] = _RATE.sub("lr", run.choices.optimizer)
    return {
        "data": None if not data else (known.get("name"), run.fingerprint, run.test.count),
        "model": run.provenance.get("model"),
        **plan,
        "clip": _form(run.plan.clip, without="R"),
    }


def same_plan(one: Run, other: Run) -> bool:
    """Whether two runs were planned alike, the learning rate included."""
    return _planned(one) == _planned(other)


def _planned(run: Run) -> tuple[Any, ...]:
    return _form(items_of(run.plan)), _form(run.choices.to_dict()), run.delta


def _form(value: Any, without: str = "") -> Any:
    """A value and one that was written down in the same form; one rule for all parameters is so also without `Flat`.

    >>> from clipwise import Abadi, Flat
    >>> _form(Flat(Abadi(0.5))) == _form(Abadi(0.5)), _form(Abadi(0.5), without="R")
    (True, ('Abadi', {}))
    """
    if isinstance(value, Mapping):
        return {key: _form(item) for key, item in value.items()}
    parts = parts_of(value)
    if parts is None:
        return value
    kind, values = parts
    if kind == "Flat" and "rule" in values:
        return _form(values["rule"], without)
    return kind, {name: _form(item) for name, item in values.items() if name != without}
