# SPDX-License-Identifier: Apache-2.0
"""Replicas that are copies of another."""
