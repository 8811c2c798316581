# SPDX-License-Identifier: Apache-2.0
"""The files of fast/ and plain/ keep the same laws: each private name is called.

What only saves time or memory is asserted of fast/ alone.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator._tf import choice, graphs, ops
from replicator.graph.order import ordering
from tests import helpers
from tests._tf import shared

_ROOMS = [pytest.param("fast", marks=pytest.mark.fast), "plain"]


def _names_of(room: str) -> Any:
    """Returns all public names of a room's files, and which room it is."""
    names: dict[str, Any] = {"fast": room == "fast"}
    for file in choice.FILES:
        names |= vars(importlib.import_module(f"replicator._tf.{room}.{file}"))
    return types.SimpleNamespace(**names)


@pytest.fixture(name="twin", params=_ROOMS)
def _twin(request: pytest.FixtureRequest) -> Any:
    return _names_of(request.param)


@pytest.fixture(name="fast", params=_ROOMS[:1])
def _fast(request: pytest.FixtureRequest) -> Any:
    """For what plain/ leaves to TensorFlow."""
    return _names_of(request.param)


def _calls() -> Any:
    """Returns the module that imports what these tests need of TensorFlow."""
    return importlib.import_module("replicator._tf.fast.calls")


def _traced(twin: Any, build: Callable[[], Any]) -> Any:
    """Returns a function traced like a step."""
    return twin.trace(build, ordering.order_as_created)


# --- Calls ----------------------------------------------------------------------------


def test_calls_return_flat_results_which_are_packed_as_they_were_returned(twin):
    variable = tf.Variable([1.0, 2.0])
    function = _traced(twin, lambda: [variable + 1.0, None, tf.sparse.eye(2), [3]])
    call = twin.prepare_call(function)
    variable.assign([2.0, 3.0])
    flat = call()
    assert [tensor.shape.rank for tensor in flat] == [1, 2, 1, 1, 0]
    dense, nothing, sparse, (three,) = twin.pack_results(function, flat)
    assert dense.numpy().tolist() == [3.0, 4.0]
    assert (nothing, int(three)) == (None, 3)
    assert tf.sparse.to_dense(sparse).numpy().tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert twin.prepare_call(_traced(twin, lambda: None))() == []


def test_calls_return_resources_with_their_shapes(twin):
    variable = tf.Variable([1.0, 2.0])
    (handle,) = twin.prepare_call(_traced(twin, lambda: variable.handle))()

    @tf.function
    def read():
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)

    assert read.get_concrete_function().output_shapes == [2]


def test_calls_ask_for_what_is_captured_at_each_call(twin):
    now = [tf.constant(1.0)]

    def build():
        graph = tf.compat.v1.get_default_graph()
        return graph.capture_call_time_value(lambda: now[0], tf.TensorSpec([])) + 1.0

    call = twin.prepare_call(_traced(twin, build))
    assert float(call()[0]) == 2.0
    now[0] = tf.constant(5.0)
    assert float(call()[0]) == 6.0


def test_calls_can_be_cancelled(twin):
    manager = _calls()._cancellation.CancellationManager()
    call = twin.prepare_call(_traced(twin, lambda: [tf.constant(1.0)]))
    assert float(manager.get_cancelable_function(call)()[0]) == 1.0
    manager.start_cancel()
    with pytest.raises(tf.errors.CancelledError):
        manager.get_cancelable_function(call)()


def test_calls_pass_no_gradient(twin):
    variable = tf.Variable(3.0)
    call = twin.prepare_call(_traced(twin, lambda: variable * 2.0))
    with tf.GradientTape() as tape:
        (doubled,) = call()
    assert tape.gradient(doubled, variable) is None


