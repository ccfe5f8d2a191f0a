"""Per-sample norms, gradients and clipped sums straight from the autograd graph of a vector of losses.

For users: `per_sample_norms`, `per_sample_gradients`, `clipped_gradients`, `check`. The other names are what the rest
of the package builds on, one line of imports for each subject.
"""

from clipwise.engine.cache import Engine, NothingFinite, lengths_beforehand
from clipwise.engine.clip import Clipped, Clipper, Total
from clipwise.engine.cost import free_bytes
from clipwise.engine.functions import Constants, check, clipped_gradients, per_sample_gradients, per_sample_norms
from clipwise.engine.graph import Graph, dense, differentiate, walk
from clipwise.engine.history import Planning
from clipwise.engine.node import IN_PLACE_WRITE, LEAF
from clipwise.engine.norms import negligible_norm, working_dtype
from clipwise.engine.ops import op_of
from clipwise.engine.origin import Evidence, Origin, backing, constant_tensors, memory_of
from clipwise.engine.parameters import Parameters, check_vector
from clipwise.engine.precision import HALF, widened
from clipwise.engine.run import Backward
from clipwise.engine.substitute import Substitute
from clipwise.engine.summary import Summary
from clipwise.engine.uses import Gathered, Outer, Use
from clipwise.engine.verify import distance

__all__ = [
    "HALF",
    "IN_PLACE_WRITE",
    "LEAF",
    "Backward",
    "Clipped",
    "Clipper",
    "Constants",
    "Engine",
    "Evidence",
    "Gathered",
    "Graph",
    "NothingFinite",
    "Origin",
    "Outer",
    "Parameters",
    "Planning",
    "Substitute",
    "Summary",
    "Total",
    "Use",
    "backing",
    "check",
    "check_vector",
    "clipped_gradients",
    "constant_tensors",
    "dense",
    "differentiate",
    "distance",
    "free_bytes",
    "lengths_beforehand",
    "memory_of",
    "negligible_norm",
    "op_of",
    "per_sample_gradients",
    "per_sample_norms",
    "walk",
    "widened",
    "working_dtype",
]
