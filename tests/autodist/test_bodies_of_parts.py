# SPDX-License-Identifier: Apache-2.0
"""Conditionals, loops and functions compute the same with parts as with a whole."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from replicator import _tf
from tests.autodist import parts
from tests.helpers import v1_control_flow


def _condition(w: Any) -> Any:
    return [
        tf.cond(tf.constant(yes), lambda: tf.gather(w, [3, 1]), lambda: w[:2] * 2)
        for yes in (True, False)
    ]


def _loop(w: Any) -> Any:
    def turn(k: tf.Tensor, t: tf.Tensor) -> Any:
        return k + 1, t + tf.reduce_sum(w * t)

    return tf.while_loop(lambda k, t: k < 3, turn, (0, 1.0))


def _function(w: Any) -> Any:
    inner = tf.function(lambda: w + 1)
    return tf.function(lambda: (tf.reduce_sum(inner()), w[1]))()


def _case(w: Any) -> Any:
    branches = [lambda k=k: w * k for k in (1.0, 2.0, 3.0)]
    return tf.switch_case(tf.constant(1), branches)


def _write(w: Any) -> Any:
    def write() -> tf.Tensor:
        with tf.control_dependencies([w.assign_add(w)]):
            return tf.identity(w.read_value())

    return [tf.cond(tf.constant(True), write, lambda: w * 1)]


BUILDS = (_condition, _loop, _function, _case, _write)


@pytest.mark.parametrize("cut", parts.CUTS)
@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
def test_control_flow_is_given_parts(build: Any, cut: str) -> None:
    graphs = parts.divide(build, parts.CUTS[cut])
    parts.check(graphs)
    calls = [
        op for op in graphs.divided.program.graph.get_operations() if "If" in op.type
    ]
    for op in calls:  # nothing is joined before
        handles = [t for t in op.inputs if t.dtype == tf.resource]
        assert {handle.op.name for handle in handles} == set(parts.ROWS.names)


@pytest.mark.parametrize("build", [_condition, _loop])
def test_so_it_is_in_the_control_flow_of_tensorflow_1(build: Any) -> None:
    with v1_control_flow():
        graphs = parts.divide(build)
    assert "If" not in graphs.types() and "While" not in graphs.types()
    parts.check(graphs)


def test_results_are_where_they_were_and_more_handles_come_last() -> None:
    graphs = parts.divide(_loop)
    (old,) = (op for op in graphs.program.ops if op.type == "While")
    new = graphs.divided.places[old]
    more = len(new.inputs) - len(old.inputs)
    assert more == 1 and new.inputs[-1].op.name == parts.ROWS.names[1]
    kinds = [tensor.dtype for tensor in old.outputs]
    assert [tensor.dtype for tensor in new.outputs] == [*kinds, tf.resource]
    for _, body in _tf.called_graphs(new):
        assert len(body.inputs) == len(new.inputs)
