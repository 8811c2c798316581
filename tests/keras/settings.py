# SPDX-License-Identifier: Apache-2.0
"""Programs of fit: what compile takes, loops, eager steps, and callbacks."""

from __future__ import annotations

import csv
import pathlib
import tempfile
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.keras import worlds
from tests.keras.fits import FIT, Batches, X, Y, compiled, fitted, program
from tests.keras.losses import Adding
from tests.keras.worlds import World, classifier, mlp, numbers

layers, callbacks = keras.layers, keras.callbacks
SGD = keras.optimizers.SGD


# --- What compile takes ---------------------------------------------------------------


def _reduced(reduction: str) -> dict[str, Any]:
    return {"loss": keras.losses.SparseCategoricalCrossentropy(reduction=reduction)}


_OPTIMIZERS = {
    "clipnorm": lambda: SGD(0.1, clipnorm=0.1),
    "accumulation": lambda: keras.optimizers.Adam(gradient_accumulation_steps=2),
    "averages": lambda: keras.optimizers.Adam(use_ema=True, ema_momentum=0.5),
}
_EAGER = {"run_eagerly": True}


@program(
    cases={
        "run_eagerly": _EAGER,
        "steps_per_execution": {"steps_per_execution": 2},
        **{name: {"optimizer": make} for name, make in _OPTIMIZERS.items()},
        "weighted_metrics": {"weighted_metrics": ["accuracy"]},
        "a sum": _reduced("sum"),
        "a weighted mean": _reduced("mean_with_sample_weight"),
        "jit_compile": {"jit_compile": True},
        "jit_compile, loops": {"jit_compile": True, "steps_per_execution": 3},
        "eagerly, loops": _EAGER | {"steps_per_execution": 2},
        **{
            f"eagerly, {name}": _EAGER | {"optimizer": make}
            for name, make in _OPTIMIZERS.items()
        },
        "eagerly, a scaled loss": _EAGER
        | {
            "auto_scale_loss": True,
            "optimizer": lambda: keras.optimizers.RMSprop(0.01),
        },
    }
)
def what_compile_takes(world: World, case: dict[str, Any]) -> Any:
    def make() -> keras.Model:
        own = {k: v() if k == "optimizer" else v for k, v in case.items()}
        return classifier(**own)

    weights = None if case.get("jit_compile") else np.linspace(0.5, 2.0, 23)
    return fitted(world, make, sample_weight=weights)


# --- Loops: steps_per_execution -------------------------------------------------------


@program(
    2, 3, cases={"of 6": (6, 22), "of 5, the last of one": (5, 21)}, in_gate=["of 6"]
)
def loops_over_batches(world: World, case: Any) -> Any:
    """The last batch is uneven, or too small for all replicas, inside a call."""
    batches, (size, rows) = Batches(), case
    model = world.made(lambda: classifier(steps_per_execution=3))
    fit = FIT | {"batch_size": size, "validation_data": (X[:13], Y[:13])}
    history = model.fit(X[:rows], Y[:rows], callbacks=[batches], **fit).history
    outputs = model.predict(X[:rows], size, verbose=0)
    return history, batches.logs, model.get_weights(), outputs


@program(2, 3)
def loops_over_sizes_that_change(world: World) -> Any:
    """Batches of all kinds in any order, static sizes, and other sizes later."""
    sizes = [4, 4, 1, 2, 3, 3, 3, 1, 2]

    def generator() -> Any:
        for start, size in zip(np.cumsum([0, *sizes]), sizes, strict=False):
            yield X[start : start + size], Y[start : start + size]

    model = world.made(lambda: classifier(steps_per_execution=4))
    spec = (tf.TensorSpec([None, 8]), tf.TensorSpec([None], tf.int64))
    data = tf.data.Dataset.from_generator(generator, output_signature=spec)
    results = [model.fit(data, epochs=2, verbose=0).history]
    for size in 5, 6:
        results.append(model.fit(X, Y, **(FIT | {"batch_size": size})).history)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(6, drop_remainder=True)
    results.append(model.fit(data, epochs=2, verbose=0).history)
    return [*results, model.evaluate(data, verbose=0), model.get_weights()]


class Free(keras.Model):
    """Logs values whose shape is unknown in advance."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        size = 1 + tf.cast(self.optimizer.iterations * 0, tf.int32)
        return logs | {"free": tf.ones([size]), "none": None, "number": 2.0}


@program(in_gate=True)
def loops_of_steps_that_log_anything(world: World) -> Any:
    seen: list[float] = []
    model = world.made(compiled(Free, "sgd", worlds.SPARSE, steps_per_execution=3))
    note = callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(logs["loss"])
    )
    model.fit(X, Y, callbacks=[note], **FIT)
    return seen, model.get_weights()


# --- run_eagerly, and jit_compile -----------------------------------------------------


class Seen:
    """Values inspected while a model runs eagerly."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def note(self, tensor: Any) -> None:
        """Notes a value, if there is one; a graph's tensors have none."""
        if not tf.is_symbolic_tensor(tensor):
            self.values.append(float(np.sum(tensor.numpy())))