def test_calls_raise_what_the_function_would(twin):
    fine = tf.Variable(False)
    function = _traced(
        twin, lambda: [tf.debugging.assert_equal(fine, True, "told")][1:]
    )
    with pytest.raises(tf.errors.InvalidArgumentError) as expected:
        function()
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        twin.prepare_call(function)()
    assert "Detected at node" in caught.value.message
    assert __file__ in caught.value.message
    lines = [e.value.message.splitlines()[:3] for e in (expected, caught)]
    assert lines[0] == lines[1]


@pytest.mark.parametrize("only_cpus", [False, True])
def test_calls_have_the_settings_of_the_process(fast, only_cpus):
    calls = _calls()
    runtime = calls._context.context()
    before = runtime.function_call_options
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=7)
    config.graph_options.rewrite_options.layout_optimizer = 1  # on
    try:
        runtime.function_call_options = calls._context.FunctionCallOptions(None, config)
        function = _traced(fast, lambda: [tf.constant(2.0) * tf.constant(3.0)])
        assert float(fast.prepare_call(function, only_cpus)()[0]) == 6.0
        options = calls._call_options(only_cpus)
    finally:
        runtime.function_call_options = before
    config = tf.compat.v1.ConfigProto.FromString(options[-1])
    assert config.inter_op_parallelism_threads == 7
    assert config.graph_options.rewrite_options.layout_optimizer == 1


def test_less_optimizing_keeps_what_users_say(twin):
    on = 1
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=7)
    rewriter = config.graph_options.rewrite_options
    rewriter.layout_optimizer, rewriter.meta_optimizer_iterations = on, 2
    before = config.SerializeToString()
    options = twin.with_less_optimizing(config, only_cpus=True)
    assert config.SerializeToString() == before
    assert options.inter_op_parallelism_threads == 7
    options = options.graph_options.rewrite_options
    assert (options.layout_optimizer, options.meta_optimizer_iterations) == (on, 2)
    assert options.memory_optimization == 0  # as it was


@pytest.mark.parametrize("only_cpus", [False, True])
def test_less_optimizing_leaves_out_what_finds_nothing(fast, only_cpus):
    options = fast.with_less_optimizing(graphs.session_config(), only_cpus)
    options = options.graph_options.rewrite_options
    assert options.meta_optimizer_iterations == 1
    assert options.disable_tfg_optimizer
    assert (options.layout_optimizer == 2) == only_cpus  # off


# --- Captures, constants --------------------------------------------------------------


def test_resources_are_captured_once_whether_in_bulk_or_not(twin):
    variables = [tf.Variable([float(k)]) for k in range(3)]
    handles = [(variable.handle, "") for variable in variables]

    @tf.function(autograph=False)
    def function():
        graph = tf.compat.v1.get_default_graph()
        first = graph.capture(variables[1].handle)
        twin.capture_all(graph, handles)
        count = len(graph.get_operations())
        assert graph.capture(variables[1].handle) is first
        values = [variable.read_value() for variable in variables]
        assert values[0].shape == [1]  # a resource knows its contents
        types = [op.type for op in graph.get_operations()[count:]]
        assert ("Placeholder" in types) != twin.fast
        twin.capture_all(graph, handles)
        assert len(graph.captures) == len(graph.inputs) == 3
        return tf.concat(values, 0)

    assert list(function()) == [0.0, 1.0, 2.0]
    variables[2].assign([7.0])
    assert list(function()) == [0.0, 1.0, 7.0]
    variables[0].assign([5.0])
    assert list(tf.function(lambda: function())()) == [5.0, 1.0, 7.0]


def _full(value: float) -> np.ndarray:
    return np.full([300], value, np.float32)  # smaller ones are captured as constants


