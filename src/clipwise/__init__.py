"""Differentially private deep learning that stays calibrated.

Everything public is here, and is loaded when it is first used: `import clipwise as cw`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clipwise.accounting import (
        GaussianSteps,
        Guarantee,
        Ledger,
        Steps,
        delta,
        epsilon,
        noise_multiplier,
        privacy_panel,
    )
    from clipwise.clipping import (
        Abadi,
        Automatic,
        BatchClip,
        Flat,
        Global,
        GlobalScaled,
        Groupwise,
        Layerwise,
        MixUp,
        NoClip,
        Normalize,
        Unclipped,
    )
    from clipwise.correlation import Banded, Independent, SquareRoot, Tree
    from clipwise.engine import Clipped, check, clipped_gradients, per_sample_gradients, per_sample_norms
    from clipwise.errors import (
        AccountingError,
        BudgetSpent,
        CheckFailed,
        CheckpointError,
        ClipwiseError,
        DataError,
        InvalidConfig,
        InvalidLosses,
        InvalidPlan,
        InvalidSampling,
        LedgerError,
        MissingExtra,
        NotConverged,
        NotSeparable,
        UnaccountedUpdate,
        UnsupportedNode,
    )
    from clipwise.mechanisms import AdaptiveClip
    from clipwise.noise import SecureNormals
    from clipwise.plan import Plan
    from clipwise.private import Checked, Looked, Private, StepStatistics, Witness, check_model, without_batchnorm
    from clipwise.sampling import BallsInBins, CyclicPoisson, FixedSize, FullBatch, Poisson, Shuffled
    from clipwise.training import Predictor, load

__version__ = "1.0.0rc1"

_HOME = {
    "accounting": (
        *("GaussianSteps", "Guarantee", "Ledger", "Steps", "delta", "epsilon", "noise_multiplier", "privacy_panel"),
    ),
    "clipping": (
        *("Abadi", "Automatic", "BatchClip", "Flat", "Global", "GlobalScaled", "Groupwise", "Layerwise", "MixUp"),
        *("NoClip", "Normalize", "Unclipped"),
    ),
    "correlation": ("Banded", "Independent", "SquareRoot", "Tree"),
    "engine": ("Clipped", "check", "clipped_gradients", "per_sample_gradients", "per_sample_norms"),
    "errors": (
        *("AccountingError", "BudgetSpent", "CheckFailed", "CheckpointError", "ClipwiseError", "DataError"),
        *("InvalidConfig", "InvalidLosses", "InvalidPlan", "InvalidSampling", "LedgerError", "MissingExtra"),
        *("NotConverged", "NotSeparable", "UnaccountedUpdate", "UnsupportedNode"),
    ),
    "mechanisms": ("AdaptiveClip",),
    "noise": ("SecureNormals",),
    "plan": ("Plan",),
    "private": ("Checked", "Looked", "Private", "StepStatistics", "Witness", "check_model", "without_batchnorm"),
    "sampling": ("BallsInBins", "CyclicPoisson", "FixedSize", "FullBatch", "Poisson", "Shuffled"),
    "training": ("Predictor", "load"),
}
_PARTS = {  # used by name: cw.ntk.kernel
    **{
        name: f"clipwise.{name}"
        for name in ("calibration", "data", "experiments", "federated", "mechanisms", "ntk", "optim", "plots", "report")
    },
    "sgld": "clipwise.optim.sgld",
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Abadi",
    "AccountingError",
    "AdaptiveClip",
    "Automatic",
    "BallsInBins",
    "Banded",
    "BatchClip",
    "BudgetSpent",
    "CheckFailed",
    "Checked",
    "CheckpointError",
    "Clipped",
    "ClipwiseError",
    "CyclicPoisson",
    "DataError",
    "FixedSize",
    "Flat",
    "FullBatch",
    "GaussianSteps",
    "Global",
    "GlobalScaled",
    "Groupwise",
    "Guarantee",
    "Independent",
    "InvalidConfig",
    "InvalidLosses",
    "InvalidPlan",
    "InvalidSampling",
    "Layerwise",
    "Ledger",
    "LedgerError",
    "Looked",
    "MissingExtra",
    "MixUp",
    "NoClip",
    "Normalize",
    "NotConverged",
    "NotSeparable",
    "Plan",
    "Poisson",
    "Predictor",
    "Private",
    "SecureNormals",
    "Shuffled",
    "SquareRoot",
    "StepStatistics",
    "Steps",
    "Tree",
    "UnaccountedUpdate",
    "Unclipped",
    "UnsupportedNode",
    "Witness",
    "check",
    "check_model",
    "clipped_gradients",
    "delta",
    "epsilon",
    "load",
    "noise_multiplier",
    "per_sample_gradients",
    "per_sample_norms",
    "privacy_panel",
    "without_batchnorm",
]


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return import_module(_PARTS[name])
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'clipwise' has no attribute {name!r}")
    value = getattr(import_module(f"clipwise.{module}"), name)
    globals()[name] = value  # the next use is an ordinary look-up
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PARTS})
