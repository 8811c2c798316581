# SPDX-License-Identifier: Apache-2.0
"""Detects which method of another library is running: each private name is called."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf
import tf_keras

from replicator import _tf


@pytest.mark.parametrize("keras", ["keras", "tf_keras"])
def test_optimizer_is_summing_sees_who_asks(keras):
    seen = []

    class Context(tf.distribute.ReplicaContext):
        def __init__(self):
            super().__init__(_tf.default_strategy(), 0)

        def all_reduce(self, reduce_op, value, options=None):
            seen.append(_tf.optimizer_is_summing())
            return value

    optimizer = importlib.import_module(keras).optimizers.SGD(1.0)
    with _tf.distribution_mode(Context()):
        tf.distribute.get_replica_context().all_reduce("SUM", 1.0)
        optimizer.apply_gradients([(tf.constant(1.0), tf.Variable(1.0))])
    assert seen[:2] == [False, True]


def test_applying_optimizer_names_the_optimizer_at_work():
    seen = []
    variable = tf.keras.Variable(1.0)

    class Watching(tf.keras.optimizers.SGD):
        def update_step(self, *args):
            seen.append(_tf.applying_optimizer())
            return super().update_step(*args)

    Watching(0.1).apply([tf.constant(1.0)], [variable])
    assert seen == ["Watching"]

    class Legacy(tf_keras.optimizers.SGD):
        def update_step(self, *args):
            seen.append(_tf.applying_optimizer())
            return super().update_step(*args)

    plain = tf.Variable(1.0)
    Legacy(0.1).apply_gradients([(tf.constant(1.0), plain)])
    scaled = tf_keras.mixed_precision.LossScaleOptimizer(Legacy(0.1))
    scaled.apply_gradients([(tf.constant(1.0), plain)])
    assert seen == ["Watching", "Legacy", "Legacy"]
    assert _tf.applying_optimizer() is None


def test_builder_names_what_builds_itself():
    seen = []

    class Watching(tf.keras.layers.Layer):
        def build(self, shape):
            seen.append(_tf.builder())

        def call(self, x):
            seen.append(_tf.builder())
            return x

    class Legacy(tf_keras.layers.Layer):
        def set_weights(self, weights):
            seen.append(_tf.builder())

    Watching()(tf.constant([1.0]))
    Legacy(weights=[])(tf.constant([1.0]))
    Legacy(weights=[1.0])(tf.constant([1.0]))
    assert seen == ["Watching", None, "Legacy", "Legacy"]
    assert _tf.builder() is None


def test_v1_optimizer_applying_is_seen_from_the_handle():
    seen = []

    class Probe(tf.compat.v1.train.GradientDescentOptimizer):
        def _resource_apply_dense(self, grad, handle):
            seen.append(_tf.v1_optimizer_applying())
            return super()._resource_apply_dense(grad, handle)

    Probe(0.1).apply_gradients([(tf.constant(1.0), tf.Variable(1.0))])
    assert seen == [True]
    assert not _tf.v1_optimizer_applying()


@pytest.mark.parametrize("family", ["keras", "legacy", "older", "v1", "sonnet"])
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
        elif family == "legacy":
            tf_keras.optimizers.SGD(momentum=0.5).build([weights])
        elif family == "older":
            optimizer = tf_keras.optimizers.legacy.SGD(momentum=0.5)
            optimizer.apply_gradients([(tf.ones([2]), weights)])
        elif family == "v1":
            optimizer = tf.compat.v1.train.MomentumOptimizer(0.1, 0.5)
            optimizer.apply_gradients([(tf.ones([2]), weights)])
        else:
            snt.optimizers.Momentum(0.1, 0.5).apply([tf.ones([2])], [weights])
    assert any(primary is weights for primary in seen)


def test_older_optimizers_ask_for_handles():
    seen = []

    class Variable(type(tf.Variable(1.0))):
        @property
        def handle(self):
            seen.append(_tf.older_optimizer_asks())
            return super().handle

    for make, older in (
        (tf_keras.optimizers.legacy.Adam, True),
        (tf_keras.optimizers.Adam, False),
        (tf.keras.optimizers.Adam, False),
    ):
        variable = Variable([1.0, 2.0])
        seen.clear()
        make().apply_gradients([(tf.ones([2]), variable)])
        assert any(seen) == older


def test_writers_are_told_from_readers_where_they_ask_for_a_handle():
    seen, functions = [], set()

    class Variable(type(tf.Variable(1.0))):
        @property
        def handle(self):
            seen.append(_tf.asked_by_writer())
            functions.add(_tf.asking_function_of_v1())
            return super().handle

    variable = Variable([1.0, 2.0])
    for use, writes in (
        (variable.read_value, False),
        (lambda: tf.gather(variable, 0), False),
        (lambda: tf.compat.v1.scatter_add(variable, [0], [1.0]), True),
        (lambda: variable.handle, True),
    ):
        seen.clear()
        use()
        assert any(seen) == writes
    assert functions == {None, "scatter_add"}


def test_savers_are_told_from_others_who_ask_for_a_slice():
    functions = set()

    class Variable(type(tf.Variable(1.0))):
        @property
        def _save_slice_info(self):
            functions.add(_tf.saver_asks())
            return None

        @_save_slice_info.setter
        def _save_slice_info(self, info):
            pass

    with tf.Graph().as_default():
        variable = Variable([1.0, 2.0])
        assert variable._get_save_slice_info() is None
        tf.compat.v1.train.Saver([variable])
        with pytest.raises(ValueError, match="Slices must all be slices"):
            tf.compat.v1.train.Saver({"name": [variable]})
    assert functions == {None, "op_list_to_dict", "saveable_objects_for_op"}


def test_strategy_asked_by_library_tells_keras_from_the_user() -> None:
    requests: list[bool] = []

    def strategy() -> Any:
        requests.append(_tf.strategy_asked_by_library())
        return _tf.default_strategy()

    def user() -> Any:
        return tf.distribute.get_strategy()

    with _tf.distribution_mode(replica="ours", strategy=strategy):
        user()
        tf.autograph.to_graph(user)()
        assert requests == [False, False]
        assert not tf.distribute.has_strategy()
        tf.nn.scale_regularization_loss(1.0)
        tf.keras.losses.MeanSquaredError()(tf.zeros([1, 1]), tf.zeros([1, 1]))
    assert len(requests) >= 5 and all(requests[2:])


def test_copied_value_asking_is_the_variable_of_a_strategy() -> None:
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        copied = tf.Variable(1.0)
    results: list[Any] = []

    class Context:
        @property
        def _replica_id(self) -> int:
            results.append(_tf.copied_value_asking())
            return 1

    with _tf.distribution_mode(replica=Context()):
        assert float(copied + 1.0) == 2.0
    assert results and all(one is copied for one in results)
    assert _tf.copied_value_asking() is None


def test_keras_loop_is_the_one_that_is_running() -> None:
    seen: list[str | None] = []

    class Noting(tf.keras.layers.Layer):
        def call(self, x: Any) -> Any:
            seen.append(_tf.keras_loop())
            return x

    model = tf.keras.Sequential([Noting()])
    model.compile(loss="mse")
    x = np.ones([2, 1], np.float32)
    for name in ("predict", "evaluate", "test_on_batch", "predict_on_batch"):
        seen.clear()
        batch = [x] if name.startswith("predict") else [x, x]
        getattr(model, name)(*batch)
        assert name in seen
    seen.clear()
    model(x)
    assert seen == [None] and _tf.keras_loop() is None


def _watching(seen):
    """Returns an identity that notes in `seen` what is being differentiated."""

    @tf.custom_gradient
    def watched(x):
        def gradient(upstream):
            seen.append(_tf.differentiated())
            return upstream

        return tf.identity(x), gradient

    return watched


def test_differentiated_tells_what_tapes_and_gradients_are_taken_of():
    seen = []
    watched = _watching(seen)

    def look(found):
        parts = found.targets, found.given
        return [[None if t is None else t.name for t in part] for part in parts]

    @tf.function
    def by_tape(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            target = {"a": tf.identity(watched(x), "target"), "b": watched(x)}
        inputs = [tf.identity(x, "given"), None]
        return tape.gradient(target, x, inputs)

    by_tape.get_concrete_function(tf.constant(1.0))
    targets, inputs = look(seen[0])
    assert targets[0] == "target:0" and inputs == ["given:0", None]
    seen.clear()
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [])
        tf.gradients(tf.identity(watched(x), "loss"), x)
        assert look(seen[0])[0] == ["loss:0"]
    assert _tf.differentiated() is None


def test_differentiations_of_one_target_are_told_apart():
    seen = []
    watched = _watching(seen)

    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [])
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            loss = watched(x) + watched(x)
        for _ in range(2):
            tape.gradient(loss, x)
            tf.gradients(loss, x)
    assert len(seen) == 8
    calls = [id(method.call) for method in seen]
    assert calls[::2] == calls[1::2] and len(set(calls)) == 4


@pytest.mark.parametrize("keras", [tf.keras, tf_keras])
def test_keras_training_names_the_loop_and_its_optimizer(keras: Any) -> None:
    seen = []

    class Watched(keras.optimizers.SGD):
        """Asks while it updates variables."""

        def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(_tf.keras_training())
            return super().apply_gradients(*args, **kwargs)

    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    optimizer = Watched(0.1)
    model.compile(optimizer, "mse", run_eagerly=True)
    x, y = np.ones([2, 2], "f"), np.ones([2, 1], "f")
    model.fit(x, y, epochs=1, verbose=0)
    model.train_on_batch(x, y)
    assert [training.optimizer for training in seen] == [optimizer] * 2
    assert [training.loop for training in seen] == ["fit", "train_on_batch"]
    assert _tf.keras_training() is None


def test_searched_op_is_what_custom_gradient_looks_for() -> None:
    names = []

    class Watched:
        """Has an `op`, as variables do."""

        trainable = True

        @property
        def op(self) -> Any:
            names.append(_tf.searched_op())
            return tf.no_op()

    with tf.Graph().as_default() as graph:
        v = tf.compat.v1.get_variable("v", [], use_resource=True)
        graph.add_to_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES, Watched())
        x = tf.constant(1.0)
        tf.gradients(tf.recompute_grad(lambda x: x * v)(x), x)
        assert names and set(names) == {"v"}
        assert Watched().op is not None and names[-1] is None


def test_stateful_layer() -> None:
    found = []

    class Layer:
        stateful = True

        def __init__(self) -> None:
            self.states = [tf.Variable(1.0)]

        def call(self, written: Any) -> None:
            found.append(_tf.stateful_layer(written))

    layer = Layer()
    layer.call(layer.states[0])
    layer.call(tf.Variable(1.0))
    layer.stateful = False
    layer.call(layer.states[0])
    assert found == [layer, None, None]
