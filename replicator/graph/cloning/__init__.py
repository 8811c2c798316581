# SPDX-License-Identifier: Apache-2.0
"""Builds further replicas as copies of one that was built in Python."""
