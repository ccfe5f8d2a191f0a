"""Gaussian noise: where its bits come from, how they become normal numbers, and how these meet what is released."""

from clipwise.noise.entropy import Entropy, arm_seed, joined
from clipwise.noise.normals import DefaultNormals, Normals, SecureNormals
from clipwise.noise.release import DESCRIPTION, GaussianNoise, grid_of

__all__ = [
    "DESCRIPTION",
    "DefaultNormals",
    "Entropy",
    "GaussianNoise",
    "Normals",
    "SecureNormals",
    "arm_seed",
    "grid_of",
    "joined",
]
