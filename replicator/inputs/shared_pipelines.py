# SPDX-License-Identifier: Apache-2.0
"""Pipelines that every process reads in full, of which each uses a part.

In between-graph mode a Dataset that feeds all replicas is created by every process, and
read by each in full. This module ensures that all read the same elements: it compares
what datasets consist of when they are created; elements that may differ all the same
are compared while they are read (agreed_ends.py). Values that calls pass to all
replicas are compared when a step is built for them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replicator import errors
from replicator.cluster.peers import Peers
from replicator.inputs import agreed_ends, moving
from replicator.world import World

_FIX = (
    "let the input_fn take an InputContext, and create a shard for each replica; or "
    "create the same dataset on every host, from equal arrays, and call "
    "tf.random.set_seed(...) at the beginning of the program."
)
_FIX_VALUES = (
    "pass the same values on every host; or a PerReplica of this host's own values, "
    "one for each of its replicas."
)
_NO_NUMBERS = (tf.string, tf.resource, tf.variant)  # hosts may have other file names
_LARGE = 16  # smaller constants of a dataset may be numbers of threads, for example


def devices(world: World) -> list[str]:
    """Returns a device per replica, with a local device in place of remote ones."""
    return [
        world.device(r) if r in world.local else world.devices[0]
        for r in world.replica_ids
    ]


def check(
    made_by: Any, dataset: tf.data.Dataset, peers: Peers
) -> agreed_ends.ComparedElements:
    """Raises if the processes would read different elements.

    Args:
        made_by: The dataset, or the input_fn that created it.
        dataset: The dataset that all processes read.
        peers: The processes.

    Returns:
        What to compare while it is read.

    Raises:
        InputError: It draws random numbers, different ones in each process.
        MismatchError: The processes created different datasets.
    """
    draws = moving.random_parts(dataset)
    if draws is None:
        raise errors.InputError(
            "every host reads the whole of a dataset that draws random numbers without "
            "a seed, and would read different elements.",
            errors.sites_of("input_fn", made_by) if callable(made_by) else [],
            _FIX,
        )
    facts = [str(dataset.element_spec), int(dataset.cardinality()), draws]
    peers.check_equal("reads a dataset", [*facts, _constants(dataset)], _FIX)
    line = errors.definition(made_by) if callable(made_by) else ""
    return agreed_ends.ComparedElements(
        peers.process, line or errors.user_line(), not moving.is_repeatable(dataset)
    )


def _constants(dataset: tf.data.Dataset) -> list[str]:
    """Returns digests of the arrays that a dataset was created from."""
    arrays = [
        tf.make_ndarray(node.attr["value"].tensor)
        for node in moving.graph_of(dataset).node
        if node.op == "Const"
        and tf.as_dtype(node.attr["dtype"].type) not in _NO_NUMBERS
    ]
    return sorted(digest(array) for array in arrays if array.size > _LARGE)


def digest(value: Any) -> str:
    """Returns the dtype and shape of an array, and its value or a digest of that."""
    array = np.asarray(value)
    kind = f"{array.dtype.name}{list(np.shape(array))}"
    if array.size == 1:
        return f"{kind} {errors.repr_of(array.item())}"
    if array.dtype == object:  # strings
        data = b"".join(b"%d:%s" % (len(text), text) for text in array.ravel())
    else:
        data = array.tobytes()
    return f"{kind} with digest {zlib.crc32(data):08x}"


def check_values(name: str, values: Sequence[Any], peers: Peers | None) -> None:
    """Raises if the processes pass different values for all replicas.

    Args:
        name: The name of the step.
        values: The tensors and composites of one call, on this host.
        peers: The processes, if there are several.

    Raises:
        MismatchError: The values differ.
    """
    if peers is None or not values:
        return
    tensors = tf.nest.flatten(list(values), expand_composites=True)
    digests = [digest(tensor.numpy()) for tensor in tensors]
    peers.check_equal(f"passes values to {name}", digests, _FIX_VALUES)
