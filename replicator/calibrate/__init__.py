"""Measures what communication costs here: `python -m replicator.calibrate`."""
