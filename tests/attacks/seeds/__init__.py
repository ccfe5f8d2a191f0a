"""Seeds that cancelled, and digests that told."""
