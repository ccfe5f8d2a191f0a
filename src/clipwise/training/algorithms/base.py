"""What every algorithm says of itself: the keys it reads, the plan it follows, and how it trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import nn

from clipwise.plan import Plan
from clipwise.training.config import OptimizerChoice, TomlTable
from clipwise.training.run import Folder, Job, Trained, Watch

if TYPE_CHECKING:
    from clipwise.training.config import Config

__all__ = ["Algorithm"]


class Algorithm(ABC):
    """A frozen value: what a configuration's `algorithm` names, with the choices that are this algorithm's own.

    A further one is a class in a file of this folder, its place in `ALGORITHMS`, and a row in
    `tests/training/test_algorithms.py`.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    """A line for the documentation."""
    keys: ClassVar[tuple[str, ...]]
    """The keys and tables of a configuration that are read by this algorithm; some may be shared with others."""

    @classmethod
    @abstractmethod
    def read(cls, root: TomlTable) -> Self:
        """Read `keys` from the top of a configuration."""

    def check(self, config: Config, root: TomlTable) -> None:  # noqa: B027 - most goes with everything
        """Refuse what makes no sense together; `root` knows where it was written."""

    def units(self, records: int) -> int:
        """How many there are of those whose privacy is protected: the records, or those who hold them."""
        return records

    def plan(self, plan: Plan) -> Plan:
        """The same plan, with what this algorithm releases in a step."""
        return plan

    @abstractmethod
    def moves(self, plan: Plan, model: nn.Module) -> OptimizerChoice:
        """How the weights move, for the loop and the report."""

    @abstractmethod
    def train(self, job: Job, folder: Folder, watch: Watch, resume: bool) -> Trained:
        """Train `job.model` to the end of the plan, from the folder's checkpoint when asked to resume."""

    def described(self) -> dict[str, Any]:
        """What a report says of it beside the plan and the optimizer."""
        return {}
