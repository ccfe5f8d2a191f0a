"""Privacy curves: delta(epsilon), the trade-off function, and the tight mu of Gaussian DP."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from clipwise.accounting._numerics.gaussian import gaussian_mu
from clipwise.accounting._numerics.lattice import Floats
from clipwise.accounting._problem import check_delta, pose
from clipwise.accounting.accountants.gdp import clt_mu
from clipwise.accounting.accounts import account, account_delta
from clipwise.accounting.events import Event
from clipwise.accounting.guarantee import Kind
from clipwise.accounting.relation import Relation
from clipwise.errors import AccountingError

__all__ = ["PrivacyCurve", "privacy_curve", "tight_mu"]


_NEIGHBOURS = {"add_remove": "more or less", "replace_one": "replaced", "zero_out": "blanked"}
_UNITS = {"example": "record", "client": "user"}


@dataclass(frozen=True)
class PrivacyCurve:
    """delta(epsilon) by the exact accountant, with what follows from it.

    `mu` is the smallest mu such that the run is mu-GDP for all delta >= `min_delta` (measured; Gomez et al. 2026), and
    `clt_mu` the central limit theorem's, which is not a bound. Where `kind` is "upper bound" (batches that are cut), a
    smaller mu may be true.
    """

    epsilon: Floats
    delta: Floats
    mu: float
    clt_mu: float
    min_delta: float
    relation: str
    sampling: str
    kind: Kind = "numerically exact"
    unit: str = "example"

    @property
    def about(self) -> str:
        """How batches are drawn and what neighbouring data are, in words."""
        return f"{self.sampling}; with one {_UNITS.get(self.unit, self.unit)} {_NEIGHBOURS[self.relation]}"

    def trade_off(self, false_positive: Floats) -> Floats:
        """The smallest false negative rate of any membership test at these false positive rates.

        f(a) is the supremum over epsilon of max(0, 1 - delta - e^eps a, e^-eps (1 - delta - a)), here over the curve's
        points, which is a lower bound of f: attacks are never made to look weaker than the curve proves.
        """
        a = np.asarray(false_positive, dtype=np.float64)
        if np.any(~((a >= 0.0) & (a <= 1.0))):
            raise AccountingError("False positive rates must lie between 0 and 1.")
        eps, delta = self.epsilon[:, None], self.delta[:, None]
        with np.errstate(over="ignore"):
            steep, flat = 1.0 - delta - np.exp(eps) * a, np.exp(-eps) * (1.0 - delta - a)
        return np.asarray(np.maximum(0.0, np.max(np.maximum(steep, flat), axis=0)))

    def to_dict(self) -> dict[str, Any]:
        """The curve as a JSON object."""
        return {
            "epsilon": self.epsilon.tolist(),
            "delta": self.delta.tolist(),
            "mu": self.mu,
            "clt_mu": self.clt_mu,
            "min_delta": self.min_delta,
            "relation": self.relation,
            "sampling": self.sampling,
            "kind": self.kind,
        }


def privacy_curve(
    events: Iterable[Event], *, relation: Relation | None = None, min_delta: float = 1e-10, count: int = 40
) -> PrivacyCurve:
    """The curve from epsilon 0 to where delta is `min_delta`.

    >>> from clipwise.accounting.events import GaussianSteps
    >>> from clipwise.sampling import FullBatch
    >>> curve = privacy_curve([GaussianSteps(FullBatch(100), noise_multiplier=2.0, steps=4)], count=8)
    >>> round(curve.mu, 6)
    1.0
    """
    min_delta = check_delta(min_delta)
    events = tuple(events)
    problem = pose(events, relation)
    if not problem.private or not problem.events:
        raise AccountingError("A privacy curve needs at least one release, and noise in all of them.")
    if problem.lower is not None:
        raise AccountingError("Shuffled and fixed-size batches have an interval, not a privacy curve.")
    top = account(events, min_delta, relation=relation).epsilon
    # Denser near zero, where delta bends most.
    epsilon = np.asarray(top * np.linspace(0.0, 1.0, count) ** 1.5)
    delta = np.array([account_delta(events, float(e), relation=relation).delta for e in epsilon])
    delta = np.minimum.accumulate(delta)
    mu = max((gaussian_mu(e, d) for e, d in zip(epsilon, delta, strict=True) if 0.0 < d < 1.0), default=0.0)
    approximate = max(clt_mu(c) for c in problem.upper)
    kind: Kind = "numerically exact" if problem.tight else "upper bound"
    return PrivacyCurve(
        epsilon, delta, mu, approximate, min_delta, problem.relation, problem.sampling, kind, problem.unit
    )


def tight_mu(events: Iterable[Event], *, relation: Relation | None = None, min_delta: float = 1e-10) -> float:
    """The smallest mu such that the run is mu-GDP for all delta >= `min_delta`, measured and not by the CLT.

    >>> from clipwise.accounting.events import GaussianSteps
    >>> from clipwise.sampling import FullBatch
    >>> round(tight_mu([GaussianSteps(FullBatch(100), noise_multiplier=2.0, steps=4)]), 6)
    1.0
    """
    return privacy_curve(events, relation=relation, min_delta=min_delta).mu
