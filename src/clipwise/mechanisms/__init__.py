"""What a step releases, as a value of the plan: it says what is allowed, and which event goes on the ledger.

A mechanism is a frozen dataclass that derives from `Mechanism`. A new one is one such class here, one name in
`__all__`, and one row in tests/core/test_mechanisms.py.
"""

from clipwise.mechanisms.adaptive import AdaptiveClip
from clipwise.mechanisms.base import Mechanism, Repeated
from clipwise.mechanisms.gaussian import Gaussian
from clipwise.mechanisms.projected import ProjectedNorms
from clipwise.mechanisms.rounds import Rounds

__all__ = ["AdaptiveClip", "Gaussian", "Mechanism", "ProjectedNorms", "Repeated", "Rounds"]
