# SPDX-License-Identifier: Apache-2.0
"""A variable's synchronizer: how its gradients are made equal on all replicas.

A variable is described by its placement and its synchronizer. The latter goes with
every call that reduces for the variable, in the call's OperandPolicy.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """Gradients are reduced over all replicas in the step that computes them.

    Attributes:
        algorithm: One of ALGORITHM_NAMES; None: as the Replicator's options say. Not
            for variables with an owner, whose gradients go to one device.
        bucket: Small gradients travel together with those of the same bucket.
        compressor: Makes gradients smaller for the transfer: its name, with options, or
            the compressor itself; "" for none.
    """

    algorithm: str | None = None
    bucket: str = ""
    compressor: Any = ""


@dataclasses.dataclass(frozen=True)
class ParameterServer:
    """Gradients are reduced only on the device that holds the variable.

    Attributes:
        sync: Whether each step waits for all replicas' gradients.
        staleness: By how many steps the fastest replica may be ahead of the slowest.
        compressor: As for AllReduce.
    """

    sync: bool = True
    staleness: int = 0
    compressor: Any = ""

    @property
    def algorithm(self) -> None:
        """None: a reduction to one device has no choice of algorithm."""
        return None

    @property
    def bucket(self) -> str:
        """The empty name: gradients for one owner travel together."""
        return ""


Synchronizer = AllReduce | ParameterServer
