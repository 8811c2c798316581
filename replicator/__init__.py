# SPDX-License-Identifier: Apache-2.0
"""Replicator: runs a step written for one device on many, in one TensorFlow graph."""

import sys

# Python imports this package before it runs a module of it, and the launcher needs none
# of these names: with them, a typing mistake in its flags would be reported only after
# the seconds that TensorFlow takes. argv[0] is "-m" until Python has found the module.
_WORDS = zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
_LAUNCHES = sys.argv[:1] == ["-m"] and ("-m", "replicator.launch") in _WORDS

if not _LAUNCHES:
    from replicator import strategy
    from replicator.autodist.autodist import AutoDist
    from replicator.autodist.function import DistributedFunction
    from replicator.autodist.session import DistributedSession
    from replicator.cluster.resources import ResourceSpec
    from replicator.costs.rates import Calibration, Rates
    from replicator.errors import (
        ArgumentError,
        CloneError,
        ClusterError,
        ContextError,
        DeadlockError,
        DependencyError,
        DeviceError,
        HostLostError,
        InputError,
        InternalError,
        MismatchError,
        PerReplicaError,
        ReplicatorError,
        StrategyError,
        UnsupportedError,
    )
    from replicator.hosts.asynchronous.workers import AsynchronousCluster
    from replicator.hosts.checkpoints import Checkpoint
    from replicator.hosts.cluster import Cluster
    from replicator.hosts.connection import connect
    from replicator.hosts.resilient import resilient
    from replicator.inputs.input_context import InputContext
    from replicator.inputs.positions import Positions
    from replicator.primitives.groups import Group, Partition
    from replicator.primitives.reductions import Extremum
    from replicator.replicator import Replicator
    from replicator.step.steps import Step
    from replicator.values import PerReplica
    from replicator.variables.replicated import ReplicatedVariable
    from replicator.version import __version__ as __version__

__all__ = [
    "ArgumentError",
    "AsynchronousCluster",
    "AutoDist",
    "Calibration",
    "Checkpoint",
    "CloneError",
    "Cluster",
    "ClusterError",
    "ContextError",
    "DeadlockError",
    "DependencyError",
    "DeviceError",
    "DistributedFunction",
    "DistributedSession",
    "Extremum",
    "Group",
    "HostLostError",
    "InputContext",
    "InputError",
    "InternalError",
    "MismatchError",
    "Partition",
    "PerReplica",
    "PerReplicaError",
    "Positions",
    "Rates",
    "ReplicatedVariable",
    "Replicator",
    "ReplicatorError",
    "ResourceSpec",
    "Step",
    "StrategyError",
    "UnsupportedError",
    "connect",
    "resilient",
    "strategy",
]
