# SPDX-License-Identifier: Apache-2.0
"""A small regression that all optimizer tests train, plain and replicated.

Its parameters are an embedding (whose gradients are IndexedSlices), a matrix and a
bias, in float64, so that plain and replicated training must agree up to rounding errors
far below what an optimizer amplifies. Indices repeat within and across replicas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from tests import helpers

TOLERANCE = 1e-10  # of a tensor's largest entry; rounding errors in float64 are 1e-16
EXAMPLES = 12  # per step, global: 1, 2, 3 and 4 replicas divide it
ROWS = 7  # of the embedding; the last is never used

_rng = np.random.default_rng(5)
TABLE = _rng.standard_normal((ROWS, 3))
MATRIX = _rng.standard_normal((3, 2))
BIAS = _rng.standard_normal(2)

Batch = tuple[np.ndarray, np.ndarray]
Apply = Callable[..., Any]


def batches(steps: int, examples: int = EXAMPLES) -> list[Batch]:
    """Returns each step's whole batch: indices [examples], targets [examples, 2]."""
    rng = np.random.default_rng(11)
    return [
        (rng.integers(0, ROWS - 1, examples), rng.standard_normal((examples, 2)))
        for _ in range(steps)
    ]


def plain(variable: Any) -> tf.Variable:
    """Returns the tf.Variable inside a Keras variable, or the variable itself."""
    return variable.value if isinstance(variable, tf.keras.Variable) else variable


def loss_of(parameters: Sequence[Any], indices: Any, targets: Any) -> tf.Tensor:
    """Returns the mean loss over the examples; NaN if there are none."""
    table, matrix, bias = map(plain, parameters)
    error = tf.gather(table, indices) @ matrix + bias - targets
    return tf.reduce_mean(tf.reduce_sum(error**2, axis=1))


def gradients(parameters: Sequence[Any], indices: Any, targets: Any) -> Any:
    """Returns (loss, gradients); the embedding's are IndexedSlices."""
    with tf.GradientTape() as tape:
        loss = loss_of(parameters, indices, targets)
    return loss, tape.gradient(loss, list(map(plain, parameters)))


def _apply(optimizer: Any, grads: Any, parameters: Any, **options: Any) -> Any:
    return optimizer.apply(grads, parameters, **options)


def _apply_gradients(
    optimizer: Any, grads: Any, parameters: Any, **options: Any
) -> Any:
    return optimizer.apply_gradients(zip(grads, parameters, strict=True), **options)


@dataclasses.dataclass(frozen=True)
class Family:
    """The interface of a family of optimizers.

    Attributes:
        create: Makes a variable from an initial value.
        apply: Calls an optimizer, with gradients and variables.
    """

    create: Callable[[np.ndarray], Any]
    apply: Apply

    def variables(self) -> list[Any]:
        """Creates the parameters, in the caller's context."""
        return [self.create(initial) for initial in (TABLE, MATRIX, BIAS)]


KERAS = Family(lambda x: tf.keras.Variable(x, dtype=x.dtype.name), _apply)
KERAS_PAIRS = dataclasses.replace(KERAS, apply=_apply_gradients)
SONNET = Family(tf.Variable, _apply)
V1 = Family(tf.Variable, _apply_gradients)
LEGACY_KERAS = V1


def train_plain(
    family: Family, make: Callable[[], Any], data: Sequence[Batch]
) -> list[np.ndarray]:
    """Trains on one device with the whole batches; returns the final parameters.

    Each row of a sparse gradient occurs once, as in Replicator; see helpers.
    """
    parameters = family.variables()
    optimizer = make()

    @tf.function(autograph=False)
    def step(indices: tf.Tensor, targets: tf.Tensor) -> None:
        _, (table, *others) = gradients(parameters, indices, targets)
        family.apply(optimizer, [helpers.each_row_once(table), *others], parameters)

    for indices, targets in data:
        step(tf.constant(indices), tf.constant(targets))
    return [parameter.numpy() for parameter in parameters]


def wrapped(
    make: Callable[[], Any], *values: Any, replicas: int = 2, **options: Any
) -> Any:
    """Returns a Replicator, what it wraps of `make`, and variables of some values."""
    repl = helpers.make(replicas)
    with repl.context():
        variables = [tf.Variable(value) for value in values]
        return repl, repl.wrap_optimizer(make(), **options), *variables


def deal(data: Sequence[Batch], replicas: int) -> tf.data.Dataset:
    """Returns the replicas' shares of each batch, one after the other."""
    indices = np.concatenate([np.split(batch[0], replicas) for batch in data])
    targets = np.concatenate([np.split(batch[1], replicas) for batch in data])
    return helpers.untuned(tf.data.Dataset.from_tensor_slices((indices, targets)))


def train(
    repl: replicator.Replicator,
    family: Family,
    make: Callable[[], Any],
    data: Sequence[Batch],
    mode: str = "eager",
    inside: bool = False,
    **options: Any,
) -> list[np.ndarray]:
    """Trains on all replicas, which share each batch; returns the final parameters.

    Asserts that the replicas' parameters are bitwise equal in the end.

    Args:
        repl: The Replicator.
        family: The optimizer's family.
        make: Makes the optimizer that is wrapped.
        data: One whole batch per step.
        mode: One of helpers.MODES.
        inside: Whether the optimizer is made inside step_fn.
        **options: Of wrap_optimizer.
    """

    def make_step() -> tuple[Any, list[Any]]:
        with repl.context():
            parameters = family.variables()
            wrapped = None if inside else repl.wrap_optimizer(make(), **options)

        def step_fn(element: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
            optimizer = repl.wrap_optimizer(make(), **options) if inside else wrapped
            loss, grads = gradients(parameters, *element)
            assert isinstance(grads[0], tf.IndexedSlices)
            family.apply(optimizer, grads, parameters)
            return loss

        return step_fn, parameters

    def input_fn() -> tf.data.Dataset:
        return deal(data, repl.num_replicas)

    if mode == "session":
        return _train_in_session(repl, make_step, input_fn, len(data))
    step_fn, parameters = make_step()
    call = repl.build(step_fn, input_fn)
    if mode == "function":
        call = tf.function(lambda: repl.run(step_fn, input_fn), autograph=False)
    for _ in data:
        call()
    helpers.assert_replicas_equal(parameters)
    return [parameter.numpy() for parameter in parameters]


def _train_in_session(
    repl: replicator.Replicator, make_step: Any, input_fn: Any, steps: int
) -> list[np.ndarray]:
    with tf.Graph().as_default():
        step_fn, parameters = make_step()
        fetches = repl.run(step_fn, input_fn)
        reads = [[c.read_value() for c in plain(p).components] for p in parameters]
        with helpers.monitored_session() as session:
            for _ in range(steps):
                session.run(fetches)
            values = session.run(reads)
    for first, *others in values:
        assert all(first.tobytes() == other.tobytes() for other in others)
    return [components[0] for components in values]


def assert_close(
    actual: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    tolerance: float = TOLERANCE,
) -> None:
    """Asserts that tensors differ by at most a share of their largest entry.

    Not of each entry: where a weight passes through zero, its last bits are the
    rounding errors of the cancelling terms.
    """
    for k, (one, two) in enumerate(zip(actual, expected, strict=True)):
        assert np.all(np.isfinite(one)), (k, one)
        error = np.max(np.abs(one - two), initial=0.0)
        allowed = tolerance * np.max(np.abs(two), initial=0.0)
        assert error <= allowed, (k, error, allowed)
