"""Which forward passes of a run are watched, what they showed, and what stays unproven."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from clipwise.engine import LEAF, Graph, Origin, free_bytes, memory_of, walk
from clipwise.entropy import Entropy
from clipwise.errors import NotSeparable
from clipwise.private.evidence.closure import LossFn, check_losses
from clipwise.private.evidence.collate import PADDED, Collate, check_collate
from clipwise.private.evidence.memory import Memory
from clipwise.private.evidence.modes import none_watching
from clipwise.private.evidence.places import refuse_places
from clipwise.private.evidence.records import Again, Change, Records, unreadable
from clipwise.private.evidence.sizes import Pass, refuse_sizes
from clipwise.private.evidence.traffic import PLACE
from clipwise.private.evidence.twin import Twin
from clipwise.private.evidence.verdict import Findings, judge
from clipwise.private.evidence.watch import Watch
from clipwise.private.parts import EARLY, PhysicalBatch

_SAMPLES_TO_CHECK, _SAMPLES_TO_WATCH = 3, 2
_GAPS = (64, 512)  # after the first steps about so many apart, at random; the last one on and on
_SOON = 8  # the same, while only few samples were watched at a time


@dataclass(frozen=True)
class Checked:
    """What a run's own checks for mixing samples have shown so far.

    `steps` are those whose forward pass was watched with other records and found clean; `unclear` says what could not
    be checked, and why.
    """

    steps: tuple[int, ...]
    unclear: tuple[str, ...]

    def __str__(self) -> str:
        notes = "; ".join(self.unclear)
        if not self.steps:
            return "not checked" + (f": {notes}" if notes else "")
        few = ", ".join(map(str, self.steps[:6])) + (", ..." if len(self.steps) > 6 else "")
        clean = f"checked with other records at steps {few}: no sample moved another's loss or gradient"
        return clean + (f". Not checked: {notes}" if notes else "")


class Seen:
    """Evidence for the engine: of the pass that was just watched, or of the same structures in earlier ones."""

    def __init__(self, checks: Checks, watch: Watch | None) -> None:
        self._checks, self._watch = checks, watch
        self.key: Hashable = id(checks)
        self.watched = watch is not None
        self.strict = checks.has_watched

    def origins(self, graph: Graph) -> list[Origin]:
        """Where the operands of every node come from."""
        if self._watch is not None:
            return self._watch.origins(graph)
        return self._checks.remembered(graph)


class _Judged:
    """Losses that were judged, and what was found: of the very tensor, with the history that it had."""

    def __init__(self, losses: Tensor, findings: Findings) -> None:
        self._losses, self._history, self.findings = weakref.ref(losses), _history(losses), findings

    def are(self, losses: Tensor) -> bool:
        """Whether these are the ones."""
        return self._losses() is losses and _history(losses) == self._history


def _history(losses: Tensor) -> tuple[int, int]:
    """Differs after an operation in place."""
    assert losses.grad_fn is not None
    return losses._version, losses.grad_fn._sequence_nr()


class Checks:
    """Watches forward passes: at the first steps, now and then, and whenever something new was met.

    `counted`: the number of samples is private too, as under Poisson sampling. `loss_fn`, where there is one, is called
    once with other records, on the first batch that has enough of them.
    """

    def __init__(
        self,
        model: nn.Module,
        constants: Iterable[Tensor | nn.Module],
        counted: bool,
        entropy: Entropy,
        loss_fn: LossFn | None = None,
    ) -> None:
        self.watches = True
        """Whether the loop's own forward passes are watched at all; else what finds the norms checks its losses."""
        self.memory = Memory(model, constants)
        self._loss_fn = loss_fn
        self._counted, self._entropy = counted, entropy
        self._watch: Watch | None = None
        self._again = False
        self._blocked = ""  # why nothing is accepted until the next watched pass: one was refused, or lost
        self._forgiven = False
        self._wary = 0  # passes still to be watched after one was refused
        self._next = 0
        self._number = 0
        self._steps: list[int] = []
        self._unclear: dict[str, None] = {}
        self._held, self._device = 0.0, torch.device("cpu")  # bytes for each sample of a watched pass, and where
        self._few = False  # the last pass was one of few samples
        self._rigid = False  # shapes follow the records
        self._judged: _Judged | None = None  # of the pass that is watched
        self._carried: set[float] = set()
        self._told = 0  # passes in which numbers of the batch left
        self._numbers: list[Pass] = []
        self._trained: Sequence[Tensor] = ()
        self._imports: list[int] | None = None  # tensors made of plain values in the last watched pass
        self._before: frozenset[int] = frozenset()  # the same, with the states of generators
        self._origins: dict[int, Origin] = {}  # of structures, by hash

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
        if unfound := self.memory.add_data(dataset):
            self.not_checked(unfound)
        unclear = check_collate(collate, dataset)
        if unclear:
            self.not_checked(unclear)
            if unclear == PADDED and self._loss_fn is None:
                warnings.warn(f"not checked: {unclear}. Padding must be masked.", stacklevel=3)

    def not_checked(self, why: str) -> None:
        """Note why something was not checked."""
        self._unclear[why] = None

    def look_at_losses(self, batch: Any, size: int, again: Again) -> None:
        """Call the loss function with longer, shorter and fewer records, once; losses that mix are refused."""
        if not self.watches or self._loss_fn is None or size < _SAMPLES_TO_CHECK:
            return
        unclear = check_losses(self.memory.apart(), self._loss_fn, batch, size, again)
        self._loss_fn = None
        if unclear:
            self.not_checked(unclear)
        else:
            self._unclear.pop(PADDED, None)

    def note_checked(self, step: int) -> None:
        """Note that a loss function was checked and found clean, and when it is due again."""
        self._number += 1
        self._schedule(step)
        self.note_clean(step)

    def note_clean(self, step: int) -> None:
        """Note that the losses of a step were checked and found clean."""
        if step not in self._steps:
            self._steps.append(step)

    def look_around(self, step: int) -> None:
        """A batch is about to be drawn: from the first one on, new memory may come from a batch."""
        if not self.memory.has_looked:
            with none_watching():
                self.memory.look_around(step)

    # When

    def is_due(self, step: int, spared: bool = False) -> bool:
        """Whether a forward pass of this step is watched. `spared`: others of the same step are, of fewer samples."""
        return self._is_wary or (step < EARLY and not spared) or step >= self._next

    @property
    def _is_wary(self) -> bool:
        """Whether the next forward pass is watched in any case."""
        return self._again or bool(self._blocked) or self._wary > 0 or not self._number

    def open_if_due(self, batch: Any, part: PhysicalBatch, step: int, again: Again) -> None:
        """Watch the forward pass on a batch of the loader, where the turn of the step it was drawn for has come."""
        if part.size < _SAMPLES_TO_WATCH or not self.is_due(part.step, part.is_spared):
            return
        if not self._is_wary and part.step >= EARLY and not self._fits(part.size):
            self.not_checked("whole physical batches: beside them there is no memory for other records")
            self._schedule(step)
            return
        self._few = part.is_few
        self.open(batch, part.size, step, again)

    def _fits(self, size: int) -> bool:
        """Whether there is memory for a watched pass, by what the last one took."""
        return 2 * size * self._held <= free_bytes(self._device)

    def _draw(self, purpose: str) -> int:
        return int.from_bytes(self._entropy.take(8, purpose, self._number), "little") >> 1

    def _schedule(self, step: int) -> None:
        gap = _SOON if self._few else _GAPS[min(max(0, self._number - EARLY), len(_GAPS) - 1)]
        self._next = step + gap // 2 + self._draw("watch") % gap

    # One pass

    def open(self, batch: Any, size: int, step: int, again: Again | None = None) -> None:
        """Watch from here on, until `close`. `again` makes the same batch of other records."""
        self.abandon()
        if not self.watches:
            return
        self._blocked = ""
        with none_watching():  # of another run in the same loop
            records = Records.of(batch, size)
            twins = [Twin(change) for change in self._changes(records, again)]
            self.memory.begin(step)
            watch = Watch(records, twins, self.memory.familiar, frozenset(self._carried), self._before)
        self._watch = watch
        watch.start()

    def _changes(self, records: Records, again: Again | None) -> list[Change]:
        draw = self._draw("halves")
        if records.opaque:
            self.not_checked("what the batch holds besides tensors (numbers, texts, arrays): twins keep it")
        if records.ragged or (again is not None and records.has_other_rows(draw, again)):
            why = "they are not known" if again is None else unreadable(again, records)
            if again is None or why:
                self.not_checked(f"the batch is not in rows of one per sample, and its records cannot be read ({why})")
                return []
            self.not_checked("whether the integers of other records matter (lengths, edges): twins keep them")
            return records.ragged_changes(draw, again)
        changes = records.changes(self._number, draw, self._rigid)
        if not changes:
            self.not_checked("the batch has no rows of different samples")
        return changes

    @contextmanager
    def watching(self, batch: Any, size: int, step: int) -> Iterator[None]:
        """Watch what is done inside."""
        self.open(batch, size, step)
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        self.pause()

    def arrive(self, step: int) -> None:
        """Losses are given. Of batches of one's own these may be the first that is known."""
        self.look_around(step)
        self.pause()

    def pause(self) -> None:
        """Leave the modes; what was seen stays for `close`."""
        watch = self._watch
        if watch is not None and watch.is_on:
            self._told += watch.traffic.told
            try:
                with none_watching():
                    self.memory.leave(watch)
            finally:
                watch.stop()

    def abandon(self) -> None:
        """Leave a forward pass that came to nothing."""
        if self._watch is not None:
            self.pause()
            self._watch = self._judged = None
            self._again = True

    def block(self) -> None:
        """A watched pass was refused: until the next one, nothing is accepted."""
        if self._watch is not None:
            self.abandon()
            self._blocked, self._wary = "the losses of this batch were refused", EARLY

    def lose(self) -> None:
        """The loop was left during a watched pass, such as by `next(iter(loader))`: its losses are not accepted."""
        if self._watch is not None:
            self.abandon()
            self._blocked = _LEFT

    def close(self, losses: Tensor, position: dict[int, int], parameters: Sequence[Tensor]) -> Seen:
        """The forward pass is over: refuse samples that mix, and give the engine what is known of it."""
        if parameters is not self._trained:
            self.memory.trains(parameters)
            self._trained = parameters
        watch = self._watch
        if watch is None:
            if self._blocked:
                raise NotSeparable(f"{self._blocked}, and {_UNWATCHED}")
            return Seen(self, None)
        self.pause()
        if losses.grad_fn is None or losses.dim() != 1:
            return Seen(self, watch)  # refused by the engine
        if not watch.knows(memory_of(losses)):
            return self._not_seen()
        if self._judged is not None:  # and the engine failed: there are no twins for other losses
            if self._judged.are(losses):
                return Seen(self, watch)
            raise NotSeparable(f"other losses of the same forward pass were given before, and {_UNWATCHED}")
        graph = walk(losses, position, parameters)
        if not any(place >= 0 for place in graph.leaf_parameter.values()):
            return Seen(self, watch)  # refused by the engine
        self._held, self._device = sum(twin.nbytes for twin in watch.twins) / watch.records.size, losses.device
        findings = judge(watch, losses, graph, partial(self.memory.end, watch))
        self.memory.notes += [f"what {name} reads besides its arguments" for name in watch.foreign]
        self._look_at_numbers(watch, graph)
        self._carried.update(watch.traffic.values)
        self._learn(graph, watch)
        self._judged = _Judged(losses, findings)
        watch.forget_twins()  # their memory is not held beside the engine's
        return Seen(self, watch)

    def _not_seen(self) -> Seen:
        """Losses from outside the watched pass, such as after an error was mended: once in a run, not every time."""
        self._watch = self._judged = None
        if self._forgiven:
            raise NotSeparable(f"this step is checked, and {_UNWATCHED}")
        self._forgiven = self._again = True
        self.not_checked("losses of one step that were computed after an error")
        return Seen(self, None)

    def accept(self, step: int) -> None:
        """The engine has accepted the losses as well."""
        judged, self._judged, self._watch = self._judged, None, None
        if judged is None:
            return
        findings = judged.findings
        self._number += 1
        self._wary = max(0, self._wary - 1)
        self._again = False
        self._rigid = self._rigid or bool(findings.unclear)
        self._schedule(step)
        for reason in (*findings.unclear, *self.memory.notes):
            self.not_checked(reason)
        if findings.conclusive and not self.memory.notes:
            self.note_clean(step)

    def _look_at_numbers(self, watch: Watch, graph: Graph) -> None:
        """Refuse the number of samples; note numbers that may be those which left earlier, by way of Python."""
        now = (watch.records.size, dict(watch.traffic.numbers), frozenset(watch.traffic.size_used))
        if self._counted:
            refuse_sizes(now, self._numbers)
            refuse_places(watch.node_marks(graph), PLACE, watch.place)
        if self._imports not in (None, watch.traffic.imports):
            self.not_checked("where tensors made of Python or NumPy values come from that differ from step to step")
        self._imports, self._before = watch.traffic.imports, watch.repeatable
        before = self._numbers[-1][1] if self._numbers and self._told > watch.traffic.told else {}
        if any(before.get(place, value) != value for place, value in now[1].items()):
            self.not_checked("numbers that change from step to step, after others were taken out of earlier batches")
        self._numbers = [*self._numbers[-2:], now]

    def _learn(self, graph: Graph, watch: Watch) -> None:
        for structure, origin in zip(_structures(graph), watch.origins(graph), strict=True):
            if self._origins.setdefault(structure, origin) is not origin:
                self._origins[structure] = Origin.BATCH

    def remembered(self, graph: Graph) -> list[Origin]:
        """The origins of nodes whose structure was seen in a watched pass. A new plan has the next pass watched."""
        self._again = True
        return [self._origins.get(structure, Origin.UNSEEN) for structure in _structures(graph)]


_LEFT = (
    "the loop over the loader had ended before these losses were given (keep the iterator: `for batch in loader`, or "
    "`batches = iter(loader)` and then `next(batches)`)"
)
_UNWATCHED = (
    "these losses were computed in a forward pass that was not watched. Compute them between the batch and step, on "
    "the same thread; continue with the next batch of the loader, or compute them in `with private.watch(batch):`."
)


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
