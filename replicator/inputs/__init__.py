# SPDX-License-Identifier: Apache-2.0
"""Input pipelines: how data reaches the replicas."""
