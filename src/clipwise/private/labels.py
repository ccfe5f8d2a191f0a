"""What the coins and the noise of a seeded run are labelled with, beside the sums that the noise is added to.

Nothing here depends on the data, so a checkpoint may hold it; the digest of the data is added where it is used.
"""

from __future__ import annotations

import json
from typing import Any

from torch import nn
from torch.optim import Optimizer

from clipwise.errors import InvalidPlan
from clipwise.hashing import digest_of, joined
from clipwise.plan import Plan

__all__ = ["of_optimizer", "of_plan", "of_run", "of_values"]


def of_run(plan: Plan, model: nn.Module, optimizer: Optimizer) -> bytes:
    """The plan, the initial values of the parameters, and the optimizer as it is at the start."""
    return joined([b"run", of_plan(plan), of_values(model), of_optimizer(optimizer)])


def of_values(model: nn.Module) -> bytes:
    """The values that the parameters have now."""
    return joined(_known(p) for p in model.parameters())


def of_optimizer(optimizer: Optimizer) -> bytes:
    """The class of the optimizer and the hyper-parameters of all its groups, as they are now.

    >>> import torch
    >>> p = nn.Parameter(torch.zeros(2))
    >>> of_optimizer(torch.optim.SGD([p], lr=0.1)) == of_optimizer(torch.optim.SGD([p], lr=0.2))
    False
    """
    parts = [type(optimizer).__qualname__.encode()]  # a script's module has another name when it is imported
    for group in optimizer.param_groups:
        parts += [str(len(group["params"])).encode()]
        parts += [part for name in sorted(group) if name != "params" for part in (name.encode(), _known(group[name]))]
    return joined(parts)


def of_plan(plan: Plan) -> bytes:
    """Everything that the plan says."""
    try:
        return json.dumps(plan.to_dict(), sort_keys=True).encode()
    except InvalidPlan:  # a rule of the user's own that cannot be written down: the sums will tell
        kind = type(plan.clip).__qualname__
        return repr((plan.sampling, plan.steps, plan.noise_multiplier, plan.mechanism, plan.correlation, kind)).encode()


def _known(value: Any) -> bytes:
    found = digest_of(value)
    return type(value).__qualname__.encode() if found is None else found
