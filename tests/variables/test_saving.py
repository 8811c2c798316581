# SPDX-License-Identifier: Apache-2.0
"""Variables are saved as one tensor by each kind of Saver; copies are independent."""

from __future__ import annotations

import contextlib
import copy
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf
import tf_keras

import replicator
from replicator import strategy
from replicator.variables.partitioned import PartitionedVariable
from replicator.variables.placement import Mirrored, Owned
from tests import helpers
from tests.variables import parted

INITIAL = np.arange(20, dtype=np.float32).reshape(5, 4)


def _saver(repl: Any, sharded: bool) -> tuple[Any, Any]:
    with repl.context():
        v = tf.Variable(INITIAL, name="table")
    return v, tf.compat.v1.train.Saver([v], sharded=sharded)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_parts_on_several_devices_are_saved_and_restored_as_a_whole(
    axis: int, sharded: bool, tmp_path: pathlib.Path
) -> None:
    path = str(tmp_path / "model")
    sizes = [1, INITIAL.shape[axis] - 2, 1]
    what = parted.chosen(axis, sizes, [Owned(0), Mirrored(), Owned(1)])
    with tf.Graph().as_default():
        v, saver = _saver(parted.replicas(2, parted.As(what)), sharded)
        with helpers.session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(v.assign(INITIAL * 2))
            saved = saver.save(session, path)
            session.run(v.assign(INITIAL))
            saver.restore(session, saved)
            np.testing.assert_array_equal(session.run(v), INITIAL * 2)
    with tf.Graph().as_default():
        v, saver = _saver(parted.one_device(), sharded)
        with helpers.session() as session:
            saver.restore(session, saved)
            np.testing.assert_array_equal(session.run(v), INITIAL * 2)


def test_a_saver_that_renames_parts_is_refused() -> None:
    with tf.Graph().as_default():
        v, _ = _saver(parted.replicas(2), sharded=False)
        with pytest.raises(
            replicator.ReplicatorError,
            match=r"(?s)Saver cannot rename.*table:0.*Fix: give it a list",
        ):
            tf.compat.v1.train.Saver({"other": v})


VALUE = np.arange(12, dtype=np.float32).reshape(6, 2)
_SUM = tf.VariableAggregation.SUM
_ON_READ = {"synchronization": tf.VariableSynchronization.ON_READ}
_REPLICATORS: dict[str, Callable[[], Any]] = {
    "mirrored": lambda: helpers.make(2, variables="mirrored"),
    "sharded": lambda: helpers.make(2, variables="sharded"),
    "parts": lambda: parted.replicas(2),
    "copies": lambda: helpers.make(2, strategy=strategy.PS(local_proxy_variable=True)),
    "undecided": lambda: helpers.make(2, strategy=strategy.PartitionedPS()),
}
_FACTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "facts": {"trainable": False, "aggregation": _SUM, "constraint": tf.nn.relu},
    "sum": {**_ON_READ, "aggregation": _SUM},
    "mean": {**_ON_READ, "aggregation": tf.VariableAggregation.MEAN},
}


def _placements(variable: Any) -> list[Any]:
    """Returns the sizes, placements and synchronizers of all parts."""
    return [
        (part.shape.as_list(), part.placement, part.description.synchronizer)
        for part in getattr(variable, "parts", (variable,))
    ]


def _components(variable: Any) -> list[Any]:
    parts = getattr(variable, "parts", (variable,))
    return [component for part in parts for component in part.components]


@pytest.mark.parametrize(
    ("kind", "inside"), [("plain", True), *((kind, False) for kind in _FACTS)]
)
@pytest.mark.parametrize("name", list(_REPLICATORS))
def test_a_copy_is_equal_placed_alike_and_independent(
    name: str, kind: str, inside: bool
) -> None:
    repl = _REPLICATORS[name]()
    with repl.context():
        v = tf.Variable(VALUE, name="scope/v", **_FACTS[kind])
    repl.run(lambda: v.assign_add(VALUE * (repl.replica_id + 1.0)))
    before = [component.numpy() for component in _components(v)]
    whole = v.numpy()
    with repl.context() if inside else contextlib.nullcontext():
        new = copy.deepcopy(v)
    assert (type(new), new.name, new.dtype) == (type(v), v.name, v.dtype)
    for fact in ("shape", "trainable", "constraint", "aggregation", "synchronization"):
        assert getattr(new, fact) == getattr(v, fact)
    assert _placements(new) == _placements(v)
    for component, value in zip(_components(new), before, strict=True):
        np.testing.assert_array_equal(component, value)
    new.assign(VALUE * 0)
    np.testing.assert_array_equal(v, whole)
    repl.run(lambda: v.assign(VALUE * 5))
    np.testing.assert_array_equal(new, VALUE * 0)


def test_a_copy_has_what_strategies_have_yet_to_decide_on_decided() -> None:
    repl = helpers.make(2, strategy=strategy.PartitionedPS())
    with repl.context():
        v = tf.Variable(VALUE)
    new = copy.deepcopy(v)
    repl.run(lambda: (v.assign_add(VALUE), new.assign_sub(VALUE)))
    assert isinstance(new, PartitionedVariable) and len(new.parts) == 2
    assert [part.owner for part in new.parts] == [part.owner for part in v.parts]
    np.testing.assert_array_equal(v, VALUE * 2)
    np.testing.assert_array_equal(new, VALUE * 0)


