# SPDX-License-Identifier: Apache-2.0
"""Single-device programs in graphs: for any optimizer, and AutoDist's own.

Each is built by plain TensorFlow alone; callers run them on one device or on many.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from replicator import strategy

v1 = tf.compat.v1
BATCH = 12  # of iterators
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: v1.train.GradientDescentOptimizer(0.1),
    "momentum": lambda: v1.train.MomentumOptimizer(0.05, 0.9),
    "adam": lambda: v1.train.AdamOptimizer(0.05),
    "adagrad": lambda: v1.train.AdagradOptimizer(0.1),
}
BUILDERS: dict[str, Callable[[], Any]] = {
    "PS": strategy.PS,
    "proxies": functools.partial(strategy.PS, local_proxy_variable=True),
    "PSLoadBalancing": strategy.PSLoadBalancing,
    "PartitionedPS": strategy.PartitionedPS,
    "UnevenPartitionedPS": strategy.UnevenPartitionedPS,
    "AllReduce": strategy.AllReduce,
    "PartitionedAR": strategy.PartitionedAR,
    "RandomAxisPartitionAR": functools.partial(strategy.RandomAxisPartitionAR, seed=1),
    "Parallax": strategy.Parallax,
    "Auto": strategy.Auto,
    "Sharded": strategy.Sharded,
    "columns": lambda: {".*": strategy.Partitioned(axis=1)},
}


@dataclasses.dataclass(frozen=True)
class Built:
    """A program in a graph.

    Attributes:
        fetches: The fetches of each step, including the training op.
        feeds: Returns the feeds of a step, given the number of examples; None: no
            feeds.
        variables: Compared after the steps.
    """

    fetches: Any
    feeds: Callable[[int], dict[Any, Any]] | None
    variables: list[Any]


def examples(size: int, *shape: int) -> np.ndarray:
    """Returns random numbers, the same in each call."""
    rng = np.random.default_rng(size)
    return rng.standard_normal((size, *shape), np.float32)


def _elements(*columns: Any) -> Any:
    """Returns the next element of an iterator over batches of a dataset."""
    data = tf.data.Dataset.from_tensor_slices(columns).repeat().batch(BATCH)
    iterator = v1.data.make_initializable_iterator(data)
    v1.add_to_collection(v1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    return iterator.get_next()


def cnn_on_an_iterator() -> Built:
    """A convolution and a dense layer, on a dataset's iterator."""
    x, y = _elements(examples(48, 6, 6, 1), np.arange(48) % 3)
    kernel = v1.get_variable("kernel", [3, 3, 1, 4])
    dense = v1.get_variable("dense", [64, 3])
    hidden = tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "VALID"))
    logits = tf.matmul(tf.reshape(hidden, [-1, 64]), dense)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
    loss = tf.reduce_mean(losses)
    train = v1.train.AdamOptimizer(0.01).minimize(loss)
    right = tf.reduce_sum(tf.cast(tf.equal(tf.argmax(logits, 1), y), tf.int32))
    return Built([loss, right, train], None, [kernel, dense])


def placeholders() -> Built:
    """Feeds: examples, a rate without a shape, a flag; clipped by their norm."""
    x = v1.placeholder(tf.float32, [None, 3])
    y = v1.placeholder(tf.float32, [None, 2])
    rate = v1.placeholder(tf.float32)
    scale = v1.placeholder(tf.float32, [2])
    w = v1.get_variable("w", [3, 2])
    step = v1.train.get_or_create_global_step()
    loss = tf.reduce_mean(((tf.matmul(x, w) - y) * scale) ** 2)
    loss += 0.01 * tf.nn.l2_loss(w)
    optimizer = v1.train.RMSPropOptimizer(rate)
    grads, variables = zip(*optimizer.compute_gradients(loss), strict=True)
    clipped, norm = tf.clip_by_global_norm(grads, 0.5)
    train = optimizer.apply_gradients(zip(clipped, variables, strict=True), step)
    return Built(
        [loss, train, norm, tf.shape(x)[0]],
        lambda n: {x: examples(n, 3), y: examples(n, 2), rate: 0.1, scale: [1, 2]},
        [w, step],
    )


class Lstm:
    """An LSTM cell for tf.compat.v1.nn.dynamic_rnn."""

    output_size = 3
    state_size = (3, 3)

    def __init__(self) -> None:
        self.kernel = v1.get_variable("kernel", [5, 12])

    def zero_state(self, size: Any, dtype: Any) -> Any:
        return tf.zeros([size, 3], dtype), tf.zeros([size, 3], dtype)

    def __call__(self, x: Any, state: Any, scope: Any = None) -> Any:
        c, h = state
        parts = tf.split(tf.matmul(tf.concat([x, h], 1), self.kernel), 4, 1)
        i, j, f, o = parts
        c = tf.sigmoid(f + 1) * c + tf.sigmoid(i) * tf.tanh(j)
        h = tf.sigmoid(o) * tf.tanh(c)
        return h, (c, h)


