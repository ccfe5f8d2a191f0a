"""The accountants: each one way from a problem to epsilon or delta."""
