# SPDX-License-Identifier: Apache-2.0
"""Numbers calls as if those had never been made that are no part of the step.

A call is numbered when it is made. Some are made where nobody will run them: Keras
finds out the shapes of a layer that was not built yet by tracing it into a graph that
it throws away, and a tf.function may be traced and not called. What is left keeps its
order, without the gaps: the other replicas need not have done so.

Runs once per build, when all replicas are built and nothing is matched or copied yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import tensorflow as tf

from replicator import _tf
from replicator.graph.ir import placeholder
from replicator.graph.ir.kinds import kind_of
from replicator.graph.ir.placeholder import Call


def close_gaps(
    replicas: Sequence[Sequence[tf.Operation]], replica_ids: Sequence[int]
) -> None:
    """Numbers the calls of each replica by those that are part of the step.

    Args:
        replicas: `replicas[n]` are the ops of `replica_ids[n]`, in build order.
        replica_ids: The replicas.
    """
    for replica_id, ops in zip(replica_ids, replicas, strict=True):
        found = _calls_in(ops, set())
        calls = {op: call for op, call in found if call.replica_id == replica_id}
        keys = without_gaps({call.key for call in calls.values()})
        for op, call in calls.items():
            if keys[call.key] != call.key:
                placeholder.set_key(op, call, keys[call.key])


def without_gaps(keys: Iterable[str]) -> dict[str, str]:
    """Returns for each key of a replica's calls what it is without those that lack.

    Args:
        keys: Keys as in `Call.key`. What is said of a gradient holds as well for the
            call that is differentiated.
    """
    numbers: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    parsed = {key: _parsed(key) for key in keys}
    for channel, path in parsed.values():
        for depth, number in enumerate(path):
            numbers.setdefault((channel, path[:depth]), set()).add(number)
    places = {
        place: {number: n for n, number in enumerate(sorted(taken))}
        for place, taken in numbers.items()
    }
    return {
        key: _joined(
            channel, [places[channel, path[:n]][k] for n, k in enumerate(path)]
        )
        for key, (channel, path) in parsed.items()
    }


def _parsed(key: str) -> tuple[str, tuple[int, ...]]:
    """Returns the channel, with its colon, and the numbers of a key."""
    call, *gradients = key.split("/")
    channel, colon, number = call.rpartition(":")
    return channel + colon, tuple(map(int, [number, *gradients]))


def _joined(channel: str, path: Iterable[int]) -> str:
    return channel + "/".join(map(str, path))


def _calls_in(
    ops: Iterable[tf.Operation], seen: set[int]
) -> Iterator[tuple[tf.Operation, Call]]:
    """Yields the placeholders among ops and in the functions that they call, once."""
    for op in ops:
        call = placeholder.read(op)
        if call is not None:
            yield op, call
        elif kind_of(op).calls:
            for _, body in _tf.called_graphs(op):
                if id(body) not in seen:
                    seen.add(id(body))
                    yield from _calls_in(body.get_operations(), seen)
