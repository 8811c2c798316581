# SPDX-License-Identifier: Apache-2.0
"""Training continues from a checkpoint as if uninterrupted, for every optimizer.

The checkpoint is read before the first step: the optimizer has no slots by then.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf
import tf_keras

import replicator
from tests import helpers

kopt = tf.keras.optimizers
legacy = tf_keras.optimizers
v1 = tf.compat.v1.train

OPTIMIZERS = {
    "keras": lambda: kopt.Adam(0.1),
    "keras_loss_scale": lambda: kopt.LossScaleOptimizer(kopt.Adam(0.1)),
    "legacy": lambda: legacy.Adam(0.1),
    "legacy_loss_scale": lambda: tf_keras.mixed_precision.LossScaleOptimizer(
        legacy.Adam(0.1)
    ),
    "older": lambda: legacy.legacy.Adam(0.1),
    "older_loss_scale": lambda: tf_keras.mixed_precision.LossScaleOptimizer(
        legacy.legacy.Adam(0.1)
    ),
    "sonnet": lambda: snt.optimizers.Adam(0.1),
    "v1_sgd": lambda: v1.GradientDescentOptimizer(0.1),
    "v1_momentum": lambda: v1.MomentumOptimizer(0.1, 0.9),
    "v1_adam": lambda: v1.AdamOptimizer(0.1),
    "v1_adagrad": lambda: v1.AdagradOptimizer(0.1),
    "v1_rmsprop": lambda: v1.RMSPropOptimizer(0.1, momentum=0.5, centered=True),
    "v1_ftrl": lambda: v1.FtrlOptimizer(0.1),
    "v1_adadelta": lambda: v1.AdadeltaOptimizer(0.1),
}


class Trained:
    """Two variables, one with sparse gradients, trained by an optimizer."""

    def __init__(
        self,
        name: str,
        replicas: int,
        variables: str,
        weighted: bool = False,
        **options: Any,
    ) -> None:
        repl = helpers.make(replicas, variables=variables)
        with repl.context():
            self.matrix = tf.Variable(tf.ones([3, 2], tf.float64))
            self.table = tf.Variable(tf.ones([4, 3], tf.float64))
            self.seen = tf.Variable(0, dtype=tf.int64)
            optimizer = repl.wrap_optimizer(OPTIMIZERS[name](), **options)
        self.optimizer = optimizer
        self.checkpoint = tf.train.Checkpoint(
            optimizer=optimizer, matrix=self.matrix, table=self.table, seen=self.seen
        )

        def step_fn() -> None:
            # Of six examples in all, which are others in each step.
            count = 6 // replicas
            examples = tf.range(count, dtype=tf.int64) + count * repl.replica_id
            targets = tf.cast(examples + self.seen, tf.float64)
            with tf.GradientTape() as tape:
                x = tf.gather(self.table, (examples + self.seen) % 3)
                error = tf.reduce_sum(x @ self.matrix, 1) - targets
                loss = tf.reduce_mean(error**2)
            variables = [self.matrix, self.table]
            grads = tape.gradient(loss, variables)
            # By the number of examples, which weigh more in some steps.
            weight = {"weight": count * (self.seen % 3 + 1)} if weighted else {}
            if hasattr(optimizer, "apply"):
                optimizer.apply(grads, variables, **weight)
            else:
                optimizer.apply_gradients(zip(grads, variables, strict=True), **weight)
            self.seen.assign_add(1)

        self.step = repl.build(step_fn)

    def train(self, steps: int) -> Trained:
        for _ in range(steps):
            self.step()
        helpers.assert_replicas_equal([self.matrix, self.table])
        return self


@pytest.mark.battery(5)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_going_on_equals_not_having_stopped(name: str, tmp_path: pathlib.Path) -> None:
    old = Trained(name, 2, "mirrored").train(2)
    path = old.checkpoint.write(str(tmp_path / "c"))
    old.train(2)
    for replicas, variables in ((2, "mirrored"), (3, "sharded")):
        new = Trained(name, replicas, variables)
        status = new.checkpoint.read(path)
        new.train(2)
        status.assert_consumed().assert_existing_objects_matched()
        np.testing.assert_allclose(new.matrix, old.matrix, rtol=1e-10)
        np.testing.assert_allclose(new.table, old.table, rtol=1e-10)


@pytest.mark.battery(5)
@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("keras", "mean"),
        ("legacy", "weighted"),
        ("older", "mean"),
        ("sonnet", "sum"),
        ("v1_adam", "weighted"),
    ],
)
def test_sums_of_accumulation_steps_are_restored(
    name: str, op: str, tmp_path: pathlib.Path
) -> None:
    """Saved one step after an update, so that the sums hold one of three steps."""
    options: dict[str, Any] = {"accumulation_steps": 3}
    options |= {"weighted": True} if op == "weighted" else {"op": op}
    old = Trained(name, 2, "mirrored", **options).train(4)
    path = old.checkpoint.write(str(tmp_path / "c"))
    started = old.table.numpy()
    old.train(2)
    assert np.any(old.table.numpy() != started)
    # The sum over other replicas is another one.
    for replicas, variables in ((2, "sharded"), (2 if op == "sum" else 3, "mirrored")):
        new = Trained(name, replicas, variables, **options)
        status = new.checkpoint.read(path)
        new.train(2)
        status.assert_consumed().assert_existing_objects_matched()
        np.testing.assert_allclose(new.matrix, old.matrix, rtol=1e-10)
        np.testing.assert_allclose(new.table, old.table, rtol=1e-10)


def test_sums_load_into_those_that_have_begun_and_into_none(
    tmp_path: pathlib.Path,
) -> None:
    old = Trained("keras", 2, "mirrored", accumulation_steps=2).train(3)
    path = old.checkpoint.write(str(tmp_path / "c"))
    old.train(3)
    begun = Trained("keras", 3, "mirrored", accumulation_steps=2).train(4)
    begun.checkpoint.read(path).assert_consumed()
    begun.train(3)
    np.testing.assert_allclose(begun.table, old.table, rtol=1e-10)
    none = Trained("keras", 2, "mirrored")
    none.checkpoint.read(path).assert_existing_objects_matched()
    none.train(1)
    fewer = Trained("keras", 2, "mirrored", accumulation_steps=3).train(2)
    path = fewer.checkpoint.write(str(tmp_path / "f"))
    fewer.train(1)
    at_once = Trained("keras", 2, "mirrored", accumulation_steps=2)
    at_once.checkpoint.read(path)
    at_once.train(1)  # the update of three steps, as two are in the sums
    np.testing.assert_allclose(at_once.table, fewer.table, rtol=1e-10)


def test_sums_are_saved_by_the_saver_of_a_session(
    tmp_path: pathlib.Path,
) -> None:
    """Resumed by a MonitoredSession, which initializes local variables after it."""

    def train(replicas: int, steps: int) -> np.ndarray:
        repl = helpers.make(replicas)
        with tf.Graph().as_default():
            with repl.context():
                table = tf.Variable(tf.ones([4, 3], tf.float64))
                step = tf.compat.v1.train.create_global_step()
                optimizer = repl.wrap_optimizer(
                    v1.AdamOptimizer(0.1), accumulation_steps=3
                )

            def step_fn() -> tf.Tensor:
                examples = tf.range(6, dtype=tf.int64)[repl.replica_id :: replicas]
                with tf.GradientTape() as tape:
                    rows = tf.gather(table, (examples + step) % 3)
                    targets = tf.cast(examples + step, tf.float64)
                    loss = tf.reduce_mean((tf.reduce_sum(rows, 1) - targets) ** 2)
                update = optimizer.apply_gradients(
                    [(tape.gradient(loss, table), table)]
                )
                with tf.control_dependencies([update]):
                    return step.assign_add(1, read_value=False)

            fetches, read = repl.run(step_fn), table.read_value()
            with v1.MonitoredTrainingSession(
                **helpers.monitored(),
                checkpoint_dir=str(tmp_path),
                save_checkpoint_secs=None,
                save_checkpoint_steps=1,
                log_step_count_steps=None,
            ) as session:
                for _ in range(steps):
                    session.run(fetches)
                return session.run(read)

    train(2, 4)
    resumed = train(3, 2)
    for name in tmp_path.iterdir():
        name.unlink()
    np.testing.assert_allclose(resumed, train(2, 6), rtol=1e-10)


@pytest.mark.parametrize("name", ["v1_momentum", "v1_adam", "older"])
def test_slots_made_outside_the_context_are_refused(
    name: str, tmp_path: pathlib.Path
) -> None:
    """As by a checkpoint of the optimizer inside, which makes them where it is read."""
    path = Trained(name, 2, "mirrored").train(1).checkpoint.write(str(tmp_path / "c"))
    repl = helpers.make(2)
    inner = OPTIMIZERS[name]()
    with repl.context():
        matrix = tf.Variable(tf.ones([3, 2], tf.float64))
        optimizer = repl.wrap_optimizer(inner)
    tf.train.Checkpoint(optimizer=inner, matrix=matrix).read(path).expect_partial()
    with pytest.raises(
        replicator.ContextError, match="created outside the context.*once per replica"
    ):
        repl.run(
            lambda: optimizer.apply_gradients([(tf.ones([3, 2], tf.float64), matrix)])
        )
