# SPDX-License-Identifier: Apache-2.0
"""How what is computed for a variable is made equal on all replicas: its synchronizer.

The second half of what a variable is like; the other is its placement. It goes with
every call that reduces for the variable, in the call's OperandPolicy.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """Gradients are reduced over all replicas in the step that computes them.

    Attributes:
        algorithm: How, one of ALGORITHM_NAMES; None: as the Replicator's options say.
            Not for variables with an owner, whose gradients go to one device.
        bucket: Small gradients travel together with those of the same bucket.
        compressor: What makes gradients smaller on their way: its name, with options,
            or the compressor itself; "" for none.
    """

    algorithm: str | None = None
    bucket: str = ""
    compressor: Any = ""


@dataclasses.dataclass(frozen=True)
class ParameterServer:
    """Gradients are reduced on the device that has the variable, for it alone.

    Attributes:
        sync: Whether all replicas' gradients are waited for in each step.
        staleness: By how many steps the fastest may be ahead of the slowest.
        compressor: As for AllReduce.
    """

    sync: bool = True
    staleness: int = 0
    compressor: Any = ""

    @property
    def algorithm(self) -> None:
        """None: what goes to one device has none."""
        return None

    @property
    def bucket(self) -> str:
        """Those of one owner travel together."""
        return ""


Synchronizer = AllReduce | ParameterServer