class Looking(keras.Model):
    """Inspects values where users do: in call, train_step and the loss."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen
        self.embedding = layers.Embedding(10, 4)
        self.hidden = layers.Dense(16, activation="relu")
        self.norm = layers.BatchNormalization(synchronized=True)
        self.dropout = layers.Dropout(0.3, seed=5)
        self.outputs_ = layers.Dense(3, activation="softmax")

    def call(self, x: Any, training: bool = False) -> Any:
        codes = tf.cast(tf.clip_by_value(tf.abs(x) * 3, 0, 9), tf.int32)
        h = tf.concat([x, tf.reduce_mean(self.embedding(codes), 1)], 1)
        h = self.norm(self.hidden(h), training=training)
        self.seen.note(h)
        # The numbers only agree in each world if everything runs on one device.
        h = self.dropout(h, training=training and self.run_eagerly)
        return self.outputs_(h)

    def train_step(self, data: Any) -> Any:
        self.seen.note(data[0])
        return super().train_step(data)


@program(cases={"sharded": "sharded", "mirrored": "mirrored"}, in_gate=["sharded"])
def eagerly_and_then_as_ever(world: World, case: str) -> Any:
    seen = Seen()

    def loss(y: Any, y_pred: Any) -> Any:
        seen.note(y_pred)
        return keras.losses.sparse_categorical_crossentropy(y, y_pred)

    def make() -> keras.Model:
        model = Looking(seen)
        model.compile(SGD(0.1, 0.9), loss, metrics=["accuracy"], run_eagerly=True)
        return model

    model = world.made(make)
    fit = FIT | {"validation_data": (X[:4], Y[:4])}
    results = [model.fit(X, Y, **fit).history, model.get_weights()]
    looked = list(seen.values)
    assert len(looked) > 3 * 8
    results += [model.predict(X, 7, verbose=0), looked]
    model.run_eagerly = False
    for name in "train", "test", "predict":
        getattr(model, f"make_{name}_function")(force=True)
    return [*results, model.fit(X, Y, **fit).history, model.get_weights()]


@program(
    cases={"graphs": [0, 0], "always": [1, 1], "first": [1, 0], "later": [0, 1]},
    in_gate=["first"],
)
def gradients_that_are_accumulated(world: World, case: list[int]) -> Any:
    """By our optimizer as by Keras' own; sums go on from eager steps and to them."""

    def make() -> keras.Model:
        optimizer = SGD(0.1, gradient_accumulation_steps=None if world.repl else 2)
        if world.repl:
            optimizer = world.repl.wrap_optimizer(optimizer, accumulation_steps=2)
        table = layers.Embedding(10, 4)
        inside = [layers.Input((3,), dtype="int32"), table, layers.Flatten()]
        model = keras.Sequential([*inside, layers.Dense(3, activation="softmax")])
        model.compile(optimizer, worlds.SPARSE)
        return model

    model, results = world.made(make), []
    x = np.arange(45).reshape(15, 3) % 10  # a last batch of one example
    for eagerly in case:
        model.run_eagerly = bool(eagerly)
        model.make_train_function(force=True)
        results.append(model.fit(x, Y[:15], **FIT).history)
    return results, model.get_weights()


class Callless(keras.Model):
    """Has a step, and no call that could build it."""

    def train_step(self, data: Any) -> Any:
        return {"loss": tf.reduce_mean(data[0])}


@program(
    cases={
        "added losses": lambda: keras.Sequential([Adding(), layers.Dense(3)]),
        "moving statistics": lambda: keras.Sequential(
            [layers.Input((8,)), layers.BatchNormalization(), layers.Dense(3)]
        ),
        "no call": Callless,
    },
    in_gate=["added losses"],
)
def what_xla_could_not_compile(world: World, case: Any) -> Any:
    made = compiled(case, jit_compile=world.repl is not None)
    return world.made(made).fit(X, numbers(1, 23, 3), **FIT).history


@program(3, cases={"2": 2, "7": 7, "8": 8}, in_gate=["2"], variables="sharded")
def compiled_by_xla_later_with_rows(world: World, case: int) -> Any:
    """Owned variables get components; earlier traces are redone."""
    model = world.made(lambda: classifier())
    x, y, fit = X[:case], Y[:case], FIT | {"batch_size": 4, "epochs": 1}
    results = [model.fit(x, y, **fit).history, model.evaluate(x, y, verbose=0)]
    with world.context():
        model.compile("sgd", worlds.SPARSE, jit_compile=True)
    results += [model.fit(x, y, **fit).history, model.predict(x, verbose=0)]
    with world.context():
        model.compile("sgd", worlds.SPARSE)
    return [*results, model.fit(x, y, **fit).history]


# --- Callbacks ------------------------------------------------------------------------


def _rates() -> Any:
    rates = callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    return [rates, callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=100.0)]


