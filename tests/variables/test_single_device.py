# SPDX-License-Identifier: Apache-2.0
"""A program for one device: its trace is the one that plain variables give."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf
import tf_keras

import replicator
from replicator import strategy
from replicator._tf import autograph
from replicator.variables import single_device

_KINDS: dict[str, dict[str, Any]] = {
    "mirrored": {"variables": "mirrored"},
    "sharded": {"variables": "sharded"},
    "parts": {"strategy": strategy.PartitionedPS()},
    "proxies": {"strategy": strategy.PS(local_proxy_variable=True)},
    "on a strategy": {"strategy": strategy.AllReduce(compressor="int8")},
}


def _replicator(kind: str) -> replicator.Replicator:
    return replicator.Replicator(["CPU:0", "CPU:1"], **_KINDS[kind])


def _ops(graph: Any) -> list[Any]:
    """Returns the types of a graph's ops and of the functions that it calls, sorted."""
    found: list[Any] = []
    for op in graph.get_operations():
        if op.type == "NoOp":  # groups of what is on one device
            continue
        found.append((op.type, [t.shape.as_list() for t in op.outputs if t.shape.rank]))
        for name in ("f", "then_branch", "else_branch", "body", "cond"):
            if name in op.node_def.attr:
                called = graph._get_function(op.get_attr(name).name)
                found.append(_ops(called.graph) if hasattr(called, "graph") else name)
    return sorted(map(repr, found))


def _traced(step: Callable[[], Any], seen: single_device.View | None) -> Any:
    def trace() -> Any:
        with seen.tracing() if seen else contextlib.nullcontext():
            return autograph.call_converted(step, ())

    return tf.function(autograph.not_converted(trace)).get_concrete_function()


def _check(make: Callable[[replicator.Replicator | None], Any], kind: str) -> None:
    """Checks that a program is traced as if its variables were plain.

    Args:
        make: Given the Replicator whose context it is called in, or None, returns a
            step and its variables.
        kind: One of _KINDS.
    """
    step, _ = make(None)
    plain = _traced(step, None)
    repl = _replicator(kind)
    seen = single_device.View()
    with repl.context():
        step, variables = make(repl)
        traced = _traced(step, seen)
    ours, theirs = map(collections.Counter, (_ops(traced.graph), _ops(plain.graph)))
    assert (ours - theirs, theirs - ours) == ({}, {})
    captured = [t for t in traced.captured_inputs if t.dtype == tf.resource]
    found = [seen.variable_of(t) for t in captured]
    assert not any(v is None for v in found)
    assert len(captured) == sum(t.dtype == tf.resource for t in plain.captured_inputs)
    assert {id(v) for v in variables} <= {id(v) for v in found}


