"""Benchmarks: what a private step costs beside the plain one and beside the peers. `python -m benchmarks --help`."""
