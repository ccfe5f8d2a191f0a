"""The clipped sum by a second backward pass, where there is no memory to keep uses from the first.

A use is formed again, from the same numbers and by the same rule, and added to the sum at once. So a sample contributes
what its norm was found from: autograd, with the factors as cotangents, would add its terms in another order and round
them otherwise, and where huge terms cancel that is more than the bound.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from clipwise.engine.graph import Edge
from clipwise.engine.pulling import pull_back
from clipwise.engine.rules import Finish
from clipwise.engine.run import Backward, Factors
from clipwise.engine.uses import joint_weighted


class Again(Backward):
    """A second pass to the meetings, for the uses that the first one let go; `sums` are as those of `weighted`."""

    def __init__(
        self,
        losses: Tensor,
        first: Backward,
        factors: Factors,
        onto: Sequence[Tensor] | None = None,
        *,
        retain_graph: bool,
    ) -> None:
        self._first, self._factors, self._onto = first, factors, onto
        self._parameter = {edges[0]: p for p, edges in first.plan.roots.items() if edges[0] in first.plan.solo}
        self._operands: dict[Edge, Tensor] = {}
        self.sums: dict[int, Tensor] = {}
        super().__init__(losses, first.graph, first.plan, retain_graph=retain_graph)
        parameters = sorted({self._parameter[edge] for edge in self._operands})
        pull_back(self.graph, self._operands, parameters, self.sums)

    def receive(self, finishers: list[tuple[Edge, Finish]], gradient: Tensor) -> None:
        """Add what a meeting gives; uses of tensors that are used more than once were kept."""
        for edge, finish in finishers:
            parameter = self._parameter.get(edge)
            if parameter is None:
                continue
            factors, chain, careful = self._factors(parameter), self.plan.chains[edge], self._first.careful([edge])
            use = finish(gradient).lasting()
            if not chain.direct:
                self._operands[edge] = joint_weighted([use], factors, None, careful)
                continue
            self.uses[edge] = [use]
            (use,) = self.in_frame(edge)
            del self.uses[edge]
            if self._onto is not None:
                joint_weighted([use], factors, self._onto[parameter], careful)
            else:
                total = joint_weighted([use], factors, None, careful)
                self.sums[parameter] = total.view(self.graph.parameters[parameter].shape)
