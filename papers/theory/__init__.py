"""Sections 3 and 4 of the paper, statement by statement: kernels, Table 1, gradient flows, convergence of DP-GD."""
