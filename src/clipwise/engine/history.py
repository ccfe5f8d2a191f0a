"""How often plans were made for one set of parameters, and what made the last ones necessary."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import zip_longest

from clipwise.engine.graph import Graph
from clipwise.engine.node import structure_names

_REMEMBERED = 256  # sets of parameters
_REASONS = 8  # of each, the latest


@dataclass(frozen=True)
class Planning:
    """`plans` made so far, and why: what differed each time, in a few words, the latest last."""

    plans: int
    reasons: tuple[str, ...]


class History:
    """Counts the plans of each set of parameters."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[int, ...], tuple[int, deque[str], tuple[object, ...]]] = OrderedDict()

    def record(self, identity: tuple[int, ...], graph: Graph, stale: bool) -> None:
        """A plan was made; `stale` when there was one of the same structure that this batch did not fit."""
        plans, reasons, before = self._seen.pop(identity, (0, deque(maxlen=_REASONS), None))
        if before is not None:
            reasons.append("rows or sizes that the plan did not fit" if stale else first_difference(before, graph))
        self._seen[identity] = (plans + 1, reasons, graph.signature)
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)

    def of(self, identity: tuple[int, ...]) -> Planning:
        """What was recorded for a set of parameters."""
        plans, reasons, _ = self._seen.get(identity, (0, (), ()))
        return Planning(plans, tuple(reasons))


def first_difference(before: tuple[object, ...], graph: Graph) -> str:
    """The first node, in order from the losses, in which a graph is not the one before."""
    for k, (old, new) in enumerate(zip_longest(before, graph.signature)):
        if old == new:
            continue
        if old is None or new is None:
            return f"{abs(len(before) - len(graph.signature))} nodes {'more' if old is None else 'less'}"
        if not isinstance(old, tuple) or not isinstance(new, tuple) or old[0] != new[0]:
            return f"{_name(new)} where {_name(old)} was"
        if old[1] != new[1]:
            return f"inputs of {new[0]}"
        names = structure_names(graph.nodes[k].__class__)
        changed = (i for i, pair in enumerate(zip(old[2:], new[2:], strict=True)) if pair[0] != pair[1])
        i = next(changed)
        return f"{new[0]}: {names[i]} {old[2 + i]} -> {new[2 + i]}"
    return "the same structure again: its layout stayed open"


def _name(entry: object) -> str:
    if not isinstance(entry, tuple):
        return "a parameter"
    return "a parameter" if isinstance(entry[0], int) else str(entry[0])
