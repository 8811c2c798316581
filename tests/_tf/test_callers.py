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

from replicator._tf import callers, distribute

_TRAINING = "tensorflow.python.training."
_V1, _OLDER = tf.compat.v1, tf_keras.optimizers.legacy
# What takes the handle of a variable, and what its module's name begins with.
ASKERS: dict[str, tuple[Any, str]] = {
    "read": (lambda v: v.read_value(), "tensorflow.python.ops.resource_variable_ops"),
    "gathered": (lambda v: tf.gather(v, 0), "tensorflow.python.ops.resource_variable"),
    "scatter_add": (
        lambda v: _V1.scatter_add(v, [0], [1.0]),
        "tensorflow.python.ops.state_ops",
    ),
    "v1": (
        lambda v: _V1.train.AdamOptimizer().apply_gradients([(tf.ones([2]), v)]),
        _TRAINING + "adam",
    ),
    "older": (
        lambda v: _OLDER.Adam().apply_gradients([(tf.ones([2]), v)]),
        "tf_keras.src.optimizers.legacy.adam",
    ),
    "user": (lambda v: v.handle, __name__),
    "converted": (tf.autograph.to_graph(lambda v: v.handle), __name__),
}


@pytest.mark.parametrize("how", ASKERS)
def test_asker_is_what_takes_a_handle(how: str) -> None:
    seen = []

    class Variable(type(tf.Variable(1.0))):
        @property
        def handle(self) -> Any:
            seen.append(callers.asker("handle"))
            return super().handle

    use, module = ASKERS[how]
    variable = Variable([1.0, 2.0])
    assert not any(asker.module.startswith(module) for asker in seen)
    use(variable)
    assert any(asker.module.startswith(module) for asker in seen)
    if how == "scatter_add":
        assert "scatter_add" in [asker.function for asker in seen]
    assert callers.asker("what nobody calls") == ("", "")


def test_asker_is_the_function_of_a_saver() -> None:
    seen = set()

    class Variable(type(tf.Variable(1.0))):
        @property
        def _save_slice_info(self) -> Any:
            seen.add(callers.asker("_save_slice_info"))

        @_save_slice_info.setter
        def _save_slice_info(self, info: Any) -> None:
            pass

    with tf.Graph().as_default():
        variable = Variable([1.0, 2.0])
        seen.clear()
        tf.compat.v1.train.Saver([variable])
        with pytest.raises(ValueError, match="Slices must all be slices"):
            tf.compat.v1.train.Saver({"name": [variable]})
    module = "tensorflow.python.training.saving.saveable_object_util"
    functions = {"op_list_to_dict", "saveable_objects_for_op"}
    assert seen == {(module, function) for function in functions}


def test_asker_is_who_asks_for_a_strategy() -> None:
    seen: list[str] = []

    def strategy() -> Any:
        seen.append(callers.asker("get_strategy").module)
        return distribute.default_strategy()

    def user() -> Any:
        return tf.distribute.get_strategy()

    with distribute.distribution_mode(replica="ours", strategy=strategy):
        user()
        tf.autograph.to_graph(user)()
        assert seen == [__name__] * 2
        seen.clear()
        assert not tf.distribute.has_strategy()
        tf.nn.scale_regularization_loss(1.0)
        assert seen and all(module.startswith("tensorflow.") for module in seen)
        seen.clear()
        tf.keras.losses.MeanSquaredError()(tf.zeros([1, 1]), tf.zeros([1, 1]))
        assert "keras.src.losses.loss" in seen


@pytest.mark.parametrize("keras", ["keras", "tf_keras"])
def test_asker_is_the_optimizer_that_sums_its_gradients(keras: str) -> None:
    seen = []

    class Context(tf.distribute.ReplicaContext):
        def __init__(self) -> None:
            super().__init__(distribute.default_strategy(), 0)

        @tf.autograph.experimental.do_not_convert
        def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
            seen.append(callers.asker("all_reduce").module)
            return value

    optimizer = importlib.import_module(keras).optimizers.SGD(1.0)
    with distribute.distribution_mode(Context()):
        tf.distribute.get_replica_context().all_reduce("SUM", 1.0)
        optimizer.apply_gradients([(tf.constant(1.0), tf.Variable(1.0))])
    assert seen[0] == __name__
    assert seen[1].startswith(f"{keras}.src.") and "optimizer" in seen[1]


def test_applying_optimizer_names_the_optimizer_at_work():
    seen = []
    variable = tf.keras.Variable(1.0)

    class Watching(tf.keras.optimizers.SGD):
        def update_step(self, *args):
            seen.append(callers.applying_optimizer())
            return super().update_step(*args)

    Watching(0.1).apply([tf.constant(1.0)], [variable])
    assert seen and type(seen.pop()) is Watching

    class Legacy(tf_keras.optimizers.SGD):
        def update_step(self, *args):
            seen.append(callers.applying_optimizer())
            return super().update_step(*args)

    plain = tf.Variable(1.0)
    Legacy(0.1).apply_gradients([(tf.constant(1.0), plain)])
    scaled = tf_keras.mixed_precision.LossScaleOptimizer(Legacy(0.1))
    scaled.apply_gradients([(tf.constant(1.0), plain)])
    assert [type(optimizer) for optimizer in seen] == [Legacy, Legacy]
    assert callers.applying_optimizer() is None


