"""DP-SGD-JL: the same sum, but clipped by norms that are only estimated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clipwise._validate import is_count
from clipwise.accounting import ProjectedSteps, check_projected_sampling
from clipwise.clipping import Flat, Rule
from clipwise.errors import AccountingError, InvalidPlan
from clipwise.mechanisms.base import Mechanism
from clipwise.sampling import Sampling

if TYPE_CHECKING:
    from clipwise.plan import Plan

__all__ = ["ProjectedNorms"]


@dataclass(frozen=True)
class ProjectedNorms(Mechanism):
    """Norms are estimated from `projections` random directions, fresh in every step.

    Clipping is by one norm over all parameters (a rule, `Flat`, or `MixUp` of such). Guarantees: `epsilon` and
    `calibrate` of such a plan are upper bounds that take estimates which are too small into account, as if the
    directions were published.

    >>> import clipwise as cw
    >>> exact = cw.Plan(cw.Poisson(60_000, 256), 1_000, cw.Abadi(1.0), noise_multiplier=1.1)
    >>> plan = cw.Plan(cw.Poisson(60_000, 256), 1_000, cw.Abadi(1.0), 1.1, mechanism=ProjectedNorms(256))
    >>> exact.epsilon(1e-5) < plan.epsilon(1e-5)
    True
    """

    projections: int

    def __post_init__(self) -> None:
        if not is_count(self.projections):
            raise InvalidPlan(f"projections must be a positive integer, got {self.projections!r}.")

    def event(self, sampling: Sampling, noise_multiplier: float, count: int) -> ProjectedSteps:
        """What `count` steps with this noise put on the ledger."""
        return ProjectedSteps(sampling, noise_multiplier, self.projections, count)

    def check(self, plan: Plan) -> None:
        """Refuse clipping by groups, and samplings in which a record takes the place of another."""
        for style in plan.styles:
            self.rule_of(style)
        try:
            check_projected_sampling(plan.sampling)
        except AccountingError as error:
            raise InvalidPlan(str(error)) from error

    @staticmethod
    def rule_of(style: object) -> Rule:
        """The one rule of a style; a style with groups is refused."""
        if not isinstance(style, Flat):
            raise InvalidPlan(
                f"norms are estimated over all parameters together, but {style!r} needs one of each group. Use a rule "
                "such as Abadi(1.0), or exact norms."
            )
        return style.rule
