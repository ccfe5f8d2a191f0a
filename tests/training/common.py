"""Configurations for tests: small enough to train in a second."""

from __future__ import annotations

from clipwise.accounting import Event, Guarantee, account
from clipwise.training import Config

DIGITS = """
seed = 3
data.source = "digits"
model = { source = "mlp", hidden = [8] }
"""
"""The beginning of a configuration, for tests that say the rest."""

TINY = """
name = "tiny"
seed = 3
steps = 12
batch_size = 64

[data]
source = "digits"

[model]
source = "mlp"
hidden = [8]

[clip]
rule = "Abadi"
R = 1.0

[optimizer]
name = "SGD"
learning_rate = 0.5

[privacy]
noise_multiplier = 1.0

[evaluation]
every = 4
resamples = 0
"""


def config(*overrides: str, text: str = TINY) -> Config:
    return Config.parse(text, "tiny.toml", overrides)


def exact_panel(events: tuple[Event, ...], delta: float) -> dict[str, Guarantee]:
    return {"exact": account(events, delta)}
