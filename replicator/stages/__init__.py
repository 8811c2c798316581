# SPDX-License-Identifier: Apache-2.0
"""The graph of a step after each stage of its build: `Replicator.stages`."""
