"""Accounting: what was released -> epsilon. The ledger stores facts, accountants are functions of it."""

from clipwise.accounting._schemes import check_correlation
from clipwise.accounting._vacuous import refuse_vacuous
from clipwise.accounting.accountants import ACCOUNTANTS, Accountant
from clipwise.accounting.accounts import account, account_delta, delta, epsilon, privacy_panel
from clipwise.accounting.confirm import confirmed
from clipwise.accounting.curves import PrivacyCurve, privacy_curve, tight_mu
from clipwise.accounting.events import (
    AHEAD,
    CHANGED_DATA,
    EARLIER,
    FIT,
    INTERRUPTED,
    UNMADE,
    Event,
    FederatedRounds,
    GaussianSteps,
    PrivateCalibration,
    PrivateStatistics,
    ProjectedSteps,
    as_earlier,
    check_projected_sampling,
)
from clipwise.accounting.guarantee import Guarantee, default_delta, needed_delta, neighbours, round_up
from clipwise.accounting.ledger import Ledger
from clipwise.accounting.relation import Relation
from clipwise.accounting.schedule import Steps
from clipwise.accounting.solve import free_cap, max_batch_size, max_steps, noise_multiplier, noise_scale

__all__ = [
    "ACCOUNTANTS",
    "AHEAD",
    "CHANGED_DATA",
    "EARLIER",
    "FIT",
    "INTERRUPTED",
    "UNMADE",
    "Accountant",
    "Event",
    "FederatedRounds",
    "GaussianSteps",
    "Guarantee",
    "Ledger",
    "PrivacyCurve",
    "PrivateCalibration",
    "PrivateStatistics",
    "ProjectedSteps",
    "Relation",
    "Steps",
    "account",
    "account_delta",
    "as_earlier",
    "check_correlation",
    "check_projected_sampling",
    "confirmed",
    "default_delta",
    "delta",
    "epsilon",
    "free_cap",
    "max_batch_size",
    "max_steps",
    "needed_delta",
    "neighbours",
    "noise_multiplier",
    "noise_scale",
    "privacy_curve",
    "privacy_panel",
    "refuse_vacuous",
    "round_up",
    "tight_mu",
]
