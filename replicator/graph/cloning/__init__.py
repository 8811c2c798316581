# SPDX-License-Identifier: Apache-2.0
"""Builds replicas as copies of another."""
