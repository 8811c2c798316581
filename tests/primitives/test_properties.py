# SPDX-License-Identifier: Apache-2.0
"""Nests of any structure, of leaves of any dtype, are communicated leaf by leaf."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import replicator
from tests import helpers, sampling
from tests.conformance.battery import CASES, Case

DTYPES = ["bool", "int8", "uint64", "float16", "bfloat16", "complex64", "string"]


def _message(repl: Any, x: Any) -> Any:
    """Replica 0 sends to replica 2."""
    if repl.replica_id == 0:
        return repl.send(x, 2)
    return repl.recv(x, 0) if repl.replica_id == 2 else None


# Those that only move what they are given.
MOVES = {
    "message": Case(_message, lambda xs: [xs[0][:0], xs[0][:0], xs[0]]),
    **{
        name: CASES[name]
        for name in (
            *("broadcast", "broadcast_last", "stack", "concat", "concat_last"),
            *("gather", "gather_concat", "gather_concat_last", "scatter_rows"),
            *("scatter_last", "all_to_all_rows", "all_to_all_columns", "permute"),
            *("shift", "groups_scatter", "groups_shift"),
        )
    },
}


def _cast(x: tf.Tensor, dtype: str) -> tf.Tensor:
    return tf.as_string(x) if dtype == "string" else tf.cast(x, dtype)


@pytest.mark.parametrize("name", MOVES)
def test_every_dtype_is_moved(name: str) -> None:
    case = MOVES[name]
    repl = helpers.make(3)
    arrays = [np.round(abs(array)) for array in case.inputs(3)]

    def step() -> Any:
        x = helpers.opaque(arrays[repl.replica_id])
        moved = [case.call(repl, _cast(x, dtype)) for dtype in DTYPES]
        for y, dtype in zip(moved, DTYPES, strict=True):
            assert y is None or (y.dtype, y.device) == (
                dtype,
                repl.devices[repl.replica_id],
            )
        return [
            tf.zeros([0, 3], dtype) if y is None else y
            for y, dtype in zip(moved, DTYPES, strict=True)
        ]

    for dtype, results in zip(DTYPES, repl.run(step), strict=True):
        for got, want in zip(
            results,
            case.plain([_cast(tf.constant(x), dtype) for x in arrays]),
            strict=True,
        ):
            if tf.size(want) or tf.size(got):
                assert tf.reduce_all(tf.equal(got, want)), dtype


# --- Nests ----------------------------------------------------------------------------

NESTS: dict[str, Callable[[Any, Any], Any]] = {
    "all_reduce": lambda repl, x: repl.all_reduce(x),
    "broadcast": lambda repl, x: repl.broadcast(x, 1),
    "all_gather": lambda repl, x: repl.all_gather(x),
    "all_to_all": lambda repl, x: repl.all_to_all(x, 0, 0),
    "all_to_all splits": lambda repl, x: repl.all_to_all(x, 0, 0, [1, 2, 0]),
    "permute": lambda repl, x: repl.permute(x, [(0, 2)]),
    "shift": lambda repl, x: repl.shift(x),
    "reduce": lambda repl, x: repl.reduce(x, 2),
    "reduce_scatter": lambda repl, x: repl.reduce_scatter(x),
    "gather": lambda repl, x: repl.gather(x, 2),
    "scatter": lambda repl, x: repl.scatter(x, 1),
    "message": _message,
}


@pytest.mark.parametrize(("name", "mode"), sampling.in_turn(NESTS, helpers.MODES))
def test_a_nest_is_as_its_leaves(name: str, mode: str) -> None:
    """And one without leaves comes back, without communication."""
    call = NESTS[name]
    repl = helpers.make(3)

    def step() -> tf.Tensor:
        r = repl.replica_id
        nest = {
            "b": [
                helpers.opaque(tf.fill([3, 2], r + 1.0)),
                (helpers.opaque([r, 2, 3]),),
            ],
            "a": (),
        }
        if name == "broadcast":
            nest["b"].append(f"r{r}")
        together = call(repl, nest)
        apart = [call(repl, leaf) for leaf in tf.nest.flatten(nest)]
        nothing = call(repl, [])
        if together is None:
            assert nothing is None and set(apart) == {None}
            return tf.constant(True)
        assert nothing == []
        tf.nest.assert_same_structure(together, nest)
        pairs = zip(tf.nest.flatten(together), apart, strict=True)
        return tf.reduce_all([tf.reduce_all(tf.equal(x, y)) for x, y in pairs])

    assert all(helpers.run(mode, repl, lambda: step))


# --- Random nests, dtypes and shapes, compared with NumPy -----------------------------

replicator_of = functools.cache(helpers.make)  # made by the first test that needs it
CALLS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    **{
        op: (
            lambda repl, nest, op=op: repl.all_reduce(nest, op),
            lambda values, combine=combine: functools.reduce(combine, values),
        )
        for op, combine in {
            **{"sum": np.add, "prod": np.multiply},
            **{"min": np.minimum, "max": np.maximum},
        }.items()
    },
    "broadcast": (
        lambda repl, nest: repl.broadcast(nest, repl.num_replicas - 1),
        lambda values: values[-1],
    ),
    "all_gather": (lambda repl, nest: repl.all_gather(nest), np.stack),
}
leaves = st.tuples(
    st.sampled_from(["float32", "float64", "int32", "int64", "uint8"]),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.booleans(),
)
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


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(count=st.integers(1, 3), nest=nests.map(_nest))
def test_random_nests(name: str, count: int, nest: Any) -> None:
    call, combine = CALLS[name]
    repl: replicator.Replicator = replicator_of(count)

    def step() -> Any:
        r = repl.replica_id
        got = call(repl, tf.nest.map_structure(lambda leaf: leaf.tensor(r), nest))
        tf.nest.assert_same_structure(got, nest)
        return [*tf.nest.flatten(got), tf.constant(0)]

    results = repl.run(step)[:-1]
    for leaf, received in zip(tf.nest.flatten(nest), results, strict=True):
        want = np.asarray(combine([leaf.value(r) for r in range(count)]))
        for got in received:
            assert got.dtype == leaf.dtype
            np.testing.assert_array_equal(got.numpy(), want, strict=True)
