"""Accounting: what was released -> epsilon. The ledger stores facts, accountants are functions of it."""

from clipwise.accounting.accountant import Accountant, Relation, account, account_delta
from clipwise.accounting.calibrate import noise_multiplier
from clipwise.accounting.events import Event, FederatedRounds, GaussianSteps, PrivateCalibration
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
    "PrivateCalibration",
    "Relation",
    "account",
    "account_delta",
    "delta",
    "epsilon",
    "noise_multiplier",
    "privacy_panel",
]
