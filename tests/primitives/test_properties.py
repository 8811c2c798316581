# SPDX-License-Identifier: Apache-2.0
"""Random nests, dtypes, shapes and options, compared with NumPy."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import replicator
from tests import helpers

replicator_of = functools.cache(helpers.make)  # made by the first test that needs it
NUMBERS = ["float32", "float64", "int32", "int64", "uint8"]
COMBINE = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}

few = settings(max_examples=15, deadline=None, derandomize=True, database=None)
replicators = st.sampled_from((1, 2, 3)).map(replicator_of)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
leaves = st.tuples(st.sampled_from(NUMBERS), shapes, st.booleans())
nests = st.recursive(
    leaves.map(lambda leaf: [leaf]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.tuples(inner, inner),
    ),
    max_leaves=4,
)


class _Leaf:
    """One random leaf; no tuple, so that tf.nest does not descend into it."""

    def __init__(self, dtype: str, shape: tuple[int, ...], unknown: bool) -> None:
        self.dtype, self.shape, self.unknown = dtype, shape, unknown

    def value(self, replica_id: int) -> np.ndarray:
        seed = replica_id + 10 * len(self.shape) + sum(self.shape)
        values = np.random.RandomState(seed).randint(0, 9, self.shape)
        return np.asarray(values).astype(self.dtype)

    def tensor(self, replica_id: int) -> tf.Tensor:
        value = self.value(replica_id)
        return helpers.opaque(value, None if self.unknown else value.shape)


def _nest(drawn: Any) -> Any:
    if isinstance(drawn, dict):
        return {key: _nest(inner) for key, inner in drawn.items()}
    if isinstance(drawn, list) and len(drawn) == 1 and isinstance(drawn[0], tuple):
        if drawn[0] and isinstance(drawn[0][0], str):
            return _Leaf(*drawn[0])
    return type(drawn)(_nest(inner) for inner in drawn)


def _results(repl: replicator.Replicator, nest: Any, call: Any) -> Any:
    """Runs `call` on the nest; returns one list of flat leaves per replica."""

    def step() -> Any:
        r = repl.replica_id
        got = call(tf.nest.map_structure(lambda leaf: leaf.tensor(r), nest))
        tf.nest.assert_same_structure(got, nest)
        return [*tf.nest.flatten(got), tf.constant(0)]

    return list(zip(*repl.run(step)[:-1], strict=True)) or [()] * repl.num_replicas


def _assert_results(results: Any, nest: Any, want: Any) -> None:
    for leaves in results:
        for leaf, got in zip(tf.nest.flatten(nest), leaves, strict=True):
            assert got.dtype == leaf.dtype
            np.testing.assert_array_equal(got.numpy(), want(leaf), strict=True)


@few
@given(replicators, nests.map(_nest), st.sampled_from(sorted(COMBINE)))
def test_all_reduce(repl: replicator.Replicator, nest: Any, op: str) -> None:
    def want(leaf: _Leaf) -> np.ndarray:
        values = [leaf.value(r) for r in range(repl.num_replicas)]
        return np.asarray(functools.reduce(COMBINE[op], values))

    results = _results(repl, nest, lambda value: repl.all_reduce(value, op))
    _assert_results(results, nest, want)


@few
@given(replicators, nests.map(_nest), st.data())
def test_broadcast(repl: replicator.Replicator, nest: Any, data: Any) -> None:
    root = data.draw(st.integers(0, repl.num_replicas - 1))
    results = _results(repl, nest, lambda value: repl.broadcast(value, root))
    _assert_results(results, nest, lambda leaf: leaf.value(root))


@few
@given(replicators, nests.map(_nest))
def test_all_gather(repl: replicator.Replicator, nest: Any) -> None:
    def want(leaf: _Leaf) -> np.ndarray:
        return np.stack([leaf.value(r) for r in range(repl.num_replicas)])

    _assert_results(_results(repl, nest, repl.all_gather), nest, want)


@few
@given(st.lists(st.integers(0, 4), min_size=1, max_size=3), st.data())
def test_all_gather_along_an_axis(sizes: list[int], data: Any) -> None:
    rest = data.draw(st.lists(st.integers(0, 3), max_size=2))
    axis = data.draw(st.integers(0, len(rest)))
    negative = data.draw(st.booleans())
    repl = replicator_of(len(sizes))
    parts = [
        np.random.RandomState(r).rand(*rest[:axis], size, *rest[axis:])
        for r, size in enumerate(sizes)
    ]
    given_axis = axis - len(rest) - 1 if negative else axis

    def step() -> tf.Tensor:
        part = parts[repl.replica_id]
        return repl.all_gather(helpers.opaque(part, [None] * part.ndim), given_axis)

    for result in repl.run(step):
        np.testing.assert_array_equal(result, np.concatenate(parts, axis))


@few
@given(
    st.lists(
        st.tuples(
            st.floats(-100, 100, width=32), st.one_of(st.just(0), st.integers(0, 50))
        ),
        min_size=1,
        max_size=3,
    )
)
def test_weighted_mean(shards: list[tuple[float, int]]) -> None:
    repl = replicator_of(len(shards))
    values, counts = zip(*shards, strict=True)

    def step() -> tf.Tensor:
        r = repl.replica_id
        x, n = helpers.opaque(np.float64(values[r])), helpers.opaque(counts[r])
        return repl.all_reduce(x, "mean", weight=n)

    want = np.average(values, weights=counts) if sum(counts) else 0.0
    for result in repl.run(step):
        np.testing.assert_allclose(result, want, rtol=1e-12, atol=1e-12)
