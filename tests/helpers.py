# SPDX-License-Identifier: Apache-2.0
"""Shared helpers: replicators, the three ways to run, comparisons."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from replicator.costs import hosts

MODES = ("eager", "function", "session")
# Whether `run` makes several steps in one call; set by --with steps_per_call=True.
STEPS_TOGETHER = contextvars.ContextVar("STEPS_TOGETHER", default=False)
# The master and config of sessions; set by --hosts.
SESSIONS = contextvars.ContextVar[dict[str, Any]]("SESSIONS", default={})  # noqa: B039


@contextlib.contextmanager
def v1_control_flow() -> Iterator[None]:
    """Uses TensorFlow 1's control flow for tf.Graphs in this block."""
    enabled = tf.compat.v1.control_flow_v2_enabled()
    tf.compat.v1.disable_control_flow_v2()
    try:
        yield
    finally:
        if enabled:
            tf.compat.v1.enable_control_flow_v2()


def make(num_replicas: int, **options: Any) -> replicator.Replicator:
    """Returns a Replicator on the first `num_replicas` logical CPUs."""
    return replicator.Replicator([f"CPU:{r}" for r in range(num_replicas)], **options)


def session(graph: tf.Graph | None = None) -> tf.compat.v1.Session:
    """Returns a session on the devices of the tests."""
    return tf.compat.v1.Session(graph=graph, **SESSIONS.get())


def monitored() -> dict[str, Any]:
    """Returns the session creator's arguments for the devices of the tests."""
    options = SESSIONS.get()
    return {"master": options.get("target", ""), "config": options.get("config")}


def monitored_session() -> Any:
    """Returns a session that initializes variables and inputs, as v1 programs do."""
    creator = tf.compat.v1.train.ChiefSessionCreator(**monitored())
    return tf.compat.v1.train.MonitoredSession(creator)


def run(
    mode: str,
    repl: replicator.Replicator,
    make_step: Callable[[], Callable[..., Any]],
    input_fn: Callable[..., Any] | None = None,
    steps: int = 1,
) -> Any:
    """Runs a step in one of MODES; returns the last step's values as NumPy arrays.

    Args:
        mode: "eager", "function" (inside a tf.function) or "session" (in a tf.Graph).
        repl: The Replicator.
        make_step: Creates the variables and returns step_fn.
        input_fn: As for `Replicator.run`.
        steps: The number of steps.
    """
    if mode == "session":
        with tf.Graph().as_default():
            with repl.context():
                step_fn = make_step()
            fetches = repl.run(step_fn, input_fn)
            with monitored_session() as running:
                for _ in range(steps):
                    result = running.run(fetches)
        return result
    with repl.context():
        step_fn = make_step()
    together = steps if STEPS_TOGETHER.get() else 1
    if mode == "function":
        call = tf.function(lambda: repl.run(step_fn, input_fn, steps_per_call=together))
    else:
        call = repl.build(step_fn, input_fn, steps_per_call=together)
    for _ in range(steps // together):
        result = call()
    if together > 1:
        result = tf.nest.map_structure(lambda t: t if t is None else t[-1], result)
    return tf.nest.map_structure(
        lambda t: t.numpy() if hasattr(t, "numpy") else t, result
    )


def added_up(repl: replicator.Replicator, values: Any) -> Any:
    """Returns the sum of all replicas' values, bitwise as communication adds them.

    That is in replica order; with several hosts, within each host first.

    Args:
        repl: The Replicator whose devices determine the order.
        values: `values[r]` is replica r's, a NumPy array.
    """
    sums = []
    for places in hosts.by_host(repl.devices):
        sums.append(functools.reduce(np.add, [values[r] for r in places]))
    return functools.reduce(np.add, sums)


def opaque(value: Any, shape: Any = ()) -> tf.Tensor:
    """Returns a tensor of a known value that TensorFlow cannot fold into a constant.

    Args:
        value: The tensor's value at run time.
        shape: Its static shape, by default the value's. None: unknown rank.
    """
    value = tf.convert_to_tensor(value)
    static = value.shape if shape == () else tf.TensorShape(shape)
    return tf.compat.v1.placeholder_with_default(value, static)


def built(
    repl: replicator.Replicator, step_fn: Callable[[], Any], mode: str
) -> tuple[tf.Graph, Any]:
    """Returns the graph of a step in "function" or "session" mode, and its results."""
    if mode == "session":
        with tf.Graph().as_default() as graph:
            return graph, repl.run(step_fn)
    results = []

    @tf.function
    def traced() -> None:
        results.append(repl.run(step_fn))

    return traced.get_concrete_function().graph, results[0]


def ops_run(fetched: Any) -> list[tf.Operation]:
    """Returns the ops that run when a session fetches a nest of tensors or ops."""
    leaves = tf.nest.flatten(fetched)
    waiting = [leaf.op if tf.is_tensor(leaf) else leaf for leaf in leaves]
    seen = set(waiting)
    while waiting:
        op = waiting.pop()
        before = {*op.control_inputs, *(tensor.op for tensor in op.inputs)} - seen
        seen |= before
        waiting += before
    return list(seen)


def components(variable: Any) -> list[np.ndarray]:
    """Returns the values of a variable's components; also of Keras' wrapper."""
    inside = getattr(variable, "value", variable)
    inside = variable if callable(inside) else inside
    return [component.numpy() for component in inside.components]


def assert_replicas_equal(variables: Any) -> None:
    """Asserts that all components of each variable hold the same bits."""
    for variable in variables:
        reference, *others = components(variable)
        for r, other in enumerate(others, 1):
            assert reference.tobytes() == other.tobytes(), (
                variable.name,
                r,
                reference,
                other,
            )


def synchronize(variable: Any, synchronizer: Any) -> None:
    """Gives a variable another synchronizer, as a strategy would."""
    storage = variable.storage
    storage.description = dataclasses.replace(
        storage.description, synchronizer=synchronizer
    )


def each_row_once(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Sums rows of equal index, as Replicator does for optimizers.

    Multiplies by a matrix of zeros and ones. Keras' own optimizers would square each
    row by itself.
    """
    indices, _ = tf.unique(slices.indices)
    holds = tf.equal(indices[:, tf.newaxis], slices.indices[tf.newaxis])
    values = tf.cast(holds, slices.dtype) @ slices.values
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset without tf.data's autotuning, for short-lived iterators.

    An iterator's destructor waits for its tuning thread, which a race in tf.data lets
    sleep for up to a minute.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
