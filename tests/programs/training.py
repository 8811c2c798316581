# SPDX-License-Identifier: Apache-2.0
"""Training on shards of a batch is training on the whole batch on one device."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import sonnet as snt
import tensorflow as tf

import replicator
from replicator import Replicator
from tests import helpers
from tests.programs.layers import weights
from tests.programs.program import NO_SESSION, PROGRAMS, Step, program, rows

v1 = tf.compat.v1
L = keras.layers
STEPS = 4
BATCH = 24  # of all replicas together, which 1, 2, 3, 4 and 8 divide


def batches(*shape: int, below: int = 0) -> np.ndarray:
    """Returns the examples of all steps, [STEPS, BATCH, *shape]; below: integers."""
    rng = np.random.default_rng(3)
    if below:
        return rng.integers(0, below, [STEPS, BATCH, *shape])
    return rng.standard_normal([STEPS, BATCH, *shape]).astype(np.float32)


def shards(*data: np.ndarray) -> Callable[[replicator.InputContext], tf.data.Dataset]:
    """Returns an input_fn that gives each replica its part of each batch."""

    def input_fn(ctx: replicator.InputContext) -> tf.data.Dataset:
        size = ctx.per_replica_batch_size(BATCH)
        start = ctx.pipeline_id * size
        parts = tuple(array[:, start : start + size] for array in data)
        return tf.data.Dataset.from_tensor_slices(parts)

    return input_fn


def trained(model: Any, optimizer: Any, *batch: Any) -> tf.Tensor:
    """Updates a model's weights; returns the loss before."""
    with tf.GradientTape() as tape:
        y = model(batch[0], training=True)
        loss = tf.reduce_mean((y - 1.0) ** 2, range(y.shape.rank))
        if len(batch) > 1:
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], y)
            loss = tf.reduce_mean(each, 0)
    variables = model.trainable_variables
    gradients = tape.gradient(loss, variables)
    if isinstance(optimizer, keras.optimizers.Optimizer):  # plain: rows as we sum them
        gradients = [
            helpers.each_row_once(g) if isinstance(g, tf.IndexedSlices) else g
            for g in gradients
        ]
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return loss


def values(model: Any) -> list[tf.Tensor]:
    """Returns the values of a model's trained weights."""
    return [tf.convert_to_tensor(v) + 0 for v in model.trainable_variables]


def _with_values(model: Any) -> Any:
    """Gives a model of Keras initial values that are not random."""
    weights = model.trainable_variables if isinstance(model, keras.Model) else ()
    for n, variable in enumerate(weights):
        size = int(np.prod(variable.shape))
        scale = 0.5 / np.sqrt(size / variable.shape[-1])
        ramp = scale * np.sin(np.arange(size) + n).reshape(variable.shape)
        variable.assign(tf.cast(ramp, variable.dtype))
    return model


def training(
    make_model: Callable[[], Any],
    make_optimizer: Callable[[], Any],
    data: Sequence[np.ndarray],
    name: str,
    close: float = 1e-5,
) -> None:
    """Adds a program that trains a model, and returns its loss and its weights."""

    def expected(count: int) -> Any:
        model, optimizer = _with_values(make_model()), make_optimizer()
        step = tf.function(lambda *batch: trained(model, optimizer, *batch))
        for batch in zip(*data, strict=True):
            loss = step(*map(tf.constant, batch))
        return [loss] * count, [[value] * count for value in values(model)]

    def make(repl: Replicator) -> Step:
        model = _with_values(make_model())
        optimizer = repl.wrap_optimizer(make_optimizer())

        def step(batch: Sequence[tf.Tensor]) -> Any:
            loss = trained(model, optimizer, *batch)
            return repl.all_reduce(loss, "mean"), values(model)

        return step

    program(
        expected,
        NO_SESSION,
        inputs=shards(*data),
        steps=STEPS,
        close=close,
        replicas=(1, 2, 3, 4, 8),
        name=name,
    )(make)


