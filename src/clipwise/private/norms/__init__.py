"""How the norms of a batch are found: from the graph of its losses, exactly, or estimated from random projections."""

from clipwise.private.norms.choice import Norms, norms_of

__all__ = ["Norms", "norms_of"]
