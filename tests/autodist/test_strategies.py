# SPDX-License-Identifier: Apache-2.0
"""Sessions follow strategies: the placement of variables, and their training."""

from __future__ import annotations

import contextlib
import functools
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl import logging

import replicator
from replicator import strategy
from replicator.strategy import Resources, VariableFacts
from tests.autodist import helpers, trained
from tests.autodist.test_session import scope
from tests.helpers import v1_control_flow

v1 = tf.compat.v1


@functools.cache
def _on_one_device(program, optimizer):
    make = trained.OPTIMIZERS[optimizer]
    return helpers.run(lambda _: program(make()), None, sizes=trained.SIZES)


def _check(program, optimizer, builder, num_replicas):
    make, built = trained.OPTIMIZERS[optimizer], trained.BUILDERS[builder]()
    with mock.patch.object(logging, "warning") as warning:
        actual = helpers.run(
            lambda _: program(make()), num_replicas, built, sizes=trained.SIZES
        )
    assert not [call for call in warning.call_args_list if "strategy" in call.args[0]]
    helpers.assert_equal(actual, _on_one_device(program, optimizer))


QUICK = [
    (trained.regression, "momentum", "PartitionedPS", 2),
    (trained.embedding, "adam", "UnevenPartitionedPS", 3),
    (trained.embedding, "adagrad", "columns", 2),
    (trained.condition, "adagrad", "PartitionedPS", 3),
    (trained.condition, "sgd", "Parallax", 2),
    (trained.loop, "adam", "RandomAxisPartitionAR", 2),
    (trained.regression, "adam", "proxies", 3),
]


@pytest.mark.parametrize("program, optimizer, builder, num_replicas", QUICK)
def test_programs_train_as_on_one_device(program, optimizer, builder, num_replicas):
    _check(program, optimizer, builder, num_replicas)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("builder", trained.BUILDERS)
@pytest.mark.parametrize("optimizer", trained.OPTIMIZERS)
@pytest.mark.parametrize("program", trained.PROGRAMS, ids=lambda p: p.__name__)
def test_all_of_them_do(program, optimizer, builder, num_replicas):
    if builder != "proxies" or program not in (trained.condition, trained.loop):
        _check(program, optimizer, builder, num_replicas)


@pytest.mark.parametrize("program", [trained.condition, trained.loop])
def test_so_they_do_with_the_control_flow_of_tensorflow_1(program):
    with v1_control_flow():
        make = trained.OPTIMIZERS["momentum"]
        run = functools.partial(helpers.run, lambda _: program(make()), sizes=(5, 4))
        helpers.assert_equal(run(2, strategy.PartitionedPS()), run(None))


def _session(program, optimizer, builder, num_replicas):
    """Returns a session, and the values of a step."""
    with scope(num_replicas, builder) as autodist:
        built = program(trained.OPTIMIZERS[optimizer]())
        session = autodist.create_distributed_session()
        session.run(built.fetches, built.feeds(6))
    return session


def _places(session):
    """Returns the devices of the components of all variables, by their names."""
    devices = {}
    for op, variable in session._steps._variables.made.items():
        parts = getattr(variable, "parts", None)
        named = (
            {f"{op.name}/part_{k}": part for k, part in enumerate(parts)}
            if parts
            else {op.name: variable}
        )
        for name, one in named.items():
            owned = one.placement.owner is not None
            components = one.components[:1] if owned else one.components
            specs = [tf.DeviceSpec.from_string(c.device) for c in components]
            devices[name] = [spec.device_index for spec in specs]
    return devices


_SHAPES = {"table": (10, 4), "dense": (12, 2)}


