# SPDX-License-Identifier: Apache-2.0
"""Traces of tf.functions, one for each replica: each private name is called."""

from __future__ import annotations

import pytest
import tensorflow as tf

from replicator._tf import traces as tf_traces


def _run(build, plain_graph):
    """Returns the numbers that a function builds, in a plain graph or a tf.function."""
    if not plain_graph:
        return [int(x) for x in tf.function(build, autograph=False)()]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        return session.run(build())


@pytest.mark.parametrize("plain_graph", [True, False])
def test_tracing_apart_gives_a_function_one_trace_per_key(plain_graph):
    traced, traces = [], tf_traces.Traces()

    @tf.function(autograph=False)
    def inner():
        traced.append(0)
        return tf.constant(len(traced))

    def outer():
        graph = tf.compat.v1.get_default_graph()
        results = []
        for key in ("a", "b", "a"):
            with tf_traces.separate_traces(graph, key, traces):
                results.append(inner())
        return results

    assert _run(outer, plain_graph) == [1, 2, 1]


@pytest.mark.parametrize("plain_graph", [True, False])
def test_traces_are_forgotten_but_for_those_of_others(plain_graph):
    inner = tf.function(lambda: tf.constant(1) + 1, autograph=False)
    outermost = tf.function(lambda: inner() + 1, autograph=False)
    others = tf.function(lambda: inner() + 1, autograph=False)
    assert int(others()) == int(inner()) + 1 == 3
    cache_size = len(inner._variable_creation_config.function_cache)

    def build():
        graph, traces = tf.compat.v1.get_default_graph(), tf_traces.Traces()
        with tf_traces.separate_traces(graph, "key", traces) as anew:
            results = [outermost()]
            results.append(outermost())
            anew()
            results.append(inner.get_concrete_function()())
        cache = inner._variable_creation_config.function_cache
        assert len(cache) == cache_size + 2
        traces.forget()
        assert len(cache) == cache_size
        assert len(outermost._variable_creation_config.function_cache) == 0
        assert not traces._unknown
        return results

    assert _run(build, plain_graph) == [3, 3, 2]
    assert int(others()) == int(outermost()) == 3


@pytest.mark.parametrize("plain_graph", [True, False])
def test_tracing_apart_traces_anew_when_asked_to(plain_graph):
    traced = []

    @tf.function(autograph=False)
    def inner():
        traced.append(0)
        if len(traced) == 1:
            again()  # while it is traced
        return tf.constant(0)

    def outer():
        nonlocal again
        graph = tf.compat.v1.get_default_graph()
        with tf_traces.separate_traces(graph, "anew", tf_traces.Traces()) as again:
            for _ in range(3):
                inner()
        return [tf.constant(0)]

    again = None
    assert _run(outer, plain_graph) == [0] and len(traced) == 2
