# SPDX-License-Identifier: Apache-2.0
"""Finds and pairs the communication calls of all replicas."""
