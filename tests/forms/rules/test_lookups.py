# SPDX-License-Identifier: Apache-2.0
"""The law of the rules of ops that select, add up or find rows by their numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.autodist import helpers as on_replicas
from tests.forms import helpers
from tests.forms.laws import SUM, WHOLE, Inputs, Sample

raw = tf.raw_ops
TABLE = np.arange(15, dtype=np.float32).reshape(5, 3) / 7
MASK = np.array([2.0, -1.0, 0.5], np.float32)


def total(x: tf.Tensor) -> tf.Tensor:
    """Returns a sum over the batch, which replicas have summands of."""
    return raw.Sum(input=x, axis=[0])


def rows(x: tf.Tensor) -> tf.Tensor:
    """Returns the number of rows."""
    return tf.shape(x)[0]


def gather(params: Any, ids: Any, axis: int = 0, dims: int = 0) -> tf.Tensor:
    return raw.GatherV2(params=params, indices=ids, axis=axis, batch_dims=dims)


def found(v: Inputs) -> tf.Tensor:
    """Returns the numbers of some rows."""
    return tf.where(v("b"))[:, 0]


def unsorted(how: str, data: Any, ids: Any, count: Any) -> tf.Tensor:
    kernel = getattr(raw, f"UnsortedSegment{how}")
    return kernel(data=data, segment_ids=ids, num_segments=count)


def scatter(ids: Any, updates: Any, shape: Any) -> tf.Tensor:
    return raw.ScatterNd(indices=ids, updates=updates, shape=shape)


SAMPLES = [
    Sample("GatherV2", lambda v: gather(TABLE, v.i)),
    Sample("GatherV2", lambda v: gather(TABLE * 1.0, v("i"), 0)),
    Sample("GatherV2", lambda v: gather(TABLE, v("i") % 3, 1)),
    Sample("GatherV2", lambda v: gather(v.x, [2, 0], 1)),
    Sample("GatherV2", lambda v: gather(v("x", 2, 3), [[1, 0]], -1)),
    Sample("GatherV2", lambda v: gather(v.x, v.i % 3, 1, 1)),
    Sample("GatherV2", lambda v: gather(total(v("x", 5, 3)), [4, 1, 1]), SUM),
    Sample("GatherV2", lambda v: gather(v.x, found(v))),
    Sample("Gather", lambda v: raw.Gather(params=TABLE, indices=v.i)),
    Sample("GatherNd", lambda v: raw.GatherNd(params=TABLE, indices=v.i[:, :2] % 3)),
    Sample("GatherNd", lambda v: raw.GatherNd(params=v.x, indices=tf.where(v.b))),
    Sample("GatherNd", lambda v: raw.GatherNd(params=total(v.x), indices=[[2]]), SUM),
    Sample("UnsortedSegmentSum", lambda v: unsorted("Sum", v.x, v("i"), 5), SUM),
    Sample("UnsortedSegmentSum", lambda v: unsorted("Sum", v.x, v.i, 5), SUM),
    Sample(
        "UnsortedSegmentSum", lambda v: unsorted("Sum", total(v.x), [0, 1, 1], 2), SUM
    ),
    Sample(
        "UnsortedSegmentSum",
        lambda v: unsorted("Sum", tf.transpose(v.x), [1, 0, 1], 2),
    ),
    Sample("UnsortedSegmentMax", lambda v: unsorted("Max", v.x, v("i"), 5), SUM),
    Sample("UnsortedSegmentMin", lambda v: unsorted("Min", v.x, v("i"), 5), SUM),
    Sample("ScatterNd", lambda v: scatter(v("i", 1), v.x, [5, 3]), SUM),
    Sample("ScatterNd", lambda v: scatter(v("i", 2), v("x"), [5, 5]), SUM),
    Sample("Where", lambda v: raw.Where(condition=v("b"))),
    Sample("Where", lambda v: raw.Where(condition=v.b)),
]


def _scattered_back(v: Inputs) -> tf.Tensor:
    """Returns rows that are chosen, changed and put back."""
    where = tf.where(v("b"))
    return tf.scatter_nd(where, tf.gather_nd(v.x, where) * 2.0, [rows(v.x), 3])


def _own_elements(v: Inputs) -> tf.Tensor:
    """Returns the index of one element of each row."""
    return tf.stack([tf.range(rows(v.x)), v("i") % 3], 1)


def _diagonal(v: Inputs) -> tf.Tensor:
    """Returns the diagonal of a square matrix with a row and a column per row."""
    each = tf.range(rows(v.x))
    return tf.gather_nd(v.x @ tf.transpose(v.x), tf.stack([each, each], 1))


def _cut_short(v: Inputs) -> tf.Tensor:
    """Returns the numbers of all rows, of which only 0 and 1 stay apart."""
    return tf.cast(tf.cast(tf.range(rows(v.x)), tf.bool), tf.int32)


def _summed_back(v: Inputs) -> tf.Tensor:
    where = found(v)
    return tf.math.unsorted_segment_sum(tf.gather(v.x, where), where, rows(v.x))


def _sparse(v: Inputs, combiner: str) -> tf.Tensor:
    """Returns the sum of embeddings of up to three values per row."""
    values = tf.where(v.b, v.i, 0)
    sparse = tf.sparse.from_dense(tf.where(v("c", 3) | (values > 0), values + 1, 0))
    table = TABLE * tf.reduce_sum(v.x)
    ids = tf.sparse.SparseTensor(sparse.indices, sparse.values % 5, sparse.dense_shape)
    return tf.nn.embedding_lookup_sparse(table, ids, None, combiner=combiner)


def _ragged(v: Inputs) -> tf.Tensor:
    """Returns what is computed of rows of different lengths."""
    ragged = tf.RaggedTensor.from_tensor(v.x, tf.minimum(v("i"), 3))
    sums = tf.reduce_sum(ragged**2, axis=1)
    return sums[:, None] * ragged.to_tensor(shape=[None, 3])


# Ops among others, and ops that are computed as a whole.
OTHERS = [
    Sample("Mul", lambda v: tf.boolean_mask(v.x, v("b")) * MASK),
    Sample("Sum", lambda v: tf.reduce_mean(tf.boolean_mask(v.x, v("b")) ** 2)),
    Sample("Mul", lambda v: tf.boolean_mask(v.x, v.b) * 2.0),
    Sample("Gather", lambda v: tf.gather(v.x, found(v)) * tf.gather(v.y, found(v))),
    Sample("ScatterNd", _scattered_back),
    Sample("UnsortedSegmentSum", _summed_back),
    Sample("GatherV2", lambda v: tf.gather(v.x, v("i") % rows(v.x)), WHOLE),
    Sample("GatherV2", lambda v: tf.gather(v.x, tf.argsort(v("x"))), WHOLE),
    Sample("GatherV2", lambda v: gather(v.x, _cut_short(v)), WHOLE),
    Sample("GatherV2", lambda v: tf.gather(total(v("x", 5, 3)), v("i")), WHOLE),
    Sample("GatherV2", lambda v: tf.linalg.normalize(tf.gather(TABLE, v.i))[0]),
    Sample("GatherNd", lambda v: tf.gather_nd(v.x, [[0, 1], [0, 0]]), WHOLE),
    Sample("GatherNd", lambda v: tf.gather_nd(v.x, _own_elements(v))),
    Sample("GatherNd", _diagonal),
    Sample("SegmentSum", lambda v: tf.math.segment_sum(v.x, tf.sort(v("i"))), WHOLE),
    Sample("Unique", lambda v: tf.unique(v("i")), WHOLE),
    Sample("UnsortedSegmentProd", lambda v: unsorted("Prod", v.x, v("i"), 5), WHOLE),
    Sample(
        "TensorScatterAdd", lambda v: tf.tensor_scatter_nd_add(TABLE, v("i", 1), v.x)
    ),
    Sample("DynamicPartition", lambda v: tf.dynamic_partition(v.x, v("i"), 5), WHOLE),
    Sample("Where", lambda v: tf.where(tf.transpose(v.b)), WHOLE),
    Sample("SparseSegmentMean", lambda v: _sparse(v, "mean"), WHOLE),
    Sample("SparseSegmentSum", lambda v: _sparse(v, "sum"), WHOLE),
    Sample("SparseSegmentSqrtN", lambda v: _sparse(v, "sqrtn"), WHOLE),
    Sample("RaggedGather", _ragged, WHOLE),
]


@pytest.mark.parametrize("how", ["sum", "max"])
@pytest.mark.parametrize("width", [1, 2])
def test_what_is_shorter_is_sent(how, width):
    # Rows are gathered for a longer table; for a shorter one, its rows are combined.
    def made_of(table):
        def make():
            kernel = getattr(tf.math, f"unsorted_segment_{how}")
            return lambda ids: kernel(
                tf.cast(ids, tf.float32) ** 2, ids % table, table
            ), []

        return make

    spec = [tf.TensorSpec([None, width], tf.int32)]
    for table in (7 * width, 7 * width + 1):
        _, repl = helpers.run(made_of(table), spec, [7, 9])
        is_gathered = "all_gather" in helpers.primitives(repl)
        assert is_gathered == (table > 7 * width), table


def test_rows_of_different_numbers_are_sent_with_these():
    # As optimizers of TensorFlow 1 take an embedding's gradient. The loss's sum and the
    # weights' gradient are one message, and all of the rows are another.
    def program(session_of):
        ids = tf.compat.v1.placeholder(tf.int32, [None, 2])
        table = tf.compat.v1.get_variable("table", initializer=np.float32(TABLE))
        weights = tf.compat.v1.get_variable("weights", initializer=np.ones(6, "f"))
        rows = tf.reshape(tf.nn.embedding_lookup(table, ids), [-1, 6])
        loss = tf.reduce_mean(tf.square(rows * weights - 1.0))
        train = tf.compat.v1.train.AdamOptimizer(0.1).minimize(loss)
        session = session_of()
        fed = {ids: np.array([[0, 1], [1, 3], [0, 0], [3, 3], [1, 0]])}
        return [session.run([loss, train], fed)[0] for _ in range(3)]

    autodist = on_replicas.make(2)
    with tf.Graph().as_default(), autodist.scope():
        losses = program(autodist.create_distributed_session)
        sent = helpers.primitives(autodist.replicator)
    assert sent == ["all_gather", "all_reduce"]
    with tf.Graph().as_default():
        expected = program(on_replicas.plain_session)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
