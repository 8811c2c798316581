# SPDX-License-Identifier: Apache-2.0
"""The values that step_fn may return, and their form in the results."""

from __future__ import annotations

import collections
import contextlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import MismatchError, PerReplica, ReplicatorError
from tests import helpers

Pair = collections.namedtuple("Pair", ["left", "right"])


class _Box(tf.Module):
    """Holds one variable."""

    def __init__(self) -> None:
        self.variable = tf.Variable(5.0)


OUTPUTS = {
    "nothing": (lambda: None, None),
    "Python number": (lambda: 3, np.int32(3)),
    "Python float": (lambda: 2.5, np.float32(2.5)),
    "bool": (lambda: True, np.bool_(True)),
    "NumPy": (lambda: np.arange(3), np.arange(3)),
    "string": (lambda: "word", b"word"),
    "tensor": (lambda: tf.ones([2]), np.ones(2, np.float32)),
    "empty": (lambda: tf.zeros([0, 3]), np.zeros([0, 3], np.float32)),
    "sparse": (lambda: tf.sparse.eye(2), np.eye(2, dtype=np.float32)),
    "ragged": (lambda: tf.ragged.constant([[1], [2, 3]]), [[1], [2, 3]]),
    "slices": (
        lambda: tf.IndexedSlices(
            tf.ones([1, 2]), tf.constant([1]), tf.constant([3, 2])
        ),
        np.float32([[0, 0], [1, 1], [0, 0]]),
    ),
}


def _dense(value: Any) -> Any:
    """Returns a value, eager or fetched, as NumPy or lists."""
    v1 = tf.compat.v1
    if isinstance(value, v1.SparseTensorValue):
        value = tf.SparseTensor(*value)
    if isinstance(value, tf.SparseTensor):
        return tf.sparse.to_dense(value).numpy()
    if hasattr(value, "dense_shape"):
        return tf.scatter_nd(
            np.asarray(value.indices)[:, None], value.values, value.dense_shape
        ).numpy()
    if value is None or hasattr(value, "to_list"):
        return value.to_list() if value is not None else None
    value = np.asarray(value)
    if value.dtype == object and value.ndim:  # a ragged tensor's
        return [list(row) for row in value]
    return value


@pytest.mark.battery(5)
@pytest.mark.parametrize(
    ("effects", "replicas"), [(False, 1), (True, 2)], ids=["pure", "with effects"]
)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize(("make", "expected"), OUTPUTS.values(), ids=OUTPUTS)
def test_outputs_of_every_kind_come_back(make, expected, mode, effects, replicas):
    def step_fn():
        if effects:
            tf.debugging.Assert(tf.random.uniform([]) < 2, [0])
        return make()

    values = helpers.run(mode, helpers.make(replicas), lambda: step_fn)
    assert len(values) == replicas
    for value in values:
        got = _dense(value)
        np.testing.assert_equal(got, expected)
        if isinstance(expected, np.generic | np.ndarray):
            assert np.asarray(got).dtype == expected.dtype


@pytest.mark.parametrize("mode", helpers.MODES)
def test_nests_keep_their_structure(mode):
    repl = helpers.make(2)

    def step_fn():
        r = tf.constant(repl.replica_id)
        return {"a": Pair(r, [r + 10]), "b": (), "c": (None, {"d": r * 2})}

    values = helpers.run(mode, repl, lambda: step_fn)
    assert type(values["a"]) is Pair
    assert [int(v) for v in values["a"].left] == [0, 1]
    assert [int(v) for v in values["a"].right[0]] == [10, 11]
    assert values["b"] == ()
    assert tuple(values["c"][0]) == (None, None)
    assert [int(v) for v in values["c"][1]["d"]] == [0, 2]
    if mode != "function":  # a function returns plain tuples
        assert type(values["a"].left) is PerReplica


@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_variable_comes_back_as_its_value_after_the_step(mode):
    repl = helpers.make(2)

    def make_step():
        box = _Box()

        def step_fn():
            before = box.variable.read_value()
            box.variable.assign_add(1.0)
            return before, box.variable

        return step_fn

    before, after = helpers.run(mode, repl, make_step, steps=2)
    assert [float(v) for v in before] == [6.0, 6.0]
    assert [float(v) for v in after] == [7.0, 7.0]


def test_an_operation_comes_back_as_none_and_is_done():
    repl = helpers.make(2)
    with repl.context():
        count = tf.Variable(0)
    values = repl.run(lambda: tf.group(count.assign_add(1)))
    assert values == PerReplica(None, None)
    assert count.numpy() == 1


