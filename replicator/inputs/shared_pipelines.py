# SPDX-License-Identifier: Apache-2.0
"""Pipelines that every process reads in full, of which each uses a part.

In between-graph mode a Dataset that feeds all replicas is created by every process, and
read by each in full. This module ensures that all read the same elements.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replicator import errors
from replicator.cluster.peers import Peers
from replicator.inputs import moving
from replicator.world import World

_FIX = (
    "let the input_fn take an InputContext, and create a shard for each replica; or "
    "call tf.random.set_seed(...) at the beginning of the program."
)


def devices(world: World) -> list[str]:
    """Returns a device per replica, with a local device in place of remote ones."""
    return [
        world.device(r) if r in world.local else world.devices[0]
        for r in world.everyone
    ]


def check(made_by: Any, dataset: tf.data.Dataset, peers: Peers) -> None:
    """Raises if the processes would read different elements.

    Args:
        made_by: The dataset, or the input_fn that created it.
        dataset: The dataset that all processes read.
        peers: The processes.

    Raises:
        InputError: It draws random numbers, different ones in each process.
        MismatchError: The processes created different datasets.
    """
    draws = moving.random_parts(dataset)
    if draws is None:
        raise errors.InputError(
            errors.compose(
                "every host reads the whole of a dataset that draws random numbers "
                "without a seed, and would read different elements.",
                errors.sites_of("input_fn", made_by) if callable(made_by) else [],
                _FIX,
            )
        )
    facts = [str(dataset.element_spec), int(dataset.cardinality()), draws]
    peers.same("reads a dataset", facts, _FIX)
