# SPDX-License-Identifier: Apache-2.0
"""Sparse and ragged tensors, stateless random numbers, axes in odd places."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.forms.programs import values
from tests.forms.programs.values import Builder, Made, calm, finite, rounded


def sparse(p: Builder) -> Made:
    """Computes with a sparse matrix that the batch tells: a row per example."""
    i, n = tf.cast(p.given["i"], tf.int64), tf.cast(p.n, tf.int64)
    own = tf.tanh(p.given["y"])
    places = tf.stack([tf.range(n), i], 1)
    rows = tf.SparseTensor(places, own, tf.stack([n, 7]))
    more = tf.sparse.from_dense(tf.cast(p.given["x"] > 0, p.dtype))
    table, x = p.variables["table"], p.given["x"]
    options: list[Any] = [
        lambda: (tf.sparse.sparse_dense_matmul(rows, table), ("n", 3)),
        lambda: (tf.sparse.sparse_dense_matmul(rows, x, adjoint_a=True), (7, 3)),
        lambda: (tf.sparse.sparse_dense_matmul(more, p.variables["w"]), ("n", 4)),
        lambda: (tf.sparse.to_dense(rows), ("n", 7)),
        lambda: (tf.sparse.to_dense(tf.sparse.transpose(rows)), (7, "n")),
        lambda: (tf.sparse.reduce_sum(rows, 0), (7,)),
        lambda: (tf.sparse.reduce_sum(rows, 1), ("n",)),
        lambda: (tf.sparse.reduce_sum(rows), ()),
        lambda: (tf.sparse.to_dense(tf.sparse.softmax(more)), ("n", 3)),
        lambda: (tf.sparse.to_dense(tf.sparse.concat(0, [rows, rows])), ("2n", 7)),
        lambda: (
            tf.sparse.to_dense(tf.sparse.concat(1, [rows, more])),
            ("n", 10),
        ),
        lambda: (tf.sparse.to_dense(more.with_values(more.values * 2)), ("n", 3)),
        lambda: (
            tf.sparse.to_dense(tf.sparse.reorder(tf.sparse.reshape(rows, [-1]))),
            ("7n",),
        ),
        lambda: (
            tf.scatter_nd(places, own, tf.stack([n, tf.constant(7, tf.int64)])),
            ("n", 7),
        ),
    ]
    made, dims = p.of(options)()
    return calm(made), dims


def ragged(p: Builder) -> Made:
    """Computes with rows of different lengths."""
    t, lengths, i = p.given["t"], p.given["lengths"], p.given["i"]
    lengths = tf.cast(lengths, tf.int64)
    words = tf.RaggedTensor.from_tensor(calm(t), lengths)
    numbers = tf.RaggedTensor.from_tensor(tf.tanh(t[:, :, 0]), lengths)
    counts = tf.cast(i % 3, lengths.dtype)  # empty rows, too
    some = tf.RaggedTensor.from_row_lengths(
        tf.repeat(tf.tanh(p.given["y"]), counts), counts
    )
    ids = tf.ragged.map_flat_values(lambda a: tf.cast(tf.abs(a) * 6, tf.int32), numbers)
    firm = tf.RaggedTensor.from_tensor(rounded(t[:, :, 0]), lengths)
    options: list[Any] = [
        lambda: (tf.reduce_sum(words, 1), ("n", 3)),
        lambda: (finite(tf.reduce_mean(some, 1)), ("n",)),
        lambda: (tf.reduce_sum(some), ()),
        lambda: (tf.reduce_max(firm, 1), ("n",)),
        lambda: (tf.reduce_sum(numbers, 0)[:1], (1,)),
        lambda: (tf.reduce_sum(some.to_tensor(), 1), ("n",)),
        lambda: (numbers.to_tensor(0.5, shape=[None, 3]), ("n", 3)),
        lambda: (words.to_tensor(shape=[None, 2, 3]), ("n", 2, 3)),
        lambda: (some.flat_values, (f"some{p._step}",)),
        lambda: (words.merge_dims(0, 1), (f"words{p._step}", 3)),
        lambda: (p.number(words.row_lengths()) / 5, ("n",)),
        lambda: (tf.gather(some.to_tensor(shape=[None, 2]), [0]), (1, 2)),
        lambda: (
            tf.reduce_mean(tf.gather(p.variables["table"], ids), 1),
            ("n", 3),
        ),
        lambda: (
            tf.reduce_sum(
                tf.ragged.map_flat_values(tf.sin, numbers * 2.0 + numbers), 1
            ),
            ("n",),
        ),
        lambda: (
            tf.reduce_sum(tf.concat([some, numbers], 1), 1),
            ("n",),
        ),
        lambda: (
            tf.reduce_sum(tf.concat([some, some], 0), 1),
            ("2n",),
        ),
        lambda: (
            tf.reduce_sum(tf.ragged.boolean_mask(numbers, firm > 0), 1),
            ("n",),
        ),
        lambda: (
            tf.reduce_sum(tf.gather(numbers, tf.argsort(i, stable=True)), 1),
            ("n",),
        ),
        lambda: (tf.reduce_sum(numbers[:, :2], 1), ("n",)),
        lambda: (tf.reduce_sum(numbers * p.given["y"][:, None], 1), ("n",)),
    ]
    made, dims = p.of(options)()
    return calm(made), dims


def drawn(p: Builder) -> Made:
    """Draws stateless random numbers, which are those of one device."""
    x, seed = p.given["x"], [int(p.rng.integers(99)), 3]
    told = tf.stack([tf.cast(p.n, tf.int32), 7])
    draw = tf.random
    shuffled = draw.experimental.stateless_shuffle(tf.range(p.n), seed)
    options: list[Any] = [
        lambda: x + draw.stateless_normal(tf.shape(x), seed, dtype=p.dtype),
        lambda: x * draw.stateless_uniform([p.n, 1], seed, dtype=p.dtype),
        lambda: x + draw.stateless_uniform([3], told, dtype=p.dtype),
        lambda: draw.experimental.stateless_shuffle(x, seed),
        lambda: tf.gather(x, shuffled),
        lambda: tf.nn.experimental.stateless_dropout(x, 0.4, seed),
        lambda: x + tf.gather(p.variables["bank"], _ids(p, seed)),
        lambda: x[:, None] + draw.stateless_normal([p.n, 2, 3], seed, dtype=p.dtype),
    ]
    made = p.of(options)()
    return calm(made), ("n", 3) if made.shape.rank == 2 else ("n", 2, 3)


def _ids(p: Builder, seed: Any) -> tf.Tensor:
    return tf.random.stateless_uniform([p.n], seed, 0, 4, tf.int32)


def oddly(p: Builder) -> Made:
    """Contracts, permutes and pools the batch where it is not in front."""
    a, dims = p.pick(lambda d: values.has_rows(d) and len(d) == 2)
    if not values.is_matrix(dims):
        a, dims = p.given["x"], ("n", 3)
    t, width, n = p.given["t"], dims[1], p.n
    order = tf.argsort(p.given["i"], stable=True)
    inverse = tf.math.invert_permutation(tf.cast(order, tf.int32))
    options: list[Any] = [
        lambda: (tf.einsum("an,nb->ab", tf.transpose(a), a) / 5, (width, width)),
        lambda: (tf.einsum("na,nb,n->ab", a, a, p.given["y"]) / 5, (width, width)),
        lambda: (tf.einsum("ntc,nd->tcd", t, a)[:2] / 5, (2, 3, width)),
        lambda: (tf.einsum("nk->k", a), (width,)),
        lambda: (tf.einsum("ntc,ntd->ncd", t, t) / 5, ("n", 3, 3)),
        lambda: (tf.einsum("nk,mk->nm", a, tf.roll(a, 1, 0)) / 3, ("n", "n")),
        lambda: (tf.einsum("...ij->...ji", t[:, :2]), ("n", 3, 2)),
        lambda: (tf.gather(tf.gather(a, order), inverse), dims),
        lambda: (tf.gather(tf.transpose(a), order, axis=1), (width, "n")),
        lambda: (tf.linalg.matrix_transpose(t)[:, :, 0], ("n", 3)),
        lambda: (tf.transpose(tf.nn.softmax(tf.transpose(a))), dims),
        lambda: (tf.scatter_nd(order[:, None], a, tf.shape(a)), dims),
        lambda: (
            (tf.tensor_scatter_nd_max(a, [[0]], a[-1:]), dims)
            if p.is_exact
            else (a, dims)
        ),
        lambda: (tf.stack(tf.split(tf.concat([a, a], 0), [n, n]), 1), ("n", 2, width)),
        lambda: (_seen_by_python(p, a), dims),
    ]
    made, found = p.of(options)()
    return calm(made), found


def _seen_by_python(p: Builder, a: tf.Tensor) -> tf.Tensor:
    def centered(b: tf.Tensor) -> tf.Tensor:
        return b - tf.reduce_mean(b, 0)

    made = tf.py_function(centered, [a], p.dtype)
    made.set_shape(a.shape)
    return made


def ringed(p: Builder) -> Made:
    """A ring buffer of the last examples, and where the next one goes."""
    bank, step, x = p.variables["bank"], p.variables["step"], calm(p.given["x"])
    few = x[:4]
    count = tf.shape(few)[0]
    places = ((step.read_value() + tf.range(count)) % 4)[:, None]
    before = bank.read_value()
    options: list[Any] = [
        lambda: bank.scatter_nd_update(places, few),
        lambda: bank.scatter_update(tf.IndexedSlices(few, places[:, 0])),
        lambda: bank.assign(tf.tensor_scatter_nd_update(before, places, few)),
        lambda: bank.scatter_nd_add(places, few),
    ]
    p.of(options)()
    step.assign_add(count)
    return calm(tf.matmul(p.given["x"], bank.read_value(), transpose_b=True)), ("n", 4)


MAKERS = (sparse, sparse, ragged, ragged, drawn, oddly, oddly, ringed)
