"""A placeholder says all that a pass over the graph needs to know."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from replicator.graph import placeholder
from replicator.graph.placeholder import Call, Value


def _call(**facts: Any) -> Call:
    return Call(
        **{
            "primitive": "broadcast",
            "options": {"root": 1},
            "replica_id": 1,
            "device": "/job:worker/replica:0/task:3/device:GPU:1",
            "key": "4/0",
            "operands": (Value("float32", (3, None)), Value("string", None)),
            "agreed": (Value("float32", (None, None)), Value("string", None)),
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


def test_find_keeps_the_order_and_ignores_other_ops() -> None:
    with tf.Graph().as_default() as graph:
        ops = [_put(_call(key=str(k))) for k in range(3)]
        tf.py_function(lambda: 1, [], tf.int32)
        tf.numpy_function(lambda: 1, [], tf.int32, stateful=False)
        found = placeholder.find(graph.get_operations())
    assert [p.op for p in found] == ops
    assert [p.call.key for p in found] == ["0", "1", "2"]
    assert found[0].operands == tuple(ops[0].inputs)
    assert found[0].results == tuple(ops[0].outputs)


def test_has_no_device_and_is_stateless() -> None:
    """So that nothing makes it run, and no accelerator has to know it."""
    with tf.Graph().as_default(), tf.device("/device:GPU:7"):
        op = _put(_call())
    assert op.device == ""
    assert not op.op_def.is_stateful


def test_left_in_place_it_fails_by_name() -> None:
    """Rather than to hand on the local value."""
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
