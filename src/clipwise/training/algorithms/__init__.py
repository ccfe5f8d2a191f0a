"""The algorithms that a configuration can name."""
