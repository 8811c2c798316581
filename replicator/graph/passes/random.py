# SPDX-License-Identifier: Apache-2.0
"""Makes every replica draw different random numbers.

Replicas build the same code, so an op with a seed of its own would draw the same
numbers on all of them (the same dropout mask, for example). Stateful generators keep
their seed in a variable, which variables/replicated.py offsets; this file handles the
seeds that are attributes of ops.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from replicator import errors
from replicator._tf import ops as tf_ops
from replicator.graph.ir import walk
from replicator.graph.ir.kinds import kind_of

OFFSET = 1_000_003  # between replicas; a prime, far from hand-picked differences
SEPARATED = "_replicator_seed"  # the attribute of an op whose seed was offset


@contextlib.contextmanager
def separate_seeds(graph: tf.Graph, replica_id: int) -> Iterator[None]:
    """Gives ops created in this block the replica's own seeds.

    A device function does that: TensorFlow calls it for each new op, and passes it on
    to the graphs of conditionals, loops and nested functions. Ops under the user's own
    tf.device(None) escape it; see `check`.

    Args:
        graph: The graph that the step is built into.
        replica_id: The replica; replica 0 keeps its seeds as they are.
    """
    with graph.device(_separator(replica_id)):
        yield


@functools.cache
def _separator(replica_id: int) -> Callable[[tf.Operation], str]:
    """Returns the device function of a replica, always the same one."""

    def separate(op: tf.Operation) -> str:
        _separate(op, replica_id)
        return op.device

    return separate


def _separate(op: tf.Operation, replica_id: int) -> None:
    """Offsets the seed of an op, once; 0 and 0, which mean no seed, stay."""
    if replica_id and _draws_alike(op):
        seed2 = op.get_attr("seed2") + replica_id * OFFSET
        tf_ops.set_int_attr(op, "seed2", seed2)
        tf_ops.set_int_attr(op, SEPARATED, replica_id)


def _draws_alike(op: tf.Operation) -> bool:
    """Whether an op has a seed that has not been offset."""
    if not kind_of(op).seeded:
        return False
    if not op.get_attr("seed") and not op.get_attr("seed2"):
        return False
    return SEPARATED not in op.node_def.attr


def check(
    replicas: Sequence[Sequence[tf.Operation]], replica_ids: Sequence[int]
) -> None:
    """Offsets the seeds that escaped, and refuses those that cannot be offset.

    Args:
        replicas: `replicas[n]` are the ops of replica `replica_ids[n]`.
        replica_ids: The replicas.

    Raises:
        ReplicatorError: A function that all replicas call, but that was not traced for
            each of them, draws with a seed of its own.
    """
    for replica_id, ops in zip(replica_ids, replicas, strict=True):
        for op in ops if replica_id else ():
            _separate(op, replica_id)
            drawing = next(filter(_draws_alike, walk.at_any_depth([op])), None)
            if drawing is None:
                continue
            raise errors.ReplicatorError(
                f"all replicas would draw the same random numbers: {drawing.type} "
                f"{drawing.name} has a seed of its own and is in a function that was "
                "not traced for each replica.",
                [
                    f"at {errors.line_of(drawing)}",
                    f"called at {errors.line_of(op)}",
                ],
                "call the tf.function rather than its concrete function, without "
                "jit_compile=True and not under tf.device(None); or draw from a "
                "tf.random.Generator created under `with repl.context():`.",
            )
