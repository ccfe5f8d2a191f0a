"""How the norms of a batch are found: from the graph of its losses, exactly, or estimated from random projections."""

from clipwise.private.norms.choice import Given, Norms, norms_of

__all__ = ["Given", "Norms", "norms_of"]
