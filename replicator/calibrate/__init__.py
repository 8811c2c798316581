# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of communication here: `python -m replicator.calibrate`."""
