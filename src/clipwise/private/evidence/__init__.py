"""Evidence that a sample's gradient depends on that sample alone: provenance, twins, and what they showed.

*Provenance* says what is shared: memory that was there before the batch, and what is computed from it alone. *Twins*
say that what is per sample is that sample's own: with other records in the batch, its loss and gradient stay the same.
"""

from clipwise.private.evidence.checks import Checked, Checks
from clipwise.private.evidence.closure import LossFn, check_model

__all__ = ["Checked", "Checks", "LossFn", "check_model"]
