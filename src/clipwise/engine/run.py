"""One step through a plan: read the saved tensors, differentiate to the meetings, and answer from the uses.

Backward stops at the nodes where parameters meet the batch, so no weight gradient is computed. What the rules need was
saved by the forward pass and is read before it is freed. No hook on a node of the graph outlives the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from clipwise.engine.chains import accumulate, gains_of, interval, overlapping, pull_back, pull_back_batched
from clipwise.engine.compiled import may_hold
from clipwise.engine.cost import kept
from clipwise.engine.grams import Doubts, Recent, is_cancelled
from clipwise.engine.graph import Edge, Graph
from clipwise.engine.joint import joint_squared_norms, summed_surely
from clipwise.engine.layout import Layout, Scattered, all_finite, blank, pack
from clipwise.engine.lengths import Lengths
from clipwise.engine.node import COMPILED, at_hand, saved_floats
from clipwise.engine.ops import Gradients, as_one, gradients_at, rule_of
from clipwise.engine.owners import Owners, StalePlan
from clipwise.engine.plan import GraphPlan, Meeting
from clipwise.engine.room import Room
from clipwise.engine.routes import is_identity
from clipwise.engine.rules import Finish, Operand, Samples
from clipwise.engine.sizes import pattern
from clipwise.engine.stages import Handed, let_nothing_through
from clipwise.engine.uses import Dense, Outer, Use, chunks, joint_weighted, squares
from clipwise.errors import UnsupportedNode

Factors = Callable[[int], Tensor]  # parameter -> factors (B,)


class _Arrival:
    """Called when the gradient of a meeting's output is complete."""

    __slots__ = ("_prepared", "backward", "meeting", "samples")

    def __init__(self, backward: Backward, meeting: Meeting, samples: Samples | None) -> None:
        self.backward, self.meeting, self.samples = backward, meeting, samples
        self._prepared: list[tuple[Edge, Finish]] | None = None

    @property
    def is_end(self) -> bool:
        """Whether autograd does not run the node: nothing below it is computed from the batch, or its rule goes on."""
        return self.meeting.end or self.meeting.node in self.backward.plan.stages.stops

    def prepare(self) -> None:
        """Read the saved tensors now, before backward frees them."""
        if self.samples is not None:
            self._prepared = self.backward.read(self.meeting, self.samples)

    def __call__(self, gradients: Gradients) -> None:
        self.receive(as_one(self.backward.graph, self.meeting.node, gradients))

    def receive(self, gradient: Tensor | None) -> None:
        """The gradient of all outputs that count, as one."""
        if gradient is None:
            return
        if self.samples is None:
            if not blank(gradient):
                raise StalePlan
            self._refuse_not_finite(gradient)
            return
        prepared = self._prepared
        self.backward.receive(
            self.backward.read(self.meeting, self.samples) if prepared is None else prepared, gradient
        )
        if self.meeting.node in self.backward.plan.stages.stops:
            self.backward.handed.pull(self.meeting.node, self.samples, gradient)

    def _refuse_not_finite(self, gradient: Tensor) -> None:
        """Nothing is lost where a gradient is zero, unless NaN or Inf meet it and nobody knows whose they are."""
        graph, k = self.backward.graph, self.meeting.node
        if self.backward.has_bad_losses:  # whose they will be
            return
        if not all_finite(gradient) or not all(all_finite(tensor) for tensor in saved_floats(graph.nodes[k])):
            raise UnsupportedNode(
                f"{graph.names[k]} holds numbers that are not finite, and no gradient shows which sample they belong "
                "to. Leave samples with NaN or infinite values out of the data."
            )


