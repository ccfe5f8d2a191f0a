"""Everything that clipwise raises on purpose.

```
ClipwiseError
├── InvalidLosses (ValueError)     losses are not a differentiable vector of shape (B,)
├── NotSeparable (ValueError)      one sample's loss depends on another sample
├── UnsupportedNode (ValueError)   an operation on the graph has no rule
├── CheckFailed                    the engine's own result disagrees with autograd
├── InvalidPlan (ValueError)       a plan, rule or schedule that cannot be private, or makes no sense
├── InvalidSampling (ValueError)   sampling that does not fit the data or the plan
├── AccountingError (ValueError)   a privacy question with no meaningful answer
├── LedgerError (ValueError)       a ledger that was edited, cut or is of another version
├── CheckpointError (ValueError)   a saved run that does not fit this model, data or plan
├── DataError (ValueError)         a data set or file that is missing, damaged or of the wrong form
├── InvalidConfig (ValueError)     a configuration with an unknown key, a wrong value, or two that contradict
├── BudgetSpent (RuntimeError)     a step beyond the plan
├── UnaccountedUpdate (RuntimeError)   an update of a run's weights that clipwise did not make
├── NotConverged (RuntimeError)    an eigenvalue iteration, a flow or an integral that did not come to an end
└── MissingExtra (ImportError)     an optional dependency is not installed
```
"""

_LONGEST = 2_000


class ClipwiseError(Exception):
    r"""The root of every error that clipwise raises on purpose.

    A message may quote a file, so control characters stand escaped in it, and the middle of a long one is left out.

    >>> str(ClipwiseError("no column '\x1b[31m'"))
    "no column '\\x1b[31m'"
    """

    def __str__(self) -> str:
        shown = _shortened(super().__str__())
        return _shortened("".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in shown))


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} [...] {text[-_LONGEST // 2 :]}"


class InvalidLosses(ClipwiseError, ValueError):
    """The losses are not a vector of shape (B,) that depends on the parameters."""


class NotSeparable(ClipwiseError, ValueError):
    """The loss of one sample depends on another sample, so it has no per-sample gradient to bound."""


class UnsupportedNode(ClipwiseError, ValueError):
    """An operation that meets a parameter has no per-sample rule, so its gradient cannot be bounded."""


class CheckFailed(ClipwiseError):
    """The engine's gradient differs from autograd's; nothing was released."""


class InvalidPlan(ClipwiseError, ValueError):
    """A plan, clipping rule or schedule that cannot be private or makes no sense."""


class InvalidSampling(ClipwiseError, ValueError):
    """A sampling scheme that does not fit the data set or the plan."""


class AccountingError(ClipwiseError, ValueError):
    """A privacy question with no meaningful answer, such as delta = 1."""


class LedgerError(ClipwiseError, ValueError):
    """A ledger that was edited, is incomplete, or was written by another version."""


class CheckpointError(ClipwiseError, ValueError):
    """A saved run that does not fit the model, optimizer, data set or plan it is resumed with."""


class DataError(ClipwiseError, ValueError):
    """A data set or file that is missing, damaged or of the wrong form.

    Guarantees: the message quotes no value of a record. `found` is what stands there, if it helps: private data, which
    `clipwise train --show-values` prints and nothing else does.
    """

    def __init__(self, message: str, found: str = "") -> None:
        super().__init__(message)
        self.found = found


class InvalidConfig(ClipwiseError, ValueError):
    """A configuration with an unknown key, a value of the wrong kind, or two that contradict each other."""


class BudgetSpent(ClipwiseError, RuntimeError):
    """The plan's steps are used up; one more would spend privacy that was not planned."""


class UnaccountedUpdate(ClipwiseError, RuntimeError):
    """An optimizer step or a gradient of a run's parameters that clipwise did not make, and no epsilon covers."""


class NotConverged(ClipwiseError, RuntimeError):
    """An eigenvalue iteration, a flow or an integral did not come to an end; the message says what to change."""


class MissingExtra(ClipwiseError, ImportError):
    """An optional dependency is needed for this; the message says how to install it."""
