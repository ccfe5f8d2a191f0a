"""The command line. Each command is one module with `NAME`, `HELP`, `add_arguments(parser)` and `run(args)`."""
