# SPDX-License-Identifier: Apache-2.0
"""Every replica draws different random numbers.

Replicas build the same code, so an op with a seed of its own would draw the same
numbers on all of them (the same dropout mask, say). Stateful generators keep their seed
in a variable, which variables/replicated.py offsets; this file is about the seeds that
are written into the ops themselves.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from replicator import _tf, errors
from replicator.graph.ir.kinds import kind_of

OFFSET = 1_000_003  # between replicas; a prime, far from hand-picked differences
_INSTEAD_OF_NONE = 2**31 - 1
SEPARATED = "_replicator_seed"  # the attribute of an op whose seed was offset


def counted(seed: int, first: int, second: int) -> int:
    """Returns the seed of replica 0's op as TensorFlow has counted it.

    A global seed of 0 and a counted one of 0 would mean none: TensorFlow writes another
    number then.

    Args:
        seed: The global seed.
        first: What is written into replica 0's op.
        second: What is written into replica 1's.
    """
    if not seed and first == _INSTEAD_OF_NONE and second != first + OFFSET:
        return 0
    return first


@contextlib.contextmanager
def separate_seeds(graph: tf.Graph, replica_id: int) -> Iterator[None]:
    """In this block, ops that are added to the graph get seeds of this replica's own.

    A device function does it: TensorFlow calls it for each new op, and hands it on to
    the graphs of conditionals, loops and nested functions. What is under the
    user's own tf.device(None) escapes it; see `check`.

    Args:
        graph: The graph that the step is built into.
        replica_id: Replica 0 keeps the seeds as they are.
    """
    with graph.device(_separator(replica_id)):
        yield


@functools.cache
def _separator(replica_id: int) -> Callable[[tf.Operation], str]:
    """Returns the device function of a replica; the same one each time."""

    def separate(op: tf.Operation) -> str:
        _separate(op, replica_id)
        return op.device

    return separate


def _separate(op: tf.Operation, replica_id: int) -> None:
    """Offsets the seed of an op, once; no seed, 0 and 0, stays none."""
    if replica_id and _draws_alike(op):
        seed2 = op.get_attr("seed2") + replica_id * OFFSET
        _tf.set_int_attr(op, "seed2", seed2)
        _tf.set_int_attr(op, SEPARATED, replica_id)


def _draws_alike(op: tf.Operation) -> bool:
    """Whether an op has a seed that was not offset."""
    if not kind_of(op).seeded:
        return False
    if not op.get_attr("seed") and not op.get_attr("seed2"):
        return False
    return SEPARATED not in op.node_def.attr


def check(
    replicas: Sequence[Sequence[tf.Operation]], replica_ids: Sequence[int]
) -> None:
    """Separates the seeds that escaped, and finds those that cannot be separated.

    Args:
        replicas: `replicas[n]` are the ops of replica `replica_ids[n]`.
        replica_ids: The replicas.

    Raises:
        ReplicatorError: A function that is called by all replicas, but was not traced
            for each of them, draws by a seed of its own.
    """
    for replica_id, ops in zip(replica_ids, replicas, strict=True):
        for op in ops if replica_id else ():
            _separate(op, replica_id)
            drawing = _find_alike(op)
            if drawing is None:
                continue
            raise errors.ReplicatorError(
                errors.compose(
                    f"all replicas would draw the same random numbers: {drawing.type} "
                    f"{drawing.name} has a seed of its own and is in a function "
                    "that was not traced for each replica.",
                    [
                        f"at {errors.line_of(drawing)}",
                        f"called at {errors.line_of(op)}",
                    ],
                    "call the tf.function rather than its concrete function, without "
                    "jit_compile=True and not under tf.device(None); or draw from a "
                    "tf.random.Generator made under `with repl.context():`.",
                )
            )


def _find_alike(op: tf.Operation) -> tf.Operation | None:
    """Returns an op inside the functions that `op` calls whose seed was not offset."""
    if not kind_of(op).calls:
        return None
    for _, body in _tf.called_graphs(op):
        for inner in body.get_operations():
            found = inner if _draws_alike(inner) else _find_alike(inner)
            if found is not None:
                return found
    return None
