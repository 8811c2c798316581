"""Replicator: a step written for one device, on many, in one TensorFlow graph."""

from replicator.errors import (
    ContextError,
    DeadlockError,
    DeviceError,
    InputError,
    MismatchError,
    ReplicatorError,
)
from replicator.inputs import InputContext
from replicator.replicator import Replicator
from replicator.values import PerReplica
from replicator.variables import ReplicatedVariable

__all__ = [
    "ContextError",
    "DeadlockError",
    "DeviceError",
    "InputContext",
    "InputError",
    "MismatchError",
    "PerReplica",
    "ReplicatedVariable",
    "Replicator",
    "ReplicatorError",
]
