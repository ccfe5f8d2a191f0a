"""Unmodified models of other people's packages, in an environment of their own: `make third-party`."""