def dynamic_lstm() -> Built:
    """An LSTM over sequences of different lengths."""
    x = v1.placeholder(tf.float32, [None, 4, 2])
    lengths = v1.placeholder(tf.int32, [None])
    cell = Lstm()
    outputs, (_, last) = v1.nn.dynamic_rnn(cell, x, lengths, dtype=tf.float32)
    loss = tf.reduce_mean((last - 0.5) ** 2)
    train = v1.train.GradientDescentOptimizer(0.5).minimize(loss)
    return Built(
        [loss, outputs, train],
        lambda n: {x: examples(n, 4, 2), lengths: np.arange(n) % 4 + 1},
        [cell.kernel],
    )


def sentiment() -> Built:
    """A classifier of sentences on an iterator, with a metric that adds up."""
    rng = np.random.default_rng(0)
    ids, y = _elements(rng.integers(0, 20, [30, 4]), np.arange(30.0) % 2)
    y = tf.cast(y, tf.float32)
    table, dense = v1.get_variable("table", [20, 2]), v1.get_variable("dense", [3, 1])
    words, cell = tf.nn.embedding_lookup(table, ids), Lstm()
    _, (_, last) = v1.nn.dynamic_rnn(cell, words, dtype=tf.float32)
    logits = tf.squeeze(tf.matmul(last, dense), 1)
    losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=logits)
    loss = tf.reduce_mean(losses)
    _, accuracy = v1.metrics.accuracy(y, tf.round(tf.sigmoid(logits)))
    train = v1.train.AdamOptimizer(0.01).minimize(loss)
    return Built([loss, accuracy, train], None, [table, dense, cell.kernel])


def lm1b() -> Built:
    """A language model with a kept state, sampled words and averages of weights."""
    x, y = _elements(*np.random.default_rng(0).integers(0, 30, [2, 36, 4]))
    table, cell = v1.get_variable("table", [30, 2]), Lstm()
    kernel, bias = v1.get_variable("out", [30, 3]), v1.get_variable("bias", [30])
    kept = [tf.Variable(tf.zeros([BATCH, 3]), False, name=name) for name in "ch"]
    state, outputs = tuple(one.read_value() for one in kept), []
    for word in tf.unstack(tf.nn.embedding_lookup(table, x), axis=1):
        output, state = cell(word, state)
        outputs.append(output)
    rows, words = tf.reshape(tf.stack(outputs, 1), [-1, 3]), tf.reshape(y, [-1, 1])
    # Which words are drawn is fixed, with how often they are expected.
    drawn = [1, 5, 9, 20], 0.2 * tf.ones_like(words, tf.float32), tf.fill([4], 0.2)
    loss = tf.reduce_mean(
        tf.nn.sampled_softmax_loss(kernel, bias, words, rows, 4, 30, 1, drawn)
    )
    own = [cell.kernel, table, kernel, bias]
    slopes = tf.gradients(loss, own)
    clipped, norm = tf.clip_by_global_norm(slopes[:1], 0.1)
    pairs = zip([*clipped, *slopes[1:]], own, strict=True)
    train = v1.train.AdagradOptimizer(0.2).apply_gradients(pairs)
    averages = v1.train.ExponentialMovingAverage(0.9)
    with tf.control_dependencies([train]):
        keep = [one.assign(new).op for one, new in zip(kept, state, strict=True)]
        train = tf.group(averages.apply(own[:1]), *keep)
    return Built([loss, norm, train], None, [*own, *kept, averages.average(own[0])])


