"""A privacy answer that carries what it is worth."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from clipwise._show import html_table
from clipwise.errors import AccountingError
from clipwise.sampling import Sampling, public_size

__all__ = ["Guarantee", "Kind", "Relation", "default_delta", "needed_delta", "neighbours", "round_up"]

Kind = Literal["numerically exact", "upper bound", "approximation"]
Relation = Literal["add_remove", "replace_one", "zero_out"]

_RELATIONS: dict[str, str] = {
    "add_remove": "adding or removing one {unit}",
    "replace_one": "replacing one {unit}",
    "zero_out": "blanking one {unit} (its contribution becomes zero; the number of {unit}s is public)",
}

_READINGS: dict[str, str] = {
    "numerically exact": "the tight value, rounded up",
    "upper bound": "an upper bound",
    "approximation": "an approximation, not a bound: the true value may be larger",
}


def neighbours(relation: str, unit: str) -> str:
    """How neighbouring data sets differ, in words."""
    return _RELATIONS[relation].format(unit=unit)


def default_delta(records: int) -> float:
    """The largest power of ten below 1/n.

    >>> default_delta(60_000), default_delta(1_297), default_delta(1_000)
    (1e-05, 0.0001, 0.0001)
    """
    return float(f"1e-{len(str(records))}")


def needed_delta(delta: float | None, sampling: Sampling | None) -> float:
    """The delta, which has to be said; the error for None proposes one.

    >>> from clipwise.sampling import Poisson
    >>> needed_delta(None, Poisson(1_400, 128))
    Traceback (most recent call last):
    clipwise.errors.AccountingError: epsilon needs a delta, below 1/n for n records: delta=1e-4, with n = 1400.
    """
    if delta is not None:
        return delta
    if sampling is None:
        raise AccountingError("epsilon needs a delta, below 1/n for n records: delta=1e-5, say, with n = 50,000.")
    records = math.floor(public_size(sampling))
    proposed = f"1e-{len(str(records))}"
    raise AccountingError(f"epsilon needs a delta, below 1/n for n records: delta={proposed}, with n = {records}.")


@dataclass(frozen=True)
class Guarantee:
    """(epsilon, delta) with its kind, accountant, relation, sampling scheme and warnings.

    `lower` is a proven lower end where only an interval is known, else None. `group` is the number of records that
    are protected together. `seconds` is the time the answer took. `relation` is the one that holds for the sampling,
    see `clipwise.accounting.relation`.
    """

    epsilon: float
    delta: float
    kind: Kind
    accountant: str
    relation: str
    sampling: str
    lower: float | None = None
    warnings: tuple[str, ...] = ()
    unit: str = "example"
    group: int = 1
    seconds: float = 0.0

    @property
    def is_bound(self) -> bool:
        """Whether the true epsilon is at most this one (up to the numerical error that printing rounds away)."""
        return self.kind != "approximation"

    @property
    def printed(self) -> str:
        """Epsilon as it is shown: bounds and exact values rounded up at 1e-3, approximations marked.

        >>> Guarantee(2.3795545, 1e-5, "numerically exact", "exact", "add_remove", "Poisson").printed
        '2.380'
        """
        if not math.isfinite(self.epsilon):
            return "infinite"
        if self.kind == "approximation":
            return f"~{self.epsilon:.3f}"
        return f"{round_up(self.epsilon):.3f}"

    def statement(self) -> str:
        """The answer in plain language, with everything it assumes; `print(guarantee)` also has the warnings."""
        interval = "" if self.lower is None else f" The true value is at least {self._least}."
        if not math.isfinite(self.epsilon):
            return (
                f"Not private, as far as the {self.accountant} accountant can tell: epsilon is infinite at delta "
                f"{self.delta:g}; under {self._neighbours}; assumes {self.sampling}.{interval}"
            )
        return (
            f"({self.printed}, {self.delta:g})-differential privacy by the {self.accountant} accountant: "
            f"{_READINGS[self.kind]}; under {self._neighbours}; assumes {self.sampling}.{interval}"
        )

    def __str__(self) -> str:
        return "\n".join([self.statement(), *(f"warning: {each}" for each in self.warnings)])

    @property
    def _neighbours(self) -> str:
        """How the data sets differ that nobody can tell apart."""
        who = neighbours(self.relation, self.unit)
        if self.group > 1:
            who = who.replace(f"one {self.unit}", f"{self.group} {self.unit}s")
            who = who.replace("its contribution becomes", "their contributions become")
        return who

    @property
    def _least(self) -> str:
        return f"{math.floor((self.lower or 0.0) * 1000.0) / 1000.0:.3f}"

    def _repr_html_(self) -> str:
        rows = [
            ("epsilon", self.printed if self.lower is None else f"{self.printed} (at least {self._least})"),
            ("delta", f"{self.delta:g}"),
            ("worth", _READINGS[self.kind]),
            ("accountant", self.accountant),
            ("neighbours", self._neighbours),
            ("assumes", self.sampling),
        ]
        return html_table("Differential privacy", rows, notes=self.warnings)

    def to_dict(self) -> dict[str, Any]:
        """The answer as a JSON object."""
        names = ("epsilon", "delta", "kind", "accountant", "relation", "sampling", "lower", "unit", "group", "seconds")
        finite = {name: getattr(self, name) for name in names}
        if not math.isfinite(self.epsilon):
            finite["epsilon"] = None
        return {**finite, "printed": self.printed, "warnings": list(self.warnings), "statement": self.statement()}


def round_up(value: float, digits: int = 3) -> float:
    """The smallest multiple of 10^-digits that is >= value.

    >>> round_up(2.1047)
    2.105
    """
    scale = 10.0**digits
    return math.ceil(value * scale) / scale
