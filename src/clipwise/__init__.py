"""Differentially private deep learning that stays calibrated."""

__version__ = "0.1.0"
