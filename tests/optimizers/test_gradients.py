# SPDX-License-Identifier: Apache-2.0
"""Combining gradients: unused variables, sparse and dense ones, weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf
from absl import logging

import replicator
from tests import helpers
from tests.optimizers import problem

v1 = tf.compat.v1

# Each drifts when it gets zeros: by momentum, or by weight decay.
OPTIMIZERS = {
    "keras": lambda: tf.keras.optimizers.SGD(0.5, momentum=0.5, weight_decay=0.1),
    "v1": lambda: v1.train.MomentumOptimizer(0.5, 0.5),
    "sonnet": lambda: snt.optimizers.Momentum(0.5, 0.5),
}

Gradients = Sequence[Any]


def _apply(optimizer: Any, grads: Gradients, variables: Any, **options: Any) -> Any:
    if isinstance(optimizer, v1.train.Optimizer):
        pairs = list(zip(grads, variables, strict=True))
        return optimizer.apply_gradients(pairs, **options)
    return optimizer.apply(grads, variables, **options)


def _values(tensors: Sequence[tf.Tensor]) -> list[list[np.ndarray]]:
    return [[np.asarray(x) for x in values] for values in tensors]


def _updated(
    mode: str,
    num_replicas: int,
    family: str,
    initial: Sequence[Any],
    grads_of: Callable[[int], Gradients],
    steps: int = 2,
) -> list[np.ndarray]:
    """Applies gradients on replicas; returns the variables' values.

    Asserts that the replicas are bitwise equal, and that the step happened once.
    """
    repl = helpers.make(num_replicas)

    def make_step() -> Callable[[], Any]:
        with repl.context():
            variables = [tf.Variable(np.float64(value)) for value in initial]
            calls = tf.Variable(
                0,
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
            optimizer = repl.wrap_optimizer(OPTIMIZERS[family]())

        def step_fn() -> Any:
            calls.assign_add(1)
            update = _apply(optimizer, grads_of(repl.replica_id), variables)
            with tf.control_dependencies([update] if family == "v1" else []):
                return [v.read_value() for v in variables], calls.read_value()

        return step_fn

    values, calls = helpers.run(mode, repl, make_step, steps=steps)
    assert list(calls) == [steps] * num_replicas
    for own in values:
        assert all(own[0].tobytes() == other.tobytes() for other in own[1:])
    return [components[0] for components in values]


def _plain(family: str, initial: Sequence[Any], grads: Gradients) -> list[np.ndarray]:
    variables = [tf.Variable(np.float64(value)) for value in initial]
    optimizer = OPTIMIZERS[family]()

    @tf.function(autograph=False)
    def step() -> None:
        _apply(optimizer, grads, variables)

    step()
    step()
    return [variable.numpy() for variable in variables]


# Which replica uses which of three variables; None: its gradient is None there.
USES = {
    "first_only": lambda r: [1.0, 2.0 if r == 0 else None, None],
    "last_only": lambda r: [1.0, 2.0 if r == 2 else None, None],
    "different_ones": lambda r: [2.0 if r == k else None for k in range(3)],
}
MEANS = {
    "first_only": [1.0, 2.0 / 3, None],
    "last_only": [1.0, 2.0 / 3, None],
    "different_ones": [2.0 / 3] * 3,
}


def _constants(grads: Sequence[float | None]) -> list[tf.Tensor | None]:
    return [None if g is None else tf.constant(g, tf.float64) for g in grads]


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("family", OPTIMIZERS)
@pytest.mark.parametrize("uses", USES)
def test_unused_on_some_counts_as_zeros_unused_on_all_is_left_alone(
    uses: str, family: str, mode: str
) -> None:
    initial = [3.0, 4.0, 5.0]
    actual = _updated(mode, 3, family, initial, lambda r: _constants(USES[uses](r)))
    expected = _plain(family, initial, _constants(MEANS[uses]))
    np.testing.assert_allclose(actual, expected, rtol=1e-12)
    if MEANS[uses][2] is None:
        assert actual[2] == 5.0


def test_building_again_leaves_no_effects() -> None:
    """The first attempt, which learns that a variable is used, must not run."""
    repl = helpers.make(2)
    printed = []
    with repl.context():
        w = tf.Variable(0.0)
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0))
        count = tf.keras.metrics.Sum()
        draws = tf.random.Generator.from_seed(1)
        alone = tf.random.Generator.from_seed(1)

    def step_fn() -> tf.Tensor:
        count.update_state(1.0)
        tf.py_function(lambda r: printed.append(int(r)), [repl.replica_id], [])
        drawn = draws.uniform([])
        grads = [tf.constant(2.0) if repl.replica_id == 1 else None]
        optimizer.apply(grads, [w])
        return drawn

    drawn = [repl.run(step_fn)[0].numpy() for _ in range(2)]
    assert count.result().numpy() == 4  # two steps on two replicas
    assert sorted(printed) == [0, 0, 1, 1]
    assert w.numpy() == -2.0
    assert optimizer.iterations.numpy() == 2
    assert drawn == [
        repl.run(lambda: alone.uniform([]))[0].numpy(),
        repl.run(lambda: alone.uniform([]))[0].numpy(),
    ]


def test_many_optimizers_with_variables_unused_on_replica_0() -> None:
    repl = helpers.make(2)
    with repl.context():
        ws = [tf.Variable(0.0) for _ in range(12)]
        optimizers = [
            repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0)) for _ in range(12)
        ]

    def step_fn() -> None:
        for optimizer, w in zip(optimizers, ws, strict=True):
            optimizer.apply([tf.constant(2.0) if repl.replica_id else None], [w])

    repl.run(step_fn)
    assert [w.numpy() for w in ws] == [-1.0] * 12


@pytest.mark.parametrize("mode", helpers.MODES)
def test_unused_with_a_v1_optimizer_made_inside_the_step(mode: str) -> None:
    repl = helpers.make(2)

    def make_step() -> Any:
        def variable(name: str) -> tf.Variable:
            if mode == "session":
                return v1.get_variable(name, initializer=3.0)
            return tf.Variable(3.0, name=name)

        def step_fn() -> Any:
            ws = [variable("a"), variable("b")]
            optimizer = repl.wrap_optimizer(v1.train.MomentumOptimizer(0.5, 0.5))
            grads = [None, tf.constant(2.0)] if repl.replica_id else [2.0, None]
            update = optimizer.apply_gradients(zip(grads, ws, strict=True))
            with tf.control_dependencies([update]):
                return [w.read_value() for w in ws]

        return step_fn

    values = helpers.run(mode, repl, make_step)
    np.testing.assert_array_equal(values, [[2.5, 2.5], [2.5, 2.5]])


@pytest.mark.parametrize("mode", helpers.MODES)
def test_slots_made_inside_the_step_are_told_apart(mode: str) -> None:
    """Replica 0 uses the second variable only, and would make its slot first."""
    repl = helpers.make(3)

    def make_step() -> Any:
        with repl.context():
            ws = [tf.Variable(tf.zeros(size)) for size in (1, 2, 3, 4)]

        def step_fn() -> Any:
            optimizer = repl.wrap_optimizer(v1.train.MomentumOptimizer(1.0, 0.5))
            mine = {0: [1], 1: [1, 2], 2: [0]}[repl.replica_id]
            grads = [
                tf.ones_like(w) * 3.0 if k in mine else None for k, w in enumerate(ws)
            ]
            update = optimizer.apply_gradients(zip(grads, ws, strict=True))
            with tf.control_dependencies([update]):
                return [w.read_value() for w in ws]

        return step_fn

    values = helpers.run(mode, repl, make_step, steps=2)
    for own, gradient in zip(values, [1.0, 2.0, 1.0, 0.0], strict=True):
        for value in own:
            np.testing.assert_allclose(value, -2.5 * gradient + 0 * value, rtol=1e-6)


@pytest.mark.parametrize("used_by", ["last", "none", "all"])
@pytest.mark.parametrize("family", ["keras", "legacy"])
def test_keras_warns_of_what_no_replica_uses_and_of_nothing_else(
    family: str, used_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even while the last replica's use is still unknown."""
    repl = helpers.make(3)
    with repl.context():
        used, other = tf.Variable(1.0, name="used"), tf.Variable(1.0, name="other")
        keras = tf.keras if family == "keras" else pytest.importorskip("tf_keras")
        optimizer = repl.wrap_optimizer(keras.optimizers.SGD(1.0))

    def step_fn() -> None:
        who = {"last": 2, "none": -1, "all": repl.replica_id}[used_by]
        gradient = tf.constant(3.0) if repl.replica_id == who else None
        optimizer.apply_gradients([(tf.constant(2.0), used), (gradient, other)])

    messages: list[str] = []
    for logger in (logging, tf.get_logger()):
        monkeypatch.setattr(
            logger, "warning", lambda text, *of: messages.append(text % of)
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        repl.run(step_fn)
    messages += [str(warning.message) for warning in caught]
    messages = [text for text in messages if "Gradients do not exist" in text]
    times = 2 if family == "legacy" else 1  # which asks twice, and warns each time
    assert len(messages) == (times if used_by == "none" else 0)
    assert all("other" in text and "used" not in text for text in messages)
    steps = {"last": 1.0, "none": 0.0, "all": 3.0}[used_by]
    np.testing.assert_allclose([used.numpy(), other.numpy()], [-1.0, 1.0 - steps])


def _slices(rows: Sequence[float], indices: Sequence[int], size: int = 4) -> Any:
    values = tf.constant([[row, -row] for row in rows], tf.float64)
    values = tf.reshape(values, [-1, 2])
    return tf.IndexedSlices(values, tf.constant(indices, tf.int64), [size, 2])


SPARSE = {
    "duplicates": lambda r: _slices([1.0, 2.0, 4.0 + r], [0, 0, r]),
    "empty_on_one": lambda r: _slices([], []) if r else _slices([1.0, 2.0], [3, 1]),
    "unused_on_one": lambda r: None if r else _slices([1.0, 2.0], [3, 1]),
    "dense_on_one": lambda r: (
        tf.ones([4, 2], tf.float64) if r else _slices([1.0, 2.0], [2, 2])
    ),
    "no_dense_shape": lambda r: (
        tf.ones([4, 2], tf.float64)
        if r
        else tf.IndexedSlices(tf.ones([1, 2], tf.float64), tf.constant([1]))
    ),
    "other_index_dtype": lambda r: tf.IndexedSlices(
        tf.ones([1, 2], tf.float64), tf.constant([r], [tf.int32, tf.int64][r]), [4, 2]
    ),
}


def _dense(gradient: Any) -> np.ndarray:
    if gradient is None:
        return np.zeros([4, 2])
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient.numpy()
    dense = np.zeros([4, 2])
    np.add.at(dense, gradient.indices.numpy(), gradient.values.numpy())
    return dense


@pytest.mark.battery(5)
@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("case", SPARSE)
def test_sparse_gradients_combine(case: str, op: str) -> None:
    """With plain SGD a sparse update is the dense one; absent rows stay."""
    repl = helpers.make(2)
    start = np.arange(8.0).reshape(4, 2)
    with repl.context():
        table = tf.Variable(start)
        optimizer = repl.wrap_optimizer(snt.optimizers.SGD(1.0), op=op)
    repl.run(lambda: optimizer.apply([SPARSE[case](repl.replica_id)], [table]))
    total = _dense(SPARSE[case](0)) + _dense(SPARSE[case](1))
    expected = start - (total / 2 if op == "mean" else total)
    np.testing.assert_allclose(table.numpy(), expected, rtol=1e-12)
    helpers.assert_replicas_equal([table])


def test_sparse_gradients_stay_sparse() -> None:
    """The optimizer gets IndexedSlices, with no more rows than were passed."""
    seen = []

    class Spy(tf.Module):
        def apply(self, updates: Gradients, parameters: Any) -> None:
            seen.extend(updates)
            rows = tf.shape(updates[0].values)[0]
            parameters[0].assign(tf.cast(rows, tf.float64))

    repl, optimizer, rows = problem.wrapped(Spy, np.float64(0.0), replicas=3)
    # Replica r passes r rows.
    step = repl.build(
        lambda: optimizer.apply(
            [
                _slices(
                    *[x[: repl.replica_id] for x in ([1.0, 1.0], [repl.replica_id, 3])]
                )
            ],
            [rows],
        )
    )
    step()
    assert all(isinstance(gradient, tf.IndexedSlices) for gradient in seen)
    assert rows.numpy() == 0 + 1 + 2


@pytest.mark.battery(5)
@pytest.mark.parametrize("kind", ["keras", "v1", "sonnet"])
@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_rows_of_one_index_are_one_row_for_the_optimizer(
    num_replicas: int, accumulation_steps: int, kind: str
) -> None:
    """Adam would square each separately, and its result depend on the replicas.

    The reference is a dense gradient on one device: if all rows are looked up, Adam's
    lazy update of sparse gradients is the dense one.
    """
    make = {
        "keras": lambda: tf.keras.optimizers.Adam(0.1),
        "v1": lambda: tf.compat.v1.train.AdamOptimizer(0.1),
        "sonnet": lambda: snt.optimizers.Adam(0.1, epsilon=1e-7),
    }[kind]
    start = np.random.RandomState(0).randn(3, 2)
    lookups = np.array([0, 1, 2, 2, 0, 2, 1, 1])

    def update(optimizer: Any, table: Any, rows: Any, dense: bool) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(tf.gather(table, rows) ** 2, 1))
        gradient = tape.gradient(loss, table)
        gradient = tf.convert_to_tensor(gradient) if dense else gradient
        if kind == "sonnet":
            optimizer.apply([gradient], [table])
        else:
            optimizer.apply_gradients([(gradient, table)])

    def train(repl: Any, dense: bool) -> np.ndarray:
        with repl.context():
            table = tf.Variable(start)
            steps = 1 if dense else accumulation_steps
            optimizer = repl.wrap_optimizer(make(), accumulation_steps=steps)
        own = lookups.reshape(repl.num_replicas, -1)
        run = repl.build(
            lambda: update(optimizer, table, tf.constant(own)[repl.replica_id], dense)
        )
        for _ in range(3 * steps):
            run()
        return table.numpy()

    dense = train(helpers.make(1), dense=True)
    sparse = train(helpers.make(num_replicas), dense=False)
    np.testing.assert_allclose(sparse, dense, rtol=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_one_index_are_added_up_in_replica_order(dtype: str) -> None:
    """Even for so many that TensorFlow's scatter ops split them among threads."""
    rng = np.random.RandomState(0)
    repl = helpers.make(3)
    rows = rng.randn(3, 3000, 4) * 10 ** rng.uniform(-4, 4, [3, 3000, 1])
    rows = rows.astype(tf.as_dtype(dtype).as_numpy_dtype)
    places = rng.randint(0, 20, [3, 3000])
    want = np.zeros([20, 4], np.float32)
    np.add.at(want, places.ravel(), rows.reshape(-1, 4).astype(np.float32))
    want = want.astype(rows.dtype)

    def step() -> Any:
        slices = tf.IndexedSlices(
            tf.constant(rows)[repl.replica_id], tf.constant(places)[repl.replica_id]
        )
        summed = repl.all_reduce(slices)
        return summed.values, summed.indices

    run = repl.build(step)
    for _ in range(3):
        for values, indices in zip(*run(), strict=True):
            assert sorted(indices.numpy()) == list(range(20))
            assert values.numpy().tobytes() == want[indices.numpy()].tobytes()


def test_rare_rows_with_lazy_momentum_equal_one_device() -> None:
    """Zeros for absent rows would let the momentum of a sparse optimizer drift."""
    repl = helpers.make(2)
    make = OPTIMIZERS["sonnet"]
    with repl.context():
        table = tf.Variable(np.ones([4, 2]))
        optimizer = repl.wrap_optimizer(make())
        turn = tf.Variable(0, dtype=tf.int64)

    def step_fn() -> None:
        index = turn.assign_add(1).read_value() % 4
        gradient = tf.IndexedSlices(
            tf.ones([1, 2], tf.float64), index[None], tf.constant([4, 2])
        )
        optimizer.apply([gradient if repl.replica_id else None], [table])

    plain, plain_optimizer = tf.Variable(np.ones([4, 2])), make()
    for k in range(1, 7):
        repl.run(step_fn)
        half = tf.IndexedSlices(
            0.5 * tf.ones([1, 2], tf.float64), tf.constant([k % 4]), [4, 2]
        )
        plain_optimizer.apply([half], [plain])
    np.testing.assert_allclose(table.numpy(), plain.numpy(), rtol=1e-12)


# How many of three examples each replica holds.
SHARES = {"uneven": [2, 1], "empty": [3, 0], "three": [0, 1, 2], "none": [0, 0]}


@pytest.mark.battery(5)
@pytest.mark.parametrize("family", OPTIMIZERS)
@pytest.mark.parametrize("shares", SHARES)
def test_weights_make_uneven_shards_equal_one_device(shares: str, family: str) -> None:
    counts = SHARES[shares]
    xs, rows = np.float64([1.0, 2.0, 4.0]), np.int64([1, 1, 0])
    repl = helpers.make(len(counts))
    bounds = np.cumsum([0, *counts])

    def gradients(variables: Any, start: int, stop: int) -> Gradients:
        with tf.GradientTape() as tape:
            w, table = variables
            loss = w * xs[start:stop] + tf.gather(table, rows[start:stop]) ** 2
            loss = tf.reduce_mean(loss)  # NaN without examples
        return tape.gradient(loss, variables)

    with repl.context():
        variables = [tf.Variable(np.float64(3.0)), tf.Variable(np.float64([1.0, 2.0]))]
        optimizer = repl.wrap_optimizer(OPTIMIZERS[family]())

    def step_fn() -> None:
        r = repl.replica_id
        grads = gradients(variables, bounds[r], bounds[r + 1])
        _apply(optimizer, grads, variables, weight=counts[r])

    plain = [tf.Variable(np.float64(3.0)), tf.Variable(np.float64([1.0, 2.0]))]
    plain_optimizer = OPTIMIZERS[family]()
    for _ in range(2):
        repl.run(step_fn)
        grads = gradients(plain, 0, 3)
        if shares == "none":  # as if there were no loss
            grads = [tf.zeros_like(v) for v in plain]
        _apply(plain_optimizer, grads, plain)
    helpers.assert_replicas_equal(variables)
    if shares != "none" or family != "v1":
        for own, other in zip(variables, plain, strict=True):
            np.testing.assert_allclose(own.numpy(), other.numpy(), rtol=1e-12)
    assert all(np.all(np.isfinite(v.numpy())) for v in variables)


@pytest.mark.parametrize("weight", [2, 2.0, np.int64(2), tf.constant(2, tf.uint8)])
def test_weight_may_be_any_number(weight: Any) -> None:
    repl, optimizer, w = problem.wrapped(lambda: tf.keras.optimizers.SGD(1.0), 0.0)

    def step_fn() -> None:
        gradient = tf.constant(3.0 * repl.replica_id)
        optimizer.apply([gradient], [w], weight=weight * (1 + repl.replica_id))

    repl.run(step_fn)
    assert w.numpy() == -2.0  # (2 * 0 + 4 * 3) / 6


def test_weight_on_one_replica_only_is_refused() -> None:
    repl, optimizer, w = problem.wrapped(lambda: tf.keras.optimizers.SGD(1.0), 0.0)
    with pytest.raises(
        replicator.MismatchError,
        match=r"(?s)with a weight and without.*replica 0.*with a weight, at .*"
        r"test_gradients.py:\d+.*replica 1.*without weight.*Fix: ",
    ):
        repl.run(
            lambda: optimizer.apply(
                [tf.constant(1.0)], [w], weight=None if repl.replica_id else 1
            )
        )


ROWS, WIDTH = 1000, 6  # of an embedding; no other tensor has this shape


@pytest.mark.parametrize("used_by", ["all", "replica 1"])
def test_nothing_passes_over_a_whole_embedding(used_by: str) -> None:
    """Neither the lookup nor its gradient is ever as large as the variable."""
    repl = helpers.make(2)
    v1 = tf.compat.v1

    def step() -> Any:
        table = v1.get_variable("table", [ROWS, WIDTH])
        other = v1.get_variable("other", [WIDTH])
        optimizer = repl.wrap_optimizer(v1.train.GradientDescentOptimizer(0.1))
        rows = tf.zeros([2, WIDTH])
        if used_by == "all" or repl.replica_id == 1:
            ids = helpers.opaque([3, 3 + repl.replica_id])
            rows = tf.gather(tf.convert_to_tensor(table), ids)
        loss = tf.reduce_sum(tf.square(rows - other))
        pairs = optimizer.compute_gradients(loss, [table, other])
        with tf.control_dependencies([optimizer.apply_gradients(pairs)]):
            return tf.identity(loss)

    with tf.Graph().as_default():
        losses = repl.run(step)
        ops = helpers.ops_run(losses)
        assert any("Scatter" in op.type for op in ops)
        tensors = [tensor for op in ops for tensor in op.outputs]
        whole = [tensor for tensor in tensors if tensor.shape == [ROWS, WIDTH]]
        assert not whole, whole
        with helpers.monitored_session() as session:
            first, second = session.run(losses), session.run(losses)
            assert sum(second) < sum(first)
