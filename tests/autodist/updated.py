# SPDX-License-Identifier: Apache-2.0
"""Programs of sessions: what variables are at first, reads and writes, and parts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from replicator import strategy
from tests.autodist.sessions import EACH, PARTS, program

v1 = tf.compat.v1
N = np.arange(1, 8)
UNEVEN = strategy.UnevenPartitionedPS()


def _sgd(loss: tf.Tensor, rate: float = 0.1) -> tf.Operation:
    return v1.train.GradientDescentOptimizer(rate).minimize(loss)


def _variable(name: str, value: Any) -> Any:
    return v1.get_variable(name, initializer=np.float32(value), use_resource=True)


# --- First values ---------------------------------------------------------------------


@program()
def values_of_initializers(begin: Any) -> Any:
    v1.set_random_seed(3)
    made = [
        v1.get_variable("w", [3, 2], initializer=v1.glorot_uniform_initializer()),
        v1.get_variable("text", initializer=np.array(["a", "bc"])),
        v1.get_variable("flag", initializer=True),
        v1.get_variable("count", initializer=np.int64(5)),
        v1.get_variable("half", initializer=np.float16([0.5])),
        v1.get_variable("complex", initializer=np.complex64(1 + 2j)),
    ]
    session = begin()
    values = session.run(made)
    session.run([made[1].assign(["d", "e"]).op, made[2].assign(False).op])
    values += session.run([made[1], made[2]])
    session.run(v1.global_variables_initializer())
    return [*values, *session.run([made[1], made[2]])]


@program()
def a_value_before_there_is_one(begin: Any) -> Any:
    session, found = begin(), []
    late = tf.Variable(2.0)
    asked = late.is_initialized()
    try:
        session.run(late)
    except tf.errors.FailedPreconditionError:
        found.append(session.run(asked))
    session.run(late.initializer)
    return [*found, *session.run([asked, late])]


@program()
def a_value_that_is_fed(begin: Any) -> Any:
    given = v1.placeholder_with_default(np.float32([1, 2]), [2])
    w = v1.Variable(given, name="w", use_resource=True)
    session = begin()
    session.run(w.initializer, {given: [3.0, 4.0]})
    return session.run(w * 2.0)


@program()
def what_begins_unless_it_is_fed(begin: Any) -> Any:
    rows, slices = (
        v1.placeholder(tf.float32, [None]),
        tf.data.Dataset.from_tensor_slices,
    )
    fed = v1.data.make_initializable_iterator(slices(rows))
    init = tf.lookup.KeyValueTensorInitializer([1], [2])
    table, w, y = tf.lookup.StaticHashTable(init, 0), tf.Variable(3.0), fed.get_next()
    session = begin()
    found = session.run([w, table.lookup(tf.constant([1, 2]))])
    try:
        session.run(y)
    except tf.errors.FailedPreconditionError:
        session.run(fed.initializer, {rows: [4.0]})
    return [*found, *session.run([w, y])]


# --- Writes ---------------------------------------------------------------------------

# The method, the value from the examples, and their dtype; the variable was 10.
WRITES: dict[str, tuple[str, Callable[[Any], Any], Any]] = {
    "a mean": ("assign", tf.reduce_mean, tf.float32),
    "a sum": ("assign_add", tf.reduce_sum, tf.float32),
    "whole numbers": ("assign_add", tf.reduce_sum, tf.int64),
    "how many": ("assign_add", lambda x: tf.size(x, tf.int64), tf.int64),
    "a maximum": ("assign", tf.reduce_max, tf.int32),
    "a minimum": ("assign_sub", tf.reduce_min, tf.float32),
    "the first": ("assign", lambda x: x[0], tf.int32),
    "the last but one": ("assign", lambda x: x[-2], tf.int32),
    "computed of a mean": ("assign", lambda x: tf.reduce_mean(x) ** 2, tf.float32),
    "complex": ("assign", tf.reduce_mean, tf.complex64),
    "of complex means": ("assign", lambda x: tf.reduce_mean(x) ** 2, tf.complex64),
}


@program()
def writes_of_all_kinds(begin: Any) -> Any:
    given, written, made = {}, [], []
    for method, make, dtype in WRITES.values():
        x = v1.placeholder(dtype, [None])
        given[x] = N * (1 + 1j) if dtype.is_complex else N
        made.append(tf.Variable(tf.constant(10, dtype)))
        written.append(getattr(made[-1], method)(make(x)).op)
    session = begin()
    session.run(written, given)
    return session.run(made)


@program()
def variables_made_for_replicas(begin: Any) -> Any:
    """What they are made with says nothing here: there is one device."""
    x, made = v1.placeholder(tf.float32, [None]), []
    for aggregation in tf.VariableAggregation:
        for name in ("AUTO", "ON_READ"):
            when = getattr(tf.VariableSynchronization, name)
            how = {"aggregation": aggregation, "synchronization": when}
            made.append(tf.Variable(0.0, trainable=False, **how))
    write = [v.assign_add(tf.reduce_max(x)).op for v in made]
    session = begin()
    for values in ([1.0, 2.0, 5.0], [4.0, 3.0]):
        session.run(write, {x: values})
    return session.run(made)


@program()
def variables_of_any_shape(begin: Any) -> Any:
    v, n = tf.Variable(tf.ones([4, 2])), tf.Variable(0)
    add, count = v.assign_add(tf.ones([4, 2])), n.assign_add(1)
    session = begin()
    session.run([add.op, count.op])
    found = [session.run(add), *session.run([n, v]), session.run(count)]
    session.run(v.assign_sub(tf.ones([4, 2])))  # made after the session
    return [*found, v.eval(session)]


@program()
def gradients_that_are_fetched(begin: Any) -> Any:
    x, ids = v1.placeholder(tf.float32, [None]), v1.placeholder(tf.int32, [None])
    w, table = tf.Variable(2.0), tf.Variable(np.ones([4, 1], np.float32))
    losses = tf.reduce_sum(w * x), tf.reduce_mean(tf.gather(table, ids) ** 2)
    pairs = list(zip(losses, (w, table), strict=True))
    slopes = [tf.gradients(loss, v)[0] for loss, v in pairs]
    dense = [tf.convert_to_tensor(slope) for slope in slopes]
    train = [v.assign_sub(g).op for (_, v), g in zip(pairs, dense, strict=True)]
    session, feeds = begin(), {x: N, ids: [3, 0, 3, 1, 3, 3, 1]}
    first, rows = session.run(slopes, feeds)
    session.run(train, feeds)
    return [first, list(rows), *session.run([w, table])]


@program()
def the_norm_of_sparse_gradients(begin: Any) -> Any:
    ids = v1.placeholder(tf.int32, [None])
    table = v1.get_variable("table", [6, 3], initializer=v1.ones_initializer())
    slopes = tf.gradients(tf.reduce_mean(tf.gather(table, ids) ** 2), [table])
    (slope,), norm = tf.clip_by_global_norm(slopes, 0.05)
    optimizer = v1.train.GradientDescentOptimizer(1.0)
    train, session = optimizer.apply_gradients([(slope, table)]), begin()
    value, _ = session.run([norm, train], {ids: [1, 1, 1, 2]})
    return [value, session.run(table)]


@program(
    {
        "an element": lambda v, x: tf.cond(
            tf.reduce_mean(x) > 0, lambda: v.assign(tf.reduce_mean(x)) + 0, lambda: 0.0
        ),
        "turns": lambda v, x: tf.while_loop(
            lambda k: k < 3,
            lambda k: k + 1 + 0 * tf.cast(v.assign_add(tf.reduce_sum(x)), tf.int32),
            [0],
        ),
        "by the value": lambda v, x: tf.cond(
            v > 3.0, lambda: v.assign_sub(1.0) + 0, lambda: v.assign_add(x[0]) + 0
        ),
    }
)
def writes_in_control_flow(begin: Any, case: Callable[..., Any]) -> Any:
    x, v = v1.placeholder(tf.float32, [None]), tf.Variable(0.5)
    written, session, values = case(v, x), begin(), []
    for n in (7, 2, 1):
        session.run(written, {x: np.arange(2.0, n + 2)})
        values.append(session.run(v))
    return values


@program(strategies=EACH)
def writes_of_matrices_in_control_flow(begin: Any) -> Any:
    double = v1.placeholder(tf.bool, [])
    w = tf.Variable(np.arange(8, dtype=np.float32).reshape(4, 2), name="w")
    write = tf.cond(
        double,
        lambda: tf.identity(w.assign(w * 2.0)),
        lambda: tf.identity(w.assign_add(tf.ones([4, 2]))),
    )
    session = begin()
    values = [session.run(write, {double: d}) for d in (True, False, True)]
    return [*values, session.run(w)]


# --- Reads beside writes --------------------------------------------------------------


@program(
    {
        "added": lambda w: w.assign_add([1.0, 1.0, 1.0]),
        "computed of itself": lambda w: w.assign(w + 1.0),
        "rows": lambda w: w.scatter_add(tf.IndexedSlices([1.0, 1.0, 1.0], [0, 1, 2])),
        "trained": lambda w: _sgd(-tf.reduce_sum(w), 1.0),
        "momentum": lambda w: v1.train.MomentumOptimizer(1.0, 0.0).minimize(
            -tf.reduce_sum(w)
        ),
    },
    EACH,
    [[[1, 2, 3], [2, 4, 6], [3, 1]], [[2, 3, 4], [4, 6, 8], [4, 2]], [3, 4, 5]],
)
def a_read_beside_an_update(begin: Any, case: Callable[[Any], Any]) -> Any:
    """Is of the value before, as it nearly always is on one device."""
    w = _variable("w", [1, 2, 3])
    update = case(w)
    fetches, update = [w, w * 2.0, tf.gather(w, [2, 0])], getattr(update, "op", update)
    session = begin()
    found = [session.run([fetches, update])[0] for _ in range(2)]
    return tf.nest.map_structure(lambda a: a.tolist(), [*found, session.run(w)])


@program(strategies=EACH)
def a_read_that_waits_for_an_update(begin: Any) -> Any:
    w = _variable("w", [1, 2, 3])
    before = w.read_value()
    with tf.control_dependencies([before]):
        added = w.assign_add([1.0, 1.0, 1.0])
    with tf.control_dependencies([added]):
        after = [w.read_value(), tf.gather(w, [2, 0]), w * 2.0]
        after.append(tf.function(lambda: w * 3.0)())
    return begin().run([before, added, *after])


def _late(value: Any) -> Any:
    time.sleep(0.1)
    return value


@program(strategies=EACH)
def functions_that_wait_and_are_waited_for(begin: Any) -> Any:
    """What they wait for takes its time, as what they do."""
    w = _variable("w", [1, 2, 3])

    def add() -> tf.Tensor:
        more = tf.numpy_function(_late, [np.float32([1, 1, 1])], tf.float32)
        return w.assign_add(tf.ensure_shape(more, [3]))

    with tf.control_dependencies([add()]):
        read = tf.function(lambda: w * 3.0)()
    with tf.control_dependencies([read]):
        written = tf.function(lambda: tf.size(add()))()
    with tf.control_dependencies([written]):
        after = w.read_value()
    return begin().run([read, after])


@program(strategies=EACH)
def updates_and_initializers(begin: Any) -> Any:
    x, w = v1.placeholder(tf.float32, [None, 2]), tf.Variable([[1.0], [2.0]], name="w")
    optimizer = v1.train.MomentumOptimizer(0.5, 0.0)
    train = optimizer.minimize(tf.reduce_mean(tf.matmul(x, w)))
    init, asked = v1.global_variables_initializer(), w.is_initialized()
    with tf.control_dependencies([train]):
        after = tf.identity(w.read_value())
    session, values = begin(), []
    for _ in range(2):
        values.append(session.run(after, {x: np.ones([6, 2])}))
        session.run(train, {x: np.ones([7, 2])})
        values.append(session.run(w))
        session.run(init)
        values.append(session.run([w, asked, "w/Read/ReadVariableOp:0"]))
    return values


@program()
def a_function_that_reads_and_writes(begin: Any) -> Any:
    v = _variable("v", np.zeros([128, 128]))

    @tf.function
    def spend() -> tf.Tensor:
        spent = tf.matmul(v, tf.eye(128)) + v
        v.assign(spent + 1.0)
        return tf.reduce_mean(spent + tf.matmul(v, tf.eye(128)))

    found, session = spend(), begin()
    return [session.run(found) for _ in range(3)]


@program()
def rows_that_are_updated_by_themselves(begin: Any) -> Any:
    """As in a center loss; each replica reads rows that only the owner writes."""
    kind = v1.placeholder(tf.int32, [None])
    centers = v1.get_variable("centers", initializer=tf.ones([3, 2]), trainable=False)
    rows = tf.gather(centers, kind)
    update = v1.scatter_sub(centers, kind, 0.25 * rows)
    loss = tf.reduce_sum(rows * rows)
    with tf.control_dependencies([update]):
        train = tf.no_op()
    session, feed = begin(), {kind: np.array([0, 1, 2, 0, 1], np.int32)}
    losses = [session.run([loss, rows, train], feed)[:2] for _ in range(3)]
    return [*losses, session.run(centers)]


# --- Variables in parts ---------------------------------------------------------------


@program(strategies=[PARTS])
def names_of_parts_that_are_the_users(begin: Any) -> Any:
    w, other = _variable("w", [3, 4]), tf.Variable(5.0, name="w/part_0")
    return begin().run([w, other])


@program(strategies=[PARTS])
def parts_in_a_compiled_function(begin: Any) -> Any:
    x, w = v1.placeholder(tf.float32, [None, 2]), tf.Variable(tf.ones([2, 2]), name="w")
    compiled = tf.function(lambda x: tf.matmul(x, w), jit_compile=True)
    loss = tf.reduce_mean(compiled(x) ** 2)
    train, session = _sgd(loss), begin()
    feed = {x: [[1.0, 2.0], [3.0, 4.0], [5.0, 1.0]]}
    return [session.run([loss, train], feed)[0], session.run(w)]


@program({f"{uses} uses, {n} loops": (uses, n) for uses, n in ((1, 1), (2, 1), (1, 2))})
def loops_over_variables(begin: Any, case: tuple[int, int]) -> Any:
    x = v1.placeholder(tf.float32, [None, 5])
    d, e = _variable("d", [0.5] * 5), _variable("e", [0.3] * 5)

    def body(t: tf.Tensor, c: tf.Tensor) -> Any:
        for _ in range(case[0]):
            c = tf.tanh(d * c) + e * c
        return t + 1, c

    found = [tf.while_loop(lambda t, c: t < 2, body, [0, x])[1] for _ in range(case[1])]
    loss = tf.reduce_mean(tf.add_n(found) ** 2)
    train, session = _sgd(loss), begin()
    feed = {x: np.arange(20, dtype=np.float32).reshape(4, 5) / 10}
    return [session.run([loss, train], feed)[0], session.run([d, e])]


@program(strategies=[PARTS, UNEVEN])
def parts_that_are_written_otherwise(begin: Any) -> Any:
    v1.get_variable_scope().set_use_resource(True)
    w, m = _variable("w", np.arange(12)), _variable("m", np.ones([4, 2]))
    ops = [
        w.assign(w * 2),
        m.scatter_add(tf.IndexedSlices([[1.0, 2.0]] * 3, [3, 0, 3])),
        m.scatter_update(tf.IndexedSlices(5.0, [1])),
        m.scatter_nd_update([[2, 1]], [7.0]),
        m[1:3, 0].assign([8.0, 9.0]),
        v1.is_variable_initialized(m),
        tf.gather_nd(m, [[3, 1], [0, 0]]),
        tf.shape(m),
        w[2:4],
    ]
    session = begin()
    return [*(session.run(op) for op in ops), session.run(m[1:] * 2.0)]


@program(strategies=[PARTS, UNEVEN])
def averages_of_examples_in_parts(begin: Any) -> Any:
    x, mean = v1.placeholder(tf.float32, [None, 4]), tf.Variable([0.0] * 4)
    write = mean.assign_sub(0.5 * (mean - tf.reduce_mean(x, 0)))
    session = begin()
    session.run(write.op, {x: np.arange(28, dtype=np.float32).reshape(7, 4)})
    return session.run(mean)


@program(strategies=[PARTS, UNEVEN])
def an_optimizer_that_assigns(begin: Any) -> Any:
    x, w = v1.placeholder(tf.float32, [None, 4]), tf.Variable(tf.ones([4, 2]))
    m = tf.Variable(tf.zeros([4, 2]), trainable=False, name="m")
    loss = tf.reduce_mean((tf.matmul(x, w) - 1.0) ** 2)
    gradient = tf.clip_by_norm(tf.gradients(loss, [w])[0], 0.5)
    moment = m.assign(0.9 * m + gradient)
    with tf.control_dependencies([moment.op]):
        train = w.assign_sub(0.1 * tf.tanh(m.read_value()))
    session, feed = begin(), {x: np.arange(20, dtype=np.float32).reshape(5, 4) / 20}
    values = [session.run([loss, train.op], feed)[0] for _ in range(3)]
    return [*values, *session.run([w, m])]


@program(strategies=[PARTS, UNEVEN])
def values_that_no_part_has(begin: Any) -> Any:
    x, w = v1.placeholder(tf.float32, [None, 6]), _variable("w", np.ones([6, 2]))
    loss = tf.reduce_mean((tf.matmul(x, w) - 1.0) ** 2)
    (gradient,) = tf.gradients(loss, [w])
    scale = tf.norm(w) / tf.norm(gradient)  # as in LARS
    whitened = tf.matmul(gradient, gradient, transpose_a=True)
    train = w.assign_sub(0.1 * scale * tf.matmul(gradient, whitened))
    session, feed = begin(), {x: np.arange(30, dtype=np.float32).reshape(5, 6) / 30}
    values = [session.run([loss, train.op], feed)[0] for _ in range(3)]
    return [*values, session.run(w)]