def test_constants_are_replaced_wherever_they_are_or_keep_their_values(twin):
    outside = tf.constant(_full(5.0))
    values = []

    def replacement(value):
        values.append(value[0])
        return tf.compat.v1.get_default_graph().capture(outside)

    def place(op):
        if op.type == "Const" and op.outputs[0].shape == [300]:
            twin.replace_new_constant(op, replacement)
        return op.device

    @tf.function(autograph=False)
    def function(flag):
        with tf.compat.v1.get_default_graph().device(place):
            one = tf.constant(_full(1.0))
            branch = tf.cond(flag, lambda: _full(3.0) * one, lambda: one)
            turns = tf.while_loop(
                lambda i, _: i < 2, lambda i, x: (i + 1, x + _full(7.0)), (0, one)
            )[1]
            with tf.init_scope():
                eager = tf.constant(_full(1.0)) + 1.0
        after = tf.constant(_full(1.0))
        return one, branch, turns, eager, after

    got = [float(y[0]) for y in function(tf.constant(True))]
    assert got == ([5, 25, 15, 2, 1] if twin.fast else [1, 3, 15, 2, 1])
    assert sorted(values) == ([1.0, 3.0, 7.0] if twin.fast else [])


def test_constants_that_are_replaced_are_held_no_more(fast):
    outside = tf.constant(np.ones([1000]))

    @tf.function(autograph=False)
    def function():
        graph = tf.compat.v1.get_default_graph()

        def place(op):
            fast.replace_new_constant(op, lambda _: graph.capture(outside))
            return op.device

        with graph.device(place):
            return tf.constant(np.zeros([1000]))

    traced = function.get_concrete_function()
    assert traced.graph.as_graph_def().ByteSize() < 1000
    np.testing.assert_array_equal(traced(), outside)


def test_constants_that_are_made_in_another_way_stay(twin):
    with tf.Graph().as_default() as graph:
        first = tf.constant([1.0])
        twin.replace_new_constant(first.op, lambda _: tf.constant([2.0]))
        second, third = tf.constant([3.0]), tf.identity(first)
        assert second.op.type == "Const" and third.op.inputs[0] is first
        assert shared.evaluate(first[0] + second[0], graph) == 4.0


# --- Nodes ----------------------------------------------------------------------------


def test_imported_nodes_are_in_order_with_devices_and_inputs(twin):
    with tf.Graph().as_default() as graph:
        with tf.device("CPU:1"):
            x = tf.constant(2.0, name="x")
            tf.multiply(tf.sin(x, name="y"), x, name="z")
        definition = graph.as_graph_def()
        del definition.node[0]
        for node in definition.node:
            node.input[:] = ["given:0" if n == "x" else n for n in node.input]
        source = tf.constant(3.0)
        with tf.device("CPU:2"):  # ignored: nodes have their devices
            new = twin.import_nodes(graph, definition, {"given:0": source}, "again/")
        assert [op.name for op in new] == ["again/y", "again/z"]
        assert {op.device for op in new} == {x.op.device}
        assert new[1].inputs[1] is source
        assert graph.get_operation_by_name("again/z") is new[1]
        assert shared.evaluate(new[1].outputs[0], graph) == pytest.approx(0.42336)
        empty = tf.compat.v1.GraphDef()
        assert twin.import_nodes(graph, empty, {}, "nothing/") == []


def test_nodes_are_added_as_other_ops_are(twin):
    with tf.Graph().as_default() as graph:
        x = tf.constant([[1.0, 2.0]])
        before = tf.no_op()
        nodes = twin.Nodes()
        value = tf.make_tensor_proto(0)
        axis = nodes.add("Const", (), "/CPU:1", dtype=tf.int32, value=value)
        both = nodes.add("ConcatV2", [x, x, axis], N=2, T=x.dtype, Tidx=tf.int32)
        shape = tf.TensorShape([None, 2])
        nodes.add("PlaceholderWithDefault", [both], dtype=x.dtype, shape=shape)
        nodes.add("Placeholder", dtype=x.dtype, shape=tf.TensorShape([]))
        with (
            tf.name_scope("outer"),
            tf.device("CPU:2"),
            tf.control_dependencies([before]),
        ):
            new = nodes.finish("inner")
        types = ["Const", "ConcatV2", "PlaceholderWithDefault", "Placeholder"]
        assert [op.type for op in new] == types
        assert [op.name for op in new] == sorted(op.name for op in new)
        assert all(op.name.startswith("outer/inner/") for op in new)
        assert [op.device[-5:] for op in new] == ["CPU:1"] + ["CPU:2"] * 3
        for op in new:
            assert before in helpers.ops_run([op.outputs[0]])
        assert new[1].outputs[0].shape == [2, 2]
        assert new[2].outputs[0].shape.as_list() == [None, 2]
        assert new[3].outputs[0].shape == []
        total = tf.reduce_sum(new[2].outputs[0])
        assert shared.evaluate(total, graph) == 6.0


