"""Federated learning with privacy for whole users: DP-FedAvg and DP-FedSGD, in this process or on Flower.

A `clipwise.Plan` with `mechanism=cw.mechanisms.Rounds()` says what is released, `Server` and `LocalTraining` or
`LocalGradient` are the two sides of a round, `run` puts them together in this process. `clipwise.federated.flower`
(extra `flower`) runs the same on Flower.
"""

from clipwise.federated.local import LocalGradient, LocalTraining, Task, Work
from clipwise.federated.server import Failure, Round, RoundReport, Server, apply, select
from clipwise.federated.simulation import dirichlet, run, shards, uniform
from clipwise.federated.updates import Reply, clip_update, shorten

__all__ = [
    "Failure",
    "LocalGradient",
    "LocalTraining",
    "Reply",
    "Round",
    "RoundReport",
    "Server",
    "Task",
    "Work",
    "apply",
    "clip_update",
    "dirichlet",
    "run",
    "select",
    "shards",
    "shorten",
    "uniform",
]
