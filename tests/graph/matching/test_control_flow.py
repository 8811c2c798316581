# SPDX-License-Identifier: Apache-2.0
"""The control flow around communication, and the ops that contain some."""

from __future__ import annotations

import pytest
import tensorflow as tf

from replicator import errors
from replicator.graph.ir import placeholder
from replicator.graph.ir.placeholder import Call, Placeholder, Value
from replicator.graph.matching import control_flow


def _refuse(graph: tf.Graph, built: tf.Graph) -> None:
    control_flow.refuse_outside(graph, built, "all_reduce on replica 3", "train.py:9")


def test_the_step_itself_is_fine() -> None:
    with tf.Graph().as_default() as graph:
        _refuse(graph, graph)


def test_functions_of_the_step_are_fine_to_any_depth() -> None:
    reached = []

    @tf.function
    def function(x: tf.Tensor) -> tf.Tensor:
        _refuse(tf.compat.v1.get_default_graph(), graph)

        def branch() -> tf.Tensor:
            _refuse(tf.compat.v1.get_default_graph(), graph)
            reached.append(True)
            return x

        return tf.cond(x > 0, branch, branch)

    with tf.Graph().as_default() as graph:
        function(tf.constant(1))
    assert len(reached) == 2


def test_a_graph_that_is_no_part_of_the_step_is_refused_by_its_name() -> None:
    body = tf.Graph()
    body.name = "elsewhere"  # as function graphs have one
    with (
        tf.Graph().as_default() as graph,
        pytest.raises(
            errors.ReplicatorError,
            match=r"(?s)^all_reduce on replica 3 is in a graph that is not part of "
            r"the step \(elsewhere\).*at train.py:9\nFix: .*in which the step",
        ),
    ):
        _refuse(body, graph)


def test_a_place_where_ops_run_at_once_is_refused() -> None:
    graph = tf.compat.v1.get_default_graph()
    with pytest.raises(
        errors.ReplicatorError, match=r"(?s)is in a tf.init_scope.*Fix: .*outside"
    ):
        _refuse(graph, graph)


# --- Ops that communicate -------------------------------------------------------------


def _put(key: str) -> tf.Tensor:
    call = Call(
        primitive="all_reduce",
        options={},
        replica_id=1,
        device="/device:CPU:1",
        group=(0, 1),
        key=key,
        operands=(),
        agreed=(),
        line=f"train.py:{key} in step_fn",
    )
    return placeholder.put(call, [tf.zeros([])], [Value("float32", ())]).outputs[0]


def _turn(n: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return n + 1, tf.cond(x > 0, lambda: _put("2"), lambda: _put("3"))


def test_finds_calls_and_what_holds_them_in_order() -> None:
    @tf.function
    def function(x: tf.Tensor) -> tf.Tensor:
        return _put("1") + x

    with tf.Graph().as_default() as graph:
        x = _put("0")
        x = function(x)
        tf.cond(x > 0, lambda: x, lambda: -x)  # holds none
        tf.while_loop(lambda n, x: n < 2, _turn, [tf.constant(0), x])
        tf.switch_case(tf.constant(0), [lambda: _put("4"), lambda: x])
        sites = control_flow.find_sites(graph.get_operations(), 1)
    kinds = ["call", "function", "loop", "2-way conditional"]
    assert [site.construct for site in sites] == kinds
    assert [[c.key for c in site.calls] for site in sites] == [
        ["0"],
        ["1"],
        ["2", "3"],
        ["4"],
    ]
    assert isinstance(sites[0], Placeholder)
    assert all(isinstance(site, control_flow.Region) for site in sites[1:])
    assert {site.replica_id for site in sites} == {1}


def test_a_call_that_two_functions_hold_counts_once() -> None:
    inner = tf.function(lambda: _put("7"))

    @tf.function
    def outer() -> tf.Tensor:
        return inner() + inner()

    with tf.Graph().as_default() as graph:
        op = outer().op
        ops = [o for o in graph.get_operations() if "Call" in o.type]
        assert [c.key for c in control_flow.calls_inside(ops[0])] == ["7"]
        assert control_flow.calls_inside(op) in ((), control_flow.calls_inside(ops[0]))


def test_a_region_says_where_it_stands() -> None:
    def branch() -> tf.Tensor:
        return tf.add_n([_put(str(k)) for k in range(4)])

    with tf.Graph().as_default() as graph:
        tf.cond(tf.constant(True), branch, lambda: tf.zeros([]), name="mine")
        (site,) = control_flow.find_sites(graph.get_operations(), 1)
    assert site.site() == (
        "replica 1 (/device:CPU:1): a conditional (mine) with "
        "all_reduce at train.py:0 in step_fn; all_reduce at train.py:1 in step_fn; "
        "all_reduce at train.py:2 in step_fn; ... (4 calls)"
    )


def test_other_ops_that_call_functions_are_refused_by_type() -> None:
    with tf.Graph().as_default() as graph:
        tf.raw_ops.RemoteCall(
            target="/device:CPU:0",
            args=[tf.zeros([])],
            Tout=[tf.float32],
            f=tf.function(lambda x: _put("0")).get_concrete_function(tf.zeros([])),
        )
        with pytest.raises(
            errors.ReplicatorError,
            match=r"(?s)^replica 1 communicates in a function that RemoteCall runs, "
            r"where the other replicas cannot join.*train.py:0 in step_fn\nFix: ",
        ):
            control_flow.find_sites(graph.get_operations(), 1)


def test_what_is_held_stays_when_its_op_is_replaced() -> None:
    with tf.Graph().as_default():
        call, plain = _put("0"), tf.zeros([])
        assert control_flow.identity_if_rewired(plain) is plain
        contained = control_flow.identity_if_rewired(call)
        assert contained.op.type == "Identity" and contained.op.inputs[0] is call
        taken = tf.cond(tf.constant(True), lambda: tf.zeros([]), lambda: plain)
        while taken.op.type == "Identity":
            taken = taken.op.inputs[0]
        assert control_flow.identity_if_rewired(taken) is not taken