def test_a_copied_generator_draws_what_each_replica_would_have_drawn() -> None:
    repl = helpers.make(2)
    with repl.context():
        one = tf.random.Generator.from_seed(1)
    repl.run(lambda: one.normal([3]))
    two = copy.deepcopy(one)
    drawn = repl.run(lambda: one.normal([3]))
    for first, second in zip(drawn, repl.run(lambda: two.normal([3])), strict=True):
        np.testing.assert_array_equal(first, second)
    assert not np.array_equal(*drawn)


class _Module(tf.Module):
    """A linear layer of a network of plain modules."""

    def __init__(self) -> None:
        super().__init__()
        self.w = tf.Variable(VALUE[:, :1] / 10)
        self.b = tf.Variable([0.5])

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        return x @ self.w + self.b


_NETWORKS: dict[str, Callable[[], Any]] = {
    "tf.Module": _Module,
    "Sonnet": lambda: snt.nets.MLP([3, 1], w_init=snt.initializers.Constant(0.1)),
    "Keras layer": lambda: tf.keras.layers.Dense(1, kernel_initializer="ones"),
    "Keras model": lambda: tf.keras.Sequential(
        [tf.keras.layers.Dense(1, kernel_initializer="ones")]
    ),
    "tf_keras layer": lambda: tf_keras.layers.Dense(1, kernel_initializer="ones"),
    "tf_keras model": lambda: tf_keras.Sequential(
        [tf_keras.layers.Dense(1, kernel_initializer="ones")]
    ),
}


def _q_learning(network: str, repl: Any, outside: bool = False) -> list[np.ndarray]:
    """Trains a network towards its own copy, which follows it; returns all weights."""
    with contextlib.nullcontext() if repl is None else repl.context():
        online = _NETWORKS[network]()
        online(tf.zeros([1, 6]))
        target = None if outside else copy.deepcopy(online)
    target = copy.deepcopy(online) if target is None else target

    def step_fn(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((online(x) - 0.9 * target(-x)) ** 2)
        weights = online.trainable_variables
        gradients = tape.gradient(loss, weights)
        if repl is not None:
            gradients = repl.all_reduce(gradients, "mean")
        for new, gradient in zip(weights, gradients, strict=True):
            new.assign_sub(0.01 * gradient)
        for new, old in zip(weights, target.trainable_variables, strict=True):
            old.assign_add(0.5 * (new - old))

    batch = np.random.default_rng(1).standard_normal((4, 6)).astype("f")
    shards = tf.data.Dataset.from_tensor_slices(np.split(batch, 2))
    run = tf.function(step_fn)
    for _ in range(2):
        if repl is None:
            run(tf.constant(batch))
        else:
            repl.run(step_fn, lambda ctx: shards.shard(2, ctx.pipeline_id))
    return [v.numpy() for v in (*online.variables, *target.variables)]


def _check(network: str, repl: Any, outside: bool = False) -> None:
    expected = _q_learning(network, None, outside)
    actual = _q_learning(network, repl, outside)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("name", list(_REPLICATORS))
def test_target_networks_train_as_on_one_device(name: str) -> None:
    _check("tf.Module", _REPLICATORS[name]())


@pytest.mark.parametrize(
    ("network", "outside"),
    [(network, False) for network in _NETWORKS]
    # Keras makes its copies anew, from their configurations: where it is told to.
    + [(network, True) for network in ("tf.Module", "Sonnet", "tf_keras layer")],
)
def test_target_networks_of_all_libraries_train_as_on_one_device(
    network: str, outside: bool
) -> None:
    _check(network, helpers.make(2), outside)


def test_a_copied_module_and_optimizer_train_on_like_the_originals() -> None:
    repl = helpers.make(2, variables="sharded")
    with repl.context():
        network = snt.nets.MLP([3, 1])
        network(tf.zeros([1, 6]))
        optimizer = repl.wrap_optimizer(snt.optimizers.Momentum(0.1, 0.9))

    def train(network: Any, optimizer: Any) -> None:
        def step_fn() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(network(tf.ones([1, 6])) ** (repl.replica_id + 2))
            weights = network.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)

        repl.run(step_fn)

    train(network, optimizer)
    copied = copy.deepcopy((network, optimizer))
    before = [v.numpy() for v in copied[0].variables]
    train(network, optimizer)
    for v, value in zip(copied[0].variables, before, strict=True):
        np.testing.assert_array_equal(v, value)
    train(*copied)
    for one, other in zip(copied[0].variables, network.variables, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("where", ["step", "init_scope", "function", "graph"])
def test_copies_in_steps_and_graphs_are_refused(where: str) -> None:
    repl = helpers.make(2)
    with repl.context():
        v = tf.Variable(VALUE, name="weights")

    def step_fn() -> Any:
        with tf.init_scope() if where == "init_scope" else contextlib.nullcontext():
            return copy.deepcopy(v).read_value()

    with pytest.raises(
        replicator.ContextError,
        match=r"(?s)weights:0 is copied in a step.*at .*test_sav.*Fix: copy it before",
    ):
        if where == "function":
            tf.function(step_fn)()
        elif where == "graph":
            with tf.Graph().as_default():
                step_fn()
        else:
            repl.run(step_fn)
