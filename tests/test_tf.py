"""Every private TensorFlow name that the library uses, by itself.

A new TensorFlow that changes one of them fails here, by name.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import linecache
import os
from typing import Any

import pytest
import sonnet as snt
import tensorflow as tf

import replicator
from replicator import _tf
from replicator.graph import ordering
from tests import helpers


def _names() -> list[str]:
    """Returns the names that _tf.py offers to the rest of the library."""
    names = []
    for node in ast.parse(inspect.getsource(_tf)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets]
    return [name for name in names if not name.startswith("_")]


@pytest.mark.parametrize("name", _names())
def test_each_name_is_called_in_this_file(name):
    with open(__file__) as file:
        assert f"_tf.{name}" in file.read()


def test_only_tf_py_knows_private_names():
    house = os.path.dirname(_tf.__file__)
    for folder, _, files in os.walk(house):
        for name in files:
            if name.endswith(".py") and name != "_tf.py":
                with open(os.path.join(folder, name)) as file:
                    text = file.read()
                assert "import tensorflow.python" not in text, name
                assert "from tensorflow.python" not in text, name
                assert "from tensorflow.core" not in text, name


# --- Rewiring -------------------------------------------------------------------------


def _evaluate(tensor: tf.Tensor, graph: tf.Graph) -> float:
    with tf.compat.v1.Session(graph=graph) as session:
        return float(session.run(tensor))


def test_set_input_rewires_a_built_op():
    with tf.Graph().as_default() as graph:
        one, two = tf.constant(1.0), tf.constant(2.0)
        total = tf.add(one, one)
        _tf.set_input(total.op, 1, two)
        assert total.op.inputs[1] is two
        assert two.consumers() == [total.op]
        assert _evaluate(total, graph) == 3.0


def test_set_input_rewires_in_a_function():
    @tf.function(autograph=False)
    def function(x):
        total = tf.add(x, x)
        _tf.set_input(total.op, 1, tf.constant(5.0))
        return total

    assert float(function(tf.constant(1.0))) == 6.0


def test_add_control_inputs_reaches_built_ops():
    order: list[str] = []
    with tf.Graph().as_default() as graph:
        last = tf.py_function(lambda: order.append("last") or 1.0, [], tf.float32)
        first = tf.py_function(lambda: order.append("first") or 1.0, [], tf.float32)
        _tf.add_control_inputs(last.op, [])
        assert not last.op.control_inputs
        _tf.add_control_inputs(last.op, [first.op])
        assert last.op.control_inputs == [first.op]
        _evaluate(last, graph)
    assert order == ["first", "last"]


def test_set_int_attr_changes_a_built_op():
    with tf.Graph().as_default() as graph:
        tf.compat.v1.set_random_seed(None)
        draws = [tf.compat.v1.random_uniform([], seed=s) for s in (7, 8)]
        for name in ("seed", "seed2"):
            _tf.set_int_attr(draws[1].op, name, draws[0].op.get_attr(name))
        assert draws[1].op.get_attr("seed2") == draws[0].op.get_attr("seed2")
        with tf.compat.v1.Session(graph=graph) as session:
            one, two = session.run(draws)
    assert one == two


def test_operation_count_counts():
    with tf.Graph().as_default() as graph:
        for count in range(3):
            assert _tf.operation_count(graph) == len(graph.get_operations()) == count
            tf.constant(0)


def test_control_flow_context_tells_v1_and_xla_from_all_else():
    seen = []

    def note(*_):
        seen.append(_tf.control_flow_context(tf.compat.v1.get_default_graph()))
        return tf.constant(1)

    tf.compat.v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default():
            note()
            tf.compat.v1.while_loop(lambda x: x < 1, note, [tf.constant(0)])
            tf.compat.v1.cond(tf.constant(True), note, lambda: tf.constant(2))
    finally:
        tf.compat.v1.enable_control_flow_v2()
    assert seen == [None, "v1", "v1"]
    seen.clear()
    tf.function(note)()
    tf.function(note, jit_compile=True).get_concrete_function()
    tf.function(lambda: tf.while_loop(lambda x: x < 1, note, [tf.constant(0)]))()
    assert seen == [None, "xla", None]


def test_tracing_apart_gives_a_function_one_trace_per_key():
    traced = []

    @tf.function(autograph=False)
    def inner():
        traced.append(0)
        return tf.constant(len(traced))

    @tf.function(autograph=False)
    def outer():
        graph = tf.compat.v1.get_default_graph()
        results = []
        for key in ("a", "b", "a"):
            with _tf.tracing_apart(graph, key):
                assert _tf.control_flow_context(graph) is None
                results.append(inner())
        return results

    assert [int(x) for x in outer()] == [1, 2, 1]


def test_tracing_apart_does_so_in_a_plain_graph_too():
    traced = []

    @tf.function(autograph=False)
    def inner():
        traced.append(0)
        return tf.constant(len(traced))

    with tf.Graph().as_default() as graph:
        results = []
        for key in ("a", "b", "a"):
            with _tf.tracing_apart(graph, key):
                results.append(inner())
        with tf.compat.v1.Session() as session:
            assert session.run(results) == [1, 2, 1]


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
        with _tf.tracing_apart(graph, (plain_graph, "anew")) as again:
            for _ in range(3):
                inner()
        return tf.constant(0)

    again = None

    if plain_graph:
        with tf.Graph().as_default():
            outer()
    else:
        tf.function(outer, autograph=False)()
    assert len(traced) == 2


def test_called_graphs_finds_the_bodies_of_functional_ops():
    inner = tf.function(lambda x: x * 2.0)

    @tf.function(autograph=False)
    def outer(x):
        x = inner(x)
        return tf.cond(x > 0, lambda: tf.sin(x), lambda: tf.cos(x))

    graph = outer.get_concrete_function(tf.constant(1.0)).graph
    bodies = {}
    for op in graph.get_operations():
        for attribute, body in _tf.called_graphs(op):
            bodies[attribute] = {op.type for op in body.get_operations()}
    assert "Mul" in bodies["f"]
    assert "Sin" in bodies["then_branch"]
    assert "Cos" in bodies["else_branch"]


# --- Merging --------------------------------------------------------------------------


def _call_of(function, *args):
    """Returns the op that calls a function, in a graph of its own."""
    with tf.Graph().as_default() as graph:
        function(*map(tf.constant, args))
        return [op for op in graph.get_operations() if "Call" in op.type][-1]


def test_called_graphs_come_in_the_order_in_which_they_are_traced():
    def turn(x):
        return tf.cond(x > 1.0, lambda: x + 1.0, lambda: x + 2.0)

    with tf.Graph().as_default() as graph:
        tf.while_loop(lambda x: x < 9.0, turn, [tf.constant(0.0)])
        loop = [op for op in graph.get_operations() if "While" in op.type][0]
    found = dict(_tf.called_graphs(loop))
    assert list(found) == ["cond", "body"]
    inner = [op for op in found["body"].get_operations() if "If" in op.type][0]
    assert [name for name, _ in _tf.called_graphs(inner)] == [
        "then_branch",
        "else_branch",
    ]


def test_a_function_put_together_op_by_op():
    with tf.Graph().as_default() as graph:
        like = tf.constant([1.0, 2.0])
        joint = _tf.new_function_graph("mine")
        x = _tf.add_input(joint, like, tf.TensorShape([None]))
        assert x.graph is joint and x.shape.rank == 1 and joint.inputs == [x]
        with joint.as_default():
            log = []
            tf.py_function(lambda: log.append("left out"), [], [])
            _tf.abandon(joint.get_operations()[1:])
            start = len(joint.get_operations())
            tf.py_function(lambda: log.append("runs"), [], [])
            must_run = joint.get_operations()[start:]
            result = x * 2.0
        f = _tf.finish_function(joint, [result], must_run)
        assert "mine" in f
        (called,) = tf.raw_ops.StatefulPartitionedCall(
            args=[like], Tout=[tf.float32], f=f
        )
        assert _evaluate(called[1], graph) == 4.0
    assert log == ["runs"]


def test_an_added_input_knows_of_its_resource():
    with tf.Graph().as_default():
        variable = tf.Variable([1.0, 2.0])
        joint = _tf.new_function_graph("reads")
        handle = _tf.add_input(joint, variable.handle, variable.handle.shape)
        with joint.as_default():
            read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
        assert read.shape == [2]


def test_copy_handle_data_tells_a_resource_what_another_knows():
    with tf.Graph().as_default():
        variable = tf.Variable([1.0, 2.0])
        bare = tf.compat.v1.placeholder(tf.resource, [])
        _tf.copy_handle_data(variable.handle, bare)
        read = tf.raw_ops.ReadVariableOp(resource=bare, dtype=tf.float32)
        assert read.shape == [2]


def test_function_body_has_the_results_of_the_function_only():
    op = _call_of(tf.function(lambda x: x * 2.0), 1.0)
    graph, outputs = _tf.function_body(op, "f")
    assert "Mul" in {o.type for o in graph.get_operations()}
    assert len(outputs) == len(op.outputs)
    with graph.as_default():
        graph.outputs.append(outputs[0] + 1.0)  # as gradients do
    assert len(_tf.function_body(op, "f")[1]) == len(op.outputs)


def test_function_body_by_position():
    with tf.Graph().as_default() as graph:
        x = tf.constant(1.0)
        tf.switch_case(tf.constant(1), [lambda: tf.sin(x), lambda: tf.cos(x)])
        case = [op for op in graph.get_operations() if "Case" in op.type][0]
    types = [
        {o.type for o in _tf.function_body(case, "branches", n)[0].get_operations()}
        for n in range(2)
    ]
    assert "Sin" in types[0] and "Cos" in types[1]


def test_set_function_changes_one_of_those_that_functions_called_finds():
    def outer():
        choice = tf.switch_case(tf.constant(1), [lambda: 1.0, lambda: 2.0])
        compiled = tf.function(lambda: tf.constant(4.0), jit_compile=True)()
        return choice + compiled

    with tf.Graph().as_default() as graph:
        total = outer()
        ops = {op.type: op for op in graph.get_operations()}
        case = ops.get("Case", ops.get("StatelessCase"))
        assert _tf.functions_called(case) == [("branches", 0), ("branches", 1)]
        calls = [op for kind, op in ops.items() if kind.endswith("PartitionedCall")]
        assert [_tf.functions_called(op) for op in calls] == [[]]
        new = _tf.new_function_graph("other")
        with new.as_default():
            result = tf.constant(7.0)
        _tf.set_function(case, "branches", 1, _tf.finish_function(new, [result], []))
        with tf.compat.v1.Session() as session:
            assert session.run(total) == 11.0


def test_import_nodes_adds_ops_in_order_with_devices_and_inputs():
    with tf.Graph().as_default() as graph:
        with tf.device("CPU:1"):
            x = tf.constant(2.0, name="x")
            tf.multiply(tf.sin(x, name="y"), x, name="z")
        definition = graph.as_graph_def()
        del definition.node[0]
        for node in definition.node:
            node.input[:] = ["given:0" if n == "x" else n for n in node.input]
        given = tf.constant(3.0)
        ops = _tf.import_nodes(graph, definition, {"given:0": given}, "again/")
        assert [op.name for op in ops] == ["again/y", "again/z"]
        assert {op.device for op in ops} == {x.op.device}
        assert ops[1].inputs[1] is given
        assert graph.get_operation_by_name("again/z") is ops[1]
        assert _evaluate(ops[1].outputs[0], graph) == pytest.approx(0.42336)


def test_nodes_are_added_as_other_ops_are():
    with tf.Graph().as_default() as graph:
        x = tf.constant([[1.0, 2.0]])
        before = tf.no_op()
        nodes = _tf.Nodes()
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
            ops = nodes.finish("inner")
        types = ["Const", "ConcatV2", "PlaceholderWithDefault", "Placeholder"]
        assert [op.type for op in ops] == types
        assert [op.name for op in ops] == sorted(op.name for op in ops)
        assert all(op.name.startswith("outer/inner/") for op in ops)
        assert [op.device[-5:] for op in ops] == ["CPU:1"] + ["CPU:2"] * 3
        assert all(op.control_inputs == [before] for op in ops)
        assert ops[1].outputs[0].shape == [2, 2]
        assert ops[2].outputs[0].shape.as_list() == [None, 2]
        assert ops[3].outputs[0].shape == []
        total = tf.reduce_sum(ops[2].outputs[0])
        assert _evaluate(total, graph) == 6.0


def test_nodes_stand_in_the_control_flow_around():
    tf.compat.v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default() as graph:

            def body(x: tf.Tensor) -> tf.Tensor:
                nodes = _tf.Nodes()
                nodes.add("Square", [x], T=x.dtype)
                (op,) = nodes.finish("inside")
                return op.outputs[0]

            loop = tf.compat.v1.while_loop(
                lambda x: x < 100.0, body, [tf.constant(2.0)]
            )
            assert _evaluate(loop, graph) == 256.0
    finally:
        tf.compat.v1.enable_control_flow_v2()


def test_function_called_is_its_graph_and_results():
    op = _call_of(tf.function(lambda x: x * 3.0), 2.0)
    graph, outputs = _tf.function_called(op, op.get_attr("f").name)
    assert graph.building_function
    assert len(outputs) == 1
    assert outputs[0].graph is graph
    assert _tf.function_called(op, "no such function") is None


def test_copy_functions_makes_them_known_with_those_that_they_call():
    inner = tf.function(lambda x: x * 3.0)
    op = _call_of(tf.function(lambda x: inner(x) + 1.0), 2.0)
    definition = op.graph.as_graph_def()
    definition.library.Clear()
    with tf.Graph().as_default() as graph:
        _tf.copy_functions(op.graph, graph)
        (result,) = tf.graph_util.import_graph_def(
            definition, return_elements=[op.outputs[0].name], name=""
        )
        assert _evaluate(result, graph) == 7.0


def test_read_only_inputs_are_what_tensorflow_takes_them_for():
    def body(x):
        return x + variable

    with tf.Graph().as_default() as graph:
        variable = tf.Variable(1.0)
        tf.while_loop(lambda x: x < 3.0, body, [tf.constant(0.0)])
        loop = [op for op in graph.get_operations() if "While" in op.type][0]
        handle = id(variable.handle)
        assert _tf.resources_touched(loop) == ({handle}, set())
        _tf.set_read_only_inputs(loop, [])
        assert _tf.resources_touched(loop) == (set(), {handle})


def test_lower_in_place_lets_the_runtime_take_it_apart():
    @tf.function(autograph=False)
    def function(x):
        branch = tf.function(lambda x: x + 1.0).get_concrete_function(x)
        taken = tf.raw_ops.StatelessIf(
            cond=x > 0.0,
            input=[x],
            Tout=[tf.float32],
            then_branch=branch,
            else_branch=branch,
        )
        _tf.lower_in_place(taken[0].op)
        assert taken[0].op.get_attr("_lower_using_switch_merge")
        return taken

    assert float(function(tf.constant(1.0))[0]) == 2.0


def test_move_control_outputs_keeps_what_else_is_waited_for():
    with tf.Graph().as_default():
        old, new, other = tf.no_op("old"), tf.no_op("new"), tf.no_op("other")
        with tf.control_dependencies([old, other]):
            late = tf.no_op("late")
        assert _tf.control_outputs(old) == [late]
        _tf.move_control_outputs(old, new)
        assert set(late.control_inputs) == {new, other}
        assert _tf.control_outputs(old) == []


# --- Effects --------------------------------------------------------------------------


def test_which_ops_have_an_effect():
    with tf.Graph().as_default():
        variable = tf.Variable(1.0)
        ops = {
            "add": (tf.constant(1.0) + 1.0).op,
            "read": variable.read_value().op.inputs[0].op,
            "write": variable.assign_add(1.0).op,
            "print": tf.print("hello"),
            "random": tf.random.uniform([]).op.inputs[0].op,
        }
        while ops["write"].type == "Identity":
            ops["write"] = ops["write"].inputs[0].op
        ops["write"] = variable.assign_add(1.0, read_value=False)
    stateful = {name for name, op in ops.items() if _tf.is_stateful(op)}
    assert [name for name, op in ops.items() if _tf.only_reads(op)] == ["read"]
    assert "add" not in stateful
    assert {"write", "print"} <= stateful


def test_resources_touched_tells_reads_from_writes():
    with tf.Graph().as_default():
        variable = tf.Variable(1.0)
        handle = id(variable.handle)
        read = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=tf.float32).op
        write = variable.assign_add(1.0, read_value=False)
        assert _tf.resources_touched(read) == ({handle}, set())
        assert _tf.resources_touched(write) == (set(), {handle})


def test_run_independently_takes_an_op_out_of_the_order():
    @tf.function(autograph=False)
    def function():
        one = tf.print("", end="", output_stream="file:///dev/null")
        two = tf.print("", end="", output_stream="file:///dev/null")
        three = tf.print("", end="", output_stream="file:///dev/null")
        _tf.run_independently(two.graph, two)
        return one.name, two.name, three.name

    graph = function.get_concrete_function().graph
    one, two, three = (op for op in graph.get_operations() if op.type == "PrintV2")
    assert not two.control_inputs
    assert one in three.control_inputs
    assert two in graph.control_outputs  # it runs all the same
    with tf.Graph().as_default() as plain:  # nothing is ordered there
        _tf.run_independently(plain, tf.no_op())


def test_abandoned_ops_do_not_run():
    calls = []

    @tf.function(autograph=False)
    def function():
        graph = tf.compat.v1.get_default_graph()
        start = _tf.operation_count(graph)
        tf.py_function(lambda: calls.append("abandoned"), [], [])
        abandoned = graph.get_operations()[start:]
        _tf.abandon(abandoned)
        tf.py_function(lambda: calls.append("kept"), [], [])
        assert [_tf.is_abandoned(op) for op in graph.get_operations()[start:]] == [
            op in abandoned for op in graph.get_operations()[start:]
        ]
        return tf.constant(0)

    function()
    assert calls == ["kept"]


# --- Tracing and calling --------------------------------------------------------------


def _traced(build):
    return _tf.trace(build, ordering.order_as_created)


def test_trace_orders_and_runs_effects_for_which_no_result_waits():
    variable = tf.Variable(0.0)
    seen: list[int] = []

    def build():
        variable.assign_add(2.0)
        tf.py_function(lambda: seen.append(1), [], [])
        variable.assign(variable * 3.0)
        return [tf.constant(5.0), variable.read_value(), None]

    function = _traced(build)
    assert not any(tensor.op.control_inputs for tensor in function.graph.outputs[:1])
    five, value, nothing = function()
    assert (float(five), float(value), nothing) == (5.0, 6.0, None)
    assert (float(variable), seen) == (6.0, [1])


@pytest.mark.parametrize("abandoned", [True, False])
def test_trace_leaves_out_what_nothing_needs_where_ops_are_abandoned(abandoned):
    variable = tf.Variable(1.0)

    def build():
        used = tf.sin(variable)
        unused = tf.cos(used)
        tf.print(tf.exp(used), output_stream="file:///dev/null")
        variable.assign(tf.tan(used))
        if abandoned:
            _tf.abandon([variable.assign(unused, read_value=False)])
        with tf.control_dependencies([tf.abs(used)]):
            return tf.square(used)

    function = _traced(build)
    kept = [node.op for node in function.function_def.node_def]
    assert {"Sin", "Exp", "PrintV2", "Tan", "AssignVariableOp", "Square"} <= set(kept)
    assert kept.count("AssignVariableOp") == 1
    assert "Abs" in kept and ("Cos" in kept) != abandoned
    assert float(function()) == pytest.approx(0.7080734)
    count = len(function.graph.get_operations())
    _tf.leave_out_unused(function.graph)
    assert len(function.graph.get_operations()) == count


def test_prepare_call_returns_flat_results_and_pack_results_what_was_returned():
    variable = tf.Variable([1.0, 2.0])
    function = _traced(lambda: [variable + 1.0, None, tf.sparse.eye(2), [3]])
    call = _tf.prepare_call(function)
    variable.assign([2.0, 3.0])
    flat = call()
    assert [tensor.shape.rank for tensor in flat] == [1, 2, 1, 1, 0]
    dense, nothing, sparse, (three,) = _tf.pack_results(function, flat)
    assert dense.numpy().tolist() == [3.0, 4.0]
    assert (nothing, int(three)) == (None, 3)
    assert tf.sparse.to_dense(sparse).numpy().tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert _tf.prepare_call(_traced(lambda: None))() == []


def test_prepare_call_returns_resources_with_their_shapes():
    variable = tf.Variable([1.0, 2.0])
    (handle,) = _tf.prepare_call(_traced(lambda: variable.handle))()

    @tf.function
    def read():
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)

    assert read.get_concrete_function().output_shapes == [2]


def test_prepare_call_asks_for_what_is_captured_at_each_call():
    now = [tf.constant(1.0)]

    def build():
        graph = tf.compat.v1.get_default_graph()
        return graph.capture_call_time_value(lambda: now[0], tf.TensorSpec([])) + 1.0

    call = _tf.prepare_call(_traced(build))
    assert float(call()[0]) == 2.0
    now[0] = tf.constant(5.0)
    assert float(call()[0]) == 6.0


def test_prepare_call_can_be_cancelled():
    manager = _tf._cancellation.CancellationManager()
    call = _tf.prepare_call(_traced(lambda: [tf.constant(1.0)]))
    assert float(manager.get_cancelable_function(call)()[0]) == 1.0
    manager.start_cancel()
    with pytest.raises(tf.errors.CancelledError):
        manager.get_cancelable_function(call)()


@pytest.mark.parametrize("only_cpus", [False, True])
def test_prepare_call_keeps_the_settings_of_the_process(only_cpus):
    runtime = _tf._context.context()
    before = runtime.function_call_options
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=7)
    config.graph_options.rewrite_options.layout_optimizer = 1  # on
    try:
        runtime.function_call_options = _tf._context.FunctionCallOptions(None, config)
        function = _traced(lambda: [tf.constant(2.0) * tf.constant(3.0)])
        assert float(_tf.prepare_call(function, only_cpus)()[0]) == 6.0
        options = _tf._call_options(only_cpus)
    finally:
        runtime.function_call_options = before
    config = tf.compat.v1.ConfigProto.FromString(options[-1])
    assert config.inter_op_parallelism_threads == 7
    assert config.graph_options.rewrite_options.layout_optimizer == 1


def test_prepare_call_raises_what_the_function_would():
    fine = tf.Variable(False)
    function = _traced(lambda: [tf.debugging.assert_equal(fine, True, "told")][1:])
    with pytest.raises(tf.errors.InvalidArgumentError) as expected:
        function()
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        _tf.prepare_call(function)()
    assert "Detected at node" in caught.value.message
    assert __file__ in caught.value.message
    lines = [e.value.message.splitlines()[:3] for e in (expected, caught)]
    assert lines[0] == lines[1]


def test_place_of_reads_is_nowhere_where_a_read_is_recorded_or_waits():
    @tf.function
    def build():
        graph = tf.compat.v1.get_default_graph()
        place = _tf.place_of_reads()
        assert place is not None and place == _tf.place_of_reads()
        with tf.control_dependencies([tf.no_op()]):
            assert _tf.place_of_reads() is None
            with tf.control_dependencies(None):
                assert _tf.place_of_reads() == place
        with tf.GradientTape():
            assert _tf.place_of_reads() is None
        inside = tf.function(lambda: inner.append(_tf.place_of_reads()))
        inner: list[Any] = []
        inside()
        assert inner[0] is not None and inner[0] != place
        assert place[0] is graph

    build()


def test_combined_context_sums_over_one_replica_without_an_op():
    with tf.Graph().as_default() as graph:
        x = tf.constant(1.0)
        with _tf.distribution_mode(_tf.CombinedContext()):
            context = tf.distribute.get_replica_context()
            assert context.all_reduce("SUM", [x])[0] is x
            assert not tf.distribute.has_strategy()
            assert context.merge_call(lambda strategy, y: y, [x]) is x
        assert len(graph.get_operations()) == 1


# --- Gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_record_gradient_is_what_tapes_use(mode):
    def differentiate():
        x = tf.constant(3.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            with _tf.stop_recording():
                y = x * 1.0
            _tf.record_gradient("test", [y], [x], lambda d: [d * 10.0])
            z = y * 2.0
        return tape.gradient(z, x)

    call = tf.function(differentiate, autograph=False)
    gradient = (call if mode == "function" else differentiate)()
    assert float(gradient) == 20.0


def test_stop_recording_reaches_the_tapes_of_callers():
    x = tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        with _tf.stop_recording():
            y = x * 2.0
    assert tape.gradient(y, x) is None


# --- The user's code ------------------------------------------------------------------


def test_user_frames_are_of_the_user():
    def inner():
        return _tf.user_frames()  # the innermost line

    frames = inner()
    assert frames == [f for f in frames if "site-packages/tensorflow" not in f[0]]
    filename, line, name = frames[-1]
    assert filename == __file__
    assert name == "inner"
    assert linecache.getline(filename, line).strip().endswith("# the innermost line")


def test_user_frames_of_an_op_are_those_that_made_it():
    def make():
        return tf.reduce_mean([1.0, 2.0])  # the op is made here

    with tf.Graph().as_default():
        frames = _tf.user_frames(make().op)
    filename, line, name = frames[-1]
    assert (filename, name) == (__file__, "make")
    assert linecache.getline(filename, line).strip().endswith("# the op is made here")


def test_user_frames_of_an_exception_are_those_that_it_left():
    @tf.autograph.experimental.do_not_convert
    def plain():
        raise KeyError("here")  # raised here

    def converted():
        if tf.constant(1) > 0:  # in a generated file
            plain()

    with pytest.raises(KeyError) as caught:
        _tf.call_converted(converted, [])
    frames = _tf.user_frames(caught.value)
    assert {filename for filename, _, _ in frames} == {__file__}
    assert linecache.getline(__file__, frames[-1][1]).strip().endswith("# raised here")


def test_user_frames_see_through_autograph():
    seen = []

    @tf.autograph.experimental.do_not_convert
    def note():
        seen.append(_tf.user_frames()[-2:])

    @tf.function
    def function(x):
        if x > 0:  # converted, so that this line is in a generated file
            note()
        return x

    function(tf.constant(1))
    assert all(frame[0] == __file__ for frame in seen[0])


def test_stack_since_shows_what_is_deeper():
    depth = _tf.stack_depth()

    def call(function):
        return function()

    def one():
        return _tf.stack_since(depth)

    def two():
        return _tf.stack_since(depth)

    first = call(one)
    lines = [inspect.getsourcelines(function)[1] + 1 for function in (call, one)]
    assert first == tuple((__file__, line) for line in lines)
    assert first == call(one)  # however often, and from wherever above `depth`
    assert first != call(two)


def test_applying_optimizer_names_the_optimizer_at_work():
    seen = []
    variable = tf.keras.Variable(1.0)

    class Watching(tf.keras.optimizers.SGD):
        def update_step(self, *args):
            seen.append(_tf.applying_optimizer())
            return super().update_step(*args)

    Watching(0.1).apply([tf.constant(1.0)], [variable])
    assert seen == ["Watching"]
    assert _tf.applying_optimizer() is None


class _OddError(Exception):
    def __init__(self, code, *, where):
        super().__init__(code, where)


def test_call_converted_converts():
    def function(x):
        if x > 0:
            return x
        return -x

    with tf.Graph().as_default() as graph:
        result = _tf.call_converted(function, [tf.constant(-2.0)])
        assert _evaluate(result, graph) == 2.0


def test_call_converted_passes_exceptions_unchanged():
    error = _OddError(1, where="here")

    def function():
        raise error

    with tf.Graph().as_default(), pytest.raises(_OddError) as caught:
        _tf.call_converted(function, [])
    assert caught.value is error
    assert not vars(error)


@pytest.mark.parametrize("method", [False, True])
def test_function_of_opens_a_tf_function(method):
    def plain(x):
        return x

    assert _tf.function_of(plain) is plain
    if not method:
        assert _tf.function_of(tf.function(plain)) is plain
        return

    class Holder:
        @tf.function(autograph=False)
        def call(self, x):
            return x + 1

    holder = Holder()
    opened = _tf.function_of(holder.call)
    assert not isinstance(opened, tf.types.experimental.PolymorphicFunction)
    assert int(opened(1)) == 2


# --- Variables ------------------------------------------------------------------------


def test_resource_variable_passes_by_creator_scopes():
    def refuse(next_creator, **kwargs):
        raise AssertionError("asked")

    with tf.variable_creator_scope(refuse):
        variable = _tf.ResourceVariable(1.0)
    assert isinstance(variable, tf.Variable)


@pytest.mark.parametrize("graph", [False, True])
def test_handle_variable_does_all_by_its_handle(graph):
    def check(read):
        plain = _tf.ResourceVariable(2.0, name="plain")
        variable = _tf.HandleVariable(
            plain,
            trainable=True,
            synchronization=tf.VariableSynchronization.AUTO,
            aggregation=tf.VariableAggregation.NONE,
        )
        assert isinstance(variable, tf.Variable)
        assert not isinstance(variable, type(plain))
        assert tf.is_tensor(variable)
        assert (variable.shape, variable.dtype) == (plain.shape, plain.dtype)
        assert variable.name == plain.name
        return read(plain, variable)

    if not graph:

        def read(plain, variable):
            variable.assign_add(1.0)
            return plain.numpy(), (variable * 2.0).numpy()

        assert check(read) == (3.0, 6.0)
        return

    def read_in_session(plain, variable):
        with tf.compat.v1.Session() as session:
            session.run(plain.initializer)
            session.run(variable.assign_add(1.0))
            return tuple(session.run([plain.read_value(), variable * 2.0]))

    with tf.Graph().as_default():
        assert check(read_in_session) == (3.0, 6.0)


def _same_op(one, two):
    nodes = [op.node_def for op in (one, two)]
    for node in nodes:
        node.name = ""
    return nodes[0] == nodes[1]


@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
@pytest.mark.parametrize("shape", [[2], [None]])
def test_write_quickly_adds_what_the_method_adds(method, shape):
    variable = tf.Variable([1.0, 2.0], shape=tf.TensorShape(shape))

    @tf.function(autograph=False)
    def function():
        like = getattr(variable, method)([0.0, 0.0], read_value=False)
        written = _tf.write_quickly(variable, method, like.inputs[1], "named")
        assert written.name == "named"
        assert _same_op(written, like)

    function.get_concrete_function()


def test_write_quickly_leaves_what_does_not_fit():
    variable = tf.Variable([1.0, 2.0])

    @tf.function(autograph=False)
    def function():
        assert _tf.write_quickly(variable, "assign", [1.0, 2.0, 3.0], None) is None
        for method in ("assign", "assign_add"):
            with pytest.raises(ValueError, match="int64"):
                _tf.write_quickly(variable, method, tf.constant([1, 2], tf.int64), None)
        with pytest.raises(ValueError, match="[Ss]hape"):
            _tf.write_quickly(variable, "assign_add", [1.0, 2.0, 3.0], None)

    function.get_concrete_function()


def test_read_quickly_adds_what_a_read_adds():
    variable = tf.Variable([1.0, 2.0])

    @tf.function(autograph=False)
    def function():
        value = _tf.read_quickly(variable)
        assert _same_op(value.op, variable.read_value().op.inputs[0].op)
        assert value.shape == [2]
        return value

    concrete = function.get_concrete_function()
    assert concrete.graph.variables == (variable,)
    assert list(concrete()) == [1.0, 2.0]


def test_read_quickly_is_differentiated():
    variable = tf.Variable([1.0, 2.0])

    @tf.function(autograph=False)
    def backward():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(_tf.read_quickly(variable) ** 3)
            gradient = tape.gradient(loss, variable)
        return gradient, outer.gradient(gradient, variable)

    @tf.function(autograph=False)
    def forward():
        with tf.autodiff.ForwardAccumulator(variable, tf.constant([1.0, 10.0])) as acc:
            return acc.jvp(_tf.read_quickly(variable) ** 2)

    first, second = backward()
    assert list(first) == [3.0, 12.0]
    assert list(second) == [6.0, 12.0]
    assert list(forward()) == [2.0, 40.0]


def test_adds_quickly_where_a_function_is_traced_and_nobody_looks():
    variable = tf.Variable(1.0)
    trace = tf.function(lambda: found.append(_tf.adds_quickly(variable)))
    found = [_tf.adds_quickly(variable)]
    trace()
    with tf.Graph().as_default():
        found.append(_tf.adds_quickly(variable))
    tf.debugging.enable_check_numerics()
    try:
        tf.function(lambda: found.append(_tf.adds_quickly(variable)))()
    finally:
        tf.debugging.disable_check_numerics()
    assert found == [False, True, False, False]


def test_in_save_context_where_functions_are_traced_for_a_saved_model(tmp_path):
    seen = []
    module = tf.Module()
    module.function = tf.function(
        lambda: seen.append(_tf.in_save_context()), input_signature=[], autograph=False
    )
    module.function()
    tf.saved_model.save(module, str(tmp_path))
    assert seen == [False, True] and not _tf.in_save_context()


def test_lift_initial_value_evaluates_outside():
    lifted = []

    @tf.function(autograph=False)
    def function(x):
        lifted.append(_tf.lift_initial_value(tf.ones([2]) * 3.0))
        with pytest.raises(_tf.UnliftableError):
            _tf.lift_initial_value(x + 1.0)
        return x

    function(tf.constant(1.0))
    assert lifted[0].numpy().tolist() == [3.0, 3.0]


def test_lift_initial_value_reaches_the_graph_around():
    lifted = []

    @tf.function(autograph=False)
    def function():
        lifted.append(_tf.lift_initial_value(tf.constant(2.0) * 3.0))
        return tf.constant(0)

    with tf.Graph().as_default() as graph:
        function()
        assert lifted[0].graph is graph
        assert _evaluate(lifted[0], graph) == 6.0


def test_saveables_are_what_the_v1_saver_asks(tmp_path):
    class Doubling(_tf.SaveableObject):
        def __init__(self, variable):
            self._variable = variable
            spec = _tf.SaveSpec(
                variable.read_value() * 2.0, "", "key", dtype=tf.float32
            )
            super().__init__(variable, [spec], "key")

        def restore(self, restored_tensors, restored_shapes):
            return self._variable.assign(restored_tensors[0])

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.Variable(3.0)
        saver = tf.compat.v1.train.Saver([Doubling(variable)])
        session.run(variable.initializer)
        path = saver.save(session, str(tmp_path / "model"))
        saver.restore(session, path)
        assert session.run(variable) == 6.0


def test_restart_iterator_starts_over_for_functions_that_captured_it():
    dataset = tf.data.Dataset.range(3)
    iterator = iter(dataset)
    take = tf.function(lambda: next(iterator))
    assert [int(take()) for _ in range(2)] == [0, 1]
    _tf.restart_iterator(dataset, iterator)
    assert [int(take()) for _ in range(3)] == [0, 1, 2]


def test_replicated_variables_are_handle_variables():
    repl = helpers.make(2)
    with repl.context():
        variable = tf.Variable(1.0)
    assert isinstance(variable, replicator.ReplicatedVariable)
    assert isinstance(variable, _tf.HandleVariable)


def test_replace_rewires_all_consumers():
    with tf.Graph().as_default() as graph:
        one, two = tf.constant(1.0), tf.constant(2.0)
        total = tf.add(one, one) * one
        _tf.replace(one, two)
        assert not one.consumers()
        assert _evaluate(total, graph) == 8.0


def test_only_reads_tells_reads_from_writes():
    with tf.Graph().as_default():
        variable = tf.Variable(1.0)
        read = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=tf.float32)
        assert _tf.only_reads(read.op)
        assert not _tf.only_reads(variable.assign(2.0, read_value=False))


@pytest.mark.parametrize("ordered", [True, False])
def test_ordered_branches_keeps_what_nothing_fetches(ordered):
    with tf.Graph().as_default() as graph:
        variable = tf.Variable(1.0)

        def branch() -> tf.Tensor:
            variable.assign_add(1.0)
            return tf.constant(0.0)

        block = _tf.ordered_branches(graph) if ordered else contextlib.nullcontext()
        with block:
            taken = tf.cond(helpers.opaque(True), branch, lambda: tf.constant(1.0))
        with tf.compat.v1.Session() as session:
            session.run(variable.initializer)
            session.run(taken)
            assert session.run(variable) == (2.0 if ordered else 1.0)


def test_v1_optimizer_applying_is_seen_from_the_handle():
    seen = []

    class Probe(tf.compat.v1.train.GradientDescentOptimizer):
        def _resource_apply_dense(self, grad, handle):
            seen.append(_tf.v1_optimizer_applying())
            return super()._resource_apply_dense(grad, handle)

    Probe(0.1).apply_gradients([(tf.constant(1.0), tf.Variable(1.0))])
    assert seen == [True]
    assert not _tf.v1_optimizer_applying()


def test_distribution_mode_answers_for_tf_distribute():
    before = tf.distribute.get_replica_context()
    ours = tf.distribute.ReplicaContext(_tf.default_strategy(), 1)
    with tf.Graph().as_default():
        with _tf.distribution_mode(replica=ours):
            assert tf.distribute.get_replica_context() is ours
            assert not tf.distribute.has_strategy()
            with _tf.distribution_mode():
                assert tf.distribute.get_replica_context() is before
            with _tf.distribution_mode(cross_replica="a strategy"):
                assert tf.distribute.in_cross_replica_context()
                assert not tf.distribute.has_strategy()
        assert tf.distribute.get_replica_context() is before


def test_distribution_mode_is_left_by_an_error():
    with tf.Graph().as_default():
        with pytest.raises(ZeroDivisionError), _tf.distribution_mode(replica="ours"):
            raise ZeroDivisionError
        assert tf.distribute.get_replica_context() != "ours"


def test_default_strategy_is_found_in_the_scope_of_another():
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        assert tf.distribute.has_strategy()
        with _tf.distribution_mode(replica="ours"):
            assert tf.distribute.get_strategy() is _tf.default_strategy()


def test_compiled_function_finds_what_xla_compiles():
    seen = {}

    def look(name):
        graph = tf.compat.v1.get_default_graph()
        seen[name] = graph, _tf.compiled_function(graph, outer.graph)

    @tf.function(jit_compile=True, autograph=False)
    def compiled(x):
        look("compiled")
        tf.cond(x > 0, lambda: (look("branch"), x)[1], lambda: x)
        return x

    @tf.function(autograph=False)
    def plain(x):
        look("plain")
        return x

    outer = tf.__internal__.FuncGraph("outer")
    with outer.as_default():
        outer.graph = outer
        x = helpers.opaque(1.0)
        look("outer")
        plain(x)
        compiled(x)
    assert seen["outer"][1] is None
    assert seen["plain"][1] is None
    function = seen["compiled"][0]
    assert seen["compiled"][1] is function
    assert seen["branch"][0] is not function
    assert seen["branch"][1] is function


def test_capture_all_knows_what_is_captured_later():
    variables = [tf.Variable([float(k)]) for k in range(3)]
    handles = [variable.handle for variable in variables]

    @tf.function(autograph=False)
    def function():
        graph = tf.compat.v1.get_default_graph()
        first = graph.capture(handles[1])
        _tf.capture_all(graph, handles)
        count = len(graph.get_operations())
        assert graph.capture(handles[1]) is first
        values = [variable.read_value() for variable in variables]
        assert values[0].shape == [1]  # a resource says what it holds
        types = [op.type for op in graph.get_operations()[count:]]
        assert "Placeholder" not in types
        _tf.capture_all(graph, handles)
        assert len(graph.captures) == len(graph.inputs) == 3
        return tf.concat(values, 0)

    assert list(function()) == [0.0, 1.0, 2.0]
    variables[2].assign([7.0])
    assert list(function()) == [0.0, 1.0, 7.0]
    variables[0].assign([5.0])
    assert list(tf.function(lambda: function())()) == [5.0, 1.0, 7.0]


def test_capture_by_call_asks_at_each_call():
    variables = [tf.Variable(1.0), tf.Variable(2.0)]
    current = variables[0]

    @tf.function(autograph=False)
    def function():
        graph = tf.compat.v1.get_default_graph()
        handles = [
            _tf.capture_by_call(
                graph, "key", variables[0].handle, lambda: current.handle
            )
            for _ in range(2)
        ]
        assert handles[0] is handles[1]
        return tf.raw_ops.ReadVariableOp(resource=handles[0], dtype=tf.float32)

    assert float(function()) == 1.0
    current = variables[1]
    assert float(function()) == 2.0
    assert function.experimental_get_tracing_count() == 1


def test_stands_in_tells_graphs_inside_a_graph() -> None:
    found = []

    @tf.function
    def function(x: tf.Tensor) -> tf.Tensor:
        graph = tf.compat.v1.get_default_graph()
        found.append(_tf.stands_in(graph))
        with tf.init_scope():
            found.append(not _tf.stands_in(graph))

        def branch() -> tf.Tensor:
            found.append(_tf.stands_in(graph))
            found.append(not _tf.stands_in(tf.Graph()))
            return x + 1

        return tf.cond(x > 0, branch, lambda: x)

    function.get_concrete_function(tf.TensorSpec([], tf.float32))
    assert len(found) >= 4 and all(found)


@pytest.mark.parametrize("family", ["keras", "v1", "sonnet"])
def test_variable_of_slot_knows_what_each_family_makes_slots_for(family: str) -> None:
    seen = []

    def creator(next_creator: Any, **kwargs: Any) -> Any:
        seen.append(_tf.variable_of_slot())
        return next_creator(**kwargs)

    weights = tf.Variable([1.0, 2.0])
    assert _tf.variable_of_slot() is None
    with tf.variable_creator_scope(creator):
        if family == "keras":
            weights = tf.keras.Variable([1.0, 2.0])
            seen.clear()
            tf.keras.optimizers.SGD(momentum=0.5).build([weights])
        elif family == "v1":
            optimizer = tf.compat.v1.train.MomentumOptimizer(0.1, 0.5)
            optimizer.apply_gradients([(tf.ones([2]), weights)])
        else:
            snt.optimizers.Momentum(0.1, 0.5).apply([tf.ones([2])], [weights])
    assert any(primary is weights for primary in seen)
