# SPDX-License-Identifier: Apache-2.0
"""Which ops have side effects, and how TensorFlow orders them.

Makes no decisions: graph/order/ordering.py orders the effects of a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps as _acd
from tensorflow.python.framework import auto_control_deps_utils as _acd_utils


def is_stateful(op: tf.Operation) -> bool:
    """Whether TensorFlow's automatic control dependencies would make `op` run."""
    return bool(_acd.op_is_stateful(op))


def only_reads(op: tf.Operation) -> bool:
    """Whether `op` only reads the variables that it takes."""
    return op.type in _acd_utils.RESOURCE_READ_OPS


def resources_touched(op: tf.Operation) -> tuple[set[int], set[int]]:
    """Returns the ids of the resource tensors that `op` reads and those it writes."""
    reads, writes = _acd_utils.get_read_write_resource_inputs(op)
    return {id(t) for t in reads}, {id(t) for t in writes}


def run_independently(graph: tf.Graph, op: tf.Operation) -> None:
    """Exempts `op` from the automatic ordering of the function being traced.

    TensorFlow chains all stateful ops that touch no resource in the order of creation,
    across replicas too. `experimental_acd_manager` is its hook to prevent that.
    """
    manager = getattr(graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(op)


@contextlib.contextmanager
def ordered_branches(graph: tf.Graph) -> Iterator[None]:
    """Keeps the effects of conditionals and loops that the block adds to a tf.Graph.

    Their bodies run ops that nothing fetches only if the enclosing graph orders
    effects, as a tf.function's does. There is no public way to ask for it in a
    tf.Graph.
    """
    previous = graph._add_control_dependencies
    graph._add_control_dependencies = True
    try:
        yield
    finally:
        graph._add_control_dependencies = previous
