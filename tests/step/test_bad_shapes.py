# SPDX-License-Identifier: Apache-2.0
"""What does not fit in an op fails in a step as it does on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tests import helpers


def _late(values: Any) -> tf.Tensor:
    """Returns a tensor whose values and length are not known until the step runs."""
    return tf.unique(tf.constant(values))[0]


OPS: dict[str, Callable[[Any], Any]] = {
    "boolean_mask": lambda v: tf.boolean_mask(v, _late([*range(7)]) >= 0),
    "gather": lambda v: tf.gather(v, _late([0, 9])),
    "gather_nd": lambda v: tf.gather_nd(v, _late([0, 9])[:, None]),
    "embedding_lookup": lambda v: tf.nn.embedding_lookup(v, _late([0, 9])),
    "scatter_nd, rows": lambda v: tf.scatter_nd(_late([0, 9])[:, None], v[:2], [6, 2]),
    "scatter_nd, shape": lambda v: tf.scatter_nd(_late([0, 1])[:, None], v[:3], [6, 2]),
    "tensor_scatter": lambda v: tf.tensor_scatter_nd_update(
        v, _late([0, 9])[:, None], v[:2]
    ),
    "segment_sum": lambda v: tf.math.segment_sum(v, _late([0, 1])),
    "concat": lambda v: tf.concat([v, tf.reshape(_late([1.0, 2.0, 3.0]), [1, -1])], 0),
    "matmul": lambda v: v @ tf.reshape(_late([1.0, 2.0, 3.0]), [-1, 1]),
}


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("variables", ["mirrored", "sharded"])
def test_what_does_not_fit_fails_as_on_one_device(variables: Any, op: Any) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError):
        tf.function(op)(tf.ones([6, 2]))
    repl = helpers.make(2, variables=variables)
    with repl.context():
        v = tf.Variable(tf.ones([6, 2]))
    with pytest.raises(tf.errors.InvalidArgumentError):
        repl.run(lambda: op(v))
    with pytest.raises(tf.errors.InvalidArgumentError):
        repl.run(lambda x: op(v) + x[0], tf.ones([3, 1]), input_mode="global_batch")