# --- Layers, each example by itself ---------------------------------------------------


class _Attend(L.Layer):
    """Self-attention, as a layer with one input."""

    def build(self, shape: Any) -> None:
        self.attention = L.MultiHeadAttention(2, 2)
        self.attention.build(shape, shape)

    def call(self, x: Any) -> Any:
        return self.attention(x, x)


_ROWS, _IMAGES, _WORDS = batches(5), batches(6, 6, 2), batches(4, below=7)
LAYERS: dict[str, tuple[np.ndarray, Callable[[], list[Any]]]] = {
    "dense": (_ROWS, lambda: [L.Dense(4, activation="tanh"), L.Dense(1)]),
    "conv": (_IMAGES, lambda: [L.Conv2D(3, 3), L.MaxPooling2D(), L.Flatten()]),
    "separable": (_IMAGES, lambda: [L.SeparableConv2D(3, 3), L.GlobalMaxPooling2D()]),
    "layer_norm": (_ROWS, lambda: [L.Dense(4), L.LayerNormalization(), L.Dense(1)]),
    "group_norm": (_IMAGES, lambda: [L.GroupNormalization(2), L.Flatten(), L.Dense(1)]),
    "embedding": (_WORDS, lambda: [L.Embedding(7, 3), L.Flatten(), L.Dense(1)]),
    "lstm": (_WORDS, lambda: [L.Embedding(7, 3), L.LSTM(4), L.Dense(1)]),
    "gru": (_WORDS, lambda: [L.Embedding(7, 3), L.GRU(4, return_sequences=True)]),
    "attention": (_WORDS, lambda: [L.Embedding(7, 4), _Attend(), L.Dense(1)]),
    "float64": (
        _ROWS.astype(np.float64),
        lambda: [
            L.Dense(4, activation="tanh", dtype="float64"),
            L.Dense(1, dtype="float64"),
        ],
    ),
    "conv_float64": (
        _IMAGES.astype(np.float64),
        lambda: [L.Conv2D(3, 3, dtype="float64"), L.Flatten(dtype="float64")],
    ),
    "synchronized": (
        _ROWS,
        lambda: [
            L.Dense(8, use_bias=False),
            L.BatchNormalization(synchronized=True),
            L.Dense(1),
        ],
    ),
}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.05),
}


def _sequential(name: str) -> keras.Model:
    data, layers = LAYERS[name]
    kind = str(data.dtype)
    return keras.Sequential([keras.Input(data.shape[2:], dtype=kind), *layers()])


def _register(name: str, optimizer: str) -> None:
    # Sums have other orders on replicas, of which Adam's division magnifies the error.
    training(
        functools.partial(_sequential, name),
        OPTIMIZERS[optimizer],
        [LAYERS[name][0]],
        f"{name}_trained_by_{optimizer}",
        close=1e-3 if optimizer == "adam" else 1e-5,
    )


for _k, _name in enumerate(LAYERS):
    _register(_name, [*OPTIMIZERS][_k % len(OPTIMIZERS)])
for _name, _optimizer in itertools.product(("dense", "conv"), OPTIMIZERS):
    if f"{_name}_trained_by_{_optimizer}" not in PROGRAMS:
        _register(_name, _optimizer)


# --- Models of all kinds --------------------------------------------------------------

_START = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        start = keras.initializers.Constant(_START)
        self.dense = L.Dense(3, use_bias=False, kernel_initializer=start)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.dense(x)


