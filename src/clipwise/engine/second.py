"""The clipped sum by a second backward pass, where there is no memory to keep the uses from the first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clipwise.engine.chains import pull_back
from clipwise.engine.graph import Edge
from clipwise.engine.node import at_hand
from clipwise.engine.rules import Finish
from clipwise.engine.run import Backward, Factors
from clipwise.engine.uses import joint_weighted
from clipwise.errors import CheckFailed

_SAME = 1e-4  # of a squared norm: what an order of additions that a device leaves open may change


class _SecondPass(Backward):
    """A second pass to the meetings; `sums` as `Backward.weighted` gives.

    A use is formed again, from the same numbers and by the same rule, and added to the sum at once. So a sample
    contributes what its norm was found from: autograd, with the factors as cotangents, would add its terms in another
    order and round them otherwise, and where huge terms cancel that is more than the bound.

    Guarantees: where the numbers may be others (made again by a checkpoint, or by a device that leaves the order of
    additions open), no sample contributes more than the norm of the first pass says.
    """

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
        self._again = losses.device.type != "cpu" or not all(map(at_hand, first.graph.nodes))
        self._squared: dict[int, tuple[Tensor, Tensor]] = {}  # of those with the same factors: then, and now
        self.sums: dict[int, Tensor] = {}
        super().__init__(losses, first.graph, first.plan, retain_graph=retain_graph)
        self._refuse_longer()
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
            if self._again:
                then, now = self._squared.get(id(factors), (0.0, 0.0))
                self._squared[id(factors)] = then + self._first.squared_norm(edge), now + use.squared_norms().double()
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

    def _refuse_longer(self) -> None:
        pairs = list(self._squared.values())
        if pairs and not bool(torch.stack([(now <= then * (1 + _SAME)).all() for then, now in pairs]).all()):
            raise CheckFailed(
                "a second backward pass gave longer gradients than the first. Nothing was released. "
                "torch.utils.checkpoint draws dropout again with preserve_rng_state=False: leave it True."
            )


def by_second_backward(
    losses: Tensor, first: Backward, factors: Factors, onto: Sequence[Tensor] | None, keep: bool
) -> dict[int, Tensor]:
    """The sums of the uses that the first pass let go."""
    return _SecondPass(losses, first, factors, onto, retain_graph=keep or first.plan.must_keep).sums
