"""Attacks on the noise: its last bits, its tail, and what they make of delta."""
