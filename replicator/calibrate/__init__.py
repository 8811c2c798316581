# SPDX-License-Identifier: Apache-2.0
"""Measures what communication costs here: `python -m replicator.calibrate`."""
