# SPDX-License-Identifier: Apache-2.0
"""Pipelines that several processes read, each by itself, and of which each uses a part.

In between-graph mode a Dataset that feeds all replicas is made by every process, and
read by each as a whole. That all read the same is seen to here.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replicator import errors
from replicator.cluster.peers import Peers
from replicator.inputs import moving
from replicator.world import World

_FIX = (
    "let the input_fn take an InputContext, and make a part for each replica; or call "
    "tf.random.set_seed(...) at the beginning of the program."
)


def devices(world: World) -> list[str]:
    """Returns a device for every replica: that of a local one in place of others."""
    return [
        world.device(r) if r in world.local else world.devices[0]
        for r in world.everyone
    ]


def check(made_by: Any, dataset: tf.data.Dataset, peers: Peers) -> None:
    """Raises if the processes would read different things.

    Args:
        made_by: The dataset, or the input_fn that made it.
        dataset: Is read by all processes.
        peers: The processes.

    Raises:
        InputError: It draws random numbers, and others in each process.
        MismatchError: The processes made different datasets.
    """
    drawn = moving.random_parts(dataset)
    if drawn is None:
        raise errors.InputError(
            errors.compose(
                "every host reads the whole of a dataset that draws random numbers "
                "without a seed, and would read something else.",
                errors.sites_of("input_fn", made_by) if callable(made_by) else [],
                _FIX,
            )
        )
    facts = [str(dataset.element_spec), int(dataset.cardinality()), drawn]
    peers.same("reads a dataset", facts, _FIX)
