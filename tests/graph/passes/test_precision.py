# SPDX-License-Identifier: Apache-2.0
"""Replicas stay equal under TensorFlow's graph rewrites: precision, XLA, and others."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator._tf import graphs
from replicator.graph.passes import precision
from tests import helpers

LOWER = "auto_mixed_precision_onednn_bfloat16"
# The options of tf.config: each must leave replicas equal.
OPTIONS = (
    {LOWER: True},
    {"auto_mixed_precision": True},
    {"layout_optimizer": True, "remapping": True, "loop_optimization": True},
    {"scoped_allocator_optimization": True, "pin_to_host_optimization": True},
    {"debug_stripper": True},
    {"disable_meta_optimizer": True},
)


@pytest.fixture
def options() -> Iterator[None]:
    """Restores the options that a test has changed."""
    before = tf.config.optimizer.get_experimental_options()
    yield
    now = tf.config.optimizer.get_experimental_options()
    off = {name: False for name, value in now.items() if isinstance(value, bool)}
    tf.config.optimizer.set_experimental_options({**off, **before})
    tf.config.optimizer.set_jit(False)


def _make_step(repl: Any, weights: list[tf.Variable], rows: int = 32) -> Any:
    """Returns a step of two layers, with products large enough for a lowering.

    With few rows, gradients are summed by their factors.
    """
    rng = np.random.default_rng(0)
    for units in (64, 10):
        weights.append(tf.Variable(rng.normal(size=(64, units)).astype("f")))
    keras = tf.keras.optimizers
    optimizer = keras.Adam(0.01) if rows == 32 else keras.SGD(0.01)
    optimizer = repl.wrap_optimizer(optimizer)
    optimizer.build(weights)
    images = rng.normal(size=(repl.num_replicas, rows, 64)).astype("f")

    def step() -> tf.Tensor:
        x = tf.constant(images[repl.replica_id])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.relu(x @ weights[0]) @ weights[1]) ** 2
        gradients = tape.gradient(loss, weights)
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return loss

    return step


@pytest.mark.battery(5)
@pytest.mark.parametrize("chosen", OPTIONS, ids=lambda chosen: next(iter(chosen)))
def test_replicas_stay_equal_under_all_optimizers_of_graphs(chosen, options) -> None:
    tf.config.optimizer.set_experimental_options(chosen)
    for mode, rows in (("eager", 32), ("function", 4)):
        weights: list[tf.Variable] = []
        repl = helpers.make(2)
        make = functools.partial(_make_step, repl, weights, rows)
        assert np.isfinite(helpers.run(mode, repl, make, steps=2)).all()
        helpers.assert_replicas_equal(weights)


def test_replicas_stay_equal_where_xla_compiles_clusters(options) -> None:
    tf.config.optimizer.set_jit("autoclustering")
    weights: list[tf.Variable] = []
    repl = helpers.make(2)
    helpers.run("eager", repl, lambda: _make_step(repl, weights), steps=2)
    helpers.assert_replicas_equal(weights)


def test_replicas_stay_equal_in_sessions_with_lower_precision() -> None:
    config = graphs.session_config()
    rewriter = config.graph_options.rewrite_options
    rewriter.auto_mixed_precision_onednn_bfloat16 = type(rewriter).ON
    repl, weights = helpers.make(2), list[tf.Variable]()
    with tf.Graph().as_default():
        with repl.context():
            step = _make_step(repl, weights)
        fetches = repl.run(step)
        with tf.compat.v1.Session(config=config) as session:
            session.run(tf.compat.v1.global_variables_initializer())
            for _ in range(2):
                session.run(fetches)
            for one, other in session.run([list(w.components) for w in weights]):
                np.testing.assert_array_equal(one, other)


def test_nothing_is_added_where_precision_is_not_lowered(options) -> None:
    assert not precision.may_be_lowered()
    tf.config.optimizer.set_experimental_options({LOWER: True})
    assert precision.may_be_lowered()
    with tf.Graph().as_default():
        assert precision.may_be_lowered()