class Linear(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = tf.Variable(_START)

    def __call__(self, x: Any, training: bool = False) -> Any:
        return x @ self.weights


class Lazy(tf.Module):
    """Creates its variable at the first call, as Sonnet's modules do."""

    def __call__(self, x: Any, training: bool = False) -> Any:
        if not hasattr(self, "weights"):
            self.weights = tf.Variable(_START)
        return x @ self.weights


class Compiled(Linear):
    """Its call is a tf.function of its own."""

    @tf.function
    def __call__(self, x: Any, training: bool = False) -> Any:
        return x @ self.weights


class OfSonnet(snt.Module):
    def __init__(self) -> None:
        super().__init__()
        start = snt.initializers.Constant(0.5)
        self.linear = snt.Linear(3, with_bias=False, w_init=start)

    def __call__(self, x: Any, training: bool = False) -> Any:
        return self.linear(x)


_LABELLED = [_ROWS, batches(below=3)]
for _kind in (Subclassed, Linear, Lazy, Compiled, OfSonnet):
    training(
        _kind,
        OPTIMIZERS["sgd"],
        _LABELLED,
        f"model_{_kind.__name__.lower()}",
    )


# --- Sessions -------------------------------------------------------------------------


def _plain_losses(count: int) -> list[float]:
    """The losses of each replica in the last step of SGD by hand."""
    model = Linear()
    for x, labels in zip(*_LABELLED, strict=True):
        with tf.GradientTape() as tape:
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(x))
            loss = tf.reduce_mean(each)
        model.weights.assign_sub(0.5 * tape.gradient(loss, model.weights))
    return [tf.reduce_mean(part) for part in tf.split(each, count)]


@program(_plain_losses, inputs=shards(*_LABELLED), steps=STEPS)
def optimizer_of_tensorflow_1(repl: Replicator) -> Step:
    w = tf.Variable(_START)
    optimizer = repl.wrap_optimizer(v1.train.GradientDescentOptimizer(0.5))

    def step(batch: Any) -> tf.Tensor:
        x, labels = batch
        with tf.GradientTape() as tape:
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x @ w)
            loss = tf.reduce_mean(each)
        update = optimizer.apply_gradients([(tape.gradient(loss, w), w)])
        with tf.control_dependencies([update] if update is not None else []):
            return tf.identity(loss)

    return step


@program(None, inputs=rows, steps=2)
def momentum(repl: Replicator) -> Step:
    w = weights(4, 3)
    optimizer = repl.wrap_optimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    optimizer.build([w])

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.matmul(x, w) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, w), w)])
        return {"own": loss, "mean": repl.all_reduce(loss, "mean"), "none": None}

    return step


@program(None, inputs=rows, steps=2)
def sparse_rows(repl: Replicator) -> Step:
    """Rows of an embedding, trained by a step that returns nothing."""
    table = weights(6, 2)
    optimizer = repl.wrap_optimizer(keras.optimizers.SGD(0.5))
    optimizer.build([table])

    def step(x: tf.Tensor) -> None:
        ids = tf.cast(tf.abs(x[:, 0]) * 100, tf.int32) % 6
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, ids) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    return step


@program(None, inputs=rows, steps=2)
def looked_up_rows(repl: Replicator) -> Step:
    """Lookups that TensorFlow builds by the device of the table."""
    table = weights(6, 2)
    optimizer = repl.wrap_optimizer(keras.optimizers.SGD(0.5))
    optimizer.build([table])

    def step(x: tf.Tensor) -> Any:
        ids = tf.sparse.from_dense(tf.cast(tf.abs(x) * 100, tf.int64) % 5 + 1)
        with tf.GradientTape() as tape:
            found = tf.nn.embedding_lookup_sparse(table, ids, None, combiner="sum")
            loss = tf.reduce_sum(found**2)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        with v1.colocate_with(table):
            norms = tf.norm(table, axis=1)
        with tf.device(table.device):
            return found, norms, tf.nn.embedding_lookup(table, ids.values, max_norm=1.0)

    return step


# --- Steps in a loop ------------------------------------------------------------------


def _looped(count: int, optimizer: str) -> Any:
    model, plain = Linear(), OPTIMIZERS[optimizer]()
    losses = [trained(model, plain, x) for x in _ROWS]
    return [losses] * count, [model.weights] * count


