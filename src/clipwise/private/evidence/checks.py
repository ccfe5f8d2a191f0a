"""Which forward passes of a run are watched, what they showed, and what stays unproven."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from clipwise.engine.graph import LEAF, Graph, walk
from clipwise.engine.origin import Origin
from clipwise.errors import NotSeparable
from clipwise.private.evidence.collate import Collate, check_collate
from clipwise.private.evidence.memory import Memory
from clipwise.private.evidence.records import Again, Change, Records
from clipwise.private.evidence.twin import Twin
from clipwise.private.evidence.verdict import Findings, judge
from clipwise.private.evidence.watch import Watch

_EARLY = (0, 1, 2, 8, 64)
_EVERY = 512


@dataclass(frozen=True)
class Checked:
    """What a run's own checks for mixing samples have shown so far.

    `steps` are those whose forward pass was watched with other records and found clean; `unclear` says what could not
    be checked, and why.
    """

    steps: tuple[int, ...]
    unclear: tuple[str, ...]

    def __str__(self) -> str:
        if self.steps:
            few = ", ".join(map(str, self.steps[:6])) + (", ..." if len(self.steps) > 6 else "")
            return f"checked with other records at steps {few}: no sample moved another's loss or gradient"
        return "not checked" + (f": {self.unclear[0]}" if self.unclear else "")


class _Seen:
    """Evidence for the engine: of the pass that was just watched, or of the same structures in earlier ones."""

    def __init__(self, checks: Checks, watch: Watch | None) -> None:
        self._checks, self._watch = checks, watch
        self.key: Hashable = id(checks)
        self.watched = watch is not None
        self.strict = checks.has_watched

    def origins(self, graph: Graph) -> list[Origin]:
        if self._watch is not None:
            return self._watch.origins(graph)
        return self._checks.remembered(graph)


class Checks:
    """Watches forward passes: at the first steps, now and then, and whenever something new was met."""

    def __init__(self, model: nn.Module, constants: Iterable[Tensor | nn.Module], counted: bool) -> None:
        self.memory = Memory(model, constants)
        self._counted = counted
        self._watch: Watch | None = None
        self._again = False
        self._last = -1  # the last step that was watched
        self._opened = 0
        self._number = 0
        self._rigid = False  # shapes follow the records
        self._steps: list[int] = []
        self._unclear: dict[str, None] = {}
        self._origins: dict[int, Origin] = {}  # of structures, by hash
        self._refused: set[tuple[object, ...]] = set()

    @property
    def has_watched(self) -> bool:
        """Whether any forward pass of this run was watched."""
        return self._number > 0

    @property
    def found(self) -> Checked:
        """The state of the checks."""
        return Checked(tuple(self._steps), tuple(self._unclear))

    def add_data(self, dataset: Dataset[Any], collate: Collate | None) -> None:
        """The data set that batches come from, and what makes batches of its records."""
        self.memory.add_data(dataset)
        unclear = check_collate(collate, dataset)
        if unclear:
            self.not_checked(unclear)

    def not_checked(self, why: str) -> None:
        """Note why something was not checked."""
        self._unclear[why] = None

    def note_clean(self, step: int) -> None:
        """Note that the losses of a step were checked, as a function, and found clean."""
        self._steps.append(step)

    def is_due(self, step: int) -> bool:
        """Whether the forward pass of this step is watched."""
        return self._again or not self._number or step in _EARLY or step % _EVERY == 0

    def open(self, batch: Any, size: int, step: int, again: Again | None = None) -> None:
        """Watch from here on, until `close`. `again` makes the same batch of other records."""
        self.abandon()
        records = Records.of(batch, size)
        twins = [Twin(change) for change in self._changes(records, again)]
        self.memory.begin(step, consecutive=self._last in (step, step - 1), hidden=records.hidden)
        self._last, self._opened = step, self._opened + 1
        self._watch = Watch(records, twins, self.memory.familiar, self._counted, self._opened)
        self._watch.start()

    def _changes(self, records: Records, again: Again | None) -> list[Change]:
        if records.ragged:
            try:
                same = again is not None and records.reads_as(again.scaled([True] * records.size, 1.0))
            except Exception:  # whatever a data set and its collate function do not do twice
                same = False
            if again is not None and same:
                self.not_checked("whether the lengths or edges of other records matter: twins keep them")
                return records.ragged_changes(self._number, again)
            self.not_checked("values that are not in rows of one per sample: their records do not read the same twice")
        changes = records.changes(self._number, self._rigid)
        if not changes:
            self.not_checked("the batch has no rows of different samples")
        return changes

    def pause(self) -> None:
        """Leave the modes; what was seen stays for `close`."""
        if self._watch is not None:
            self._watch.stop()

    def abandon(self) -> None:
        """Leave a forward pass that came to nothing."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
            self._again = True

    def close(self, losses: Tensor, position: dict[int, int], parameters: Sequence[Tensor], step: int) -> _Seen:
        """The forward pass is over: refuse samples that mix, and give the engine what is known of it."""
        watch, self._watch = self._watch, None
        if watch is None:
            self._refuse_again(losses, position, parameters)
            return _Seen(self, None)
        watch.stop()
        self._again = True  # until this pass was found clean
        if losses.grad_fn is None or losses.dim() != 1:
            return _Seen(self, watch)  # refused by the engine
        graph = walk(losses, position, parameters)
        try:
            findings = judge(watch, losses, graph)
            self.memory.end(watch)
        except NotSeparable:
            self._refused.add(graph.signature)
            raise
        self._learn(graph, watch)
        self._note(findings, step)
        return _Seen(self, watch)

    def _note(self, findings: Findings, step: int) -> None:
        self._number += 1
        self._again = self.memory.look_again
        self._rigid = self._rigid or bool(findings.unclear)
        for reason in findings.unclear:
            self.not_checked(reason)
        if findings.conclusive:
            self._steps.append(step)

    def _refuse_again(self, losses: Tensor, position: dict[int, int], parameters: Sequence[Tensor]) -> None:
        """A graph that was refused is refused until a watched pass shows it clean."""
        if not self._refused or losses.grad_fn is None:
            return
        if walk(losses, position, parameters).signature in self._refused:
            raise NotSeparable(
                "these losses have the structure of those that were just refused, and their forward pass was not "
                "watched. Continue with the next batch of the loader, or compute them in `with private.watch(batch):`."
            )

    def _learn(self, graph: Graph, watch: Watch) -> None:
        self._refused.discard(graph.signature)
        for structure, origin in zip(_structures(graph), watch.origins(graph), strict=True):
            if self._origins.setdefault(structure, origin) is not origin:
                self._origins[structure] = Origin.BATCH

    def remembered(self, graph: Graph) -> list[Origin]:
        """The origins of nodes whose structure was seen in a watched pass. A new plan has the next pass watched."""
        self._again = True
        return [self._origins.get(structure, Origin.UNSEEN) for structure in _structures(graph)]


def _structures(graph: Graph) -> list[int]:
    """A hash of each node with all that it was computed from; leaves count by their parameter."""
    found = [0] * len(graph.nodes)
    for k in graph.leaves_first:
        if graph.names[k] == LEAF:
            found[k] = hash((LEAF, graph.leaf_parameter[k]))
        else:
            below = tuple((found[child] if child >= 0 else -1, output) for child, output in graph.edges[k])
            found[k] = hash((graph.names[k], below))
    return found
