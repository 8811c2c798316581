# SPDX-License-Identifier: Apache-2.0
"""A placeholder states everything that a pass over the graph needs."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import tensorflow as tf

from replicator.graph.ir import placeholder
from replicator.graph.ir.placeholder import Call, OperandPolicy, PrimitiveFacts, Value
from replicator.primitives import table


def _call(**facts: Any) -> Call:
    return Call(
        **{
            "primitive": "broadcast",
            "options": {"root": 1},
            "replica_id": 1,
            "device": "/job:worker/replica:0/task:3/device:GPU:1",
            "group": (1, 3),
            "key": "1,3:4/0",
            "operands": (Value("float32", (3, None)), Value("string", None)),
            "agreed": (Value("float32", (None, None)), Value("string", None)),
            "facts": PrimitiveFacts(same_for_all=True),
            "line": 'a "quoted" dir/träin.py:4 in <lambda>',
            **facts,
        }
    )


def _put(call: Call) -> tf.Operation:
    operands = [tf.zeros([3, 2]), tf.constant("text")]
    results = [Value("float32", (3, None)), Value("string", None)]
    return placeholder.put(call, operands, results)


def test_reads_back_what_was_put() -> None:
    with tf.Graph().as_default():
        call = _call()
        assert placeholder.read(_put(call)) == call


def test_the_text_holds_all_fields_and_is_read_once() -> None:
    policy = OperandPolicy("v", 3, "ring", "b")
    call = _call(policies=(policy, OperandPolicy()), receipt=True)
    token = placeholder.token_of(call)
    assert token.endswith(json.dumps(dataclasses.asdict(call)))
    actual = placeholder.call_of(token.encode())
    assert actual == call and placeholder.call_of(token.encode()) is actual


def test_survives_serialisation_of_the_graph() -> None:
    """No registry: another process knows as much."""
    with tf.Graph().as_default() as graph:
        name = _put(_call()).name
    with tf.Graph().as_default() as copy:
        tf.graph_util.import_graph_def(graph.as_graph_def(), name="")
        assert placeholder.read(copy.get_operation_by_name(name)) == _call()


def test_outputs_have_the_dtypes_and_shapes_of_the_results() -> None:
    with tf.Graph().as_default():
        first, second = _put(_call()).outputs
    assert first.dtype == tf.float32 and first.shape.as_list() == [3, None]
    assert second.dtype == tf.string and second.shape.rank is None


def test_other_ops_are_none() -> None:
    with tf.Graph().as_default():
        tf.py_function(lambda: 1, [], tf.int32)
        plain = tf.numpy_function(lambda: 1, [], tf.int32, stateful=False).op
        assert placeholder.read(plain) is None
        assert placeholder.read(tf.constant(1).op) is None


def test_a_placeholder_tells_results_from_the_receipt() -> None:
    with tf.Graph().as_default():
        call = _call(receipt=True)
        results = [Value("float32", (3,)), Value("float32", ())]
        op = placeholder.put(call, [tf.zeros([3])], results)
        placed = placeholder.Placeholder(op, placeholder.read(op))
        assert placed.call == call
        assert placed.operands == tuple(op.inputs)
        assert placed.results == (op.outputs[0],)
        assert placed.receipt is op.outputs[1]
        plain = placeholder.Placeholder(_put(_call()), _call())
        assert len(plain.results) == 2 and plain.receipt is None
        assert placed.calls == (call,) and placed.construct == "call"
        assert placed.replica_id == 1 and placed.site() == call.site()


@pytest.mark.parametrize(("operands", "results"), [(0, 0), (0, 1), (2, 0)])
def test_operands_and_results_may_be_missing(operands: int, results: int) -> None:
    with tf.Graph().as_default():
        tensors = [tf.zeros([]) for _ in range(operands)]
        op = placeholder.put(_call(), tensors, [Value("float32", ())] * results)
        assert (len(op.inputs), len(op.outputs)) == (operands, results)
        assert placeholder.read(op) == _call()


def test_has_no_device_and_is_stateless() -> None:
    """So nothing makes it run, and no accelerator needs a kernel for it."""
    with tf.Graph().as_default(), tf.device("/device:GPU:7"):
        op = _put(_call())
    assert op.device == ""
    assert not op.op_def.is_stateful


def test_left_in_place_it_fails_by_name() -> None:
    """Instead of returning the local value."""
    with tf.Graph().as_default():
        op = _put(_call())
        with (
            tf.compat.v1.Session() as session,
            pytest.raises(tf.errors.OpError, match=r'"primitive": "broadcast"'),
        ):
            session.run(op.outputs[0])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Value("float32", (128, 10)), "float32[128, 10]"),
        (Value("int8", ()), "int8[]"),
        (Value("bool", (None, 2)), "bool[?, 2]"),
        (Value("string", None), "string[...]"),
    ],
)
def test_value_as_text(value: Value, text: str) -> None:
    assert str(value) == text


def test_call_as_text() -> None:
    assert _call(key="0", line="train.py:4 in step_fn").site() == (
        "replica 1 (/job:worker/replica:0/task:3/device:GPU:1): "
        "broadcast root=1 float32[3, ?], string[...] at train.py:4 in step_fn"
    )
    assert "in the gradient, at " in str(_call(key="0/0"))
    assert "axis" not in str(_call(options={"axis": None}))


@pytest.mark.parametrize(
    ("key", "channel", "number", "depth"),
    [
        ("3", "", "3", 0),
        ("3/0", "", "3", 1),
        ("3/0/12", "", "3", 2),
        ("0,2:4", "0,2", "4", 0),
        ("0,2:4/1", "0,2", "4", 1),
        ("0>2#7:11", "0>2#7", "11", 0),
        ("0>2#7:11/0", "0>2#7", "11", 1),
    ],
)
def test_what_a_key_says(key: str, channel: str, number: str, depth: int) -> None:
    call = _call(key=key)
    assert (call.channel, call.number, call.depth) == (channel, number, depth)
    assert call.backward == (depth > 0)


@pytest.mark.parametrize(
    ("primitive", "what"),
    [("send", "message"), ("recv", "message"), ("all_reduce", "all_reduce")],
)
def test_both_ends_of_a_message_are_paired(primitive: str, what: str) -> None:
    facts = table.FACTS[primitive]
    assert _call(primitive=primitive, facts=facts).pairs_as == what
