# SPDX-License-Identifier: Apache-2.0
"""Variables with components in other processes too: between-graph mode.

Each starts with its value in the first process, and reads that combine all components
are made by all processes together.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from replicator import errors
from replicator.cluster.peers import Peers
from replicator.graph.ir.placeholder import Value
from replicator.graph.lowering import words


def adopt(peers: Peers, variable: tf.Variable) -> None:
    """Gives a new variable the value that it has in the first process.

    Args:
        peers: The processes, all of which create the variable.
        variable: The variable, with this process's initial value.

    Raises:
        MismatchError: The processes make different variables.
        ContextError: It is made in a tf.Graph.
    """
    if not tf.executing_eagerly():
        raise errors.ContextError(
            f"variable {variable.name} is created in a tf.Graph.",
            fix="in between-graph mode, create variables while TensorFlow executes "
            "eagerly; or run the program in-graph, which needs no --mode=between.",
        )
    facts = [variable.name, variable.dtype.name, str(variable.shape)]
    peers.check_equal(
        "creates a variable",
        facts,
        "create the same variables on every host, in the same order.",
    )
    value = variable.read_value()
    if not value.dtype.size or not value.shape.num_elements():
        return  # a string, or nothing
    received = peers.broadcast(words.of(value))
    with tf.device(value.device):
        adopted = words.to_tensor(received, Value.of(value), value.shape)
        variable.assign(adopted)


def check_equal(peers: Peers, variables: Iterable[Any]) -> None:
    """Raises unless mirrored variables hold the same values in all processes.

    Outside steps each process writes its own components, a restored checkpoint for
    example, so the values are compared whenever a step that uses them is built.

    Args:
        peers: The processes.
        variables: The variables that a step uses.

    Raises:
        MismatchError: The processes hold different values.
    """
    with tf.init_scope():
        sums = {
            variable.key: [variable.name, _checksum(variable.components[0])]
            for variable in variables
            if variable.placement.is_copied and variable.dtype.size
        }
    peers.check_equal(
        "holds variables",
        [sums[key] for key in sorted(sums)],
        "write the same values on every host: assign equal values, restore the same "
        "checkpoint; or write in a step, with values reduced over all replicas.",
    )


def _checksum(variable: tf.Variable) -> int:
    return zlib.crc32(variable.read_value().numpy().tobytes())


def all_values(variable: Any, peers: Peers | None) -> list[tf.Tensor]:
    """Returns the values of all components, in the order of the processes.

    Args:
        variable: The variable, read outside a step. If `peers` have to send their
            components' values, it should be small.
        peers: The processes that hold components, all of which make this read; None if
            all components are in this process.

    Raises:
        MismatchError: Another process does something else at this point.
        ContextError: The variable is read in a graph.
    """
    values = [component.read_value() for component in variable.outside]
    if peers is None or not variable.placement.is_aggregated:
        return values
    if not tf.executing_eagerly():
        raise errors.ContextError(
            f"variable {variable.name}, which holds a different value on each replica, "
            "is read outside a step in a graph.",
            fix="in between-graph mode, read it eagerly, on every host; or in a step, "
            "and reduce it there: repl.all_reduce(variable).",
        )
    arrays = [value.numpy() for value in values]
    payload = [base64.b64encode(array.tobytes()).decode() for array in arrays]
    dtype, shape = arrays[0].dtype, arrays[0].shape
    payloads = peers.exchange(f"reads variable {variable.name}", payload)
    buffers = [base64.b64decode(data) for sent in payloads for data in sent]
    return [tf.constant(np.frombuffer(x, dtype).reshape(shape)) for x in buffers]
