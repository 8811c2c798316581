# SPDX-License-Identifier: Apache-2.0
"""Measures a step, predicts when more replicas pay: `python -m replicator.profile`."""
