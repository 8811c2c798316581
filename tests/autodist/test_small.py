# SPDX-License-Identifier: Apache-2.0
"""Small programs compute the same on replicas as on one device."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.autodist import helpers, small

v1 = tf.compat.v1
W = np.array([[0.5, -0.3], [0.2, 0.7], [-0.4, 0.1]], np.float32)
B = np.array([0.1, -0.2], np.float32)
SIZES = (5, 4, 2)  # even and uneven, on 2 and 3 replicas, and none for the last


def _examples(n: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(n)
    x = rng.standard_normal([n, 3]).astype(np.float32)
    # Both signs on each replica, and no zeros.
    y = (np.abs(rng.standard_normal(n)) + 0.1) * (-1) ** np.arange(n)
    return x, y.astype(np.float32), np.arange(n, dtype=np.int32) * 7 % 11


def _placeholders() -> list[tf.Tensor]:
    kinds = ([None, 3], tf.float32), ([None], tf.float32), ([None], tf.int32)
    return [v1.placeholder(dtype, shape) for shape, dtype in kinds]


def _in_a_session(build: Any, num_replicas: int | None) -> Any:
    """Returns the fetches of each step, and the final variables.

    Args:
        build: Returns ops, fetches and variables, given the examples.
        num_replicas: The number of replicas; None: plain TensorFlow.
    """
    autodist = num_replicas and helpers.make(num_replicas)
    with tf.Graph().as_default(), contextlib.ExitStack() as stack:
        if autodist:
            stack.enter_context(autodist.scope())
        inputs = _placeholders()
        ops, fetches, variables = build(*inputs)
        if autodist:
            session = autodist.create_distributed_session()
        else:
            session = v1.Session()
            session.run(v1.global_variables_initializer())
        results = []
        for n in SIZES:
            feed = dict(zip(inputs, _examples(n), strict=True))
            results.append(
                (session.run([fetches, ops], feed)[0], session.run(variables))
            )
        return results


def _in_a_function(build: Any, make: Any, num_replicas: int | None) -> Any:
    """The same for a function, whose variables are made before."""
    autodist = num_replicas and helpers.make(num_replicas)
    with autodist.scope() if autodist else contextlib.nullcontext():
        variables = make()

    def step(*given: tf.Tensor) -> Any:
        return build(variables, *given)

    run = autodist.function(step) if autodist else tf.function(step)
    results = []
    for n in SIZES:
        result = tf.nest.map_structure(np.asarray, run(*_examples(n)))
        results.append((result, [v.numpy() for v in variables]))
    return results


def _update(variables: Any, gradients: Any) -> list[Any]:
    return [
        v.assign_sub(0.1 * tf.convert_to_tensor(g))
        for v, g in zip(variables, gradients, strict=True)
        if g is not None
    ]


def _training(loss: Any, *given: tf.Tensor) -> Any:
    """Returns the ops of a step in a graph, its loss and its variables."""
    variables = [
        v1.get_variable(name, initializer=value, use_resource=True)
        for name, value in (("w", W), ("b", B))
    ]
    value = loss(*given, *variables)
    ops = _update(variables, tf.gradients(value, variables))
    return [op.op for op in ops], value, variables


def _train(loss: Any, form: str, num_replicas: int | None) -> Any:
    if form == "function":

        def step(variables, *given):
            with tf.GradientTape() as tape:
                value = loss(*given, *variables)
            _update(variables, tape.gradient(value, variables))
            return value

        return _in_a_function(
            step, lambda: [tf.Variable(W), tf.Variable(B)], num_replicas
        )

    return _in_a_session(functools.partial(_training, loss), num_replicas)


def _write(write: Any, form: str, num_replicas: int | None) -> Any:
    if form == "function":

        def step(variables, *given):
            write(*variables, *given)

        return _in_a_function(
            step, lambda: [tf.Variable(1.0), tf.Variable(2)], num_replicas
        )

    def build(*given):
        v = v1.get_variable("v", initializer=1.0, use_resource=True)
        n = v1.get_variable("n", initializer=2, use_resource=True)
        return write(v, n, *given).op, [], [v, n]

    return _in_a_session(build, num_replicas)


def _fetch(fetch: Any, form: str, num_replicas: int | None) -> Any:
    if form == "function":
        return _in_a_function(lambda _, *given: fetch(*given), list, num_replicas)
    return _in_a_session(lambda *given: ([], fetch(*given), []), num_replicas)


@functools.cache
def _expected(run: Any, table: str, name: str, form: str) -> Any:
    return run(getattr(small, table)[name], form, None)


def _cases(table: dict[str, Any], often: tuple[str, ...]) -> list[Any]:
    """Returns all cases, marking as slow those that do not run each time.

    They alternate between sessions and functions.
    """
    quick = {(name, ("session", "function")[k % 2], 2) for k, name in enumerate(often)}
    return [
        pytest.param(
            *(case := (name, form, num_replicas)),
            marks=() if case in quick else pytest.mark.slow,
        )
        for name in table
        for form in ("session", "function")
        for num_replicas in (1, 2, 3)
    ]


def _check(run: Any, table: str, name: str, form: str, num_replicas: int) -> None:
    actual = run(getattr(small, table)[name], form, num_replicas)
    for a, b in zip(
        tf.nest.flatten(actual),
        tf.nest.flatten(_expected(run, table, name, form)),
        strict=True,
    ):
        if np.asarray(b).dtype.kind in "OSU":
            assert np.array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
            assert np.shape(a) == np.shape(b)


# Without variables, the weight of an inner gradient is unknown where it is taken.


@pytest.mark.battery(3)
@pytest.mark.parametrize(
    "name, form, num_replicas",
    _cases(
        small.LOSSES,
        (
            *("custom gradient", "masked, at least one", "mean of some", "penalty"),
            *("norm of a gradient", "an inner step, weighted", "one behind the other"),
            *("over n - 1", "all, over some", "two masked means"),
            *("normalized examples", "over n - 1, or nothing"),
        ),
    ),
)
def test_losses_train_as_on_one_device(name, form, num_replicas):
    _check(_train, "LOSSES", name, form, num_replicas)


@pytest.mark.parametrize("name", small.SPLIT)
def test_what_goes_by_rows_is_split_and_as_on_one_device(name):
    autodist = helpers.make(2)
    with tf.Graph().as_default(), autodist.scope():
        given = _placeholders()
        ops, *_ = _training(small.LOSSES[name], *given)
        session = autodist.create_distributed_session()
        session.run(ops, dict(zip(given, _examples(5), strict=True)))
    sent = [row.primitive for row in autodist.replicator.plan]
    assert sent == ["all_reduce"] * small.SPLIT[name]
    _check(_train, "LOSSES", name, "session", 2)


@pytest.mark.parametrize(
    "name, form, num_replicas", _cases(small.FETCHES, ("F1", "three", "products"))
)
def test_what_is_fetched_is_computed_of_all_examples(name, form, num_replicas):
    _check(_fetch, "FETCHES", name, form, num_replicas)


@pytest.mark.parametrize(
    "name, form, num_replicas",
    _cases(small.WRITES, ("root", "count", "median", "average of sums")),
)
def test_what_is_written_is_computed_of_all_examples(name, form, num_replicas):
    _check(_write, "WRITES", name, form, num_replicas)


@pytest.fixture
def control_flow_of_tensorflow_1():
    v1.disable_control_flow_v2()
    yield
    v1.enable_control_flow_v2()


_IN_BRANCHES = [
    (run, table, name)
    for run, table in ((_fetch, "FETCHES"), (_write, "WRITES"), (_train, "LOSSES"))
    for name in getattr(small, table)
    if name.startswith(("a branch", "a loop"))
]


@pytest.mark.parametrize(
    "run, table, name", _IN_BRANCHES, ids=[f"{t} {name}" for _, t, name in _IN_BRANCHES]
)
@pytest.mark.parametrize("num_replicas", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_branches_of_tensorflow_1_are_those_of_one_device(
    run, table, name, num_replicas, control_flow_of_tensorflow_1
):
    actual = run(getattr(small, table)[name], "session", num_replicas)
    helpers.assert_equal(actual, run(getattr(small, table)[name], "session", None))


@pytest.mark.parametrize("form", ["session", "function"])
def test_what_python_computes_of_the_batch_is_computed_of_the_whole(form):
    def drawn(x, y, i, w, b):
        noise = tf.numpy_function(np.mean, [y], tf.float32)
        return tf.reduce_mean(small.rows(x, y, w) * tf.ensure_shape(noise, []))

    helpers.assert_equal(_train(drawn, form, 2), _train(drawn, form, None))


def test_turns_of_tensorflow_1_that_examples_decide_are_those_of_one_device(
    control_flow_of_tensorflow_1,
):
    def turns(x, y, i):
        total = tf.reduce_sum(tf.abs(y))
        return tf.while_loop(lambda k: k < total, lambda k: k + 1.0, [0.0])[0]

    helpers.assert_equal(_fetch(turns, "session", 2), _fetch(turns, "session", None))
    branch = small.LOSSES["times a branch by examples"]
    helpers.assert_equal(_train(branch, "session", 2), _train(branch, "session", None))


_OFTEN = (
    *("products of examples", "sorted", "over a norm behind a gradient of its own"),
    *("a masked mean in a function", "example by example", "two inner steps"),
)


@pytest.mark.battery(2)
@pytest.mark.parametrize("name, form, num_replicas", _cases(small.WHOLE, _OFTEN))
def test_losses_across_examples_are_those_of_one_device(name, form, num_replicas):
    _check(_train, "WHOLE", name, form, num_replicas)