def test_builder_names_what_builds_itself():
    seen = []

    class Watching(tf.keras.layers.Layer):
        def build(self, shape):
            seen.append(callers.builder())

        def call(self, x):
            seen.append(callers.builder())
            return x

    class Legacy(tf_keras.layers.Layer):
        def set_weights(self, weights):
            seen.append(callers.builder())

    Watching()(tf.constant([1.0]))
    Legacy(weights=[])(tf.constant([1.0]))
    Legacy(weights=[1.0])(tf.constant([1.0]))
    assert seen == ["Watching", None, "Legacy", "Legacy"]
    assert callers.builder() is None


@pytest.mark.parametrize("family", ["keras", "legacy", "older", "v1", "sonnet"])
def test_variable_of_slot_knows_what_each_family_makes_slots_for(family: str) -> None:
    seen = []

    def creator(next_creator: Any, **kwargs: Any) -> Any:
        seen.append(callers.variable_of_slot())
        return next_creator(**kwargs)

    weights = tf.Variable([1.0, 2.0])
    assert callers.variable_of_slot() is None
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


def test_searched_op_is_what_custom_gradient_looks_for() -> None:
    names = []

    class Watched:
        """Has an `op`, as variables do."""

        trainable = True

        @property
        def op(self) -> Any:
            names.append(callers.searched_op())
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
            found.append(callers.stateful_layer(written))

    layer = Layer()
    layer.call(layer.states[0])
    layer.call(tf.Variable(1.0))
    layer.stateful = False
    layer.call(layer.states[0])
    assert found == [layer, None, None]


@pytest.mark.parametrize("keras", [tf.keras, tf_keras])
def test_metric_call_is_the_innermost_update(keras: Any) -> None:
    seen = []

    def note() -> None:
        call = callers.metric_call("update_state")
        seen.append(call and (type(call.metric).__name__, call.arguments))

    class Inner(keras.metrics.Mean):
        def update_state(self, values: Any, sample_weight: Any = None) -> None:
            note()

    class Outer(keras.metrics.Metric):
        def update_state(self, y: Any, y_pred: Any) -> None:
            note()
            Inner().update_state(y - y_pred)

        def result(self) -> float:
            return 0.0

    class NoMetric:
        def update_state(self, values: Any) -> None:
            note()

    Outer().update_state(5, y_pred=2)
    NoMetric().update_state(1)
    assert seen == [
        ("Outer", {"y": 5, "y_pred": 2}),
        ("Inner", {"values": 3, "sample_weight": None}),
        None,
    ]


@pytest.mark.parametrize("keras", [tf.keras, tf_keras])
def test_is_mean_knows_what_takes_the_means_of_values(keras: Any) -> None:
    metrics = keras.metrics
    assert callers.is_mean(metrics.Mean()) and callers.is_mean(
        metrics.MeanSquaredError()
    )
    assert not callers.is_mean(metrics.Sum()) and not callers.is_mean(5)


@pytest.mark.parametrize("keras", [tf.keras, tf_keras])
def test_keras_loop_is_the_one_that_trains(keras: Any) -> None:
    seen: list[str | None] = []

    class Watched(keras.optimizers.SGD):
        """Asks while it updates variables."""

        def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(callers.keras_loop())
            return super().apply_gradients(*args, **kwargs)

    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile(Watched(0.1), "mse", run_eagerly=True)
    x, y = np.ones([2, 2], "f"), np.ones([2, 1], "f")
    model.fit(x, y, epochs=1, verbose=0)
    model.train_on_batch(x, y)
    assert seen == ["fit", "train_on_batch"] and callers.keras_loop() is None


def test_output_gradients_of_pass_are_what_a_pass_begins_from() -> None:
    seen: list[Any] = []

    @tf.custom_gradient
    def watched(x: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            seen.append(callers.output_gradients_of_pass())
            return upstream

        return tf.identity(x), gradient

    @tf.function
    def by_tape(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            target = {"a": tf.identity(watched(x), "target"), "b": watched(x)}
        return tape.gradient(target, x, [tf.identity(x, "given"), None])

    by_tape.get_concrete_function(tf.constant(1.0))
    assert [x if x is None else x.name for x in seen[0]] == ["given:0", None]
    seen.clear()
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [])
        tf.gradients(tf.identity(watched(x), "loss"), x)
        assert seen[0] is not None and callers.output_gradients_of_pass() is None
