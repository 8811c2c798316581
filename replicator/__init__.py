"""Replicator: a step written for one device, on many, in one TensorFlow graph."""

from replicator.errors import (
    ContextError,
    DeadlockError,
    DeviceError,
    InputError,
    MismatchError,
    ReplicatorError,
)
from replicator.inputs.input_context import InputContext
from replicator.primitives.groups import Group, Partition
from replicator.primitives.reductions import Extremum
from replicator.replicator import Replicator
from replicator.values import PerReplica
from replicator.variables.replicated import ReplicatedVariable

__all__ = [
    "ContextError",
    "DeadlockError",
    "DeviceError",
    "Extremum",
    "Group",
    "InputContext",
    "InputError",
    "MismatchError",
    "Partition",
    "PerReplica",
    "ReplicatedVariable",
    "Replicator",
    "ReplicatorError",
]
