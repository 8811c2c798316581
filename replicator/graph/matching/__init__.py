# SPDX-License-Identifier: Apache-2.0
"""Finds the communication of all replicas and pairs it."""