@pytest.mark.parametrize("fetched", ["number", "op", "one replica's", "none"])
def test_fetching_any_output_runs_the_whole_step(fetched):
    repl = helpers.make(3)
    with tf.Graph().as_default():
        with repl.context():
            count = tf.Variable(0.0)

        def step_fn():
            count.assign_add(repl.all_reduce(1.0, "mean"))
            return {"number": tf.constant(1), "op": tf.no_op(), "none": None}

        out = repl.run(step_fn)
        fetches = out["number"][1] if fetched.startswith("one") else out[fetched]
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            for _ in range(2):
                session.run(fetches)
            assert list(session.run(count.components)) == [2.0] * 3


# --- Parts that were made outside -----------------------------------------------------


class Extension(tf.experimental.ExtensionType):
    """A user's composite, with another one inside."""

    plain: tf.Tensor
    ragged: tf.RaggedTensor


COMPOSITES: dict[str, tuple[Any, ...]] = {
    # How it is built from its parts, and their values.
    "dense": (lambda part: part, [1.5, 2.5]),
    "ragged": (
        lambda values, splits: tf.RaggedTensor.from_row_splits(
            values, splits, validate=False
        ),
        [1.5, 2.5, 3.5],
        np.int64([0, 1, 3]),
    ),
    "nested ragged": (
        lambda values, inner, outer: tf.RaggedTensor.from_nested_row_splits(
            values, [outer, inner], validate=False
        ),
        [1.5, 2.5, 3.5],
        np.int64([0, 1, 3]),
        np.int64([0, 2, 2]),
    ),
    "sparse": (tf.SparseTensor, np.int64([[0], [2]]), [1.5, 2.5], np.int64([4])),
    "slices": (tf.IndexedSlices, [1.5, 2.5], [0, 2], [4]),
    "slices of unknown shape": (tf.IndexedSlices, [1.5, 2.5], [0, 2]),
    "extension": (
        lambda plain, values, splits: Extension(
            plain, tf.RaggedTensor.from_row_splits(values, splits, validate=False)
        ),
        [5.5],
        [1.5, 2.5, 3.5],
        np.int64([0, 1, 3]),
    ),
}


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("name", COMPOSITES)
def test_any_part_may_be_eager(name: str, mode: str) -> None:
    """Each part of each composite: made outside, and all of them; on three replicas."""
    make, *values = COMPOSITES[name]
    # In sessions, TensorFlow accepts eager tensors in these alone.
    if mode == "session" and name not in ("dense", "slices", "slices of unknown shape"):
        return
    outside = [tf.constant(value) for value in values]
    choices = [{k} for k in range(len(values))] + [set(range(len(values)))]

    def step_fn() -> list[Any]:
        # Ops computed in the step also show that they are not disturbed.
        return [
            make(
                *(
                    outside[k] if k in eager else tf.add(value, tf.zeros_like(value))
                    for k, value in enumerate(values)
                )
            )
            for eager in choices
        ]

    def parts_of(value: Any) -> list[tf.Tensor]:
        return tf.nest.flatten(value, expand_composites=True)

    repl = helpers.make(3)
    if mode == "session":
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            parts = session.run(parts_of(repl.run(step_fn)))
    else:
        run = tf.function(repl.run) if mode == "function" else repl.run
        parts = parts_of(run(step_fn))
    expected = parts_of(make(*outside)) * repl.num_replicas * len(choices)
    for got, value in zip(parts, expected, strict=True):
        np.testing.assert_array_equal(got, value)


# --- Errors --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["eager", "session"])
@pytest.mark.parametrize(
    "step",
    [
        lambda r: (1,) * (r + 1),
        lambda r: {"ab"[r]: 1},
        lambda r: None if r else 1,
        lambda r: [1] if r else 1,
        lambda r: tf.sparse.eye(2) if r else tf.eye(2),
        lambda r: tf.no_op() if r else tf.constant(1),
    ],
    ids=["length", "keys", "None", "depth", "sparse", "operation"],
)
def test_replicas_return_one_structure(step, mode):
    repl = helpers.make(2)
    graph = tf.Graph().as_default() if mode == "session" else contextlib.nullcontext()
    with graph, pytest.raises(MismatchError) as caught:
        repl.run(lambda: step(repl.replica_id))
    message = str(caught.value)
    assert message.startswith("step_fn returns different structures on different repl")
    for r, device in enumerate(repl.devices):
        assert f"\n  replica {r} ({device}): " in message
    assert "\nFix: return the same structure on every replica" in message
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("mode", ["eager", "session"])
@pytest.mark.parametrize(
    ("leaf", "name"),
    [
        (object(), "object"),
        (tf.data.Dataset.range(3), "_RangeDataset"),
        (_Box, "type"),
        ({1, 2}, "set"),
    ],
    ids=["object", "dataset", "class", "set"],
)
def test_what_is_no_tensor_is_not_returned(leaf, name, mode):
    graph = tf.Graph().as_default() if mode == "session" else contextlib.nullcontext()
    with (
        graph,
        pytest.raises(ReplicatorError, match=f"returned {name} .*is not a tensor"),
    ):
        helpers.make(2).run(lambda: [leaf])
