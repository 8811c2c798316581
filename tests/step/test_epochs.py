# SPDX-License-Identifier: Apache-2.0
"""An epoch is one pass over a data set, whatever the way of dividing it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import ContextError, InputError
from tests import helpers

_N = 7


def _data() -> tf.data.Dataset:
    return tf.data.Dataset.range(_N)


def _elements(results: Any) -> list[int]:
    return sorted(int(x) for result in results for x in result)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize(
    ("mode", "remainder"),
    [
        ("per_replica", "drop"),
        ("per_worker", "drop"),
        ("per_replica", "pad"),
        ("global_batch", "drop"),
    ],
)
def test_each_pass_gives_every_element_once(
    mode: str, remainder: str, replicas: int
) -> None:
    repl = helpers.make(replicas)
    data = _data().batch(2) if remainder == "pad" or mode == "global_batch" else _data()

    def step_fn(x: Any) -> Any:
        return repl.all_reduce(tf.reduce_sum(x))

    epoch = repl.epoch(step_fn, data, mode, remainder=remainder)
    every = remainder == "pad" or mode == "global_batch"
    seen = range(_N) if every else range(_N // replicas * replicas)
    for _ in range(2):
        sums = [int(x) for x in epoch]
        assert sum(sums) == sum(seen) and len(sums) == len(epoch)
    assert sum(
        int(x) for x in repl.epoch(step_fn, data, mode, remainder=remainder)
    ) == (sum(seen))


def test_a_shuffled_data_set_has_another_order_in_each_pass() -> None:
    repl, data = helpers.make(2), tf.data.Dataset.range(64).shuffle(64, seed=1)
    step_fn = lambda x: x  # noqa: E731
    passes = [
        [int(x) for result in repl.epoch(step_fn, data) for x in result]
        for _ in range(2)
    ]
    assert sorted(passes[0]) == sorted(passes[1]) == [*range(64)]
    assert passes[0] != passes[1]


@pytest.mark.parametrize("input_mode", ["per_replica", "global_batch"])
def test_the_step_is_built_once_with_the_static_sizes_of_its_batches(
    input_mode: str,
) -> None:
    repl, shapes = helpers.make(2, build="trace"), []
    data = tf.data.Dataset.from_tensor_slices(np.ones([16, 3])).batch(4, True)

    def step_fn(x: Any) -> Any:
        shapes.append(x.shape.as_list())
        return tf.reduce_sum(x)

    for _ in range(3):
        for _ in repl.epoch(step_fn, data, input_mode):
            pass
    rows = 2 if input_mode == "global_batch" else 4
    assert shapes == [[rows, 3]] * 2


def test_lengths_are_known_where_the_data_set_knows_them() -> None:
    repl, step_fn = helpers.make(2), lambda x: x
    unknown = _data().filter(lambda x: x < 4)
    for inputs in (unknown, lambda: _data()):
        epoch = repl.epoch(step_fn, inputs)
        with pytest.raises(TypeError, match="not known"):
            len(epoch)
        assert _elements(epoch) == [*range(4 if inputs is unknown else 6)]


def test_args_are_those_of_the_pass() -> None:
    repl = helpers.make(2)
    step_fn, data = (lambda x, scale: x * scale), _data()
    for scale in (1, 2):
        scaled = repl.epoch(step_fn, data, args=(tf.constant(scale, tf.int64),))
        assert _elements(scaled) == [scale * x for x in range(6)]


def test_an_error_of_the_step_itself_does_not_end_the_pass() -> None:
    repl = helpers.make(1)
    other = iter(tf.data.Dataset.range(1))

    def step_fn(x: Any) -> Any:
        return x + other.get_next()

    with pytest.raises(tf.errors.OutOfRangeError):
        list(repl.epoch(step_fn, _data()))


def test_passes_that_are_mixed_are_refused() -> None:
    repl, step_fn, data = helpers.make(2), (lambda x: x), _data()
    with pytest.raises(InputError, match=r"(?s)another one.*test_epochs\.py.*Fix: "):
        for _ in zip(
            repl.epoch(step_fn, data), repl.epoch(step_fn, data), strict=False
        ):
            pass


def test_what_never_ends_and_graphs_are_refused() -> None:
    repl, step_fn = helpers.make(2), lambda x: x
    for inputs, said in (
        (_data().repeat(), "never ends"),
        (None, "no inputs"),
        (np.ones(4), "values"),
    ):
        with pytest.raises(InputError, match=rf"(?s){said}.*Fix: .*Dataset|take"):
            repl.epoch(step_fn, inputs)
    with pytest.raises(ContextError, match="epoch was called inside a step or a graph"):
        tf.function(lambda: repl.epoch(step_fn, _data()))()
    with tf.Graph().as_default(), pytest.raises(ContextError, match="OutOfRangeError"):
        repl.epoch(step_fn, _data())
    with pytest.raises(ContextError, match="inside a step"):
        repl.run(lambda: repl.epoch(step_fn, _data()))


def test_the_replicators_input_mode_holds_unless_a_call_says_another() -> None:
    repl = helpers.make(2, input_mode="global_batch")
    step_fn, data = (lambda x: tf.size(x)), _data().batch(4)
    assert _elements(repl.epoch(step_fn, data)) == [1, 2, 2, 2]
    repl.initialize()
    assert _elements([repl.run(step_fn, data)]) == [2, 2]
    assert _elements([repl.build(step_fn, data)()]) == [1, 2]
    assert _elements(repl.epoch(step_fn, data, "per_replica")) == [3, 4]