@pytest.mark.parametrize("kind", _KINDS)
def test_methods_create_the_ops_of_a_plain_variable(kind):
    def make(_):
        v = tf.Variable(np.arange(24, dtype=np.float32).reshape(6, 4))
        counter = tf.Variable(0)
        seen = tf.Variable(
            1.0,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
        rows = tf.IndexedSlices(tf.ones([2, 4]), [1, 5])

        @tf.function
        def inner(x):
            v.assign_sub(x)
            return tf.reduce_sum(v)

        def step():
            with tf.GradientTape() as tape:
                looked_up = tf.gather(v, [0, 3])
                loss = tf.reduce_sum(looked_up * looked_up) + tf.reduce_sum(v**2)
            v.assign(v - tape.gradient(loss, v))
            v.assign_add(tf.ones([6, 4])).assign_sub(tf.ones([6, 4]), name="named")
            v.scatter_add(rows)
            v.scatter_update(rows)
            v.scatter_max(rows)
            v.scatter_nd_add([[0, 1]], [2.0])
            v[1:3, 0].assign([1.0, 2.0])
            counter.assign_add(1, read_value=False)
            seen.assign_add(tf.gather_nd(v, [2, 2]))
            count = counter.count_up_to(9)
            branch = tf.cond(v[0, 0] > 0, lambda: v.assign(v * 2.0), lambda: v + 1)
            total = tf.while_loop(
                lambda i: i < 3, lambda i: [i + tf.cast(v[0, 0] > i, i.dtype)], [0.0]
            )
            known = v.is_initialized()
            return count, branch, total, known, inner(v + 1), seen.value()

        inner(tf.zeros([6, 4]))
        return step, [v, counter, seen]

    _check(make, kind)


_OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "keras SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=1.0),
    "keras Adam": lambda: keras.optimizers.Adam(0.1, global_clipnorm=1.0),
    "keras scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.1)
    ),
    "tf_keras Adam": lambda: tf_keras.optimizers.Adam(0.1, jit_compile=False),
    "tf_keras SGD": lambda: tf_keras.optimizers.SGD(0.1, 0.9, jit_compile=False),
    "older SGD": lambda: tf_keras.optimizers.legacy.SGD(0.1, momentum=0.9),
    "older Adam": lambda: tf_keras.optimizers.legacy.Adam(0.1),
    "v1 Adam": lambda: tf.compat.v1.train.AdamOptimizer(0.1),
    "v1 Momentum": lambda: tf.compat.v1.train.MomentumOptimizer(0.1, 0.9),
    "sonnet Adam": lambda: snt.optimizers.Adam(0.1),
    "sonnet SGD": lambda: snt.optimizers.SGD(0.1),
}


@pytest.mark.parametrize("kind, wraps", [("proxies", False), ("parts", True)])
@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_optimizers_update_like_on_one_device(name, kind, wraps):
    def make(repl):
        v = tf.Variable(np.arange(24, dtype=np.float32).reshape(6, 4))
        table = tf.Variable(np.ones([6, 4], np.float32))
        optimizer = _OPTIMIZERS[name]()
        if wraps and repl is not None:
            optimizer = repl.wrap_optimizer(optimizer)

        def step():
            with tf.GradientTape() as tape:
                rows = tf.gather(table, [0, 3, 3])
                loss = tf.reduce_mean(tf.matmul(rows, v, transpose_b=True) ** 2)
            grads = tape.gradient(loss, [v, table])
            if "sonnet" in name:
                optimizer.apply(grads, [v, table])
            else:
                optimizer.apply_gradients(zip(grads, [v, table], strict=True))
            return loss

        _traced(step, None if repl is None else single_device.View())  # makes slots
        return step, [v, table]

    _check(make, kind)


def test_the_view_ends_with_the_trace_and_with_init_scope():
    repl = _replicator("mirrored")
    with repl.context():
        v, w = tf.Variable(1.0), tf.Variable(1.0)

    @tf.function
    def double():
        v.assign(2 * v)

    def step():
        double()
        with tf.init_scope():
            w.assign(5.0)
        return v

    view = single_device.View()
    _traced(step, view)
    assert single_device.view() is None
    assert [float(component) for component in w.components] == [5.0, 5.0]
    double()
    assert [float(component) for component in v.components] == [2.0, 2.0]
    assert view.variable_of(v.components[0].handle) is v
    assert view.variable_of(tf.Variable(1.0).handle) is None


@pytest.mark.parametrize("what", ["all_reduce", "weight"])
def test_what_has_a_meaning_in_steps_only_is_refused(what):
    repl = _replicator("mirrored")
    with repl.context():
        v = tf.Variable(1.0)
        optimizer = repl.wrap_optimizer(keras.optimizers.SGD(1.0))

    def step():
        if what == "all_reduce":
            return repl.all_reduce(v)
        optimizer.apply([tf.constant(1.0)], [v], weight=2.0)

    with pytest.raises(replicator.ContextError, match="(?s)outside a step.*Fix:"):
        _traced(step, single_device.View())
