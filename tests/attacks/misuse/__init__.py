"""Loops that train without clipping, noise or a charge, or that claim a sampling nobody drew; and loops that may."""
