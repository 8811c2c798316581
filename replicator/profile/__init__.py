# SPDX-License-Identifier: Apache-2.0
"""What a step takes, and when more replicas pay: `python -m replicator.profile`."""
