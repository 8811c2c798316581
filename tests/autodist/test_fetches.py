# SPDX-License-Identifier: Apache-2.0
"""What a session fetches has the types, and names, that it has in TensorFlow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import errors
from tests.autodist import helpers
from tests.autodist.test_session import scope

v1 = tf.compat.v1
START = np.array([[2.0], [3.0]], np.float32)
STRATEGIES = ["mirrored", "PS", "PartitionedPS"]


def _session(strategy: str | None, use_resource: bool | None) -> tuple[Any, Any]:
    """Returns a variable "w" and a session, of plain TensorFlow if strategy is None."""
    autodist = None
    if strategy is not None:
        made = getattr(replicator.strategy, strategy, lambda: strategy)
        autodist = helpers.make(2, made())
    place = contextlib.nullcontext() if autodist is None else autodist.scope()
    with tf.Graph().as_default(), place:
        x = v1.placeholder(tf.float32, [None, 2], "x")
        w = v1.get_variable("w", initializer=START, use_resource=use_resource)
        loss = tf.reduce_mean(x @ w)
        v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        made_session = autodist.create_distributed_session if autodist else v1.Session
        session = made_session()
        session.run(v1.global_variables_initializer())
    return w, session


@pytest.mark.parametrize("use_resource", [True, False])
@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_ops_of_variables_give_nothing(strategy, use_resource):
    w, session = _session(strategy, use_resource)
    value, *nothing = session.run([w, w.op, "w"])
    np.testing.assert_array_equal(value, START)
    assert nothing == [None, None]


@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_names_of_reference_variables_give_their_values(strategy):
    w, session = _session(strategy, use_resource=False)
    for value in session.run(["w:0", w.name, w]):
        np.testing.assert_array_equal(value, START)


@pytest.mark.parametrize("by_name", [True, False])
def test_handles_of_resource_variables_are_refused(by_name):
    w, session = _session("mirrored", use_resource=True)
    with pytest.raises(
        errors.ArgumentError,
        match=r"(?s)cannot fetch w:0: it is the handle of variable w,.*created at .*"
        r"test_fetches.py.*fetched at .*test_fetches.py.*Fix: fetch the variable its",
    ):
        session.run({"handle": "w:0" if by_name else w.handle})


@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_what_names_are_depends_on_the_default_of_tensorflow_1(strategy):
    enabled = v1.resource_variables_enabled()
    v1.disable_resource_variables()
    try:
        _, session = _session(strategy, use_resource=None)
    finally:
        if enabled:
            v1.enable_resource_variables()
    np.testing.assert_array_equal(session.run("w:0"), START)


def _sparse(x: tf.Tensor) -> Any:
    return tf.sparse.from_dense(x[:, None] * [0.0, 1.0])


def _slices(x: tf.Tensor) -> Any:
    ids = tf.cast(x, tf.int32)
    table = tf.Variable(tf.ones([9, 2]))
    return tf.gradients(tf.reduce_mean(tf.gather(table, ids) ** 2), [table])[0]


def _slices_without_a_shape(x: tf.Tensor) -> Any:
    return tf.IndexedSlices(x * 2.0, tf.cast(x, tf.int64))


def _ragged(x: tf.Tensor) -> Any:
    lengths = tf.cast(x, tf.int32)
    return tf.RaggedTensor.from_row_lengths(tf.range(tf.reduce_sum(lengths)), lengths)


def _ragged_in_two_ways(x: tf.Tensor) -> Any:
    inner = _ragged(x)
    return tf.RaggedTensor.from_row_lengths(inner, [inner.nrows() - 1, 1])


@pytest.mark.parametrize(
    "make", [_sparse, _slices, _slices_without_a_shape, _ragged, _ragged_in_two_ways]
)
def test_values_of_several_tensors_are_those_of_tensorflow(make):
    found = []

    def run(begin):
        x = v1.placeholder(tf.float32, [None])
        fetch = make(x)
        found.append(begin().run({"x": x, "value": [fetch]}, {x: [1, 3, 0, 1, 2]}))

    helpers.in_sessions(run)
    expected, *others = (one["value"][0] for one in found)
    for actual in others:
        assert type(actual) is type(expected)
        if hasattr(expected, "to_list"):
            assert actual.to_list() == expected.to_list()
            continue
        for a, b in zip(actual, expected, strict=True):
            assert (a is None) == (b is None)
            if b is not None:
                np.testing.assert_allclose(a, b, rtol=1e-6)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a handle": (lambda w: w.handle, r"handle of .*weight.*Fix: fetch the variable it"),
    "no name": (lambda w: "no_such:0", r"cannot fetch .*no_such.*Fix: fetch tensors"),
    "a number": (lambda w: 3, r"cannot fetch 3.*Fix"),
    "nothing": (lambda w: None, r"cannot fetch.*Fix"),
    "of another graph": (
        lambda w: tf.Graph().create_op("NoOp", [], []),
        r"cannot fetch.*Fix",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_value_is_refused(name):
    given, says = REFUSED[name]
    with scope(2) as autodist:
        weight = v1.get_variable("weight", initializer=1.0)
        fetch = given(weight)
        session = autodist.create_distributed_session()
        with pytest.raises(errors.ArgumentError, match=rf"(?s)session\.run.*{says}"):
            session.run([weight, fetch])
        assert session.run([weight, "weight/Read/ReadVariableOp:0"]) == [1.0, 1.0]


def test_what_is_fetched_twice_is_given_twice():
    def run(begin):
        x = v1.placeholder(tf.float32, [None], "x")
        mean, session = tf.reduce_mean(x, name="mean"), begin()
        return session.run([mean, "mean:0", (x, mean), "x:0"], {x: [1.0, 2.0, 6.0]})

    helpers.in_sessions(run)


def test_nothing_is_fetched_of_an_empty_nest():
    with scope(2) as autodist:
        assert autodist.create_distributed_session().run([{}, ()]) == [{}, ()]