def bert() -> Built:
    """A transformer on an iterator: masked words, next sentences, Adam by hand."""
    rng = np.random.default_rng(0)
    words, places = rng.integers(0, 20, [2, 36, 2]), rng.integers(0, 5, [36, 2])
    ids, masked, chosen, weights, is_next = _elements(
        *(rng.integers(0, 20, [36, 5]), words[0], places),
        *(np.float32(words[1] > 5), np.arange(36) % 2),
    )
    table, position = v1.get_variable("table", [20, 4]), v1.get_variable("at", [5, 4])
    n, cross_entropy = tf.shape(ids)[0], v1.nn.sparse_softmax_cross_entropy_with_logits
    x = tf.reshape(tf.gather(table, tf.reshape(ids, [-1])), [n, 5, 4]) + position
    flat = tf.reshape(x, [-1, 4])
    q, k, v = (
        tf.reshape(flat @ v1.get_variable(name, [4, 4]), [n, 5, 2, 2]) for name in "qkv"
    )
    likeness = tf.nn.softmax(tf.einsum("nihd,njhd->nhij", q, k))
    mixed = tf.reshape(tf.einsum("nhij,njhd->nihd", likeness, v), [-1, 4])
    x = tf.nn.gelu(flat + mixed @ v1.get_variable("mix", [4, 4]))
    at = tf.reshape(chosen + 5 * tf.range(n, dtype=tf.int64)[:, None], [-1])
    logits = tf.matmul(tf.gather(x, at), table, transpose_b=True)
    losses = cross_entropy(labels=tf.reshape(masked, [-1]), logits=logits)
    weights = tf.reshape(weights, [-1])
    loss = tf.reduce_sum(losses * weights) / (tf.reduce_sum(weights) + 1e-5)
    logits = tf.reshape(x, [n, 5, 4])[:, 0] @ v1.get_variable("pool", [4, 2])
    loss += tf.reduce_mean(cross_entropy(labels=is_next, logits=logits))
    own, step = v1.trainable_variables(), v1.train.get_or_create_global_step()
    slopes, norm = tf.clip_by_global_norm(tf.gradients(loss, own), 1.0)
    rate, updates = v1.train.polynomial_decay(0.05, step, 10), []
    for slope, w in zip(map(tf.convert_to_tensor, slopes), own, strict=True):
        m, s = (tf.Variable(tf.zeros(w.shape), False) for _ in range(2))
        m_now, s_now = 0.9 * m + 0.1 * slope, 0.99 * s + 0.01 * slope**2
        decayed = m_now / (tf.sqrt(s_now) + 1e-3) + 0.01 * w
        updates += [m.assign(m_now).op, s.assign(s_now).op]
        updates += [w.assign_sub(rate * decayed).op]
    with tf.control_dependencies(updates):
        train = step.assign_add(1).op
    return Built([loss, norm, train], None, [*own, step])


# --- For any optimizer of TensorFlow 1 ------------------------------------------------


def regression(optimizer: Any) -> Built:
    """A matrix and a vector, on fed examples."""
    x = v1.placeholder(tf.float32, [None, 6], "x")
    y = v1.placeholder(tf.float32, [None, 4], "y")
    w = v1.get_variable("w", [6, 4])
    loss = tf.reduce_mean((tf.matmul(x, w) - y) ** 2)
    return Built(
        [loss, optimizer.minimize(loss), w],
        lambda n: {x: examples(n, 6), y: examples(n, 4)},
        [w, *_slots(optimizer, [w])],
    )


def embedding(optimizer: Any) -> Built:
    """A table with row lookups, and a dense layer."""
    ids = v1.placeholder(tf.int32, [None, 3], "ids")
    y = v1.placeholder(tf.float32, [None, 2], "y")
    table = v1.get_variable("table", [10, 4])
    dense = v1.get_variable("dense", [12, 2])
    rows = tf.reshape(tf.nn.embedding_lookup(table, ids), [-1, 12])
    loss = tf.reduce_mean((tf.matmul(rows, dense) - y) ** 2)
    return Built(
        [loss, optimizer.minimize(loss)],
        lambda n: {ids: np.arange(3 * n).reshape(n, 3) % 7, y: examples(n, 2)},
        [table, dense, *_slots(optimizer, [table, dense])],
    )


def condition(optimizer: Any) -> Built:
    """A table with row lookups in a branch."""
    ids = v1.placeholder(tf.int32, [None], "ids")
    y = v1.placeholder(tf.float32, [None], "y")
    use = v1.placeholder_with_default(True, [])
    table = v1.get_variable("table", [10, 4])
    base = v1.get_variable("base", [4, 4])
    rows = tf.cond(
        use,
        lambda: tf.nn.embedding_lookup(table, ids) @ base,
        lambda: tf.zeros([tf.size(ids), 4]) + base[0],
    )
    loss = tf.reduce_mean((tf.reduce_sum(rows, 1) - y) ** 2)
    return Built(
        [loss, optimizer.minimize(loss)],
        lambda n: {ids: np.arange(n) % 7, y: examples(n), use: n != 7},
        [table, base, *_slots(optimizer, [table, base])],
    )


def loop(optimizer: Any) -> Built:
    """A loop over a variable, with a fed number of turns."""
    x = v1.placeholder(tf.float32, [None, 4], "x")
    turns = v1.placeholder(tf.int32, [])
    w = v1.get_variable("w", [4, 4])
    _, output = tf.while_loop(
        lambda k, h: k < turns,
        lambda k, h: (k + 1, tf.tanh(tf.matmul(h, w))),
        [0, x],
    )
    loss = tf.reduce_mean((output - 1.0) ** 2)
    return Built(
        [loss, optimizer.minimize(loss)],
        lambda n: {x: examples(n, 4), turns: n % 3 + 1},
        [w, *_slots(optimizer, [w])],
    )


def _slots(optimizer: Any, variables: list[Any]) -> list[Any]:
    return [
        optimizer.get_slot(variable, name)
        for variable in variables
        for name in optimizer.get_slot_names()
    ]


ANY = (regression, embedding, condition, loop)
OWN = (cnn_on_an_iterator, placeholders, dynamic_lstm, sentiment, lm1b, bert)
SIZES = (12, 7, 1, 4, 3)  # examples of the steps: even, uneven, fewer than replicas
FEW = (6, 7, 1)
