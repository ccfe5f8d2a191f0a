"""Smooth calibration error (Błasiok & Nakkiran 2023, "Smooth ECE"): no bins, and no bandwidth to choose.

Each sample puts its gap (confidence minus 1 when right) on the line of confidences; a Gaussian of width s, reflected
at 0 and 1, spreads it. smECE_s is the integral of the absolute value of the sum. It falls as s grows, and the smooth
ECE is the one s where smECE_s = s. Here the gaps lie on a grid, where the reflected Gaussian is a product after a
cosine transform.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import fft

__all__ = ["grid_shares", "smooth_errors"]

Floats = NDArray[np.float64]


def grid_shares(confidence: Floats, cells: int) -> tuple[NDArray[np.intp], NDArray[np.intp], Floats]:
    """Two neighbouring cells for each confidence, and the share of the second: linear interpolation between centres.

    >>> left, right, share = grid_shares(np.array([0.25, 0.5]), cells=4)
    >>> left.tolist(), right.tolist(), share.tolist()
    ([0, 1], [1, 2], [0.5, 0.5])
    """
    place = confidence * cells - 0.5
    left = np.floor(place).astype(np.intp)
    share = place - left
    return np.clip(left, 0, cells - 1), np.clip(left + 1, 0, cells - 1), share


def smooth_errors(gaps: Floats, halvings: int = 34) -> Floats:
    """The smooth ECE of each row of `gaps` of shape (R, cells): sums of gaps by cell, over the number of samples.

    >>> smooth_errors(np.zeros((1, 64))).tolist()
    [0.0]
    """
    spectrum = fft.dct(gaps, type=2, norm="ortho", axis=-1)
    frequency = np.pi * np.arange(gaps.shape[-1])
    low, high = np.zeros(len(gaps)), np.abs(gaps).sum(axis=-1)  # smECE_s - s is >= 0 at the one, <= 0 at the other
    for _ in range(halvings):
        width = 0.5 * (low + high)
        kernel = np.exp(np.maximum(-0.5 * (width[:, None] * frequency) ** 2, -80.0))  # denormal numbers are slow
        spread = np.abs(fft.idct(spectrum * kernel, type=2, norm="ortho", axis=-1)).sum(axis=-1)
        low, high = np.where(spread > width, width, low), np.where(spread > width, high, width)
    widths: Floats = 0.5 * (low + high)
    return widths
