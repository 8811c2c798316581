# SPDX-License-Identifier: Apache-2.0
"""Functions that ops call: each private name is called."""

from __future__ import annotations

import re

import tensorflow as tf

from replicator._tf import callers, functions
from replicator._tf import ops as tf_ops
from tests._tf import shared


def _call_of(function, *args):
    """Returns the op that calls a function, in a separate graph."""
    with tf.Graph().as_default() as graph:
        function(*map(tf.constant, args))
        return [op for op in graph.get_operations() if "Call" in op.type][-1]


def test_called_graphs_finds_the_bodies_of_functional_ops():
    inner = tf.function(lambda x: x * 2.0)

    @tf.function(autograph=False)
    def outer(x):
        x = inner(x)
        return tf.cond(x > 0, lambda: tf.sin(x), lambda: tf.cos(x))

    graph = outer.get_concrete_function(tf.constant(1.0)).graph
    bodies = {}
    for op in graph.get_operations():
        for attribute, body in functions.called_graphs(op):
            bodies[attribute] = {op.type for op in body.get_operations()}
    assert "Mul" in bodies["f"]
    assert "Sin" in bodies["then_branch"]
    assert "Cos" in bodies["else_branch"]


def test_called_graphs_finds_what_only_a_graph_around_knows():
    with tf.Graph().as_default() as graph, tf.GradientTape() as one:
        x = tf.constant(1.0)
        with tf.GradientTape() as two:
            one.watch(x)
            two.watch(x)
            tf.cond(x > 0.0, lambda: tf.stop_gradient(tf.sin(x)), lambda: x)
    (call,) = [op for op in graph.get_operations() if functions.called_graphs(op)]
    ((_, wrapper),) = functions.called_graphs(call)
    (inside,) = [op for op in wrapper.get_operations() if "If" in op.type]
    name = inside.get_attr("then_branch").name
    assert wrapper._get_function(name) is None, "TensorFlow does better now"
    branch = dict(functions.called_graphs(inside))["then_branch"]
    assert "Sin" in {op.type for op in branch.get_operations()}
    assert functions.function_called(inside, name)[0] is branch
    assert ("then_branch", 0) in functions.functions_called(inside)


def test_called_graphs_come_in_the_order_in_which_they_are_traced():
    def turn(x):
        return tf.cond(x > 1.0, lambda: x + 1.0, lambda: x + 2.0)

    with tf.Graph().as_default() as graph:
        tf.while_loop(lambda x: x < 9.0, turn, [tf.constant(0.0)])
        loop = [op for op in graph.get_operations() if "While" in op.type][0]
    results = dict(functions.called_graphs(loop))
    assert list(results) == ["cond", "body"]
    inner = [op for op in results["body"].get_operations() if "If" in op.type][0]
    assert [name for name, _ in functions.called_graphs(inner)] == [
        "then_branch",
        "else_branch",
    ]


def test_a_function_put_together_op_by_op():
    with tf.Graph().as_default() as graph:
        like = tf.constant([1.0, 2.0])
        joint = functions.new_function_graph("mine")
        (x,) = functions.add_inputs(joint, [like], [tf.TensorShape([None])])
        assert x.graph is joint and x.shape.rank == 1 and joint.inputs == [x]
        with joint.as_default():
            log = []
            tf.py_function(lambda: log.append("left out"), [], [])
            tf_ops.abandon(joint.get_operations()[1:])
            start = len(joint.get_operations())
            tf.py_function(lambda: log.append("runs"), [], [])
            must_run = joint.get_operations()[start:]
            result = x * 2.0
        f = functions.finish_function(joint, [result], must_run)
        assert "mine" in f
        (called,) = tf.raw_ops.StatefulPartitionedCall(
            args=[like], Tout=[tf.float32], f=f
        )
        assert shared.evaluate(called[1], graph) == 4.0
    assert log == ["runs"]


def test_an_added_input_knows_of_its_resource():
    with tf.Graph().as_default():
        variable = tf.Variable([1.0, 2.0])
        joint = functions.new_function_graph("reads")
        (handle,) = functions.add_inputs(
            joint, [variable.handle], [variable.handle.shape]
        )
        with joint.as_default():
            read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
        assert read.shape == [2]


def test_function_body_has_the_results_of_the_function_only():
    op = _call_of(tf.function(lambda x: x * 2.0), 1.0)
    graph, outputs = functions.function_body(op, "f")
    assert "Mul" in {o.type for o in graph.get_operations()}
    assert len(outputs) == len(op.outputs)
    with graph.as_default():
        graph.outputs.append(outputs[0] + 1.0)  # as gradients do
    assert len(functions.function_body(op, "f")[1]) == len(op.outputs)


