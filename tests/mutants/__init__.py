"""Would the tests notice? `python -m tests.mutants` changes one thing at a time and runs what covers it."""
