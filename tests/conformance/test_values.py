# SPDX-License-Identifier: Apache-2.0
"""Every primitive's result: in every mode, on any shape, the same bits everywhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests import helpers
from tests.conformance.battery import CASES, DISTINCT, Case

ALIKE = [name for name, case in CASES.items() if not case.may_differ]
# Shapes as a graph may know them: a scalar has no axis to concatenate along.
NO_AXIS = [name for name in ALIKE if CASES[name].axis is None]


def _run(mode: str, case: Case, arrays: Any, shape: Any = ()) -> list[np.ndarray]:
    """Runs a call on tensors of static shape `shape`; returns all replicas' values."""
    repl = helpers.make(len(arrays))

    def step() -> tf.Tensor:
        return case.run(repl, helpers.opaque(arrays[repl.replica_id], shape))

    return list(helpers.run(mode, repl, lambda: step))


def _assert_plain(case: Case, arrays: Any, got: list[np.ndarray]) -> None:
    want = case.plain([tf.constant(array) for array in arrays])
    for r, (one, two) in enumerate(zip(got, want, strict=True)):
        assert one.shape == two.shape, r
        np.testing.assert_allclose(one, two, rtol=1e-13, err_msg=f"replica {r}")
        if case.same:
            assert one.tobytes() == got[0].tobytes(), f"replica {r} holds other bits"


@pytest.mark.battery(3)
@pytest.mark.parametrize("name", CASES)
def test_equals_plain(name: str) -> None:
    """With gradients, in functions and sessions, too: test_gradients.py."""
    arrays = CASES[name].inputs(4)
    _assert_plain(CASES[name], arrays, _run("eager", CASES[name], arrays))


@pytest.mark.battery(3)
@pytest.mark.parametrize("size", [(), (0,), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("name", NO_AXIS)
def test_scalars_and_empty_tensors(name: str, size: tuple[int, ...]) -> None:
    rng = np.random.RandomState(1)
    arrays = [np.asarray(rng.randn(*size)) for _ in range(3)]
    _assert_plain(CASES[name], arrays, _run("eager", CASES[name], arrays))


@pytest.mark.battery(5)
@pytest.mark.parametrize("shape", [[None, 3], None], ids=["batch", "rank"])
@pytest.mark.parametrize("name", CASES)
def test_unknown_static_shapes(name: str, shape: Any) -> None:
    arrays = CASES[name].inputs(3)
    _assert_plain(CASES[name], arrays, _run("eager", CASES[name], arrays, shape))


@pytest.mark.battery(3)
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_unknown_rank(name: str) -> None:
    case = CASES[name]
    arrays = case.inputs(3)
    repl = helpers.make(3)

    def step(shape: Any = None) -> tf.Tensor:
        x = helpers.opaque(arrays[repl.replica_id], shape)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = repl.linked(tf.reduce_sum(case.run(repl, x) ** 2))
        return tape.gradient(loss, x)

    static = helpers.run("eager", repl, lambda: lambda: step(()))
    unknown = helpers.run("eager", repl, lambda: lambda: step(None))
    for one, two in zip(static, unknown, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-15)


DIFFERENT = [([3], [1]), ([1], [3]), ([], [3]), ([3, 3], [3]), ([2], [3])]
DIFFERENT += [([2, 3], [3, 2]), ([4], [4, 1])]  # of as many elements


def _disagreements() -> Iterator[tuple[str, Any, int | None]]:
    """Yields a case, two shapes, and the replica whose shape is known at build time."""
    names = [name for name in ALIKE if name in DISTINCT]
    for name, shapes, known in itertools.product(names, DIFFERENT, [0, 1, None]):
        case = CASES[name]
        if case.axis is not None and known is not None and not shapes[known]:
            continue  # a scalar without an axis is refused at build time
        if case.joins and len(shapes[0]) == len(shapes[1]) == 1:
            continue  # these sizes may differ
        yield name, shapes, known


@pytest.mark.battery(5)
@pytest.mark.parametrize(("name", "shapes", "known"), list(_disagreements()), ids=str)
def test_shapes_that_differ_when_run_are_an_error(
    name: str, shapes: Any, known: int | None
) -> None:
    """Even if one replica knows its shape: nothing may broadcast."""
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        r = repl.replica_id
        static = shapes[r] if r == known else None
        return CASES[name].run(repl, helpers.opaque(tf.ones(shapes[r]), static))

    with pytest.raises(tf.errors.InvalidArgumentError):
        repl.run(step)


@pytest.mark.battery(3)
@pytest.mark.parametrize("name", ALIKE)
def test_shapes_that_differ_when_run_are_an_error_in_a_session(name: str) -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = tf.ones([2, 3] if repl.replica_id else [1, 3])
        return CASES[name].run(repl, helpers.opaque(x, [None, 3]))

    with pytest.raises(tf.errors.InvalidArgumentError):
        helpers.run("session", repl, lambda: step)


def test_rows_that_differ_when_run_are_an_error_even_of_no_rows() -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = tf.zeros([2, 4] if repl.replica_id else [0, 3])
        return repl.all_gather(helpers.opaque(x, None), axis=0)

    with pytest.raises(tf.errors.InvalidArgumentError):
        repl.run(step)


@pytest.mark.battery(3)
@pytest.mark.parametrize("name", CASES)
def test_results_keep_what_is_known_of_the_shape(name: str) -> None:
    case = CASES[name]
    arrays = case.inputs(3)
    repl = helpers.make(3)
    shapes = []

    def step() -> tf.Tensor:
        y = case.run(repl, helpers.opaque(arrays[repl.replica_id]))
        shapes.append(y.shape)
        return y

    for result, static in zip(repl.run(step), shapes, strict=True):
        assert static.rank == result.shape.rank
        assert static.is_compatible_with(result.shape)


@pytest.mark.battery(3)
@pytest.mark.parametrize("name", CASES)
def test_runs_are_bitwise_equal(name: str) -> None:
    case = CASES[name]
    repl = helpers.make(8)
    arrays = [array.astype(np.float32) for array in case.inputs(8)]
    step = repl.build(lambda: case.run(repl, helpers.opaque(arrays[repl.replica_id])))
    results = {tuple(y.numpy().tobytes() for y in step()) for _ in range(10)}
    assert len(results) == 1
    if case.same:
        assert len(set(next(iter(results)))) == 1