def test_function_body_by_position():
    with tf.Graph().as_default() as graph:
        x = tf.constant(1.0)
        tf.switch_case(tf.constant(1), [lambda: tf.sin(x), lambda: tf.cos(x)])
        case = [op for op in graph.get_operations() if "Case" in op.type][0]
    types = [
        {
            o.type
            for o in functions.function_body(case, "branches", n)[0].get_operations()
        }
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
        assert functions.functions_called(case) == [("branches", 0), ("branches", 1)]
        calls = [op for kind, op in ops.items() if kind.endswith("PartitionedCall")]
        assert [functions.functions_called(op) for op in calls] == [[]]
        new = functions.new_function_graph("other")
        with new.as_default():
            result = tf.constant(7.0)
        functions.set_function(
            case, "branches", 1, functions.finish_function(new, [result], [])
        )
        with tf.compat.v1.Session() as session:
            assert session.run(total) == 11.0


def test_function_called_is_its_graph_and_results():
    op = _call_of(tf.function(lambda x: x * 3.0), 2.0)
    graph, outputs = functions.function_called(op, op.get_attr("f").name)
    assert graph.building_function
    assert len(outputs) == 1
    assert outputs[0].graph is graph
    assert functions.function_called(op, "no such function") is None


def test_copy_functions_makes_them_known_with_those_that_they_call():
    inner = tf.function(lambda x: x * 3.0)
    op = _call_of(tf.function(lambda x: inner(x) + 1.0), 2.0)
    definition = op.graph.as_graph_def()
    definition.library.Clear()
    with tf.Graph().as_default() as graph:
        functions.copy_functions(op.graph, graph)
        (result,) = tf.graph_util.import_graph_def(
            definition, return_elements=[op.outputs[0].name], name=""
        )
        assert shared.evaluate(result, graph) == 7.0


def test_functions_are_called_and_named():
    @tf.function(autograph=False)
    def around(x):
        ops = [
            tf.cond(x > 0, lambda: x, lambda: -x).op,
            tf.switch_case(tf.cast(x, tf.int32), [lambda: x] * 3).op,
            (x + 1).op,
        ]
        while ops[0].type == "Identity":
            ops[0] = ops[0].inputs[0].op
        while ops[1].type == "Identity":
            ops[1] = ops[1].inputs[0].op
        names = [functions.names_called(op) for op in ops]
        assert [len(set(called)) for called in names] == [2, 3, 0]
        branches = functions.named(ops[1].node_def.attr["branches"])
        assert [branch.name for branch in branches] == names[1]

    around.get_concrete_function(tf.constant(1.0))


def test_capture_by_call_asks_at_each_call():
    variables = [tf.Variable(1.0), tf.Variable(2.0)]
    current = variables[0]

    @tf.function(autograph=False)
    def function():
        graph = tf.compat.v1.get_default_graph()
        handles = [
            functions.capture_by_call(
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


def test_capture_at_call_asks_at_each_call():
    current = [tf.constant([1.0])]

    @tf.function(autograph=False)
    def function():
        spec = tf.TensorSpec([None])
        return 2.0 * functions.capture_at_call(lambda: current[0], spec)

    assert function().numpy().tolist() == [2.0]
    current[0] = tf.constant([2.0, 3.0])
    assert function().numpy().tolist() == [4.0, 6.0]
    assert function.experimental_get_tracing_count() == 1


def test_compiled_are_functions_of_xla():
    results = []
    for jit_compile in (False, True):
        inner = tf.function(lambda x: x + 1, jit_compile=jit_compile)
        outer = tf.function(inner).get_concrete_function(tf.constant(1.0))
        (call,) = [op for op in outer.graph.get_operations() if "Call" in op.type]
        results.append(functions.compiled(call, call.get_attr("f").name))
    assert results == [False, True]


def test_freezing_asks_for_the_handles_of_variables():
    seen = []

    class Variable(type(tf.Variable(1.0))):
        @property
        def handle(self):
            seen.append(callers.asker("handle").module)
            return super().handle

    variable = Variable(2.0)
    function = tf.function(lambda: variable + 1.0).get_concrete_function()
    freezer = "tensorflow.python.framework.convert_to_constants"
    assert seen and freezer not in seen
    tf.lite.TFLiteConverter.from_concrete_functions([function]).convert()
    assert freezer in seen


def test_has_ops_looks_into_functions_and_at_the_graphs_around():
    @tf.function
    def sine(x):
        return tf.sin(x)

    looked: list[bool] = []

    @tf.function
    def inner(x):
        graph = tf.compat.v1.get_default_graph()
        looked.extend(
            functions.has_ops(graph, re.compile(name)) for name in ("Sin", "Cos")
        )
        return x

    @tf.function(autograph=False)
    def outer(x):
        return inner(tf.cond(x > 0, lambda: sine(x), lambda: x))

    outer(tf.constant(1.0))
    assert looked == [True, False]
