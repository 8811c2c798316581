"""How what replicas compute for a variable is made equal: its synchronizer.

Together with its placement, that is all in which variables differ from one another. A
synchronizer says how a gradient is lowered, and nothing of where the variable is: what
is reduced for a variable with an owner goes to the owner whatever reduces it.

AutoDist calls these two the synchronizer and the partitioner of a node (Zhang et al.
2020).
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """Gradients are reduced over all replicas in the step that computes them.

    Attributes:
        algorithm: How, one of ALGORITHM_NAMES; None: as the Replicator's options say.
            Not for variables with an owner, whose gradients go to one device.
        bucket: Small gradients travel together with those of the same bucket.
    """

    algorithm: str | None = None
    bucket: str = ""
