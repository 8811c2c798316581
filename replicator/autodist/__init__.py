# SPDX-License-Identifier: Apache-2.0
"""AutoDist: runs a program that knows nothing of replicas on many devices."""
