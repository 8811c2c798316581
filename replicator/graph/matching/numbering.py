# SPDX-License-Identifier: Apache-2.0
"""Renumbers calls, so that calls outside the step leave no gaps.

A call is numbered when it is made, but some are made where nothing will run: Keras
infers the shapes of an unbuilt layer by tracing it into a throwaway graph, and a
tf.function may be traced and never called. The remaining calls keep their order and
lose the gaps, since other replicas may not have made the discarded ones.

Runs once per build, after all replicas are built and before anything is matched or
copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

from replicator.graph.ir import placeholder, walk


def close_gaps(
    replicas: Sequence[Sequence[tf.Operation]], replica_ids: Sequence[int]
) -> None:
    """Renumbers each replica's calls, counting only those in the step.

    Args:
        replicas: `replicas[n]` are the ops of `replica_ids[n]`, in build order.
        replica_ids: The replicas.
    """
    for replica_id, ops in zip(replica_ids, replicas, strict=True):
        calls = {
            op: call
            for op in walk.at_any_depth(ops)
            if (call := placeholder.read(op)) and call.replica_id == replica_id
        }
        keys = without_gaps({call.key for call in calls.values()})
        for op, call in calls.items():
            if keys[call.key] != call.key:
                placeholder.set_key(op, call, keys[call.key])


def without_gaps(keys: Iterable[str]) -> dict[str, str]:
    """Maps each key of a replica's calls to the key without gaps.

    Args:
        keys: Keys as in `Call.key`. The key of a gradient also keeps the number of the
            call that it differentiates.
    """
    numbers: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    parsed = {key: _parsed(key) for key in keys}
    for channel, path in parsed.values():
        for depth, number in enumerate(path):
            numbers.setdefault((channel, path[:depth]), set()).add(number)
    places = {
        place: {number: n for n, number in enumerate(sorted(in_use))}
        for place, in_use in numbers.items()
    }
    return {
        key: _joined(
            channel, [places[channel, path[:n]][k] for n, k in enumerate(path)]
        )
        for key, (channel, path) in parsed.items()
    }


def _parsed(key: str) -> tuple[str, tuple[int, ...]]:
    """Splits a key into its channel, with the colon, and its numbers."""
    call, *gradients = key.split("/")
    channel, colon, number = call.rpartition(":")
    return channel + colon, tuple(map(int, [number, *gradients]))


def _joined(channel: str, path: Iterable[int]) -> str:
    return channel + "/".join(map(str, path))
