"""Gaussian noise: how random bits become normal numbers, and how these meet what is released."""

from clipwise.noise.normals import DefaultNormals, Normals, SecureNormals
from clipwise.noise.release import DESCRIPTION, GaussianNoise, grid_of

__all__ = [
    "DESCRIPTION",
    "DefaultNormals",
    "GaussianNoise",
    "Normals",
    "SecureNormals",
    "grid_of",
]
