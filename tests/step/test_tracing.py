# SPDX-License-Identifier: Apache-2.0
"""What step_fn raises while a replica is built."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests import helpers


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_what_is_raised_without_examples_is_noted_to_be(rows: int) -> None:
    """TensorFlow's batch_jacobian divides by the number of rows while it is built."""
    repl = helpers.make(2)

    def step_fn(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x * x
        jacobian = tape.batch_jacobian(y, x)
        if rows == 2:
            raise TypeError("own")
        return repl.all_reduce(tf.reduce_sum(jacobian), "sum")

    dataset = tf.data.Dataset.from_tensors(tf.ones([rows, 3])).repeat()

    def run() -> float:
        return float(repl.run(step_fn, dataset, input_mode="global_batch"))

    if rows == 3:
        assert run() == 2.0 * 9
        return
    with pytest.raises((ZeroDivisionError, TypeError)) as caught:
        run()
    notes = "\n".join(caught.value.__notes__)
    assert ("replica 1 has none of the 1 examples" in notes) == (rows == 1)
    assert "test_tracing.py" in notes