def _in_a_loop(optimizer: str, repl: Replicator) -> Step:
    model = Linear()
    wrapped = repl.wrap_optimizer(OPTIMIZERS[optimizer]())
    wrapped.build([model.weights])

    def step(x: tf.Tensor) -> Any:
        def body(n: tf.Tensor, losses: Any) -> tuple[tf.Tensor, Any]:
            loss = trained(model, wrapped, x[n])
            return n + 1, losses.write(n, repl.all_reduce(loss, "mean"))

        losses = tf.TensorArray(tf.float32, STEPS)
        losses = tf.while_loop(lambda n, _: n < STEPS, body, [tf.constant(0), losses])[
            1
        ]
        return losses.stack(), model.weights.read_value()

    return step


def _all_steps(ctx: replicator.InputContext) -> tf.Tensor:
    size = ctx.per_replica_batch_size(BATCH)
    return tf.constant(_ROWS[:, ctx.replica_id * size :][:, :size])


for _optimizer in OPTIMIZERS:
    program(
        functools.partial(_looped, optimizer=_optimizer),
        inputs=_all_steps,
        close=1e-3 if _optimizer == "adam" else 1e-5,
        name=f"steps_in_a_loop_by_{_optimizer}",
    )(functools.partial(_in_a_loop, _optimizer))


# --- Kinds of step_fn -----------------------------------------------------------------


class Trainer:
    """Has a bound method, and is callable itself."""

    def __init__(self, repl: Replicator) -> None:
        self.repl, self.w = repl, tf.Variable(0.0)
        self.optimizer = repl.wrap_optimizer(keras.optimizers.SGD(1.0))
        self.optimizer.build([self.w])

    def method(self, x: tf.Tensor, factor: float = 1.0) -> Any:
        self.optimizer.apply([x * factor], [self.w])
        return self.repl.all_reduce(x), self.w.read_value()

    __call__ = method

    @staticmethod
    def static(trainer: Trainer, x: tf.Tensor) -> Any:
        return trainer.method(x)


KINDS: dict[str, Callable[[Trainer], Step]] = {
    "bound_method": lambda t: t.method,
    "callable_object": lambda t: t,
    "partial": lambda t: functools.partial(t.method, factor=1.0),
    "partial_of_static": lambda t: functools.partial(Trainer.static, t),
    "tf_function": lambda t: tf.function(t.method),
    "no_autograph": lambda t: tf.function(t.method, autograph=False),
    "lambda": lambda t: lambda x: t.method(x),
}


def _stepped(count: int) -> Any:
    mean = (count + 1) / 2
    return [count * mean] * count, [-2 * mean] * count


for _name, _of in KINDS.items():

    def _of_kind(repl: Replicator, of: Any = _of) -> Step:
        return of(Trainer(repl))

    program(_stepped, steps=2, name=f"step_fn_{_name}")(_of_kind)


# --- Compressors ----------------------------------------------------------------------


def _compressed(text: str, repl: Replicator) -> Step:
    """The received values, and the weights that they update."""
    w = tf.Variable(tf.zeros([6, 5]))
    optimizer = repl.wrap_optimizer(keras.optimizers.SGD(1.0), compressor=text)
    factors = np.sin(np.arange(30.0, dtype=np.float32)).reshape(6, 5)

    def step(x: tf.Tensor) -> Any:
        y = x * factors + 0.01
        optimizer.apply([y], [w])
        return repl.all_reduce(y, compressor=text), w.read_value()

    return step


for _text in ("bf16", "topk(ratio=0.3)", "powersgd(rank=1)"):
    for _spec in (_text, f"ef({_text})"):
        # Sums in 16 bits depend on their order.
        program(
            None,
            steps=2,
            close=2e-2 if _text == "bf16" else 1e-5,
            name=f"compressed_by_{_spec}",
        )(functools.partial(_compressed, _spec))
