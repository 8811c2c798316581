"""Every private TensorFlow name that the library uses, by itself.

A new TensorFlow that changes one of them fails here, by name.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import linecache
import os

import pytest
import tensorflow as tf

import replicator
from replicator import _tf
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


def test_in_v1_control_flow():
    with tf.Graph().as_default() as graph:
        seen = [_tf.in_v1_control_flow(graph)]

        def body(x):
            seen.append(_tf.in_v1_control_flow(graph))
            return x + 1

        with tf.compat.v1.variable_scope(""):
            tf.compat.v1.disable_control_flow_v2()
            try:
                tf.compat.v1.while_loop(lambda x: x < 3, body, [tf.constant(0)])
            finally:
                tf.compat.v1.enable_control_flow_v2()
        seen.append(_tf.in_v1_control_flow(graph))
    assert seen == [False, True, False]


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
                assert not _tf.in_v1_control_flow(graph)
                results.append(inner())
        return results

    assert [int(x) for x in outer()] == [1, 2, 1]


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
    effects = {name for name, op in ops.items() if _tf.has_effect(op)}
    stateful = {name for name, op in ops.items() if _tf.is_stateful(op)}
    assert {"write", "print"} <= effects
    assert not {"add", "read"} & effects
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
        _tf.abandon(graph.get_operations()[start:])
        tf.py_function(lambda: calls.append("kept"), [], [])
        return tf.constant(0)

    function()
    assert calls == ["kept"]


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
