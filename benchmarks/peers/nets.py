# SPDX-License-Identifier: Apache-2.0
"""The peers' workloads: the same networks and batches as Replicator's."""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmarks import networks

Network = networks.Perceptron | networks.LanguageModel


@dataclasses.dataclass(frozen=True)
class Workload:
    """A network with its training settings.

    Attributes:
        name: As in benchmarks.steps.
        network: The sizes; makes the examples.
        batch: Examples per step, over all replicas.
        steps: How many steps of each contender are measured by default.
    """

    name: str
    network: Network
    batch: int
    steps: int

    def parts(self, replicas: int) -> list[networks.Batch]:
        """Returns the batch, cut into one part per replica."""
        examples, labels = (
            np.array_split(part, replicas) for part in self.network.batch(self.batch)
        )
        return list(zip(examples, labels, strict=True))


WORKLOADS = (
    Workload("small", networks.SMALL, 128, 1000),
    Workload("large", networks.LARGE, 128, 60),
    Workload("deep", networks.DEEP, 128, 200),
    Workload("lstm", networks.LANGUAGE, 64, 40),
)
