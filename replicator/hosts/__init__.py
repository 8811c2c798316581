# SPDX-License-Identifier: Apache-2.0
"""Programs on several hosts: connects them, shares their checkpoints, resumes them.

Above the core: what a build itself knows of other processes is in replicator/cluster.
"""