@pytest.mark.parametrize("name", [n for n in trained.BUILDERS if n != "Auto"])
def test_the_strategy_in_force_is_the_builders(name):
    builder = trained.BUILDERS[name]()
    session = _session(trained.embedding, "sgd", builder, 2)
    facts = [
        VariableFacts("table", (10, 4), "float32", True, True, 0, 160),
        VariableFacts("dense", (12, 2), "float32", True, False, 1, 96),
    ]
    if isinstance(builder, dict):
        builder = strategy.Rules(builder)
    devices = ["CPU:0", "CPU:1"]
    for node in builder.build(facts, Resources(devices)).nodes:
        actual = session.strategy.node(node.name)
        assert actual.axis == node.axis
        if node.axis is not None:
            assert list(actual.sizes) == list(
                node.extents(_SHAPES[node.name][node.axis])
            )
        for own, expected in zip(
            [actual, *actual.parts], [node, *node.parts], strict=True
        ):
            assert type(own.synchronizer) is type(expected.synchronizer)
            if isinstance(own.synchronizer, strategy.PSSynchronizer):
                assert own.synchronizer.reduction_destination.endswith(
                    expected.synchronizer.reduction_destination[-5:]
                )
                assert (
                    own.synchronizer.local_replication
                    == expected.synchronizer.local_replication
                )


def test_parts_and_their_slots_are_where_the_strategy_says():
    places = _places(_session(trained.embedding, "adam", strategy.PartitionedPS(), 2))
    table, dense = ([f"{name}/part_{k}" for k in (0, 1)] for name in ("table", "dense"))
    assert [places[name] for name in (*table, *dense)] == [[0], [1], [0], [1]]
    for k, name in ((0, "table/Adam/part_0"), (1, "table/Adam_1/part_1")):
        assert places[name] == [k]
    assert not {"table", "dense", "table/Adam", "dense/Adam"} & set(places)


def test_what_control_flow_uses_has_one_place_too():
    for program, names in ((trained.condition, ["base"]), (trained.loop, ["w"])):
        places = _places(_session(program, "momentum", strategy.PS(), 3))
        for name in names:
            assert places[name] == places[f"{name}/Momentum"] == [0]
        parts = _places(_session(program, "momentum", strategy.PartitionedPS(), 3))
        assert parts[f"{names[0]}/part_1"] == parts[f"{names[0]}/Momentum/part_1"]
        assert len(parts[f"{names[0]}/part_1"]) == 1 and names[0] not in parts


def test_a_builder_is_told_which_gradients_are_sparse():
    session = _session(trained.condition, "sgd", strategy.Parallax(), 3)
    places = _places(session)
    assert len(places["table"]) == 1 and len(places["base"]) == 3


def test_lookups_and_updates_join_no_parts():
    session = _session(trained.embedding, "adagrad", strategy.PartitionedPS(), 2)
    *_, step = session._steps._steps.values()
    stack = [getattr(one, "op", one) for one in step._fetches]
    needed = set(stack)
    while stack:
        op = stack.pop()
        sources = {*(t.op for t in op.inputs), *op.control_inputs} - needed
        needed |= sources
        stack += sources
    joined = [
        source.op.inputs[0].op.name
        for op in needed
        if op.type == "ConcatV2"
        for source in op.inputs
        if source.op.type == "ReadVariableOp"
    ]
    assert not any("table" in name for name in joined)
    applied = [op for op in needed if op.type.startswith("ResourceApplyAdagrad")]
    assert len(applied) == 2  # each part of the dense one, once for all replicas


