# SPDX-License-Identifier: Apache-2.0
"""TF-Replicator's conveniences: named reductions, and distributed work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import errors
from tests import helpers, sampling

REDUCED = {
    "sum": np.sum,
    "mean": np.mean,
    "min": np.min,
    "max": np.max,
    "prod": np.prod,
}


@pytest.mark.parametrize("op", ["sum", "min", "max"])
def test_named_reductions(op: str) -> None:
    repl = helpers.make(3)
    partition = repl.groups([[0, 2], [1]])

    def step() -> Any:
        reduce = getattr(repl, f"all_{op}")
        x = {"x": helpers.opaque(float(repl.replica_id))}
        return reduce(x)["x"], reduce(x, group=partition)["x"]

    everywhere, own = repl.run(step)
    assert [float(x) for x in everywhere] == [REDUCED[op]([0, 1, 2])] * 3
    pair = REDUCED[op]([0, 2])
    assert [float(x) for x in own] == [pair, 1.0, pair]


@pytest.mark.battery(5)
@pytest.mark.parametrize(
    ("op", "count", "mode"), sampling.in_turn([*REDUCED], [1, 2, 3, 5], helpers.MODES)
)
def test_map_reduce(op: str, count: int, mode: str) -> None:
    """With fewer values than replicas, as many, and more."""
    repl = helpers.make(3)
    values = np.random.RandomState(0).uniform(-2, 3, [count, 2])

    def step() -> Any:
        entries = [{"x": helpers.opaque(value)} for value in values]
        return repl.map_reduce(lambda entry: [entry["x"] ** 2], entries, op)

    (result,) = helpers.run(mode, repl, lambda: step)
    for replica_result in result:
        np.testing.assert_allclose(
            replica_result, REDUCED[op](values**2, axis=0), rtol=1e-12
        )
        assert replica_result.tobytes() == result[0].tobytes()


NUMBERS = [
    (op, dtype)
    for op in ("sum", "min", "max", "prod")
    for dtype in ("int8", "uint16", "float16", "bfloat16")
]


@pytest.mark.battery(5)
@pytest.mark.parametrize(("op", "dtype"), [*NUMBERS, ("min", "bool"), ("max", "bool")])
def test_replicas_without_work_change_nothing(op: str, dtype: str) -> None:
    repl = helpers.make(3)
    for value in (0, 1):
        result = repl.run(
            lambda value=value: repl.map_reduce(
                lambda x: tf.cast(x, dtype), [helpers.opaque([value])], op
            )
        )
        assert all(leaf.numpy() == value for leaf in tf.nest.flatten(result))


def test_map_reduce_shares_the_work_out() -> None:
    repl = helpers.make(2)
    done: list[tuple[int, int]] = []

    def step() -> tf.Tensor:
        def work(x: int) -> tf.Tensor:
            done.append((repl.replica_id, x))
            return tf.constant(x)

        return repl.map_reduce(work, [10, 20, 30])

    assert [int(x) for x in repl.run(step)] == [60, 60]
    assert done == [(0, 10), (0, 30), (1, 20)]


def _counted(runs: list[int], k: int, function: Callable[..., Any]) -> Any:
    """Wraps a function to record each run."""

    def note(x: np.ndarray) -> np.ndarray:
        runs.append(k)
        return x

    def noting(x: tf.Tensor) -> tf.Tensor:
        noted = tf.numpy_function(note, [x], x.dtype)
        noted.set_shape(x.shape)
        return function(noted)

    return noting


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("static", [(), [None], None], ids=str)
def test_each_function_of_map_gather_runs_once(static: Any, mode: str) -> None:
    """Their results may differ in dtype and shape."""
    repl = helpers.make(3)
    runs: list[int] = []
    functions = [
        lambda x: {"sum": tf.reduce_sum(x), "twice": [x, x]},
        lambda x: tf.as_string(tf.cast(x, tf.int32)),
        lambda x: tf.stack([x, x], 1) > 2,
        lambda x: (),
        lambda x: tf.cast(x[1:], tf.float16),
    ]
    values = [np.arange(k + 1.0) for k in range(5)]

    def step() -> Any:
        counted = [_counted(runs, k, fn) for k, fn in enumerate(functions)]
        return repl.map_gather(counted, [helpers.opaque(v, static) for v in values])

    one, two, three, four, five = helpers.run(mode, repl, lambda: step)
    assert sorted(run for run in runs if run != 3) == [0, 1, 2, 4]
    for r in range(3):
        assert one["sum"][r] == 0.0
        np.testing.assert_array_equal(one["twice"][1][r], [0.0])
        assert list(two[r]) == [b"0", b"1"]
        np.testing.assert_array_equal(three[r], [[False] * 2, [False] * 2, [False] * 2])
        np.testing.assert_array_equal(five[r], [1, 2, 3, 4])
    assert four == ()


def test_results_of_map_gather_keep_their_static_shapes() -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        known, open_ = repl.map_gather(
            tf.transpose,
            [
                helpers.opaque(tf.ones([2, 3])),
                helpers.opaque(tf.ones([2, 3]), [2, None]),
            ],
        )
        assert known.shape == [3, 2]
        assert open_.shape.as_list() == [None, 2]
        return open_

    for result in repl.run(step):
        assert result.shape == [3, 2]


@pytest.mark.parametrize("by", ["map_reduce", "map_gather"])
def test_gradients_of_variables_that_the_functions_use(by: str) -> None:
    """As on one device, by the sum over the replicas."""
    values = [1.0, 2.0, 3.0, 4.0]

    def make_step(repl: Any, share: Callable[..., Any]) -> Any:
        w = tf.Variable(2.0)

        def step() -> tf.Tensor:
            with tf.GradientTape() as tape:
                result = share(lambda x: (w * x) ** 2, values)
                loss = tf.add_n(result) if isinstance(result, list) else result
            return repl.all_reduce(tape.gradient(loss, w), "mean")

        return step

    for count in (1, 3, 5):
        repl = helpers.make(count)
        share = getattr(repl, by)
        got = helpers.run("eager", repl, lambda r=repl, s=share: make_step(r, s))
        # All replicas have the loss 30 w**2; their sum is differentiated, and averaged.
        assert [float(d) for d in got] == [120.0] * count


def test_autograph_in_the_functions() -> None:
    repl = helpers.make(2)

    def halve(x: tf.Tensor) -> tf.Tensor:
        while x > 1.0:
            x = x / 2.0
        return x

    def step() -> Any:
        values = [helpers.opaque(12.0), helpers.opaque(5.0)]
        return repl.map_reduce(halve, values), repl.map_gather(halve, values)

    total, each = repl.run(step)
    assert [float(x) for x in total] == [0.75 + 0.625] * 2
    assert [float(x[1]) for x in each] == [0.75, 0.625]


def test_nothing_to_map() -> None:
    repl = helpers.make(2)
    assert repl.run(lambda: repl.map_gather([], [])) == []
    assert repl.run(lambda: repl.map_reduce(lambda x: [], [1])) == []


BAD = {
    "tensor": (
        lambda repl: repl.map_reduce(tf.sin, tf.ones([2])),
        "map_reduce on replica 0 was given values=<tf.Tensor",
        "tf.unstack",
    ),
    "no value": (
        lambda repl: repl.map_reduce(tf.sin, []),
        r"map_reduce on replica 0 was given values=\[\]",
        "at least one entry",
    ),
    "op": (
        lambda repl: repl.map_reduce(tf.sin, [1.0], "argmin"),
        "op='argmin'",
        "op is one of sum, mean",
    ),
    "dtype": (
        lambda repl: repl.map_reduce(tf.identity, [1], "mean"),
        "asked for the mean of int32",
        "cast to a float",
    ),
    "sparse": (
        lambda repl: repl.map_reduce(
            lambda x: tf.IndexedSlices(x, [0], [3]), [tf.ones([1])]
        ),
        "cannot share IndexedSlices",
        "its values",
    ),
    "variant": (
        lambda repl: repl.map_gather(
            lambda _: tf.raw_ops.EmptyTensorList(
                element_shape=-1, max_num_elements=2, element_dtype=tf.float32
            ),
            [1.0, 2.0],
        ),
        "cannot share variant tensors",
        "tensors of numbers",
    ),
    "gather tensor": (
        lambda repl: repl.map_gather(tf.sin, tf.ones([2])),
        "map_gather on replica 0 was given values=<tf.Tensor",
        "tf.unstack",
    ),
    "number of functions": (
        lambda repl: repl.map_gather([tf.sin], [1.0, 2.0]),
        "1 functions for 2 values",
        "or one for all",
    ),
    "no function": (
        lambda repl: repl.map_gather(3, [1.0, 2.0]),
        "fns=3",
        "of one function for each value",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name: str) -> None:
    call, message, fix = BAD[name]
    repl = helpers.make(2)
    with pytest.raises(
        errors.ArgumentError, match=rf"(?s){message}.*at tests.*Fix: .*{fix}"
    ):
        repl.run(lambda: call(repl))


def test_a_function_that_communicates_is_an_error() -> None:
    repl = helpers.make(2)

    def step() -> Any:
        return repl.map_gather(repl.all_reduce, [helpers.opaque(1.0)])

    with pytest.raises(errors.MismatchError, match=r"(?s)differen.*all_reduce.*Fix: "):
        repl.run(step)
