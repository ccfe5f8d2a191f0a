"""Attacks on what a guarantee says: relations that the sampling does not support, and a number that is not public."""
