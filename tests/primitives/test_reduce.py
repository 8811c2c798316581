# SPDX-License-Identifier: Apache-2.0
"""reduce and reduce_scatter: the bits of all_reduce, on the root alone or in slices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import errors
from replicator.primitives.reductions import REDUCTIONS
from tests import helpers

R = 3
DTYPES = {"floating": "bfloat16", "complex": "complex64", "integer": "uint8"}
DTYPES["bool"] = "bool"
PAIRS = [(op, kind) for op in REDUCTIONS for kind in REDUCTIONS[op].kinds]


@pytest.mark.battery(3)
@pytest.mark.parametrize(("op", "kind"), PAIRS)
def test_all_receive_the_bits_of_all_reduce(op: str, kind: str) -> None:
    numbers = np.random.RandomState(3).uniform(0, 3, [R, 5, 2])
    values = numbers > 1 if kind == "bool" else numbers
    repl = helpers.make(R, algorithm="hub")

    def step() -> Any:
        x = helpers.opaque(tf.cast(values[repl.replica_id], DTYPES[kind]))
        whole = repl.all_reduce(x, op)
        slices = repl.reduce_scatter(x, op)
        reduced = repl.reduce(x, 1, op)
        return (
            whole,
            tf.nest.map_structure(lambda y: repl.all_gather(y, axis=0), slices),
            whole if reduced is None else reduced,
        )

    wholes, *others = map(tf.nest.flatten, repl.run(step))
    for found in others:
        for one, two in zip(found, wholes, strict=True):
            assert one.dtype == two.dtype
            assert one.numpy().tobytes() == two.numpy().tobytes()


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_slices_are_those_of_all_reduce(op: str, dtype: str) -> None:
    """Each row once, and sums of 16 bits rounded once."""
    repl = helpers.make(3)

    def step() -> Any:
        count = helpers.opaque(3 - repl.replica_id)  # some have fewer rows
        values = tf.constant([[0.1], [1e3], [1e-3]], dtype)[:count] * tf.cast(
            count + 1, dtype
        )
        indices = tf.constant([2, 0, 2])[:count]
        slices = tf.IndexedSlices(values, indices, tf.constant([4, 1]))
        one, all_ = repl.reduce(slices, 1, op), repl.all_reduce(slices, op)
        one = all_ if one is None else one
        return one.values, one.indices, all_.values, all_.indices

    values, indices, all_values, all_indices = repl.run(step)
    assert indices[1].numpy().tolist() == all_indices[1].numpy().tolist() == [2, 0]
    assert values[1].numpy().tobytes() == all_values[1].numpy().tobytes()


@pytest.mark.parametrize("known", [True, False])
def test_slices_with_more_rows_than_indices_are_refused(known: bool) -> None:
    """Another replica's indices would be taken for theirs."""
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        r = repl.replica_id
        values = helpers.opaque(tf.ones([3 - 2 * r, 1]), () if known else [None, 1])
        indices = helpers.opaque(tf.constant([0, 1]), () if known else [None])
        rows = repl.reduce(tf.IndexedSlices(values, indices, tf.constant([2, 1])))
        return tf.zeros([2, 1]) if rows is None else tf.convert_to_tensor(rows)

    error = errors.ArgumentError if known else tf.errors.InvalidArgumentError
    with pytest.raises(error, match=r"(?s)reduce on replica .*Fix: give each row its"):
        repl.run(step)


@pytest.mark.parametrize("primitive", ["reduce", "reduce_scatter"])
def test_a_mean_over_shards_of_different_sizes_is_refused(primitive: str) -> None:
    repl = helpers.make(2)
    x = np.arange(10, dtype=np.float32).reshape(5, 2) ** 2

    def step(x: tf.Tensor, op: str = "mean") -> Any:
        factor = 1.0 if op == "mean" else repl.weight
        reduced = getattr(repl, primitive)(tf.reduce_mean(x, 0) * factor, op=op)
        return tf.zeros([0]) if reduced is None else reduced

    with pytest.raises(
        errors.ArgumentError,
        match=rf"(?s){primitive} on replica 0 was given op='mean', which counts all "
        rf"replicas the same.*at tests.*Fix:.*{primitive}\(x \* repl.weight\)",
    ):
        repl.run(step, x, input_mode="global_batch")
    summed = repl.run(lambda x: step(x, "sum"), x, input_mode="global_batch")
    np.testing.assert_allclose(tf.concat([*summed], 0), x.mean(0), rtol=1e-6)
    even = repl.run(step, x[:4], input_mode="global_batch")
    np.testing.assert_allclose(tf.concat([*even], 0), x[:4].mean(0), rtol=1e-6)
