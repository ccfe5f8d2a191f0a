"""Accounting: what was released -> epsilon. The ledger stores facts, accountants are functions of it."""

from clipwise.accounting.accountant import Accountant, Relation, account, account_delta
from clipwise.accounting.calibrate import free_cap, max_batch_size, max_steps, noise_multiplier, noise_scale
from clipwise.accounting.curves import PrivacyCurve, privacy_curve, tight_mu
from clipwise.accounting.edgeworth import saddle_interval
from clipwise.accounting.events import Event, FederatedRounds, GaussianSteps, PrivateCalibration, ProjectedSteps
from clipwise.accounting.functions import delta, epsilon
from clipwise.accounting.guarantee import Guarantee
from clipwise.accounting.ledger import Ledger
from clipwise.accounting.panel import privacy_panel

__all__ = [
    "Accountant",
    "Event",
    "FederatedRounds",
    "GaussianSteps",
    "Guarantee",
    "Ledger",
    "PrivacyCurve",
    "PrivateCalibration",
    "ProjectedSteps",
    "Relation",
    "account",
    "account_delta",
    "delta",
    "epsilon",
    "free_cap",
    "max_batch_size",
    "max_steps",
    "noise_multiplier",
    "noise_scale",
    "privacy_curve",
    "privacy_panel",
    "saddle_interval",
    "tight_mu",
]
