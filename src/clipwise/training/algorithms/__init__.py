"""The algorithms that a configuration can name: one frozen class each, with what it reads, plans and trains."""

from __future__ import annotations

from clipwise.training.algorithms.base import Algorithm
from clipwise.training.algorithms.dp_sgd import PrivateFTRL, PrivateSGD, ProjectedSGD
from clipwise.training.algorithms.dp_sgld import PrivateSGLD, PrivateSGNHT
from clipwise.training.algorithms.fedavg import FedAvg, FedSGD
from clipwise.training.config import TomlTable

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "FedAvg",
    "FedSGD",
    "PrivateFTRL",
    "PrivateSGD",
    "PrivateSGLD",
    "PrivateSGNHT",
    "ProjectedSGD",
    "read_algorithm",
]

ALGORITHMS: dict[str, type[Algorithm]] = {
    kind.name: kind for kind in (PrivateSGD, PrivateFTRL, ProjectedSGD, PrivateSGLD, PrivateSGNHT, FedAvg, FedSGD)
}
"""All of them, by the name in a configuration."""


def read_algorithm(root: TomlTable) -> Algorithm:
    """The algorithm that a configuration names, with its choices; the keys of others are refused.

    >>> from clipwise.training.config import TomlText
    >>> read_algorithm(TomlText.parse("optimizer.learning_rate = 0.5").root()).name
    'dp-sgd'
    """
    kind = ALGORITHMS[root.text("algorithm", PrivateSGD.name, ALGORITHMS)]
    made = kind.read(root)
    for key in sorted({key for other in ALGORITHMS.values() for key in other.keys} - set(kind.keys)):
        if root.raw(key) not in (None, {}):
            owners = [repr(other.name) for other in ALGORITHMS.values() if key in other.keys]
            root.fail(key, f"is for algorithm = {' or '.join(owners)} only.")
    return made
