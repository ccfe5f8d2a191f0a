"""`python -m benchmarks`: the benchmark of the engine."""

from benchmarks.run import main

main()
