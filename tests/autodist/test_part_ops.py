# SPDX-License-Identifier: Apache-2.0
"""Ops on a variable in parts compute what NumPy does with the whole array."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.autodist import parts

W = parts.W
G = np.array([[1.0, -2.0], [0.5, 3.0], [-1.0, 4.0], [2.0, 0.25]], np.float32)
ROWS = np.array([3, 0, 1])  # in both parts, and not in order
SLOT = 0.5
CUTS = pytest.mark.parametrize("cut", parts.CUTS)


def _values(build: Callable[[Any], Any], cut: str, slots: Any = (), feed: Any = ()):
    """Returns what the graph with w in parts computes, in the order of its ops."""
    return parts.divide(build, parts.CUTS[cut], slots=slots).run(True, dict(feed))


def _after(write: Callable[[Any], Any], variables: Any = ()) -> Callable[[Any], Any]:
    """Returns what builds a write, and reads of w and other variables behind it."""

    def build(w: Any) -> Any:
        own = [tf.Variable(SLOT * tf.ones([4, 2]), name=name) for name in variables]
        with tf.control_dependencies([write(w, *own)]):
            return [tf.stack([one.read_value() for one in (w, *own)])]

    return build


# --- Updates of optimizers ------------------------------------------------------------


def _descent(w: Any) -> Any:
    return tf.raw_ops.ResourceApplyGradientDescent(var=w.handle, alpha=0.1, delta=G)


def _momentum(nesterov: bool) -> Callable[..., Any]:
    return lambda w, a: tf.raw_ops.ResourceApplyMomentum(
        var=w.handle,
        accum=a.handle,
        lr=0.1,
        grad=G,
        momentum=0.9,
        use_nesterov=nesterov,
    )


def _sparse_adagrad(w: Any, a: Any) -> Any:
    return tf.raw_ops.ResourceSparseApplyAdagrad(
        var=w.handle, accum=a.handle, lr=0.1, grad=G[:3], indices=ROWS
    )


def _sparse_adagrad_alone(w: Any, a: Any) -> Any:
    return tf.raw_ops.ResourceSparseApplyAdagrad(
        var=w.handle,
        accum=a.handle,
        lr=0.1,
        grad=G[:3],
        indices=ROWS,
        update_slots=False,
    )


def _with_momentum(nesterov: bool) -> list[np.ndarray]:
    accum = 0.9 * SLOT + G
    return [W - 0.1 * (G + 0.9 * accum if nesterov else accum), accum]


def _with_adagrad(accumulates: bool) -> list[np.ndarray]:
    w, accum = W.copy(), np.full_like(W, SLOT)
    accum[ROWS] += accumulates * G[:3] ** 2
    w[ROWS] -= 0.1 * G[:3] / np.sqrt(accum[ROWS])
    return [w, accum]


UPDATES: dict[str, tuple[Callable[..., Any], list[np.ndarray]]] = {
    "gradient descent": (_descent, [W - 0.1 * G]),
    "momentum": (_momentum(False), _with_momentum(False)),
    "of Nesterov": (_momentum(True), _with_momentum(True)),
    "rows": (_sparse_adagrad, _with_adagrad(True)),
    "rows without slots": (_sparse_adagrad_alone, _with_adagrad(False)),
}


@CUTS
@pytest.mark.parametrize("name", UPDATES)
def test_updates_are_those_of_the_whole_and_of_its_slots(name: str, cut: str) -> None:
    update, expected = UPDATES[name]
    slots = ["a"] * (len(expected) - 1)
    (found,) = _values(_after(update, slots), cut, slots)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


# --- Rows and places ------------------------------------------------------------------

AT: dict[str, Any] = {
    **{"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide},
    **{"Min": np.minimum, "Max": np.maximum, "Update": lambda one, two: two},
}


@CUTS
@pytest.mark.parametrize("how", AT)
def test_rows_are_written_where_they_are(how: str, cut: str) -> None:
    write = getattr(tf.raw_ops, f"ResourceScatter{how}")
    ((found,),) = _values(
        _after(lambda w: write(resource=w.handle, indices=ROWS, updates=G[:3])), cut
    )
    expected = W.copy()
    expected[ROWS] = AT[how](W[ROWS], G[:3])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@CUTS
@pytest.mark.parametrize("updates", [G.reshape(2, 2, 2), np.float32(3.0)], ids=np.shape)
@pytest.mark.parametrize("shape", [[2, 2], [4]], ids=len)
def test_rows_of_any_indices_are_added(shape: Any, updates: Any, cut: str) -> None:
    indices = np.reshape([3, 0, 3, 1], shape)
    updates = updates.reshape(*shape, 2) if updates.ndim else updates
    ((found,),) = _values(
        _after(
            lambda w: tf.raw_ops.ResourceScatterAdd(
                resource=w.handle, indices=indices, updates=updates
            )
        ),
        cut,
    )
    expected = W.copy()
    np.add.at(expected, indices, updates)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("how", [how for how in AT if how not in ("Mul", "Div")])
def test_places_are_written_where_they_are(how: str) -> None:
    write = getattr(tf.raw_ops, f"ResourceScatterNd{how}")
    places = np.array([[3, 1], [0, 0], [2, 1]])
    ((found,),) = _values(
        _after(lambda w: write(ref=w.handle, indices=places, updates=G[:3, 0])), "rows"
    )
    expected = W.copy()
    at = tuple(places.T)
    expected[at] = AT[how](W[at], G[:3, 0])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


SLICES: dict[str, Any] = {
    "rows": (slice(1, 3),),
    "all": (slice(None),),
    "columns": (..., slice(1, None)),
    "every other row, backwards": (slice(None, None, -2),),
    "a row": (2,),
    "a number": (-1, 0),
    "a new axis": (tf.newaxis, slice(0, 2)),
}


@pytest.mark.parametrize("name", SLICES)
def test_slices_are_written_where_they_are(name: str) -> None:
    where = SLICES[name]
    written = -np.arange(1, 1 + W[where].size, dtype=np.float32).reshape(W[where].shape)
    ((found,),) = _values(_after(lambda w: w[where].assign(written)), "columns")
    expected = W.copy()
    expected[where] = written
    np.testing.assert_array_equal(found, expected)


# --- Reading --------------------------------------------------------------------------


@CUTS
@pytest.mark.parametrize("indices", [2, [3, 0, 3], [[[1], [3]]], []], ids=str)
def test_rows_are_looked_up_by_indices_of_any_shape(indices: Any, cut: str) -> None:
    own = np.array(indices, np.int64)
    (found,) = _values(lambda w: [tf.gather(w, own)], cut)
    np.testing.assert_array_equal(found, W[own])


@CUTS
@pytest.mark.parametrize("shape", [[None, 3], [3]], ids=str)
def test_the_shape_of_rows_is_as_known_as_it_was(shape: Any, cut: str) -> None:
    def build(w: Any) -> Any:
        return tf.gather(w, tf.compat.v1.placeholder(tf.int32, shape))

    made = parts.divide(build, parts.CUTS[cut])
    assert made.divided_value(made.fetches).shape.as_list() == [*shape, 2]


def _picked(w: Any, places: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.ResourceGatherNd(
        resource=w.handle, indices=places, dtype=tf.float32
    )


def _picked_by_row(w: Any, places: tf.Tensor) -> tf.Tensor:
    columns = tf.reshape(places, [4, 1])
    return tf.raw_ops.ResourceGather(
        resource=w.handle, indices=columns, dtype=tf.float32, batch_dims=1
    )


def _slowly(value: np.ndarray) -> np.ndarray:
    time.sleep(0.02)  # so that what does not wait for the write comes before it
    return value


READS: dict[str, Any] = {
    "places": (_picked, [W[1, 1], W[0, 0]]),
    "of each row": (_picked_by_row, W[range(4), [1, 1, 0, 0]][:, None]),
}


@pytest.mark.parametrize("name", READS)
def test_reads_follow_the_writes_that_their_operands_follow(name: str) -> None:
    read, expected = READS[name]

    def build(w: Any) -> Any:
        ones = tf.numpy_function(_slowly, [tf.ones([4, 2])], tf.float32)
        ones = tf.ensure_shape(ones, [4, 2])
        with tf.control_dependencies([w.assign_add(ones)]):
            places = tf.identity([[1, 1], [0, 0]])
        return [read(w, places)]

    (found,) = _values(build, "columns")
    np.testing.assert_allclose(found, np.array(expected) + 1)


# --- Values ---------------------------------------------------------------------------


@CUTS
def test_values_of_unknown_shape_are_written_if_they_fit(cut: str) -> None:
    fed: list[tf.Tensor] = []

    def build(w: Any) -> Any:
        fed.append(tf.compat.v1.placeholder(tf.float32))
        write = tf.raw_ops.AssignVariableOp(resource=w.handle, value=fed[0])
        with tf.control_dependencies([write]):
            return [w.read_value()]

    made = parts.divide(build, parts.CUTS[cut])
    np.testing.assert_array_equal(made.run(True, {fed[0]: G})[0], G)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[4,2\]"):
        made.run(True, {fed[0]: np.ones([8, 2])})


@CUTS
def test_parts_of_which_one_has_no_value_are_not_initialized(cut: str) -> None:
    made = parts.divide(
        lambda w: [tf.compat.v1.is_variable_initialized(w)], parts.CUTS[cut]
    )
    program = made.divided.program
    is_initialized = made.divided_value(made.fetches[0])
    found = []
    with tf.compat.v1.Session(graph=program.graph) as session:
        for variable in program.variables.values():
            found.append(session.run(is_initialized))
            session.run(variable.initializer)
        found.append(session.run(is_initialized))
    assert found == [False, False, True]


@CUTS
def test_what_is_in_the_place_of_an_op_has_its_name(cut: str) -> None:
    def build(w: Any) -> Any:
        places = tf.zeros([2, 2], tf.int32)
        return [
            tf.identity(w, "read").op.inputs[0],
            tf.gather(w, [0], name="rows"),
            tf.gather_nd(w, places, name="places"),
            tf.raw_ops.VariableShape(input=w.handle, name="size"),
            tf.raw_ops.VarIsInitializedOp(resource=w.handle, name="exists"),
            w.assign(W, name="write", read_value=False),
            w.scatter_nd_add(places, [1.0, 1.0], name="added").op,
        ]

    made = parts.divide(build, parts.CUTS[cut])
    for one in made.fetches:
        op = getattr(one, "op", one)
        assert made.divided.places[op].name == op.name
