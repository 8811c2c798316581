# SPDX-License-Identifier: Apache-2.0
"""Calls outside the step leave no gaps in the numbering."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.graph.matching import numbering
from tests import helpers

CHANNELS = ["", "0,2:", "0>1#7:"]


@pytest.mark.parametrize(
    ("keys", "want"),
    [
        ("0 1 2", "0 1 2"),
        ("1 3", "0 1"),
        ("10 9", "1 0"),
        ("2 2/0 2/1 5/3/1", "0 0/0 0/1 1/0/0"),
        ("0,2:4 4 0>1#7:1 0>1#8:2", "0,2:0 0 0>1#7:0 0>1#8:0"),
        ("1/2", "0/0"),
    ],
)
def test_what_is_left_is_numbered_anew(keys: str, want: str) -> None:
    assert list(numbering.without_gaps(keys.split()).values()) == want.split()


def _path(key: str) -> tuple[int, ...]:
    return tuple(map(int, key.rpartition(":")[2].split("/")))


PATHS = st.lists(st.integers(0, 12), min_size=1, max_size=3)
KEYS = st.builds(
    lambda channel, path: channel + "/".join(map(str, path)),
    st.sampled_from(CHANNELS),
    PATHS,
)


@hypothesis.settings(deadline=None)
@hypothesis.given(st.sets(KEYS, max_size=20))
def test_order_channels_and_ancestors_are_what_they_were(keys: set[str]) -> None:
    new = numbering.without_gaps(keys)
    assert numbering.without_gaps(new.values()) == {key: key for key in new.values()}
    for one in keys:
        assert new[one].rpartition(":")[0] == one.rpartition(":")[0]
        assert new[one].count("/") == one.count("/")
        for two in keys:
            if one.rpartition(":")[0] == two.rpartition(":")[0]:
                before, after = (
                    (_path(one), _path(two)),
                    (_path(new[one]), _path(new[two])),
                )
                assert (before[0] < before[1]) == (after[0] < after[1])
                assert two.startswith(one + "/") == new[two].startswith(new[one] + "/")


def _traced_and_thrown_away(f: Callable[..., Any], x: tf.Tensor) -> None:
    tf.function(f, autograph=False).get_concrete_function(x)


def _in_a_graph_of_its_own(f: Callable[..., Any], x: tf.Tensor) -> None:
    """As Keras does to infer the shapes of a layer's results."""
    with tf.__internal__.FuncGraph("scratch").as_default():
        f(tf.compat.v1.placeholder(x.dtype, x.shape))


def _in_a_graph_with_its_gradient(f: Callable[..., Any], x: tf.Tensor) -> None:
    with tf.__internal__.FuncGraph("scratch").as_default():
        inside = tf.compat.v1.placeholder(x.dtype, x.shape)
        tf.gradients(f(inside), inside)


SCRATCH = [
    _traced_and_thrown_away,
    _in_a_graph_of_its_own,
    _in_a_graph_with_its_gradient,
]


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("scratch", SCRATCH, ids=lambda f: f.__name__.strip("_"))
def test_one_replica_calls_where_nobody_runs_it(
    scratch: Callable[..., None], mode: str
) -> None:
    repl = helpers.make(2)

    def loss(x: tf.Tensor) -> tf.Tensor:
        total = repl.all_reduce(x) ** 2
        if repl.replica_id == 0:
            repl.send(x, 1, tag=3)
            return repl.linked(total)
        return total * repl.recv(x, 0, tag=3)

    def step() -> tuple[tf.Tensor, tf.Tensor]:
        x = helpers.opaque([2.0, 3.0][repl.replica_id])
        if repl.replica_id == 0:
            scratch(loss, x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = tf.cond(helpers.opaque(True), lambda: loss(x), lambda: x)
            if repl.replica_id == 1:
                scratch(lambda x: repl.broadcast(x, 1), x)
            value += repl.broadcast(x)
        return value, tape.gradient(value, x)

    values, gradients = helpers.run(mode, repl, lambda: step)
    np.testing.assert_allclose(values, [25.0 + 2.0, 50.0 + 2.0])
    np.testing.assert_allclose(gradients, [10.0 + 20.0 + 25.0 + 2.0, 10.0 + 20.0])


def test_what_is_missing_is_still_refused() -> None:
    """A call in the step does not pair with one outside of it."""
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque(1.0)
        if repl.replica_id == 0:
            _in_a_graph_of_its_own(repl.all_reduce, x)
            return x
        return repl.all_reduce(x)

    with pytest.raises(
        replicator.MismatchError,
        match=r"(?s)call 0 of replica 1 has no partner.*replica 0: 0 calls",
    ):
        repl.run(step)