def _stop() -> Any:
    options = {"patience": 1, "min_delta": 100.0, "restore_best_weights": True}
    return [callbacks.EarlyStopping("val_loss", **options)]


@program(
    cases={"batches": lambda: [Batches()], "rates": _rates, "stop early": _stop},
    in_gate=["stop early"],
)
def callbacks_that(world: World, case: Any) -> Any:
    model, used = world.made(classifier), case()
    fit = FIT | {"epochs": 4, "validation_data": (X[:9], Y[:9])}
    history = model.fit(X, Y, callbacks=used, **fit).history
    assert len(history["loss"]) < 4 or case is not _stop
    seen = getattr(used[0], "logs", [])
    return history, seen, model.optimizer.learning_rate, model.get_weights()


@program()
def a_callback_that_saves_the_best(world: World) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "best.keras")
        best = callbacks.ModelCheckpoint(path, "val_loss", save_best_only=True)
        data, model = (X[:9], Y[:9]), world.made(classifier)
        model.fit(X, Y, validation_data=data, callbacks=[best], **FIT)
        return keras.saving.load_model(path).get_weights()


class _Interrupted(Exception):
    pass


@program()
def a_backup_that_resumes(world: World) -> Any:
    def interrupt(epoch: int, logs: Any) -> None:
        if epoch == 1:
            raise _Interrupted

    stop = callbacks.LambdaCallback(on_epoch_begin=interrupt)
    straight = world.made(classifier)
    history = straight.fit(X, Y, **FIT).history
    with tempfile.TemporaryDirectory() as folder:
        backup = callbacks.BackupAndRestore(folder)
        try:
            world.made(classifier).fit(X, Y, callbacks=[stop, backup], **FIT)
        except _Interrupted:
            pass
        model, backup = world.made(classifier), callbacks.BackupAndRestore(folder)
        resumed = model.fit(X, Y, callbacks=[backup], **FIT).history
    for name, values in resumed.items():
        np.testing.assert_allclose(values, history[name][1:], 1e-5, 1e-6)
    return resumed, model.get_weights()


@program()
def a_nan_that_ends_training(world: World) -> Any:
    model, x = world.made(classifier), X.copy()
    x[8, 0] = np.nan  # on one of the replicas
    history = model.fit(x, Y, callbacks=[callbacks.TerminateOnNaN()], **FIT).history
    return len(history["loss"]), model.stop_training


@program()
def logs_on_disk(world: World) -> Any:
    scalars = {}
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        board = callbacks.TensorBoard(folder / "board", update_freq=1)
        used, data = [callbacks.CSVLogger(folder / "log.csv"), board], (X[:9], Y[:9])
        model = world.made(classifier)
        model.fit(X, Y, callbacks=used, validation_data=data, **FIT)
        with open(folder / "log.csv") as file:
            rows = [
                {k: float(v) for k, v in row.items()} for row in csv.DictReader(file)
            ]
        for path in sorted((folder / "board").rglob("events*")):
            for event in tf.compat.v1.train.summary_iterator(str(path)):
                for value in event.summary.value:
                    if value.tag.startswith(("epoch_loss", "batch_loss", "evaluation")):
                        key = (path.parent.name, value.tag, event.step)
                        scalars[str(key)] = tf.make_ndarray(value.tensor)
    assert len(scalars) > 6
    return rows, scalars


# --- Models that are compiled, frozen and loaded again --------------------------------


@program(cases={"before": True, "only behind": False})
def compile_once_more(world: World, case: bool) -> Any:
    keras.utils.set_random_seed(3)
    with world.context():
        model = mlp()
        if case:
            model.compile("sgd", "mse")
    if world.repl:
        world.repl.keras_model(model)
    with world.context():
        model.compile(SGD(0.1), "mse")
    return model.fit(X, numbers(1, 23, 3), **FIT).history


@program()
def freezing_and_compiling_again(world: World) -> Any:
    model = world.made(classifier)
    histories = [model.fit(X, Y, **FIT).history]
    model.layers[0].layers[0].trainable = False
    with world.context():
        model.compile(keras.optimizers.Adam(0.01), worlds.SPARSE)
    histories += [model.fit(X, Y, **FIT).history for _ in range(2)]
    return histories, model.get_weights()


@program()
def training_that_goes_on_from_a_file(world: World) -> Any:
    model = world.made(classifier)
    model.fit(X, Y, **FIT)
    with tempfile.TemporaryDirectory() as folder, world.context():
        path = pathlib.Path(folder, "model.keras")
        model.save(path)
        loaded = keras.saving.load_model(path)
    if world.repl:
        world.repl.keras_model(loaded)
    return loaded.fit(X, Y, **FIT).history


class Clipping(SGD):
    """Clips what it is to apply."""

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        pairs = [(tf.clip_by_norm(g, 0.01), v) for g, v in grads_and_vars]
        return super().apply_gradients(pairs)


@program(in_gate=True)
def an_optimizers_own_apply_gradients(world: World) -> Any:
    return fitted(world, lambda: classifier(optimizer=Clipping(1.0)))
