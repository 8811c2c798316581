# SPDX-License-Identifier: Apache-2.0
"""Which values are the same on all replicas."""
