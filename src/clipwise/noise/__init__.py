"""Gaussian noise: how random bits become normal numbers, and how these meet what is released."""

from clipwise.noise.chain import NoiseChain, chain_of
from clipwise.noise.normals import DefaultNormals, Normals, SecureNormals
from clipwise.noise.release import DESCRIPTION, GaussianNoise, grid_of

__all__ = [
    "DESCRIPTION",
    "DefaultNormals",
    "GaussianNoise",
    "NoiseChain",
    "Normals",
    "SecureNormals",
    "chain_of",
    "grid_of",
]
