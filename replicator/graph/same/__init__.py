# SPDX-License-Identifier: Apache-2.0
"""Which values are equal on all replicas by construction."""
