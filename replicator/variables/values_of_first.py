"""Variables of several processes begin with what they hold in the first of them."""

from __future__ import annotations

import tensorflow as tf

from replicator import errors
from replicator.cluster.peers import Peers
from replicator.graph.ir.placeholder import Value
from replicator.graph.lowering import crossing


def adopt(peers: Peers, variable: tf.Variable) -> None:
    """Gives a new variable the value that it has in the first process.

    Args:
        peers: The processes; all of them make the variable.
        variable: Has its own initial value.

    Raises:
        MismatchError: The processes make different variables.
        ContextError: It is made in a tf.Graph.
    """
    if not tf.executing_eagerly():
        raise errors.ContextError(
            errors.compose(
                f"variable {variable.name} is made in a tf.Graph.",
                [f"at {errors.user_line()}"],
                "in between-graph mode, make variables while TensorFlow executes "
                "eagerly; or run the program in-graph, which needs no --mode=between.",
            )
        )
    facts = [variable.name, variable.dtype.name, str(variable.shape)]
    peers.same(
        "creates a variable",
        facts,
        "make the same variables on every host, in the same order.",
    )
    value = variable.read_value()
    if not value.dtype.size or not value.shape.num_elements():
        return  # a string, or nothing
    received = peers.broadcast(crossing.words(value))
    with tf.device(value.device):
        mine = crossing.from_words(received, Value.of(value), value.shape)
        variable.assign(mine)
