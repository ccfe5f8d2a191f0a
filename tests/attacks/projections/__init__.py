"""Attacks on estimated norms: what else a neighbouring data set changes."""