class Backward:
    """The uses of every shared operand after one backward pass to the meetings.

    Each use is formed when its gradient arrives, by a pre-hook on the graph's node that is removed with the call. What
    autograd frees behind it is then really free: at no time are all gradients and all activations held.
    """

    def __init__(
        self,
        losses: Tensor,
        graph: Graph,
        plan: GraphPlan,
        *,
        retain_graph: bool,
        norms_only: bool = False,
        room: Room | None = None,
    ) -> None:
        self.graph, self.plan, self.norms_only = graph, plan, norms_only
        self.batch_size = losses.shape[0]
        self._losses = losses
        self.uses: dict[Edge, list[Use]] = {}
        self._norms: dict[Edge, Tensor] = {}
        self._lengths = Lengths()
        self._recent = Recent()
        # Settled at the end, for which all operands are held; where only norms are wanted nothing is.
        self._doubts = Doubts(at_once=norms_only)
        self._apart: list[int] = []  # samples whose gradients of derived parameters are added by themselves
        self._room = room
        self._kept: frozenset[Edge] = frozenset()
        if room is not None and plan.streaming and not norms_only:
            room.begin()
            self._kept = kept(graph, plan, self.batch_size, room.memory)
        self._refuse_stale()
        owners = Owners(losses, graph, plan) if plan.routed else None
        moved = {} if owners is None else owners.moved_rows()
        arrivals = [
            _Arrival(self, meeting, self._samples(meeting, moved.get(meeting.node))) for meeting in plan.meetings
        ]
        self.handed = Handed(graph, plan.stages)
        if owners is not None:
            for arrival in arrivals:
                arrival.receive(owners.gradients.pop(arrival.meeting.node))
            return
        for stage in range(plan.stages.count):
            due = [arrival for arrival in arrivals if plan.stages.of[arrival.meeting.node] == stage]
            if not plan.streaming and not retain_graph:
                for arrival in due:
                    arrival.prepare()
            for arrival, gradients in self._differentiate(losses, stage, due, retain_graph):
                arrival.receive(as_one(graph, arrival.meeting.node, gradients))

    def _differentiate(
        self, losses: Tensor, stage: int, due: Sequence[_Arrival], retain_graph: bool
    ) -> list[tuple[_Arrival, Gradients]]:
        """Back-propagate to the meetings of a stage, from the losses or from below the stops before them.

        Joints of a later stage hold what arrives already. On the way to them autograd goes through stops, which let
        nothing through, and through what lies between, which must not be freed.
        """
        graph, streaming, stages = self.graph, self.plan.streaming, self.plan.stages
        ends = [arrival for arrival in due if arrival.is_end or not streaming]
        handles = [
            graph.nodes[arrival.meeting.node].register_prehook(arrival)
            for arrival in due
            if streaming and not arrival.is_end
        ]
        joints = [k for k, when in stages.joints.items() if when > stage]
        if joints:
            handles += [graph.nodes[k].register_prehook(let_nothing_through) for k in stages.stops.union(joints)]
            retain_graph = True
        try:
            nodes = [arrival.meeting.node for arrival in ends] + joints
            found = gradients_at(*self.handed.starts(losses, stage), graph, nodes, keep=retain_graph, whole=joints)
        finally:
            for handle in handles:
                handle.remove()
        for k, parts in zip(joints, found[len(ends) :], strict=True):
            for output, part in enumerate(parts):
                self.handed.hold((k, output), part)
        return list(zip(ends, found[: len(ends)], strict=True))

    @property
    def has_bad_losses(self) -> bool:
        """Whether some loss is not finite."""
        return not all_finite(self._losses)

    def read(self, meeting: Meeting, samples: Samples) -> list[tuple[Edge, Finish]]:
        """The rules of a meeting's operands, with the tensors that they need from the node."""
        graph, k = self.graph, meeting.node
        rule = rule_of(graph, k)
        assert rule is not None
        finishers = []
        for position in meeting.operands:
            edge = graph.edges[k][position]
            shape = self.plan.shapes.get(edge) or graph.shape(edge)
            finishers.append((edge, rule(Operand(graph, k, position, shape), samples)))
        return finishers

    def receive(self, finishers: list[tuple[Edge, Finish]], gradient: Tensor) -> None:
        """Turn the gradient of a meeting's output into uses of its shared operands."""
        for edge, finish in finishers:
            use = finish(gradient)
            if edge in self.plan.solo:
                rows = None if self.norms_only else use.row_factors()
                if rows is None:
                    use = use.formed(self._room) if edge in self._kept else use
                    self._doubts.whose = (edge,)
                    self._norms[edge], use = use.settled(self._recent, self._doubts)
                    if self.norms_only:
                        continue
                else:
                    self._lengths.add(edge, rows)
            self.uses.setdefault(edge, []).append(use)

    def _refuse_stale(self) -> None:
        """A plan is only used while everything it took from the numbers still holds."""
        graph, plan = self.graph, self.plan
        if (
            any(pattern(graph, k) != seen for k, seen in plan.entries)
            or not (plan.sizes is None or plan.sizes.hold(graph, self.batch_size))
            or not all(is_identity(graph, k) for k in plan.identities)
            or not all(region.holds(graph) for region in plan.regions)
            or any(graph.names[k] == COMPILED and may_hold(graph, k, self.batch_size) for k in plan.unseen)
            or (plan.at_hand and not all(at_hand(graph.nodes[meeting.node]) for meeting in plan.meetings))
        ):
            raise StalePlan
        for edges in plan.parted:
            if overlapping(graph, [plan.chains[edge].region for edge in edges]):
                raise StalePlan

    def _samples(self, meeting: Meeting, owners: Tensor | None) -> Samples | None:
        if not meeting.layouts:
            return None
        layout = meeting.layouts[0]
        if isinstance(layout, Scattered):
            assert owners is not None
            return Samples(self.batch_size, Layout(layout.axis), owners, pack(owners, self.batch_size))
        if not layout.fits(self.graph.shape((meeting.node, 0)), self.batch_size):
            raise StalePlan
        return Samples(self.batch_size, layout)

    def discard(self, bad_B: Tensor) -> None:
        """Set the contribution of some samples to zero, whatever they hold."""
        self.uses = {edge: [use.without(bad_B) for use in uses] for edge, uses in self.uses.items()}
        self._norms.clear()
        self._lengths = Lengths()

    # -- per parameter ------------------------------------------------------------------------------------------

    def let_go(self) -> None:
        """Keep the norms, and of the uses those that a second pass would have to keep as well."""
        self.norms_only = True
        self.uses = {edge: uses for edge, uses in self.uses.items() if edge not in self.plan.solo}

    def in_frame(self, edge: Edge) -> list[Use]:
        """Uses of a framed operand, turned to the orientation of the parameter."""
        uses = self.uses.get(edge, [])
        if not self.plan.chains[edge].transposed:
            return uses
        seen = [use if isinstance(use, (Outer, Dense)) else Dense(use.gradients(), use.shape) for use in uses]
        return [use.transposed() for use in seen]

    @property
    def doubt(self) -> Tensor | None:
        """Whether some norm must be settled first, as a tensor that nobody has waited for; None where none can be."""
        return self._doubts.any(self._losses.device)

    def settle(self) -> None:
        """Compute norms again that float32 could not tell, in place: those that were given out already, too."""
        self._doubts.settle()

    def take_care(self, some_B: Tensor) -> None:
        """Have the terms of some samples added in float64."""
        self._doubts.whose = tuple(edge for edges in self.plan.roots.values() for edge in edges)
        self._doubts.note(some_B)

    def careful(self, edges: Iterable[Edge]) -> Tensor | None:
        """The samples whose terms are to be added in float64, (B,); None where there are none."""
        found = [self._doubts.careful[edge] for edge in edges if edge in self._doubts.careful]
        return torch.stack(found).any(0) if found else None

    def squared_norms(self) -> dict[int, Tensor]:
        """Squared per-sample gradient norm (B,) of every parameter that is reached."""
        norms = self.unsettled_norms()
        self.settle()
        return norms

    def squared_norm(self, edge: Edge) -> Tensor:
        """Of an operand that makes up its parameter's gradient, (B,), after `squared_norms`, in float64."""
        return self._norms[edge].double()

    def unsettled_norms(self) -> dict[int, Tensor]:
        """The same, to be used only where there is no `doubt`, or after `settle`."""
        self._norms.update(self._lengths.squared(self._doubts))
        self._lengths = Lengths()
        norms = {
            parameter: self._simple_squared_norms(parameter, edges)
            for parameter, edges in self.plan.roots.items()
            if parameter not in self.plan.derived
        }
        if self.plan.derived:
            norms.update(self._derived_norms())
        return {parameter: norm for parameter, norm in norms.items() if norm is not None}

    def _simple_squared_norms(self, parameter: int, edges: Sequence[Edge]) -> Tensor | None:
        if len(edges) == 1:
            known = self._norms.get(edges[0])
            uses = self.uses.get(edges[0], [])
            self._doubts.whose = (edges[0],)
            return known if known is not None else joint_squared_norms(uses, self._doubts) if uses else None
        total: Tensor | None = None
        for group in self._regions(edges):
            uses = [use for edge in group for use in self.in_frame(edge)]
            if uses:
                own = Doubts(at_once=True)  # parts are added
                own.whose = tuple(group)
                norm = joint_squared_norms(uses, own)
                self._doubts.careful.update(own.careful)
                total = norm if total is None else total + norm
        return total

    def _regions(self, edges: Sequence[Edge]) -> list[list[Edge]]:
        """Operands by the part of the parameter they are; different parts do not overlap."""
        whole: list[Edge] = []
        parts: dict[tuple[int, int, int], list[Edge]] = {}
        for edge in edges:
            region = self.plan.chains[edge].region
            if region is None:
                whole.append(edge)
            else:
                parts.setdefault(interval(self.graph, region), []).append(edge)
        return [whole] if whole else list(parts.values())

    def _derived_edges(self) -> list[Edge]:
        parameters = sorted(self.plan.derived)
        return list({edge: None for p in parameters for edge in self.plan.roots[p] if self.uses.get(edge)})

    def _derived(self, samples: slice) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Instantiate the gradients of operands, and pull them back to their parameters."""
        edges, parameters = self._derived_edges(), sorted(self.plan.derived)
        grads = [self._formed(edge, samples) for edge in edges]
        pulled = pull_back_batched(self.graph, self.plan.chains, edges, grads, parameters) if edges else []
        return grads, dict(zip(parameters, pulled, strict=False))

    def _derived_norms(self) -> dict[int, Tensor]:
        """Of derived parameters. What nearly cancels on the way is rounded otherwise in a sum, so it stays apart."""
        edges = self._derived_edges()
        if not edges:
            return {}
        largest = max((self.uses[edge][0] for edge in edges), key=lambda use: torch.Size(use.shape).numel())
        found, expected = list[Tensor](), list[Tensor]()
        gains: Tensor | None = None
        for chunk in chunks(largest):
            grads, pulled = self._derived(chunk)
            if gains is None:
                gains = gains_of(
                    self.graph, self.plan.chains, self.plan.roots, dict(zip(edges, grads, strict=True)), list(pulled)
                )
            found.append(torch.stack([squares(gradient) for gradient in pulled.values()]))
            sizes = [squares(gradient.abs() if gradient.is_complex() else gradient).sqrt_() for gradient in grads]
            expected.append(gains @ torch.stack(sizes).to(gains.dtype))
        norms = torch.cat(found, 1)
        apart, careful = is_cancelled(norms, torch.cat(expected, 1)).any(0), self.careful(edges)
        self._apart = (apart if careful is None else apart | careful).nonzero().flatten().tolist()
        for sample in self._apart:
            pulled = self._derived(slice(sample, sample + 1))[1]
            norms[:, sample] = torch.cat([squares(gradient) for gradient in pulled.values()])
        return dict(zip(pulled, norms, strict=True))

    def _formed(self, edge: Edge, samples: slice) -> Tensor:
        """The gradients of an operand. Where terms cancel they are formed in float64, as they are for the sum."""
        gradients, cancels = summed_surely(self.uses[edge], samples)
        if cancels is not None:
            known = self.careful([edge])
            self._doubts.careful[edge] = cancels if known is None else cancels | known
        return gradients

    def gradients(self, samples: slice = slice(None)) -> dict[int, Tensor]:
        """Per-sample gradients (b, *shape) of every parameter that is reached."""
        found: dict[int, Tensor] = {}
        for parameter, edges in self.plan.roots.items():
            used = [edge for edge in edges if self.uses.get(edge)]
            if parameter in self.plan.derived or not used:
                continue
            if all(self.plan.chains[edge].direct for edge in used):
                whole = [use for edge in used for use in self.in_frame(edge)]
                found[parameter] = _turned(summed_surely(whole, samples)[0], self.graph.parameters[parameter])
            else:
                grads = [self._formed(edge, samples) for edge in used]
                found[parameter] = pull_back_batched(self.graph, self.plan.chains, used, grads, [parameter])[0]
        return found | self._derived(samples)[1]

    # -- the clipped sum by book-keeping ------------------------------------------------------------------------

    def weighted(
        self, factors: Factors, *, consume: bool = False, onto: Sequence[Tensor] | None = None
    ) -> dict[int, Tensor]:
        """sum_i c_i g_i of every parameter that is reached, from the same saved tensors.

        `consume` lets go of each use as its sum is formed, so that gradients and sums are not held together. Given
        `onto`, one tensor for each parameter, sums are added there; those of parameters that autograd must be asked for
        are returned.
        """
        if consume:  # doubts hold the uses as well, and the last Gram matrix nobody needs
            self._doubts.drop()
            self._recent = Recent()
        sums: dict[int, Tensor] = {}
        through: dict[tuple[int, bool], list[int]] = {}
        for sample in self._apart:
            for parameter, gradients in self._derived(slice(sample, sample + 1))[1].items():
                accumulate(sums, parameter, gradients[0] * factors(parameter)[sample].to(gradients.dtype))
        for parameter, edges in self.plan.roots.items():
            used = [edge for edge in edges if self.uses.get(edge)]
            direct = [edge for edge in used if edge in self.plan.chains and self.plan.chains[edge].direct]
            if len(direct) < len(used):
                through.setdefault((id(factors(parameter)), parameter in self.plan.derived), []).append(parameter)
            uses = [use for edge in direct for use in self.in_frame(edge)]
            if consume:
                for edge in direct:
                    del self.uses[edge]
            careful = self.careful(edges)
            if uses and onto is not None:
                joint_weighted(uses, self._joint_factors(factors, parameter), onto[parameter], careful)
            elif uses:
                total = joint_weighted(uses, self._joint_factors(factors, parameter), None, careful)
                shape = self.graph.parameters[parameter].shape
                total = total if total.shape == shape else total.view(shape)
                sums[parameter] = sums[parameter] + total if parameter in sums else total
        for parameters in through.values():  # of one clipping group
            common = self._joint_factors(factors, parameters[0])
            operands = {
                place: joint_weighted(uses, common, None, self.careful(edges))
                for place, (uses, edges) in self._pulled(parameters).items()
            }
            pull_back(self.graph, operands, sorted(parameters), sums)
        return sums

    def _pulled(self, parameters: Sequence[int]) -> dict[Edge, tuple[list[Use], list[Edge]]]:
        """What autograd must move to these parameters: from which edges, and which uses of which operands.

        Operands that are the same part of a parameter are one: between them terms may cancel.
        """
        found: dict[Edge, tuple[list[Use], list[Edge]]] = {}
        for parameter in parameters:
            edges = [edge for edge in self.plan.roots[parameter] if self.uses.get(edge)]
            if parameter in self.plan.derived or len(edges) == 1:
                chains = self.plan.chains
                moved = [edge for edge in edges if edge not in chains or not chains[edge].direct]
                found |= {edge: (self.uses[edge], [edge]) for edge in moved}
                continue
            for group in self._regions(edges):
                place = self.plan.chains[group[0]].region
                assert place is not None
                found[place] = ([use for edge in group for use in self.in_frame(edge)], group)
        return found

    def _joint_factors(self, factors: Factors, parameter: int) -> Tensor:
        """Zero for samples that are added by themselves."""
        found = factors(parameter)
        if not self._apart or parameter not in self.plan.derived:
            return found
        return found.index_fill(0, torch.tensor(self._apart, device=found.device), 0)


def _turned(gradients_B: Tensor, parameter: Tensor) -> Tensor:
    return gradients_B.reshape(gradients_B.shape[0], *parameter.shape)
