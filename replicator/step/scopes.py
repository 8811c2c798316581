# SPDX-License-Identifier: Apache-2.0
"""The surroundings of code written for one device while a step is built.

Scopes and collections of TensorFlow 1 stay consistent, and summaries are written once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from replicator import context, errors
from replicator._tf import distribute
from replicator.primitives import base


@contextlib.contextmanager
def restored_caching_device() -> Iterator[None]:
    """Restores the variable scope's caching device after an exception in tf.map_fn.

    TensorFlow sets one there and does not reset it; v1 optimizers would fail from then
    on.
    """
    scope = tf.compat.v1.get_variable_scope()
    device = scope.caching_device
    try:
        yield
    finally:
        if scope.caching_device is not device:
            scope.set_caching_device(device)


@contextlib.contextmanager
def shared_variables(build: context.Build, replica_id: int) -> Iterator[None]:
    """Lets tf.compat.v1.get_variable find variables of replica 0 or earlier attempts.

    Those that it does not find by name (slots, for example, whose names are made
    unique) are found by the variable factory, by their place in the code.
    """
    first = replica_id == 0 and not build.knowledge
    if build.graph.building_function or first:
        yield
        return
    v1 = tf.compat.v1
    scope = v1.get_variable_scope()
    with v1.variable_scope(scope, reuse=v1.AUTO_REUSE, auxiliary_name_scope=False):
        yield


_HANDLES = ("VarHandleOp", "VariableV2")


class _Collected(list[tuple[str, Any]]):
    """What replicas added to the graph's collections: names and items."""


@contextlib.contextmanager
def own_collections(build: context.Build, scope: str) -> Iterator[None]:
    """Hides from later replicas what this one adds to the graph's collections.

    Losses and updates are collected as they are built, and a step that asks for all of
    them means its own. Variables stay: all replicas share them. So do summaries, of
    which TensorFlow builds those of the first replica only. What a failed attempt added
    is dropped.

    Args:
        build: The build that the replica is part of.
        scope: The replica's name scope.
    """
    try:
        yield
    except BaseException:
        _take(build.graph, scope)
        raise
    added = _take(build.graph, scope)
    build.states.of(_Collected).extend(added)


def return_collected(build: context.Build) -> list[tuple[str, Any]]:
    """Adds to the collections what `own_collections` took out of them.

    Returns:
        The names of the collections and the items, nests of tensors and ops.
    """
    collected = build.states.of(_Collected)
    for key, item in collected:
        build.graph.add_to_collection(key, item)
    return [(key, _op_of(item) or item) for key, item in collected]


def _take(graph: tf.Graph, scope: str) -> list[tuple[str, Any]]:
    """Removes the tensors and ops of a name scope from all collections."""
    removed: list[tuple[str, Any]] = []
    for key in graph.get_all_collection_keys():
        if key == tf.compat.v1.GraphKeys.SUMMARIES:
            continue
        items = graph.get_collection_ref(key)
        in_scope = [item for item in items if _is_within(item, scope)]
        if in_scope:
            ids = set(map(id, in_scope))
            items[:] = [item for item in items if id(item) not in ids]
            removed += [(key, item) for item in in_scope]
    return removed


def _is_within(item: Any, scope: str) -> bool:
    """Whether an item of a collection was computed in a name scope."""
    if isinstance(item, tf.IndexedSlices | tf.RaggedTensor | tf.SparseTensor):
        item = item.values
    op = item.op if isinstance(item, tf.Tensor) else _op_of(item)
    return op is not None and op.type not in _HANDLES and op.name.startswith(scope)


def _op_of(item: Any) -> tf.Operation | None:
    """Returns an op, or that of an assignment, which is a variable that stands for it.

    None for tensors.
    """
    is_tensor = isinstance(item, tf.Tensor | tf.__internal__.CompositeTensor)
    op = None if is_tensor else getattr(item, "op", item)
    return op if isinstance(op, tf.Operation) else None


class _Writers(dict[Any, int]):
    """The replica that writes each summary, by its name and number."""


def summaries_once(
    replica: context.ReplicaContext,
) -> contextlib.AbstractContextManager[None]:
    """Lets only the first replica that writes a summary of some name write it.

    As under tf.distribute, where only the first replica writes summaries.

    Args:
        replica: The replica that is built in this block.
    """
    writers = replica.build.states.of(_Writers)

    def is_written() -> tf.Tensor:
        name = tf.get_current_name_scope().removeprefix(replica.scope)
        place = name, replica.count((_Writers, name))
        _warn_of_fixed_step()
        writer = writers.setdefault(place, replica.replica_id)
        return base.differing(lambda r: r == writer)

    return distribute.summaries_if(is_written)


def _warn_of_fixed_step() -> None:
    """Warns once of a Python number as the step of summaries, which never changes."""
    step = tf.summary.experimental.get_step()
    if isinstance(step, int | np.integer):
        logging.log_first_n(
            logging.WARNING,
            "A summary is written at %s while the step of tf.summary is %d, a Python "
            "number: it is part of the step that is built, and stays the same in all "
            "calls. Set a tf.Variable as the step: tf.summary.experimental.set_step.",
            1,
            errors.user_line(),
            step,
        )
