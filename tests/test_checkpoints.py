# SPDX-License-Identifier: Apache-2.0
"""Checkpoints hold plain variables: round trips to and from plain TensorFlow."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests import helpers

K = tf.keras
SUM = tf.VariableAggregation.SUM
MEAN = tf.VariableAggregation.MEAN
ON_READ = tf.VariableSynchronization.ON_READ
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)


class Lazy(tf.Module):
    """Creates its variable at the first call."""

    weights: tf.Variable | None = None

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        if self.weights is None:
            self.weights = tf.Variable(tf.random.normal([3, 2]), name="weights")
        return x @ self.weights


class Trained(tf.Module):
    """A program's trained state: a model, its optimizer, a metric, counters.

    Args:
        num_replicas: None for plain TensorFlow.
        seed: The seed of the initial weights.
    """

    def __init__(self, num_replicas: int | None, seed: int) -> None:
        self.repl = repl = helpers.make(num_replicas) if num_replicas else None
        wrap = repl.wrap_optimizer if repl else lambda optimizer: optimizer
        with repl.context() if repl else tf.name_scope(""):
            K.utils.set_random_seed(seed)
            tf.random.set_seed(None)
            self.model = K.Sequential(
                [
                    K.Input([3]),
                    K.layers.Dense(4),
                    K.layers.BatchNormalization(),
                    K.layers.Dropout(0.5, seed=seed),
                    K.layers.Dense(1),
                ]
            )
            self.optimizer = wrap(K.optimizers.Adam(0.1 * seed))
            self.metric = K.metrics.Mean()
            self.steps = tf.Variable(0, trainable=False)
            self.total = tf.Variable(0.0, synchronization=ON_READ, aggregation=SUM)
            self.average = tf.Variable(0.0, synchronization=ON_READ, aggregation=MEAN)
            self.lookup = [tf.Variable(["a", "b"]), tf.Variable([True])]
        self.checkpoint = tf.train.Checkpoint(
            model=self.model,
            optimizer=self.optimizer,
            metric=self.metric.variables,
            seed=self.model.layers[2].seed_generator.state,  # Keras does not save it
            steps=self.steps,
            total=self.total,
            average=self.average,
            lookup=self.lookup,
        )

    def step(self) -> None:
        replica_id = self.repl.replica_id if self.repl else 0
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                self.model(X * (1.0 + replica_id), training=True) ** 2
            )
        variables = self.model.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self.metric.update_state(loss)
        self.steps.assign_add(1)
        self.total.assign_add(1.0 + replica_id)
        self.average.assign_add(1.0 + replica_id)

    def train(self, steps: int = 2) -> Trained:
        for _ in range(steps):
            self.repl.run(self.step) if self.repl else self.step()
        return self

    @property
    def variables(self) -> list[Any]:
        """The complete contents of a checkpoint."""
        exact = [*self.model.variables, *self.optimizer.variables, self.steps]
        return [*exact, *self.metric.variables, self.total, self.average, *self.lookup]

    def values(self) -> list[np.ndarray]:
        return [variable.numpy() for variable in self.variables]


def assert_same(one: Trained, other: Trained) -> None:
    for left, right in zip(one.values(), other.values(), strict=True):
        np.testing.assert_array_equal(left, right)
    if other.repl:
        different = [other.total, other.average, *other.metric.variables]
        ids = {id(v) for v in different}
        mirrored = [v for v in other.variables if id(v) not in ids]
        helpers.assert_replicas_equal(
            [v for v in mirrored if "seed" not in getattr(v, "path", "")]
        )


# Numbers of replicas before and after; None is plain TensorFlow.
ROUTES = [(2, None), (None, 2), (2, 4), (4, 2), (2, 1)]


@pytest.mark.battery(5)
@pytest.mark.parametrize(("source", "target"), ROUTES)
def test_checkpoints_go_from_any_number_of_replicas_to_any(
    source: int | None, target: int | None, tmp_path: pathlib.Path
) -> None:
    old = Trained(source, seed=1).train()
    path = old.checkpoint.save(str(tmp_path / "c"))
    new = Trained(target, seed=2).train(1)
    new.checkpoint.restore(path).assert_consumed()
    assert_same(old, new)
    new.train(1)
    assert new.steps.numpy() == 3
    for old_value, value in zip(old.values()[:2], new.values()[:2], strict=True):
        assert not np.array_equal(old_value, value)


def test_going_on_from_a_checkpoint_equals_not_having_stopped(
    tmp_path: pathlib.Path,
) -> None:
    straight = Trained(2, seed=1).train(2)
    path = straight.checkpoint.write(str(tmp_path / "c"))
    straight.train(2)
    resumed = Trained(2, seed=2)
    resumed.checkpoint.read(path)
    resumed.train(2)
    exact = [*straight.model.variables, *straight.optimizer.variables, straight.steps]
    for one, other in zip(exact, resumed.variables, strict=False):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    # ON_READ variables are already aggregated in the checkpoint.
    np.testing.assert_allclose(straight.metric.result(), resumed.metric.result())
    assert straight.total.numpy() == resumed.total.numpy()


def keys(path: str) -> list[tuple[str, list[int]]]:
    return tf.train.list_variables(path)


def test_keys_are_those_of_plain_tensorflow(tmp_path: pathlib.Path) -> None:
    paths = [
        Trained(n, seed=1).train(1).checkpoint.write(str(tmp_path / str(n)))
        for n in (None, 3)
    ]
    plain, replicated = map(keys, paths)
    assert replicated == plain
    assert "steps/.ATTRIBUTES/VARIABLE_VALUE" in dict(plain)


def test_on_read_variables_are_saved_aggregated(tmp_path: pathlib.Path) -> None:
    old = Trained(3, seed=1).train(2)
    path = old.checkpoint.write(str(tmp_path / "c"))
    reader = tf.train.load_checkpoint(path)
    assert reader.get_tensor("total/.ATTRIBUTES/VARIABLE_VALUE") == 12.0
    assert reader.get_tensor("average/.ATTRIBUTES/VARIABLE_VALUE") == 4.0
    new = Trained(2, seed=2)
    new.checkpoint.read(path)
    assert new.total.numpy() == 12.0 and new.average.numpy() == 4.0
    new.train(1)
    assert new.total.numpy() == 15.0 and new.average.numpy() == 5.5


def test_generators_stay_apart_after_a_restore(tmp_path: pathlib.Path) -> None:
    def generators(num_replicas: int | None, seed: int) -> Any:
        repl = helpers.make(num_replicas) if num_replicas else None
        with repl.context() if repl else tf.name_scope(""):
            return repl, tf.random.Generator.from_seed(seed)

    _, plain = generators(None, 5)
    path = tf.train.Checkpoint(g=plain).write(str(tmp_path / "c"))
    expected = plain.normal([4])
    draws = []
    for num_replicas in (2, 3):
        repl, generator = generators(num_replicas, 9)
        tf.train.Checkpoint(g=generator).read(path).assert_consumed()
        draws.append(
            np.stack(repl.run(lambda generator=generator: generator.normal([4])))
        )
    np.testing.assert_array_equal(draws[0], draws[1][:2])
    np.testing.assert_array_equal(draws[0][0], expected)
    assert len(np.unique(draws[1])) == 12


@pytest.mark.parametrize("where", ["context", "step"])
@pytest.mark.parametrize("kind", ["module", "keras"])
def test_a_restore_waits_for_variables_that_do_not_exist_yet(
    kind: str, where: str, tmp_path: pathlib.Path
) -> None:
    def make() -> Any:
        if kind == "module":
            return Lazy()
        return K.Sequential([K.layers.Dense(4), K.layers.Dense(2)])

    old = make()
    old(X)
    path = tf.train.Checkpoint(model=old).write(str(tmp_path / "c"))
    repl = helpers.make(2)
    new = make()
    status = tf.train.Checkpoint(model=new).read(path)
    if where == "context":
        with repl.context():
            new(X)
    else:
        repl.run(lambda: new(X))
    status.assert_consumed()
    helpers.assert_replicas_equal(new.variables)
    for old_variable, variable in zip(old.variables, new.variables, strict=True):
        inside = variable if kind == "module" else variable.value
        assert isinstance(inside, replicator.ReplicatedVariable)
        np.testing.assert_array_equal(variable.numpy(), old_variable.numpy())
    for output in repl.run(lambda: new(X)):
        np.testing.assert_allclose(output, old(X), rtol=1e-6)


def test_optimizer_slots_may_be_restored_before_they_exist(
    tmp_path: pathlib.Path,
) -> None:
    old = Trained(2, seed=1).train(2)
    path = old.checkpoint.write(str(tmp_path / "c"))
    new = Trained(2, seed=2)
    assert len(new.optimizer.variables) < len(old.optimizer.variables)
    status = new.checkpoint.read(path)
    old.train(1)
    new.train(1)
    status.assert_consumed()
    assert_same(old, new)


def test_a_manager_keeps_the_last_checkpoints(tmp_path: pathlib.Path) -> None:
    old = Trained(2, seed=1)
    manager = tf.train.CheckpointManager(
        old.checkpoint, str(tmp_path), max_to_keep=2, step_counter=old.steps
    )
    for _ in range(3):
        old.train(1)
        manager.save()
    assert [pathlib.Path(p).name for p in manager.checkpoints] == ["ckpt-2", "ckpt-3"]
    new = Trained(3, seed=2).train(1)
    tf.train.CheckpointManager(new.checkpoint, str(tmp_path), 2).restore_or_initialize()
    assert_same(old, new)


def test_asynchronous_checkpoints(tmp_path: pathlib.Path) -> None:
    old = Trained(2, seed=1).train(1)
    options = tf.train.CheckpointOptions(enable_async=True)
    path = old.checkpoint.save(str(tmp_path / "c"), options=options)
    expected = old.values()
    old.train(1)  # while it is being written
    old.checkpoint.sync()
    new = Trained(2, seed=2).train(1)
    new.checkpoint.restore(path)
    for value, saved in zip(new.values(), expected, strict=True):
        np.testing.assert_array_equal(value, saved)
    helpers.assert_replicas_equal(new.model.trainable_variables)


def test_a_shape_that_does_not_fit_is_refused(tmp_path: pathlib.Path) -> None:
    path = tf.train.Checkpoint(v=tf.Variable([1.0, 2.0])).write(str(tmp_path / "c"))
    with helpers.make(2).context():
        variable = tf.Variable([0.0], name="narrow")
    with pytest.raises(
        ValueError, match=r"shape \(2,\) does not fit variable narrow:0 of shape \(1,\)"
    ):
        tf.train.Checkpoint(v=variable).read(path)
    assert helpers.components(variable) == [[0.0], [0.0]]


# --- Keras' own files -----------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), [(2, None), (None, 2), (2, 4)])
def test_keras_weights(
    source: int | None, target: int | None, tmp_path: pathlib.Path
) -> None:
    old, new = Trained(source, seed=1).train(), Trained(target, seed=2).train(1)
    path = str(tmp_path / "m.weights.h5")
    old.model.save_weights(path)
    new.model.load_weights(path)
    for one, other in zip(old.model.weights, new.model.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    if target:
        helpers.assert_replicas_equal(new.model.weights)


@pytest.mark.parametrize(("source", "target"), [(2, None), (None, 2), (2, 4)])
def test_keras_models(
    source: int | None, target: int | None, tmp_path: pathlib.Path
) -> None:
    old = Trained(source, seed=1).train()
    old.model.compile(old.optimizer, "mse")
    path = str(tmp_path / "m.keras")
    old.model.save(path)
    repl = helpers.make(target) if target else None
    with repl.context() if repl else tf.name_scope(""):
        model = K.models.load_model(path)
        optimizer = model.optimizer
    assert type(optimizer) is K.optimizers.Adam
    loaded = [*model.weights, *optimizer.variables]
    saved = [*old.model.weights, *old.optimizer.variables]
    for one, other in zip(saved, loaded, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    np.testing.assert_allclose(model(X), old.model(X), rtol=1e-6)
    if repl:
        assert isinstance(model.weights[0].value, replicator.ReplicatedVariable)
        helpers.assert_replicas_equal([*model.weights, *optimizer.variables])
        repl.wrap_optimizer(optimizer)
