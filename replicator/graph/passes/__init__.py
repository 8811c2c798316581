# SPDX-License-Identifier: Apache-2.0
"""Passes that need only a graph."""