def test_what_is_written_otherwise_is_written_part_by_part():
    def build():
        w = v1.get_variable("w", initializer=np.arange(12.0, dtype=np.float32))
        m = v1.get_variable("m", [4, 2], initializer=v1.ones_initializer())
        return {
            "assign": w.assign(w * 2),
            "rows": m.scatter_add(tf.IndexedSlices([[1.0, 2.0]] * 3, [3, 0, 3])),
            "same": m.scatter_update(tf.IndexedSlices(5.0, [1])),
            "place": m.scatter_nd_update([[2, 1]], [7.0]),
            "slice": m[1:3, 0].assign([8.0, 9.0]),
            "is": v1.is_variable_initialized(m),
            "gathered": tf.gather_nd(m, [[3, 1], [0, 0]]),
            "shape": tf.shape(m),
            "read": w[2:4],
        }

    results = []
    for place in (scope(2, strategy.PartitionedPS()), tf.Graph().as_default()):
        with place as autodist:
            v1.get_variable_scope().set_use_resource(True)
            ops = build()
            if isinstance(autodist, replicator.AutoDist):
                session = autodist.create_distributed_session()
                assert session.strategy.node("m").partitioner == "2,1"
            else:
                session = v1.Session()
                session.run(v1.global_variables_initializer())
            values = [session.run(op) for op in ops.values()]
            late = session.run(v1.trainable_variables()[1][1:] * 2.0)
            results.append([*values, late])
    helpers.assert_equal(*results)


def test_averages_over_the_examples_are_assigned_to_parts():
    with scope(3, strategy.PartitionedPS()) as autodist:
        x = v1.placeholder(tf.float32, [None, 2])
        mean = tf.Variable([0.0, 0.0])
        write = mean.assign_sub(0.5 * (mean - tf.reduce_mean(x, 0)))
        session = autodist.create_distributed_session()
        values = np.arange(14, dtype=np.float32).reshape(7, 2)
        session.run(write.op, {x: values})
        assert session.strategy.node("Variable").partitioner == "2"
        np.testing.assert_allclose(session.run(mean), 0.5 * values.mean(0))


def test_an_optimizer_of_keras_updates_parts():
    results = []
    for place in (scope(2, strategy.PartitionedPS()), tf.Graph().as_default()):
        with place as autodist:
            x = v1.placeholder(tf.float32, [None, 4])
            w = tf.Variable(tf.ones([4, 2]))
            m = tf.Variable(tf.zeros([4, 2]), trainable=False, name="m")
            loss = tf.reduce_mean((tf.matmul(x, w) - 1.0) ** 2)
            (gradient,) = tf.gradients(loss, [w])
            gradient = tf.clip_by_norm(gradient, 0.5)
            moment = m.assign(0.9 * m + gradient)
            with tf.control_dependencies([moment.op]):
                train = w.assign_sub(0.1 * tf.tanh(m.read_value()))
            if isinstance(autodist, replicator.AutoDist):
                session = autodist.create_distributed_session()
                assert _places(session)["m/part_1"] == [1]
            else:
                session = v1.Session()
                session.run(v1.global_variables_initializer())
            feed = {x: np.arange(20, dtype=np.float32).reshape(5, 4) / 20}
            values = [session.run([loss, train.op], feed)[0] for _ in range(3)]
            results.append([*values, *session.run([w, m])])
    helpers.assert_equal(*results)


def test_what_a_session_cannot_do_at_all_is_refused():
    with scope(2, strategy.PS(staleness=2)) as autodist:
        tf.Variable(1.0)
        with pytest.raises(replicator.StrategyError, match=r"(?s)staleness=2.*Fix"):
            autodist.create_distributed_session()
    with scope(2, {"misspelt": strategy.PS()}) as autodist:
        tf.Variable(1.0)
        with pytest.raises(replicator.StrategyError, match=r"(?s)misspelt.*Fix"):
            autodist.create_distributed_session()


def test_gradients_travel_as_the_strategy_says():
    bf16 = strategy.PartitionedAR(compressor="bf16")
    topk = strategy.AllReduce(compressor="ef(topk(ratio=0.5))")
    with mock.patch.object(logging, "warning") as warning:
        session = _session(trained.regression, "sgd", bf16, 2)
        sparsified = _session(trained.regression, "sgd", topk, 2)
        assert not warning.call_args_list
    assert session.strategy.node("w").parts[0].synchronizer.compressor == "bf16"
    assert "topk" in sparsified.strategy.node("w").synchronizer.compressor
    make = trained.OPTIMIZERS["sgd"]
    expected = _on_one_device(trained.regression, "sgd")
    for builder, tolerance in ((bf16, 2e-2), (topk, None)):
        actual = helpers.run(
            lambda _: trained.regression(make()), 2, builder, sizes=trained.SIZES
        )
        if tolerance is not None:
            helpers.assert_equal(actual, expected, tolerance)
        with pytest.raises(AssertionError):  # it is compressed
            helpers.assert_equal(actual, expected)


