"""Products of two operands: what each kind means for the batch, besides its rule.

A product is given by the positions of its operands among the node's inputs. Where one of them is not differentiated,
the batch may enter.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from clipwise.engine.node import Node, saved
from clipwise.engine.passing import alive, finite, is_dead, random
from clipwise.engine.routes import Routing, Site, recurrent, samples_first, stacked
from clipwise.engine.rules.conv import Geometry


@dataclass(frozen=True)
class Product:
    """Any product of rows and matrices; of this kind nothing more is known."""

    first: int
    second: int

    @property
    def operands(self) -> tuple[int, ...]:
        """The positions of what may be data."""
        return self.first, self.second

    def data_axes(self, rank: int, left_is_data: bool, right_is_shared: bool) -> list[int]:
        """The axes of the output that come from the operand that is not differentiated."""
        return [*range(rank - 2), rank - 2 if left_is_data else rank - 1]

    def routing(self, site: Site) -> Routing:
        """Whether it keeps the samples apart."""
        return Routing.MAYBE

    def passing(self, node: Node, position: int, gradient: Tensor, arrived: Tensor) -> Tensor:
        """How a probe passes it: with other weights, where its own let nothing through."""
        instead = self._other_weights(node, position, gradient, arrived) if is_dead(gradient) else None
        return finite(node, position, gradient, arrived) if instead is None else alive(gradient, instead)

    def _other_weights(self, node: Node, position: int, gradient: Tensor, arrived: Tensor) -> Tensor | None:
        """The gradient of an input with random weights; None: not known."""
        return None


class RowProduct(Product):
    """Rows on any leading axes, times a matrix: `F.linear` as one node."""

    def _other_weights(self, node: Node, position: int, gradient: Tensor, arrived: Tensor) -> Tensor | None:
        if position != self.first:
            return None
        return arrived @ random((*arrived.shape[:-2], arrived.shape[-1], gradient.shape[-1]), arrived)


class MatrixProduct(RowProduct):
    """One matrix times another."""

    def routing(self, site: Site) -> Routing:
        """A product keeps the axis of the factor that it comes from: that factor is the batch's, the other is not."""
        if site.own is None:
            return Routing.MAYBE
        left, right = (site.graph.edges[site.k][position][0] for position in (self.first, self.second))
        by_columns = site.rank > 1 and site.own.axis == site.rank - 1
        source, other = (right, left) if by_columns else (left, right)
        return Routing.NEVER if site.is_from_batch(source) and not site.is_from_batch(other) else Routing.MAYBE

    def _other_weights(self, node: Node, position: int, gradient: Tensor, arrived: Tensor) -> Tensor | None:
        if position != self.second:
            return super()._other_weights(node, position, gradient, arrived)
        return random((*arrived.shape[:-2], gradient.shape[-2], arrived.shape[-2]), arrived) @ arrived


class BatchedProduct(MatrixProduct):
    """Stacks of matrices, sample with sample."""

    def routing(self, site: Site) -> Routing:
        """Matrices of one stack meet those at the same place of the other."""
        return Routing.NEVER if site.own is not None and site.own.axis == 0 else super().routing(site)


class VectorProduct(MatrixProduct):
    """A matrix times a vector."""

    def data_axes(self, rank: int, left_is_data: bool, right_is_shared: bool) -> list[int]:
        """The rows of the matrix."""
        return [0] if right_is_shared else []

    def _other_weights(self, node: Node, position: int, gradient: Tensor, arrived: Tensor) -> None:
        return None


class ImageProduct(Product):
    """Images and a kernel."""

    def data_axes(self, rank: int, left_is_data: bool, right_is_shared: bool) -> list[int]:
        """The images."""
        return [0]

    def routing(self, site: Site) -> Routing:
        """Images are worked on one by one."""
        return samples_first(site)

    def _other_weights(self, node: Node, position: int, gradient: Tensor, arrived: Tensor) -> Tensor | None:
        if position != self.first:
            return None
        return Geometry.of(node).input_gradient(arrived, gradient, random(saved(node, "weight").shape, arrived))


class RecurrentProduct(Product):
    """Rows of many times and a matrix; the first states may be data too."""

    @property
    def operands(self) -> tuple[int, ...]:
        """The rows, and both states."""
        return self.first, -2, -1

    def data_axes(self, rank: int, left_is_data: bool, right_is_shared: bool) -> list[int]:
        """Times and samples."""
        return [0, 1]

    def routing(self, site: Site) -> Routing:
        """Every sample is read by itself, from one time to the next."""
        return recurrent(site)


class StackProduct(RecurrentProduct):
    """The same for all layers of a stack in one kernel."""

    def routing(self, site: Site) -> Routing:
        """Every sample is read by itself here too."""
        return stacked(site)