def test_nodes_are_recorded_by_no_tape(twin):
    @tf.function(autograph=False)
    def function(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            tape.watch(x)
            nodes = twin.Nodes()
            nodes.add("Square", [x], T=x.dtype)
            (op,) = nodes.finish("unseen")
        assert tape.gradient(op.outputs[0], x) is None

    function(tf.constant(2.0))


def test_nodes_stand_in_the_control_flow_around(twin):
    def body(x: tf.Tensor) -> tf.Tensor:
        nodes = twin.Nodes()
        nodes.add("Square", [x], T=x.dtype)
        (op,) = nodes.finish("inside")
        return op.outputs[0]

    with helpers.v1_control_flow(), tf.Graph().as_default() as graph:
        loop = tf.compat.v1.while_loop(lambda x: x < 100.0, body, [tf.constant(2.0)])
        assert shared.evaluate(loop, graph) == 256.0


# --- Traces ---------------------------------------------------------------------------


def test_traces_run_effects_in_order_whether_or_not_a_result_waits(twin):
    variable = tf.Variable(0.0)
    seen: list[int] = []

    def build():
        variable.assign_add(2.0)
        tf.py_function(lambda: seen.append(1), [], [])
        variable.assign(variable * 3.0)
        return [tf.constant(5.0), variable.read_value(), None]

    function = _traced(twin, build)
    if twin.fast:
        assert not any(t.op.control_inputs for t in function.graph.outputs[:1])
    five, value, nothing = function()
    assert (float(five), float(value), nothing) == (5.0, 6.0, None)
    assert (float(variable), seen) == (6.0, [1])


@pytest.mark.parametrize("abandoned", [True, False])
def test_traces_leave_out_what_was_abandoned_and_all_before_it(twin, abandoned):
    variable = tf.Variable(1.0)

    def build():
        used = tf.sin(variable)
        unused = tf.cos(used)
        tf.print(tf.exp(used), output_stream="file:///dev/null")
        variable.assign(tf.tan(used))
        if abandoned:
            ops.abandon([variable.assign(unused, read_value=False)])
        with tf.control_dependencies([tf.abs(used)]):
            return tf.square(used)

    function = _traced(twin, build)
    if twin.fast:
        types = [node.op for node in function.function_def.node_def]
        assert {"Sin", "Exp", "PrintV2", "Tan", "Abs", "Square"} <= set(types)
        assert types.count("AssignVariableOp") == 1
        assert ("Cos" in types) != abandoned
    assert float(function()) == pytest.approx(0.7080734)
    assert float(variable) == pytest.approx(np.tan(np.sin(1.0)))


def test_traces_know_whether_there_is_more_than_a_step(twin):
    assert twin.is_step(_traced(twin, lambda: tf.constant(1.0)).graph)
    order = ordering.order_as_created
    more = twin.trace(lambda: tf.constant(1.0), order, only_step=False)
    assert not twin.is_step(more.graph) and not twin.is_step(tf.Graph())


def test_traces_build_once_and_raise_what_building_raised(twin):
    built = []

    def build():
        built.append(1)
        return tf.constant(1.0)

    assert float(_traced(twin, build)()) == 1.0 and built == [1]

    def fail():
        raise KeyError("told")

    with pytest.raises(KeyError, match="told"):
        _traced(twin, fail)


# --- Reads and writes of variables ----------------------------------------------------


def _same_op(one, two):
    nodes = [op.node_def for op in (one, two)]
    for node in nodes:
        node.name = ""
    return nodes[0] == nodes[1]


def test_places_of_reads_are_nowhere_where_a_read_is_recorded_or_waits(fast):
    @tf.function
    def build():
        graph = tf.compat.v1.get_default_graph()
        place = fast.place_of_reads()
        assert place is not None and place == fast.place_of_reads()
        with tf.control_dependencies([tf.no_op()]):
            assert fast.place_of_reads() is None
            with tf.control_dependencies(None):
                assert fast.place_of_reads() == place
        with tf.GradientTape():
            assert fast.place_of_reads() is None
        inside = tf.function(lambda: inner.append(fast.place_of_reads()))
        inner: list[Any] = []
        inside()
        assert inner[0] is not None and inner[0] != place
        assert place[0] is graph

    build()


@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
@pytest.mark.parametrize("shape", [[2], [None]])
def test_quick_writes_add_what_the_method_adds(fast, method, shape):
    variable = tf.Variable([1.0, 2.0], shape=tf.TensorShape(shape))

    @tf.function(autograph=False)
    def function():
        like = getattr(variable, method)([0.0, 0.0], read_value=False)
        written = fast.write_quickly(variable, method, like.inputs[1], "named")
        assert written.name == "named"
        assert _same_op(written, like)

    function.get_concrete_function()


def test_quick_writes_leave_what_does_not_fit(fast):
    variable = tf.Variable([1.0, 2.0])

    @tf.function(autograph=False)
    def function():
        assert fast.write_quickly(variable, "assign", [1.0, 2.0, 3.0], None) is None
        integers = tf.constant([1, 2], tf.int64)
        for method in ("assign", "assign_add"):
            with pytest.raises(ValueError, match="int64"):
                fast.write_quickly(variable, method, integers, None)
        with pytest.raises(ValueError, match="[Ss]hape"):
            fast.write_quickly(variable, "assign_add", [1.0, 2.0, 3.0], None)

    function.get_concrete_function()


def test_quick_reads_add_what_a_read_adds(fast):
    variable = tf.Variable([1.0, 2.0])

    @tf.function(autograph=False)
    def function():
        value = fast.read_quickly(variable)
        assert _same_op(value.op, variable.read_value().op.inputs[0].op)
        assert value.shape == [2]
        return value

    concrete = function.get_concrete_function()
    assert concrete.graph.variables == (variable,)
    assert list(concrete()) == [1.0, 2.0]


def test_quick_reads_are_differentiated(fast):
    variable = tf.Variable([1.0, 2.0])

    @tf.function(autograph=False)
    def backward():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(fast.read_quickly(variable) ** 3)
            gradient = tape.gradient(loss, variable)
        return gradient, outer.gradient(gradient, variable)

    @tf.function(autograph=False)
    def forward():
        with tf.autodiff.ForwardAccumulator(variable, tf.constant([1.0, 10.0])) as acc:
            return acc.jvp(fast.read_quickly(variable) ** 2)

    first, second = backward()
    assert list(first) == [3.0, 12.0]
    assert list(second) == [6.0, 12.0]
    assert list(forward()) == [2.0, 40.0]


def test_quick_ops_are_added_where_a_function_is_traced_and_nobody_looks(twin):
    variable = tf.Variable(1.0)
    results = []

    def add():
        read = twin.read_quickly(variable)
        written = twin.write_quickly(variable, "assign", 2.0, None)
        assert (read is None) == (written is None)
        assert twin.fast or twin.place_of_reads() is None
        results.append(read is not None)

    add()
    tf.function(add)()
    with tf.Graph().as_default():
        add()
    tf.debugging.enable_check_numerics()
    try:
        tf.function(lambda: add())()
    finally:
        tf.debugging.disable_check_numerics()
    assert results == [False, twin.fast, False, False]
