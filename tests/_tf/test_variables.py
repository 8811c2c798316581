# SPDX-License-Identifier: Apache-2.0
"""The creation of variables, the abilities of a handle: each private name is called."""

from __future__ import annotations

import contextlib

import pytest
import tensorflow as tf

from replicator._tf import variables
from tests import helpers
from tests._tf import shared


def test_resource_variable_passes_by_creator_scopes():
    def refuse(next_creator, **kwargs):
        raise AssertionError("asked")

    with tf.variable_creator_scope(refuse):
        variable = variables.ResourceVariable(1.0)
    assert isinstance(variable, tf.Variable)


def test_last_variable_creator_comes_behind_the_others():
    requests = []

    def creator(name):
        def ask(next_creator, **kwargs):
            requests.append(name)
            return next_creator(**kwargs)

        return ask

    with (
        tf.variable_creator_scope(creator("around")),
        variables.last_variable_creator(creator("last")),
        tf.variable_creator_scope(creator("inside")),
    ):
        variable = tf.Variable(1.0)
    assert requests == ["inside", "around", "last"]
    assert isinstance(variable, tf.Variable)


@pytest.mark.parametrize("graph", [False, True])
def test_handle_variable_does_all_by_its_handle(graph):
    def check(read):
        plain = variables.ResourceVariable(2.0, name="plain")
        variable = variables.HandleVariable(
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


def test_lift_initial_value_evaluates_outside():
    lifted = []

    @tf.function(autograph=False)
    def function(x):
        lifted.append(variables.lift_initial_value(tf.ones([2]) * 3.0))
        with pytest.raises(variables.UnliftableError):
            variables.lift_initial_value(x + 1.0)
        return x

    function(tf.constant(1.0))
    assert lifted[0].numpy().tolist() == [3.0, 3.0]


def test_lift_initial_value_takes_what_was_captured_but_no_state():
    outside, variable = tf.ones([300]), tf.Variable(tf.ones([300]))
    lifted = []

    @tf.function
    def function():
        lifted.append(variables.lift_initial_value(outside * 3.0))
        with pytest.raises(variables.UnliftableError):
            variables.lift_initial_value(variable * 3.0)

    function()
    assert list(lifted[0].numpy()) == [3.0] * 300


def test_lift_initial_value_reaches_the_graph_around():
    lifted = []

    @tf.function(autograph=False)
    def function():
        lifted.append(variables.lift_initial_value(tf.constant(2.0) * 3.0))
        return tf.constant(0)

    with tf.Graph().as_default() as graph:
        function()
        assert lifted[0].graph is graph
        assert shared.evaluate(lifted[0], graph) == 6.0


def test_who_asks_for_a_name_shares_the_variable() -> None:
    like = tf.Variable([1.0, 2.0], name="like")
    one = variables.shared_variable("shared/1", tf.float32, [2], "CPU:0", like)
    assert not variables.is_initialized(one)
    one.assign(like)
    other = variables.shared_variable("shared/1", tf.float32, [2], "CPU:0")
    assert variables.is_initialized(other)
    other.assign_add([1.0, 1.0])
    del other  # must take nothing from the remaining ones
    assert one.numpy().tolist() == [2.0, 3.0]
    assert (one.name, one.shape, one.dtype) == (like.name, [2], tf.float32)


@pytest.mark.parametrize("graph", [False, True])
def test_stand_for_gives_a_variable_another_one_s_handle(graph):
    def check():
        one, other = (variables.ResourceVariable(x, name="one") for x in (1.0, 2.0))
        facts = {
            "trainable": True,
            "synchronization": tf.VariableSynchronization.AUTO,
            "aggregation": tf.VariableAggregation.NONE,
        }
        variable = variables.HandleVariable(one, **facts)
        variables.stand_for(variable, other)
        assert variable.handle is other.handle
        return variable

    if not graph:
        assert float(check().read_value()) == 2.0
        return
    with tf.Graph().as_default(), helpers.session() as session:
        variable = check()
        session.run(tf.compat.v1.global_variables_initializer())
        session.run([variable._handle.op, variable._is_initialized_op])


@pytest.mark.parametrize("graph", [None, tf.Graph()])
def test_unfilled_is_a_handle_without_a_value(graph):
    with contextlib.nullcontext() if graph is None else graph.as_default():
        like = variables.unfilled("table", [9, 4], tf.float32)
        variable = variables.HandleVariable(like)
        assert variable.name == "table:0"
        assert variable.shape == [9, 4]
        assert variable.dtype == tf.float32
        read = tf.raw_ops.VarIsInitializedOp(resource=variable.handle)
        assert not (read if graph is None else shared.evaluate(read, graph))


def test_note_access_tells_tapes_and_functions():
    variable = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        variables.note_access(variable)
    assert tape.watched_variables() == (variable,)
    function = tf.function(lambda: variables.note_access(variable))
    concrete = function.get_concrete_function()
    assert concrete.graph.variables == (variable,)


@pytest.mark.parametrize("name", ["keras", "tf_keras"])
def test_layer_state_follows_the_public_properties(name):
    keras = pytest.importorskip(name)
    dense = keras.layers.Dense
    model = keras.Sequential([dense(1), keras.Sequential([dense(1)]), dense(1)])

    def check(parts):
        assert variables.layers_in(model) == model.layers
        expected = [layer.trainable for layer in (model, *model.layers)]
        assert variables.layer_state(model) == expected and len(expected) == 1 + parts

    check(3)
    model.layers[2].trainable = False
    check(3)
    model.trainable = False
    check(3)
    model.add(dense(1))
    check(4)
    assert variables.layer_state(dense(1)) == [True]
