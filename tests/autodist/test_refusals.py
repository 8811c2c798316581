# SPDX-License-Identifier: Apache-2.0
"""What AutoDist refuses: each program with its error, the line and the way out.

A program is a function under `refused`. It is given an AutoDist of two replicas, and
runs in its scope and a graph, or eagerly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import errors, strategy
from replicator.autodist import elements
from tests.autodist import helpers
from tests.autodist.helpers import scope
from tests.helpers import v1_control_flow

v1 = tf.compat.v1
X = np.arange(14.0).reshape(7, 2)
HERE = r"test_refusals\.py:\d+ in"
ARGUMENT, UNSUPPORTED = errors.ArgumentError, errors.UnsupportedError
Refused = Callable[[Any], Any]
REFUSED: list[Any] = []


def refused(
    error: type[Exception], message: str, eagerly: bool = False
) -> Callable[[Refused], Refused]:
    """Adds a program to the table.

    Args:
        error: What it raises.
        message: A pattern of the message; . is any character, and HERE this file.
        eagerly: Whether it runs without a scope and graph.
    """

    def register(program: Refused) -> Refused:
        pattern = "(?s)" + message.replace("HERE", HERE)
        row = program, error, pattern, eagerly
        REFUSED.append(pytest.param(*row, id=program.__name__.strip("_")))
        return program

    return register


def _placeholder(name: str = "x", shape: Any = (None,), dtype: Any = tf.float32) -> Any:
    return v1.placeholder(dtype, shape, name)


# --- Scopes and sessions --------------------------------------------------------------


@refused(errors.ContextError, "inside another scope.*Fix")
def scopes_in_scopes(autodist: Any) -> None:
    with autodist.scope():
        pass


@refused(errors.ContextError, "outside of a scope.*Fix")
def a_session_of_another_graph(autodist: Any) -> None:
    with tf.Graph().as_default():
        autodist.create_distributed_session()


@refused(errors.ContextError, "outside of a scope.*Fix")
def a_session_of_another_autodist(autodist: Any) -> None:
    helpers.make(2).create_distributed_session()


@refused(errors.ContextError, "asynchronous.*=async; or")
def a_session_of_asynchronous_programs(autodist: Any) -> None:
    repl = autodist.replicator
    shared = dataclasses.replace(repl._settings, clock=mock.Mock())
    with mock.patch.object(repl, "_settings", shared):
        autodist.create_distributed_session()


@refused(errors.ClusterError, "nowhere.yml.*Fix")
def a_missing_file(autodist: Any) -> None:
    replicator.AutoDist("nowhere.yml")


@refused(ARGUMENT, "'some'.*Fix")
def no_strategy(autodist: Any) -> None:
    replicator.AutoDist(["CPU:0"], "some")


@refused(ARGUMENT, "'mirrored'.*'sharded'.*Fix: pass only")
def a_strategy_and_another_option(autodist: Any) -> None:
    helpers.make(2, "mirrored", variables="sharded")


@refused(ARGUMENT, "AutoDist was given local_stat")
def no_boolean(autodist: Any) -> None:
    helpers.make(1, local_statistics=2)


@refused(ARGUMENT, "config='no'.*Fix")
def no_config(autodist: Any) -> None:
    autodist.create_distributed_session("no")


@refused(ARGUMENT, "config='no'.*Fix")
def no_config_of_a_creator(autodist: Any) -> None:
    autodist.session_creator("no").create_session()


@refused(ARGUMENT, "loss='some'.*Fix")
def another_word_for_a_loss(autodist: Any) -> None:
    autodist.create_distributed_session(loss="some")


@refused(ARGUMENT, "loss='some'.*Fix")
def another_word_for_a_loss_of_a_function(autodist: Any) -> None:
    autodist.function(loss="some")


@refused(UNSUPPORTED, "partial_run_setup.*Fix")
def parts_of_a_run(autodist: Any) -> None:
    autodist.create_distributed_session().partial_run_setup([])


@refused(UNSUPPORTED, "partial_run.*Fix")
def the_first_part_of_a_run(autodist: Any) -> None:
    autodist.create_distributed_session().partial_run([])


@refused(errors.StrategyError, "staleness=2.*Fix")
def staleness(autodist: Any) -> None:
    with scope(2, strategy.PS(staleness=2)) as stale:
        tf.Variable(1.0)
        stale.create_distributed_session()


@refused(errors.StrategyError, "misspelt.*Fix")
def a_rule_for_no_variable(autodist: Any) -> None:
    with scope(2, {"misspelt": strategy.PS()}) as ruled:
        tf.Variable(1.0)
        ruled.create_distributed_session()


# --- Fetches --------------------------------------------------------------------------


def _fetched(autodist: Any, fetch: Callable[[Any], Any]) -> None:
    """Fetches beside a variable, which is fetched by itself all the same."""
    weight = v1.get_variable("weight", initializer=1.0, use_resource=True)
    session, given = autodist.create_distributed_session(), fetch(weight)
    names = [weight, "weight/Read/ReadVariableOp:0"]
    assert session.run(names) == [1.0, 1.0]
    session.run({"weight": weight, "given": given})


@refused(
    ARGUMENT, "handle of variable weight,.*created at .*HERE.*fetched at .*HERE.*Fix"
)
def a_handle_is_fetched(autodist: Any) -> None:
    _fetched(autodist, lambda weight: weight.handle)


@refused(
    ARGUMENT, "cannot fetch weight:0: it is the handle.*Fix: fetch the variable it"
)
def a_handle_is_fetched_by_name(autodist: Any) -> None:
    _fetched(autodist, lambda weight: "weight:0")


@refused(ARGUMENT, "cannot fetch .*no_such.*Fix: fetch tensors")
def a_name_of_nothing_is_fetched(autodist: Any) -> None:
    _fetched(autodist, lambda weight: "no_such:0")


@refused(ARGUMENT, "session.run cannot fetch 3.*Fix")
def a_number_is_fetched(autodist: Any) -> None:
    _fetched(autodist, lambda weight: 3)


@refused(ARGUMENT, "session.run cannot fetch.*Fix")
def none_is_fetched(autodist: Any) -> None:
    _fetched(autodist, lambda weight: None)


@refused(ARGUMENT, "session.run cannot fetch.*Fix")
def an_op_of_another_graph_is_fetched(autodist: Any) -> None:
    _fetched(autodist, lambda weight: tf.Graph().create_op("NoOp", [], []))


# --- Feeds ----------------------------------------------------------------------------


def _graph() -> tf.Graph:
    """Returns a graph of x, [None, 2] floats, and of y, integers."""
    with tf.Graph().as_default() as graph:
        _placeholder("x", (None, 2))
        _placeholder("y", None, tf.int32)
    return graph


FEEDS: dict[str, tuple[Callable[[tf.Graph], Any], str]] = {
    "no dict": (lambda g: [("x:0", X)], "feed_dict=.*Fix: pass a dict"),
    "no tensor": (
        lambda g: {"z:0": X},
        "fed 'z:0', which is not a tensor of its gr.*Fix",
    ),
    "an op": (lambda g: {"x": X}, "fed 'x', which is not a tensor"),
    "of another graph": (
        lambda g: {_graph().get_tensor_by_name("x:0"): X},
        "which is not a tensor of its graph",
    ),
    "part of a sparse tensor": (
        lambda g: {tf.SparseTensor([[0]], [1], [1]): X},
        "for a SparseTensor.*fed at .*HERE.*Fix: feed its components",
    ),
    "another size": (
        lambda g: {"x:0": X[:, :1]},
        r"x:0, float32\(None, 2\).*of shape \(7, 1\).*created at .*HERE.*Fix:",
    ),
    "another rank": (lambda g: {"x:0": [1.0]}, r"x:0, float32.*of shape \(1,\).*Fix"),
    "another dtype": (
        lambda g: {"x:0": [["a", "b"]]},
        "x:0, float32.*could not convert.*fed at .*HERE",
    ),
    "a number that does not fit": (lambda g: {"y:0": 2**40}, "y:0, int32.*: "),
    "a handle": (
        lambda g: {"x:0": tf.Variable(1.0).handle},
        "x:0, float32.*fed at .*Fix: feed",
    ),
    "a tensor of a graph": (
        lambda g: {"x:0": g.get_tensor_by_name("x:0")},
        "a symbolic tensor, which has no value",
    ),
}


@pytest.mark.parametrize("name", FEEDS)
def test_feeds_that_do_not_fit_are_refused(name: str) -> None:
    feed, message = FEEDS[name]
    graph = _graph()
    with pytest.raises(ARGUMENT, match="(?s)" + message.replace("HERE", HERE)):
        elements.fed(graph, feed(graph))


def test_a_session_goes_on_after_a_feed_that_is_refused() -> None:
    with scope(2) as autodist:
        x = _placeholder()
        session = autodist.create_distributed_session()
        for wrong in ({x: [[1.0]]}, {"q": 1}, 3, {x: ["a"]}):
            with pytest.raises(ARGUMENT, match=r"(?s)fed|feed_dict"):
                session.run(x, wrong)
            assert session.run(x, {x: [1.0, 2.0]}).tolist() == [1, 2]


@refused(ARGUMENT, r"\b[xy]\b.*HERE .*Fix")
def a_placeholder_that_is_not_fed(autodist: Any) -> None:
    total = tf.reduce_sum(_placeholder("x")) + tf.reduce_sum(_placeholder("y"))
    session = autodist.create_distributed_session()
    assert session.run(total, {"x:0": [1.0, 2.0], "y:0": [3.0]}) == 6
    session.run(total, {"x:0": [1.0, 2.0]})


@refused(ARGUMENT, "unstack:1 is not.*created at .*HERE some_results.*fed at .*Fix")
def some_results_of_an_op_are_fed(autodist: Any) -> None:
    one, two = tf.unstack(tf.constant([[1.0, 2.0], [3.0, 4.0]]))
    total, session = one + two, autodist.create_distributed_session()
    both = {one: [5.0, 6.0], two: [1.0, 1.0]}
    assert session.run(total, both).tolist() == [6, 7]
    assert session.run(total).tolist() == [4, 6]
    assert session.run(one, {one: [5.0, 6.0]}).tolist() == [5, 6]
    session.run(total, {one: [5.0, 6.0]})


# --- Ops ------------------------------------------------------------------------------


def _run(autodist: Any, op: Any) -> None:
    """Runs something that cannot run on replicas, after something that can."""
    x = _placeholder("given")
    session = autodist.create_distributed_session()
    assert session.run(x * 2, {x: [3.0]}).tolist() == [6.0]
    session.run(op)


@refused(
    UNSUPPORTED, "VariableV2 .*holds state.*HERE a_ref.*Fix: use variables created in"
)
def a_reference_variable(autodist: Any) -> None:
    _run(autodist, tf.raw_ops.VariableV2(shape=[2], dtype=tf.float32).op)


@refused(
    UNSUPPORTED, "Switch .*of TensorFlow 1.*HERE a_co.*Fix: build it in autodist.scope"
)
def a_conditional(autodist: Any) -> None:
    switch = tf.raw_ops.Switch(data=tf.constant(1.0), pred=tf.constant(True))
    _run(autodist, switch[0].op)


@refused(
    UNSUPPORTED, "Enter .*of TensorFlow 1.*HERE a_loop.*Fix: build it in autodist.sc"
)
def a_loop(autodist: Any) -> None:
    _run(autodist, tf.raw_ops.Enter(data=tf.constant(1.0), frame_name="loop").op)


@refused(
    UNSUPPORTED, "CollectiveReduce .*communicates by itself.*HERE.*Fix: use variables"
)
def a_collective(autodist: Any) -> None:
    reduced = tf.raw_ops.CollectiveReduce(
        input=tf.constant([1.0]),
        **{"group_size": 2, "group_key": 1, "instance_key": 1},
        **{"merge_op": "Add", "final_op": "Id", "subdiv_offsets": [0]},
    )
    _run(autodist, reduced.op)


@refused(UNSUPPORTED, "(Merge|Switch) .*HERE .*Fix: build it")
def control_flow_built_outside(autodist: Any) -> None:
    with v1_control_flow(), tf.Graph().as_default():
        x = _placeholder()
        found = tf.cond(tf.size(x) > 2, lambda: x * 2.0, lambda: x)
        with (other := helpers.make(2)).scope():
            session = other.create_distributed_session()
            session.run(found, {x: [1.0, 2.0, 3.0]})


@refused(UNSUPPORTED, "AsOptional.*HERE.*next")
def optional_elements(autodist: Any) -> None:
    iterator = v1.data.make_one_shot_iterator(tf.data.Dataset.range(4).batch(2))
    has_value = iterator.get_next_as_optional().has_value()
    autodist.create_distributed_session().run(has_value)


@refused(UNSUPPORTED, "MapDataset.*variable.*HERE.*Fix")
def a_dataset_that_uses_a_variable(autodist: Any) -> None:
    w = v1.get_variable("w", initializer=np.float32([3, 4]), use_resource=True)
    data = tf.data.Dataset.range(4).map(lambda k: w[k % 2])
    iterator = v1.data.make_initializable_iterator(data)
    x, session = iterator.get_next(), autodist.create_distributed_session()
    session.run(iterator.initializer)
    session.run(x)


@refused(UNSUPPORTED, "variable outside was created outs.*HERE a_var.*Fix")
def a_variable_from_outside(autodist: Any) -> None:
    with tf.Graph().as_default(), v1.variable_scope("", use_resource=True):
        outside = v1.get_variable("outside", initializer=np.float32([1.0, 2.0]))
        with (other := helpers.make(2)).scope():
            inside = v1.get_variable("inside", initializer=3.0)
            total = tf.reduce_sum(outside) + inside
            session = other.create_distributed_session()
            assert session.run(inside) == 3
            session.run(total)


@refused(UNSUPPORTED, "variable w .*or imported.*a Saver")
def a_variable_of_an_imported_graph(autodist: Any) -> None:
    with tf.Graph().as_default(), v1.variable_scope("", use_resource=True):
        w = v1.get_variable("w", [2])
        name = (w * 2.0).name
        exported = v1.train.export_meta_graph()
    v1.train.import_meta_graph(exported)
    autodist.create_distributed_session().run(name)


# --- Functions ------------------------------------------------------------------------


@refused(ARGUMENT, "was given 3.*Fix")
def no_function(autodist: Any) -> None:
    autodist.function(3)


def _call(*arguments: Any) -> None:
    helpers.make(2).function(lambda *given: given[0])(*arguments)


@refused(ARGUMENT, r"\(7, 2\), \(5,\).*Fix", eagerly=True)
def arguments_of_two_lengths(autodist: Any) -> None:
    _call(X, np.zeros(5))


@refused(ARGUMENT, r"are \[\(0,\)\].*Fix", eagerly=True)
def no_rows(autodist: Any) -> None:
    _call(np.zeros(0))


@refused(ARGUMENT, r"with \{1\}: .*hashable.*Fix", eagerly=True)
def an_argument_without_a_hash(autodist: Any) -> None:
    _call(X, {1})


@refused(ARGUMENT, "<lambda>.*hashable.*Fix", eagerly=True)
def an_argument_in_a_dict_without_a_hash(autodist: Any) -> None:
    _call(X, {"name": {1}})


@refused(ARGUMENT, r"are \[None, .*Fix", eagerly=True)
def an_argument_of_unknown_rank(autodist: Any) -> None:
    specs = [tf.TensorSpec(None), tf.TensorSpec([3])]
    plus = helpers.make(2).function(lambda a, b: a + b)
    unknown = tf.function(plus, input_signature=specs)
    unknown(np.ones(3, "f"), np.ones(3, "f"))


@refused(
    tf.errors.InvalidArgumentError, r"are \[\(None,\), \(3,\)\].*Fix", eagerly=True
)
def rows_that_turn_out_to_differ(autodist: Any) -> None:
    specs = [tf.TensorSpec([None]), tf.TensorSpec([3])]
    plus = helpers.make(2).function(lambda a, b: a + b)
    outer = tf.function(lambda a, b: plus(a, b), input_signature=specs)
    outer(np.ones(3, "f"), np.ones(3, "f"))
    outer(np.ones(4, "f"), np.ones(3, "f"))


@pytest.mark.parametrize(
    "arguments", [(X,), (X, X), (), (tf.ones([3, 3], tf.int32),)], ids=range(4)
)
def test_arguments_that_are_not_as_declared_are_refused(arguments: Any) -> None:
    spec = [tf.TensorSpec([None, 3])]
    first = helpers.make(2).function(lambda x, *_: x, input_signature=spec)
    message = r"(?s)<lambda> (was given|cannot).*Fix"
    with pytest.raises(ARGUMENT, match=message):
        first(*arguments)


@refused(ARGUMENT, "input_signature=3.*Fix")
def no_signature(autodist: Any) -> None:
    autodist.function(lambda x: x, input_signature=3)


@refused(ARGUMENT, "of is a method of a Scale.*__weakref__", eagerly=True)
def a_method_of_an_object_without_weak_references(autodist: Any) -> None:
    class Scale:
        __slots__ = ()

        @helpers.make(2).function
        def of(self, x: Any) -> Any:
            return x

    Scale().of(X)


@pytest.mark.parametrize("program, error, message, eagerly", REFUSED)
def test_it_is_refused(program: Any, error: Any, message: str, eagerly: bool) -> None:
    if eagerly:
        with pytest.raises(error, match=message):
            program(helpers.make(2))
        return
    with scope(2) as autodist, pytest.raises(error, match=message):
        program(autodist)