@pytest.mark.parametrize("builder", ["PS", "PartitionedPS", "AllReduce"])
def test_what_control_flow_writes_is_as_on_one_device(builder):
    results = []
    for place in (scope(2, trained.BUILDERS[builder]()), tf.Graph().as_default()):
        with place as autodist:
            double = v1.placeholder(tf.bool, [])
            w = tf.Variable(np.arange(8, dtype=np.float32).reshape(4, 2), name="w")
            write = tf.cond(
                double,
                lambda w=w: tf.identity(w.assign(w * 2.0)),
                lambda w=w: tf.identity(w.assign_add(tf.ones([4, 2]))),
            )
            if isinstance(autodist, replicator.AutoDist):
                session = autodist.create_distributed_session()
            else:
                session = v1.Session()
                session.run(v1.global_variables_initializer())
            values = [session.run(write, {double: d}) for d in (True, False, True)]
            results.append([*values, session.run(w)])
    helpers.assert_equal(*results)


def test_values_that_no_part_has_are_computed_of_the_whole():
    results = []
    for place in (scope(3, strategy.UnevenPartitionedPS()), tf.Graph().as_default()):
        with place as autodist:
            x = v1.placeholder(tf.float32, [None, 6])
            w = v1.get_variable(
                "w", initializer=np.ones([6, 2], np.float32), use_resource=True
            )
            loss = tf.reduce_mean((tf.matmul(x, w) - 1.0) ** 2)
            (gradient,) = tf.gradients(loss, [w])
            scale = tf.norm(w) / tf.norm(gradient)  # as in LARS
            whitened = tf.matmul(gradient, gradient, transpose_a=True)
            train = w.assign_sub(0.1 * scale * tf.matmul(gradient, whitened))
            if isinstance(autodist, replicator.AutoDist):
                session = autodist.create_distributed_session()
                assert len(session.strategy.node("w").parts) == 4
            else:
                session = v1.Session()
                session.run(v1.global_variables_initializer())
            feed = {x: np.arange(30, dtype=np.float32).reshape(5, 6) / 30}
            values = [session.run([loss, train.op], feed)[0] for _ in range(3)]
            results.append([*values, session.run(w)])
    helpers.assert_equal(*results)


def test_layers_of_tf_keras_are_trained_in_parts():
    results = []
    for autodist in (helpers.make(2, strategy.PartitionedPS()), None):
        with autodist.scope() if autodist else contextlib.nullcontext():
            seeds = [tf_keras.initializers.RandomUniform(seed=k) for k in range(2)]
            embedding = tf_keras.layers.Embedding(7, 4, seeds[0])
            dense = tf_keras.layers.Dense(2, kernel_initializer=seeds[1])
            layers = [embedding, tf_keras.layers.GlobalAveragePooling1D(), dense]
            model = tf_keras.Sequential(layers)
            model.build([None, 3])
            optimizer = tf_keras.optimizers.SGD(0.5, momentum=0.9)

        def step(ids, model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(ids) - 1.0) ** 2)
            own = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, own), own, strict=True))
            return loss

        run = autodist.function(step) if autodist else tf.function(step)
        losses = [run(np.arange(3 * n).reshape(n, 3) % 5) for n in (6, 5, 1)]
        results.append([*losses, *model.get_weights()])
        if autodist:
            assert len(dense.kernel.parts) == 2
    helpers.assert_equal(*results)
