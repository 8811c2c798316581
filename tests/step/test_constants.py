# SPDX-License-Identifier: Apache-2.0
"""Large constants are stored once, wherever a step uses them, and keep their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.step import constants
from tests import helpers

_ROWS = constants.LARGE // 4 // 64


def _table(seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).rand(_ROWS, 64).astype(np.float32)


_TABLE = _table()


def _summed(weight: Any) -> tf.Tensor:
    return tf.reduce_sum(_TABLE @ weight) + tf.reduce_sum(tf.constant(_TABLE) @ weight)


def _top(repl: Any, weight: Any, yes: tf.Tensor) -> tf.Tensor:
    return _summed(weight)


def _branch(repl: Any, weight: Any, yes: tf.Tensor) -> tf.Tensor:
    return tf.cond(yes, lambda: _summed(weight), lambda: tf.reduce_max(_TABLE))


def _communicating_branch(repl: Any, weight: Any, yes: tf.Tensor) -> tf.Tensor:
    return tf.cond(yes, lambda: repl.all_reduce(_summed(weight), "mean"), lambda: 0.0)


def _case(repl: Any, weight: Any, yes: tf.Tensor) -> tf.Tensor:
    return tf.switch_case(
        tf.cast(yes, tf.int32), [lambda: 0.0, lambda: _summed(weight), lambda: 1.0]
    )


def _loop(repl: Any, weight: Any, yes: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(
        lambda i, _: i < 3, lambda i, x: (i + 1, x + _summed(weight)), (0, 0.0)
    )[1]


def _loop_in_branch(repl: Any, weight: Any, yes: tf.Tensor) -> tf.Tensor:
    return tf.cond(yes, lambda: _loop(repl, weight, yes), lambda: 0.0)


def _map(repl: Any, weight: Any, yes: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.map_fn(lambda x: x * _summed(weight), tf.ones([2])))


def _function(repl: Any, weight: Any, yes: tf.Tensor) -> tf.Tensor:
    return tf.function(lambda: _summed(weight))()


def _recomputed(repl: Any, weight: Any, yes: tf.Tensor) -> tf.Tensor:
    return tf.recompute_grad(lambda w: _summed(w))(tf.convert_to_tensor(weight))


PLACES: list[Callable[..., tf.Tensor]]
PLACES = [_top, _branch, _communicating_branch, _case, _loop, _loop_in_branch]
PLACES += [_map, _function, _recomputed]


def _with_gradient(place: Callable[..., tf.Tensor], repl: Any, weight: Any) -> Any:
    value = tf.convert_to_tensor(weight)
    with tf.GradientTape() as tape:
        tape.watch(value)
        total = place(repl, value, tf.reduce_sum(value) > 0.0)
    return total, tape.gradient(total, value)


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("place", PLACES)
def test_arrays_give_what_they_give_on_one_device(
    place: Callable[..., tf.Tensor], mode: str
) -> None:
    class Alone:
        all_reduce = staticmethod(lambda x, op: x)

    want = _with_gradient(place, Alone(), tf.ones([64, 2]))
    repl = helpers.make(3)

    def make_step() -> Any:
        weight = tf.Variable(tf.ones([64, 2]))
        return lambda: _with_gradient(place, repl, weight)

    total, gradient = helpers.run(mode, repl, make_step)
    for r in range(3):
        np.testing.assert_allclose(total[r], want[0], rtol=1e-5)
        np.testing.assert_allclose(gradient[r], want[1], rtol=1e-5)


@pytest.mark.battery(5)
@pytest.mark.fast
@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("place", PLACES)
def test_no_definition_holds_them(place: Callable[..., tf.Tensor], mode: str) -> None:
    graphs: list[Any] = []
    repl = helpers.make(3)

    def make_step() -> Any:
        weight = tf.Variable(tf.ones([64, 2]))

        def step_fn() -> Any:
            graphs.append(tf.compat.v1.get_default_graph())
            return _with_gradient(place, repl, weight)

        return step_fn

    helpers.run(mode, repl, make_step)
    nbytes = graphs[-1].as_graph_def().ByteSize()
    assert nbytes < 2 * constants.LARGE  # of which each replica has two


@pytest.mark.fast
def test_what_has_the_same_bits_is_one_tensor() -> None:
    tables, zeros = [_table(0), _table(1)], np.zeros((_ROWS, 64), np.float32)
    graphs: list[Any] = []
    repl = helpers.make(3)

    def step_fn() -> Any:
        graphs.append(tf.compat.v1.get_default_graph())
        tensors = [tf.constant(value) for value in (*tables, zeros, -zeros, _table(0))]
        tensors.append(tf.constant(tables[0].astype(np.float64)))
        tensors.append(tf.constant(tables[0].reshape([64, _ROWS])))
        small = tf.constant(_table()[:-1])
        return [tf.reduce_min(tf.math.reciprocal(value)) for value in tensors], small

    (least, small) = repl.run(step_fn)
    assert len(graphs[-1].captures) == 6
    for r in range(3):
        np.testing.assert_array_equal(small[r], _table()[:-1])
        assert [least[k][r] for k in (2, 3)] == [np.inf, -np.inf]
        np.testing.assert_allclose(
            [least[k][r] for k in (0, 1, 4, 5, 6)],
            [1.0 / tables[k].max() for k in (0, 1, 0, 0, 0)],
            rtol=1e-6,
        )


@pytest.mark.battery(5)
@pytest.mark.parametrize("dtype", [np.float64, np.int8, np.bool_, np.complex64, "U3"])
def test_each_dtype_is_returned_as_it_is(dtype: Any) -> None:
    value = (np.arange(constants.LARGE) % 3).astype(dtype)
    repl = helpers.make(2)
    result = repl.run(lambda: (value, tf.constant(value)))
    for part in result:
        for r in range(2):
            np.testing.assert_array_equal(part[r].numpy().astype(dtype), value)


def test_step_fn_that_fails_behind_a_large_constant_can_be_mended() -> None:
    repl = helpers.make(2)
    broken = [True]

    def step_fn() -> Any:
        table = tf.constant(_TABLE)
        if broken[0]:
            raise KeyError("mine")
        return tf.reduce_sum(table)

    with pytest.raises(KeyError, match="mine"):
        repl.run(step_fn)
    broken[0] = False
    np.testing.assert_allclose(repl.run(step_fn)[1], _TABLE.sum(), rtol=1e-5)
    assert tf.get_static_value(_constant_in_a_graph()) is not None


def _constant_in_a_graph() -> tf.Tensor:
    with tf.Graph().as_default():
        return tf.constant(_TABLE)


def test_compiled_functions_keep_theirs() -> None:
    held = []

    @tf.function(jit_compile=True)
    def summed(weight: tf.Tensor) -> tf.Tensor:
        table = tf.constant(_TABLE)
        held.append(tf.get_static_value(table))  # XLA must know some at times
        return tf.reduce_sum(table @ weight) + tf.reduce_sum(tf.constant(_TABLE))

    repl = helpers.make(2)
    with_both = repl.run(lambda: summed(tf.ones([64, 2])) + tf.reduce_sum(_TABLE))
    for r in range(2):
        np.testing.assert_allclose(with_both[r], 4.0 * _TABLE.sum(), rtol=1e-5)
    assert held and all(value is not None for value in held)


class _Creating(tf.Module):
    """Creates a variable at its first call."""

    def __init__(self, initial: Any) -> None:
        super().__init__()
        self._initial, self.variable = initial, None

    def __call__(self) -> tf.Tensor:
        if self.variable is None:
            self.variable = tf.Variable(self._initial())
        return tf.reduce_sum(self.variable)


_EAGER = tf.constant(_TABLE)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "initial",
    [lambda: _TABLE, lambda: tf.constant(_TABLE) * 1.0, lambda: _EAGER * 1.0],
)
def test_variables_are_created_of_them(
    initial: Callable[[], Any], inside: bool
) -> None:
    model = _Creating(initial)
    call = tf.function(model.__call__) if inside else model
    repl = helpers.make(3)
    total = repl.run(lambda: call())
    np.testing.assert_allclose(total, [_TABLE.sum()] * 3, rtol=1e-5)
    np.testing.assert_array_equal(model.variable, _TABLE)


def test_data_sets_and_composites_are_made_of_them() -> None:
    repl = helpers.make(2)
    splits = np.arange(0, _TABLE.size + 1, 2)

    def step_fn() -> Any:
        ragged = tf.RaggedTensor.from_row_splits(tf.constant(_TABLE.ravel()), splits)
        places = np.stack(np.nonzero(_TABLE), 1)
        sparse = tf.SparseTensor(places, _TABLE.ravel(), _TABLE.shape)
        elements = tf.data.Dataset.range(2).map(
            lambda i: tf.reduce_sum(_TABLE) * tf.cast(i, tf.float32)
        )
        return [
            tf.reduce_sum(ragged),
            tf.reduce_sum(tf.sparse.sparse_dense_matmul(sparse, tf.ones([64, 1]))),
            elements.reduce(0.0, lambda one, two: one + two),
        ]

    for total in repl.run(step_fn):
        np.testing.assert_allclose(total, [_TABLE.sum()] * 2, rtol=1e-5)


def test_step_fn_is_called_once_per_replica() -> None:
    repl = helpers.make(2, build="trace")
    calls = iter(range(10))

    def step_fn() -> Any:
        try:
            return next(calls) + 0 * tf.reduce_sum(tf.constant(_TABLE))
        except BaseException:
            return tf.constant(-1.0)

    assert [float(x) for x in repl.run(step_fn)] == [0.0, 1.0]


def test_a_graph_of_the_users_own_keeps_its_constants() -> None:
    repl = helpers.make(2)

    def step_fn() -> Any:
        total = tf.reduce_sum(tf.constant(_TABLE))
        with tf.Graph().as_default() as graph:
            own = tf.reduce_sum(tf.constant(_TABLE * 2))
        with tf.compat.v1.Session(graph=graph) as session:
            return total + session.run(own)

    np.testing.assert_allclose(repl.run(step_fn), [3 * _TABLE.sum()] * 2, rtol=1e-5)


def test_a_large_variable_in_parts_is_read_by_a_loop() -> None:
    """The gradient of the loop starts with zeros of that size, in its own body."""
    sums = []
    for strategy in (replicator.strategy.PartitionedPS(), None):
        repl = helpers.make(2, strategy=strategy)
        with repl.context():
            kernel = tf.Variable(tf.fill([256, 256], 0.01))
            optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.1))

        def step_fn(repl=repl, kernel=kernel, optimizer=optimizer):
            with tf.GradientTape() as tape:
                _, x = tf.while_loop(
                    lambda i, x: i < 3,
                    lambda i, x: (i + 1, tf.tanh(x @ kernel)),
                    [0, tf.ones([2, 256])],
                )
                loss = tf.reduce_mean(x)
            optimizer.apply([tape.gradient(loss, kernel)], [kernel])

        repl.run(step_fn)
        sums.append(float(tf.reduce_sum(kernel)))
    assert sums[0] == pytest.approx(sums[1], rel=1e-5) and sums[1] != 655.36
