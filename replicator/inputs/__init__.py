# SPDX-License-Identifier: Apache-2.0
"""What feeds the replicas."""
