"""The Edgeworth accountant (Wang et al. 2022): the central limit theorem with corrections, an approximation."""

from __future__ import annotations

from clipwise.accounting.gdp import gdp_delta, gdp_epsilon

__all__ = ["edgeworth_delta", "edgeworth_epsilon"]

edgeworth_epsilon = gdp_epsilon
edgeworth_delta = gdp_delta
