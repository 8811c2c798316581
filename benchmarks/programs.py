# SPDX-License-Identifier: Apache-2.0
"""Every primitive on two replicas, as `benchmarks.anywhere` tries it.

Each in three forms: with Replicator, with MirroredStrategy if that has a call for it
inside a replica, and for all replicas at once in plain TensorFlow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

import replicator
from benchmarks.places import Call, Plain


@dataclasses.dataclass(frozen=True)
class Program:
    """One use of a primitive, on a tensor [2, 2] of each of two replicas.

    Attributes:
        ours: With Replicator; returns None where nothing is received.
        plain: Maps all replicas' operands to all replicas' results.
        mirrored: With MirroredStrategy; None if it has no such call.
    """

    ours: Callable[[replicator.Replicator, tf.Tensor], tf.Tensor | None]
    plain: Plain
    mirrored: Call | None = None


def _context() -> tf.distribute.ReplicaContext:
    return tf.distribute.get_replica_context()


def _all_alike(combine: Callable[[Sequence[tf.Tensor]], tf.Tensor]) -> Plain:
    return lambda xs: [combine(xs)] * len(xs)


def _on_root(combine: Callable[[Sequence[tf.Tensor]], tf.Tensor]) -> Plain:
    return lambda xs: [combine(xs), None]


def _mirrored_reduce(x: tf.Tensor) -> tf.Tensor:
    def merge(strategy: tf.distribute.Strategy, x: tf.Tensor) -> tf.Tensor:
        total = tf.distribute.ReduceOp.SUM
        return strategy.extended.reduce_to(total, x, destinations=x)

    total = _context().merge_call(merge, args=(x,))
    at_root = _context().replica_id_in_sync_group == 0
    return tf.where(at_root, total, tf.zeros_like(total))


def _mirrored_broadcast(x: tf.Tensor) -> tf.Tensor:
    def merge(strategy: tf.distribute.Strategy, x: tf.Tensor) -> tf.Tensor:
        sent = strategy.experimental_local_results(x)[1]
        return strategy.extended.broadcast_to(sent, destinations=x)

    return _context().merge_call(merge, args=(x,))


def _message(repl: replicator.Replicator, x: tf.Tensor) -> tf.Tensor | None:
    """Replica 0 sends to replica 1, whose own tensor gets a zero gradient."""
    if repl.replica_id == 0:
        repl.send(x, 1)
        return None
    return repl.recv(x, 0)


def _split(xs: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
    return [tf.split(x, 2) for x in xs]


def _exchanged(xs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return [tf.concat([parts[r] for parts in _split(xs)], 0) for r in range(2)]


PROGRAMS = {
    "all_reduce": Program(
        lambda repl, x: repl.all_reduce(x),
        _all_alike(tf.add_n),
        lambda x: _context().all_reduce("sum", x),
    ),
    "all_reduce max": Program(
        lambda repl, x: repl.all_reduce(x, "max"),
        _all_alike(lambda xs: tf.maximum(*xs)),
    ),
    "all_reduce, weighted": Program(
        lambda repl, x: repl.all_reduce(x, "mean", weight=1 + 2 * repl.replica_id),
        _all_alike(lambda xs: (xs[0] + 3 * xs[1]) / 4),
    ),
    "all_gather": Program(
        lambda repl, x: repl.all_gather(x, 0),
        _all_alike(lambda xs: tf.concat(xs, 0)),
        lambda x: _context().all_gather(x, 0),
    ),
    "broadcast": Program(
        lambda repl, x: repl.broadcast(x, 1),
        _all_alike(lambda xs: xs[1]),
        _mirrored_broadcast,
    ),
    "reduce": Program(
        lambda repl, x: repl.reduce(x, 0), _on_root(tf.add_n), _mirrored_reduce
    ),
    "gather": Program(
        lambda repl, x: repl.gather(x, 0, axis=0),
        _on_root(lambda xs: tf.concat(xs, 0)),
    ),
    "scatter": Program(
        lambda repl, x: repl.scatter(x, 1), lambda xs: tf.unstack(xs[1])
    ),
    "reduce_scatter": Program(
        lambda repl, x: repl.reduce_scatter(x), lambda xs: tf.split(tf.add_n(xs), 2)
    ),
    "all_to_all": Program(lambda repl, x: repl.all_to_all(x, 0, 0), _exchanged),
    "permute": Program(
        lambda repl, x: repl.permute(x, [(0, 1), (1, 0)]), lambda xs: xs[::-1]
    ),
    "shift": Program(lambda repl, x: repl.shift(x, 1), lambda xs: xs[::-1]),
    "send and recv": Program(_message, lambda xs: [None, xs[0]]),
}
