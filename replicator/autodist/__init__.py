# SPDX-License-Identifier: Apache-2.0
"""The single-device door: a program that knows nothing of replicas, on many devices."""
