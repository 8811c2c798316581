# SPDX-License-Identifier: Apache-2.0
"""Small programs compute the same on replicas as on one device, by all doors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.autodist import helpers, small
from tests.forms.programs import doors
from tests.helpers import v1_control_flow

v1 = tf.compat.v1
W = np.array([[0.5, -0.3], [0.2, 0.7], [-0.4, 0.1]], np.float32)
B = np.array([0.1, -0.2], np.float32)
INITIAL: dict[str, dict[str, Any]] = {
    "FETCHES": {},
    "WRITES": {"v": np.float32(1), "n": np.int32(2)},
    "LOSSES": {"w": W, "b": B},
    "WHOLE": {"w": W, "b": B},
}
SIZES = (5, 4, 2)  # even and uneven, on 2 and 3 replicas, and none for the last
SIGNATURE = [
    tf.TensorSpec([None, 3], tf.float32),
    tf.TensorSpec([None], tf.float32),
    tf.TensorSpec([None], tf.int32),
]


def _examples(n: int) -> list[np.ndarray]:
    rng = np.random.default_rng(n)
    x = rng.standard_normal([n, 3])
    # Both signs on each replica, and no zeros.
    y = (np.abs(rng.standard_normal(n)) + 0.1) * (-1) ** np.arange(n)
    return [np.float32(x), np.float32(y), np.int32(np.arange(n) * 7 % 11)]


def _trained(loss: Any, variables: Any, given: Any, by_tape: bool) -> Any:
    """Returns a loss, and the ops of a step of gradient descent."""
    with tf.GradientTape() as tape:
        value = loss(*given, *variables)
    differentiate = tape.gradient if by_tape else tf.gradients
    slopes = differentiate(value, variables)
    return value, [
        v.assign_sub(0.1 * tf.convert_to_tensor(slope)).op
        for v, slope in zip(variables, slopes, strict=True)
        if slope is not None
    ]


def _step(table: str, name: str, by_tape: bool, variables: Any, *given: Any) -> Any:
    """Returns what a step of a program returns, and the ops of its writes."""
    make = getattr(small, table)[name]
    if table == "FETCHES":
        return make(*given), []
    if table == "WRITES":
        return [], [make(*variables, *given).op]
    return _trained(make, variables, given, by_tape)


def _by_function(step: Any, make: Any, signature: Any, replicas: int) -> Any:
    autodist = helpers.make(replicas)
    with autodist.scope():
        variables = make()
    return variables, autodist.function(lambda *given: step(variables, *given))


_DOORS: dict[str, Any] = {
    "one device": doors.one_device,
    "function": _by_function,
    "engine": doors.engine,
    "few are whole": doors.few_are_whole,
}


def _run(table: str, name: str, door: str, replicas: int) -> list[Any]:
    """Returns what each call returns, and the variables behind it."""
    if door in ("session", "session with a tape"):
        return _run_in_a_session(table, name, door != "session", replicas)

    def step(variables: Any, *given: Any) -> Any:
        return _step(table, name, True, variables, *given)[0]

    def make() -> list[tf.Variable]:
        return [tf.Variable(value) for value in INITIAL[table].values()]

    variables, function = _DOORS[door](step, make, SIGNATURE, replicas)
    results = []
    for n in SIZES:
        returned = function(*map(tf.constant, _examples(n)))
        results.append((_arrays(returned), [v.numpy() for v in variables]))
    return results


def _arrays(nest: Any) -> Any:
    return [np.asarray(x) for x in tf.nest.flatten(nest, expand_composites=True)]


def _run_in_a_session(table: str, name: str, by_tape: bool, replicas: int) -> list[Any]:
    autodist, results = helpers.make(replicas), []
    with tf.Graph().as_default(), autodist.scope():
        given = [v1.placeholder(spec.dtype, spec.shape) for spec in SIGNATURE]
        variables = [
            v1.get_variable(key, initializer=value, use_resource=True)
            for key, value in INITIAL[table].items()
        ]
        fetches, ops = _step(table, name, by_tape, variables, *given)
        session = autodist.create_distributed_session()
        for n in SIZES:
            feed = dict(zip(given, _examples(n), strict=True))
            returned = session.run([fetches, ops], feed)[0]
            results.append((_arrays(returned), session.run(variables)))
    return results


@functools.cache
def _expected(table: str, name: str) -> list[Any]:
    return _run(table, name, "one device", 1)


def _check(table: str, name: str, door: str, replicas: int) -> None:
    actual = _run(table, name, door, replicas)
    helpers.assert_equal(actual, _expected(table, name))


def _cases() -> Iterator[Any]:
    """Yields all programs by all doors, with two and three replicas in turn."""
    turn = itertools.cycle((2, 3, 3))
    for table in INITIAL:
        tapes = ["session with a tape"] if table in ("LOSSES", "WHOLE") else []
        for name in getattr(small, table):
            for door in ("session", "function", "engine", "few are whole", *tapes):
                yield pytest.param(table, name, door, next(turn))


@pytest.mark.battery(20)
@pytest.mark.parametrize("table, name, door, replicas", list(_cases()))
def test_small_programs(table: str, name: str, door: str, replicas: int) -> None:
    _check(table, name, door, replicas)


# Of which nothing but sums is sent, and how many: of gradients, and before them.
@pytest.mark.parametrize("name", small.SPLIT)
def test_what_goes_by_rows_is_split(name: str) -> None:
    autodist = helpers.make(2)
    with tf.Graph().as_default(), autodist.scope():
        given = [v1.placeholder(spec.dtype, spec.shape) for spec in SIGNATURE]
        variables = [tf.Variable(W), tf.Variable(B)]
        _, ops = _trained(small.LOSSES[name], variables, given, False)
        session = autodist.create_distributed_session()
        session.run(ops, dict(zip(given, _examples(5), strict=True)))
    sent = [row.primitive for row in autodist.replicator.plan]
    assert sent == ["all_reduce"] * small.SPLIT[name]


_IN_BRANCHES = [
    (table, name)
    for table in INITIAL
    for name in getattr(small, table)
    if "a branch" in name or name.startswith("a loop")
]


@pytest.mark.battery(2)
@pytest.mark.parametrize("table, name", _IN_BRANCHES)
def test_branches_and_loops_of_tensorflow_1(table: str, name: str) -> None:
    expected = _expected(table, name)
    with v1_control_flow():
        helpers.assert_equal(_run(table, name, "session", 2), expected)
