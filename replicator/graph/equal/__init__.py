# SPDX-License-Identifier: Apache-2.0
"""Finds out which values are the same on all replicas."""
