# SPDX-License-Identifier: Apache-2.0
"""Programs of sessions: elements of datasets and queues, tables, and several steps."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tests.autodist.sessions import EACH, program

v1 = tf.compat.v1
X = np.random.default_rng(0).normal(size=[10, 3]).astype(np.float32)


def _sgd(loss: tf.Tensor, rate: float = 0.1) -> tf.Operation:
    return v1.train.GradientDescentOptimizer(rate).minimize(loss)


def _iterator(batch: int = 4, **options: Any) -> Any:
    data = tf.data.Dataset.from_tensor_slices(X).batch(batch, **options)
    return v1.data.make_one_shot_iterator(data)


# --- Elements of datasets -------------------------------------------------------------


@program(
    {
        "plain": lambda train: _iterator().get_next(),
        "conditional": lambda train: v1.cond(
            train, _iterator().get_next, _iterator(3).get_next
        ),
        "function": lambda train: tf.function(_iterator().get_next)(),
        "function in a function": lambda train: tf.function(
            lambda iterator: tf.function(iterator.get_next)()
        )(_iterator()),
        "of static size": lambda train: _iterator(drop_remainder=True).get_next(),
    }
)
def elements(begin: Any, case: Callable[[Any], tf.Tensor]) -> Any:
    x = case(v1.placeholder_with_default(True, []))
    w = v1.get_variable("w", [3, 1], initializer=v1.ones_initializer())
    loss = tf.reduce_mean((x @ w - 1.0) ** 2)
    train, session = _sgd(loss), begin()
    steps = [session.run([x, loss, train])[:2] for _ in range(2)]
    return [*steps, session.run(w)]


@program()
def an_iterator_that_ends(begin: Any) -> Any:
    total, session, found = tf.reduce_sum(_iterator(3).get_next(), 0), begin(), []
    try:
        while True:
            found.append(session.run(total))  # the last of one row
    except tf.errors.OutOfRangeError:
        return found


@program()
def elements_of_few_rows_or_none(begin: Any) -> Any:
    data = tf.data.Dataset.from_generator(
        lambda: (X[:n] for n in (2, 0, 1, 5)),
        output_signature=tf.TensorSpec([None, 3]),
    )
    iterator = v1.data.make_initializable_iterator(data)
    x = iterator.get_next()
    fetches, session = (x * 2, tf.reduce_sum(x, 0), tf.shape(x)[0]), begin()
    session.run(iterator.initializer)
    return [session.run(fetches) for _ in range(4)]


@program()
def an_element_that_is_every_replicas(begin: Any) -> Any:
    x = v1.placeholder(tf.float32, [None])
    data = tf.data.Dataset.from_tensor_slices(np.float32([1, 2, 3]))
    rate = v1.data.make_one_shot_iterator(data).get_next()
    session, rows = begin(), x * rate
    return [session.run(rows, {x: X[:5, 0]}) for _ in range(3)]


@program()
def a_component_of_another_length(begin: Any) -> Any:
    """It has a first axis of one, as the error says that one without has."""
    specs = (tf.TensorSpec([None, 3]), tf.TensorSpec([1, None, 3]))
    data = tf.data.Dataset.from_generator(
        lambda: ((X[:n], X[None, n:]) for n in (4, 7, 1)), output_signature=specs
    )
    x, others = v1.data.make_one_shot_iterator(data).get_next()
    likeness = x @ tf.transpose(others[0])
    fetches, session = [likeness, tf.reduce_mean(likeness)], begin()
    return [session.run(fetches) for _ in range(3)]


@program()
def an_iterator_that_is_fed(begin: Any) -> Any:
    rows = v1.placeholder(tf.float32, [None])
    data = tf.data.Dataset.from_tensor_slices(rows).batch(2)
    iterator = v1.data.make_initializable_iterator(data)
    mean, session, found = tf.reduce_mean(iterator.get_next()), begin(), []
    for values in ([1, 2, 6], [3, 5, 7, 9]):
        session.run(iterator.initializer, {rows: values})
        found += [session.run(mean), session.run(mean)]
    return found


@program()
def an_iterator_of_several_datasets(begin: Any) -> Any:
    one, two = (tf.data.Dataset.from_tensor_slices(X * k).batch(4) for k in (1, 2))
    facts = v1.data.get_output_types(one), v1.data.get_output_shapes(one)
    iterator = v1.data.Iterator.from_structure(*facts)
    starts = iterator.make_initializer(one), iterator.make_initializer(two)
    x, session, found = iterator.get_next(), begin(), []
    for start in starts:
        session.run(start)
        found += [session.run(x) for _ in range(2)]
    return found


@program()
def a_handle_of_an_iterator(begin: Any) -> Any:
    first = tf.data.Dataset.range(12).batch(4)
    second = tf.data.Dataset.range(100, 112).batch(4)
    iterators = [
        v1.data.make_initializable_iterator(first),
        v1.data.make_one_shot_iterator(second),
    ]
    handle = v1.placeholder(tf.string, [])
    facts = v1.data.get_output_types(first), v1.data.get_output_shapes(first)
    element = v1.data.Iterator.from_string_handle(handle, *facts).get_next()
    fetches, session = [tf.reduce_sum(element), element], begin()
    session.run(iterators[0].initializer)
    handles = session.run([one.string_handle() for one in iterators])
    return [session.run(fetches, {handle: handles[k]}) for k in (0, 1, 0, 1)]


@program()
def a_default_beside_an_element(begin: Any) -> Any:
    dataset = tf.data.Dataset.from_tensor_slices(np.arange(8.0)).batch(4)
    iterator = v1.data.make_initializable_iterator(dataset)
    scale = v1.placeholder_with_default(np.arange(4.0), [None])
    scaled, session = iterator.get_next() * scale, begin()
    session.run(iterator.initializer)
    return [session.run(scaled) for _ in range(2)]


@program(
    {
        "mixed": lambda x, w: tf.reduce_sum(w * x) + w * w,
        "sorted": lambda x, w: tf.reduce_mean(tf.sort(w * x) * x),
    }
)
def losses_of_elements(begin: Any, case: Any) -> Any:
    data = tf.data.Dataset.from_tensor_slices(np.float32([3, 1, 2, 7, 5, 4]))
    iterator = v1.data.make_initializable_iterator(data.batch(3).repeat())
    x, w = iterator.get_next(), tf.Variable(1.0)
    loss = case(x, w)
    train, session = _sgd(loss, 0.01), begin()
    session.run(iterator.initializer)
    return [*(session.run([loss, train])[0] for _ in range(3)), session.run(w)]


# --- What is only for an evaluation ---------------------------------------------------


@program(strategies=EACH)
def data_of_an_evaluation(begin: Any) -> Any:
    rows = tf.data.Dataset.from_tensors(np.int32([0, 1, 2, 1])).repeat()
    ids = v1.data.make_one_shot_iterator(rows).get_next()
    others = tf.data.Dataset.from_tensor_slices(np.arange(12, dtype=np.int32))
    other = v1.data.make_one_shot_iterator(others.batch(1)).get_next()
    table = v1.get_variable("table", [12, 3], initializer=v1.ones_initializer())
    loss, _ = tf.reduce_mean(tf.gather(table, ids) ** 2), tf.gather(table, other)
    train, session = _sgd(loss), begin()
    for _ in range(3):
        session.run(train)
    return session.run([other, table])


@program({"gathered": True, "dense": False}, EACH)
def a_feed_of_an_evaluation(begin: Any, case: bool) -> Any:
    one, two = (v1.placeholder(tf.int32, [None], name) for name in "ab")
    table = v1.get_variable("table", [5, 3], initializer=v1.ones_initializer())

    def found(ids: tf.Tensor) -> tf.Tensor:
        return tf.gather(table, ids) if case else tf.one_hot(ids, 5) @ table

    loss, other = (tf.reduce_mean(found(ids) ** 2) for ids in (one, two))
    train, session = _sgd(loss), begin()
    value, _ = session.run([loss, train], {one: [1, 1, 3]})
    return [value, session.run(table), session.run(other, {two: [1, 3]})]


# --- Queues, tables and stages --------------------------------------------------------


def _dequeued_in_a_branch(queue: Any) -> tf.Tensor:
    test = v1.placeholder_with_default(True, [])
    branches = (lambda: queue.dequeue_many(4)), (lambda: queue.dequeue_many(2))
    return v1.cond(test, *branches)


@program({"plain": lambda q: q.dequeue_many(4), "conditional": _dequeued_in_a_branch})
def a_queue(begin: Any, case: Any) -> Any:
    queue = tf.queue.FIFOQueue(20, [tf.float32], [[3]])
    rows = v1.placeholder(tf.float32, [None, 3])
    put, size, x = queue.enqueue_many([rows]), queue.size(), case(queue)
    fetches, session = [x, tf.reduce_sum(x)], begin()
    session.run(put, {rows: X})
    return [session.run(fetches), session.run(fetches), session.run(size)]


@program()
def a_table(begin: Any) -> Any:
    x = v1.placeholder(tf.string, [None])
    keys = tf.constant(["a", "b"]), tf.constant([1.0, 2.0])
    init = tf.lookup.KeyValueTensorInitializer(*keys)
    found = tf.lookup.StaticHashTable(init, 0.0).lookup(x)
    doubled = v1.py_func(lambda v: v * 2, [found], tf.float32)
    doubled.set_shape([None])
    return begin().run([found, doubled], {x: ["b", "c", "a"]})


@program()
def a_table_that_is_written(begin: Any) -> Any:
    x, values = v1.placeholder(tf.int64, [None]), []
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)
    write, found = table.insert(x, x * x), table.lookup(x)
    session = begin()
    for given in ([1, 2, 3], [3, 4, 5], [5]):
        values.append(session.run(found, {x: given}))
        session.run(write, {x: given})
        values.append(session.run([found, table.size()], {x: given}))
    return values


@program()
def a_file(begin: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "lines")
        path.write_text("1\n2\n3\n4\n")
        data = tf.data.TextLineDataset(str(path)).batch(3)
        iterator = v1.data.make_initializable_iterator(data)
        x = tf.strings.to_number(iterator.get_next())
        text, session = tf.io.read_file(str(path)), begin()
        session.run(iterator.initializer)
        fetches = [x, tf.reduce_sum(x)]
        return [session.run(fetches), session.run(fetches), session.run(text)]


@program()
def a_checkpoint(begin: Any) -> Any:
    x = v1.placeholder(tf.float32, [None, 3])
    w = v1.get_variable("w", [3], initializer=v1.ones_initializer())
    train, saver, session = w.assign_add(tf.reduce_sum(x, 0)), v1.train.Saver(), begin()
    with tempfile.TemporaryDirectory() as folder:
        session.run(train, {x: X})
        path = saver.save(session, f"{folder}/model")
        session.run(train, {x: X[:2]})
        saver.restore(session, path)
        names = sorted(file.name for file in pathlib.Path(folder).iterdir())
        return [session.run(w), *names]


@program()
def a_stage(begin: Any) -> Any:
    x = v1.placeholder(tf.float32, [None])
    area = {"container": "", "shared_name": "area"}
    put = tf.raw_ops.Stage(values=[x], capacity=0, memory_limit=0, **area)
    size, session = tf.raw_ops.StageSize(dtypes=[tf.float32], **area), begin()
    session.run(put, {x: np.ones(4)})
    return session.run(size)


# --- Several steps of a session -------------------------------------------------------


def _one_shot() -> Any:
    data = tf.data.Dataset.range(9)
    return v1.data.make_one_shot_iterator(data).get_next(), []


def _initializable() -> Any:
    iterator = v1.data.make_initializable_iterator(tf.data.Dataset.range(9))
    return iterator.get_next(), [iterator.initializer]


def _queue() -> Any:
    queue = tf.queue.FIFOQueue(9, [tf.int64], [[]])
    return queue.dequeue(), [queue.enqueue_many([tf.range(9, dtype=tf.int64)])]


@program({"one shot": _one_shot, "initializable": _initializable, "queue": _queue})
def steps_that_pull_from_the_same(begin: Any, case: Any) -> Any:
    pulled, prepare = case()
    other, session = pulled * 10, begin()
    session.run(prepare)
    return [session.run(one) for one in (pulled, other, [pulled, other], pulled)]


@program()
def batches_of_other_patterns(begin: Any) -> Any:
    x, y = v1.placeholder(tf.float32, [None]), v1.placeholder(tf.float32, [None])
    session, fetch = begin(), tf.reduce_sum(x) * tf.reduce_mean(y)
    shapes = (4, 4), (4, 5), (6, 6), (1, 4), (7, 3), (5, 4)
    return [session.run(fetch, {x: np.ones(n), y: np.ones(m)}) for n, m in shapes]


def _trained() -> tuple[Any, ...]:
    x = v1.placeholder(tf.float32, [None, 3], "x")
    w = v1.get_variable("w", [3, 1], initializer=v1.ones_initializer())
    loss = tf.reduce_mean(tf.matmul(x, w) ** 2)
    return x, w, loss, v1.train.AdamOptimizer(0.1).minimize(loss)


@program(strategies=EACH)
def a_step_that_is_built_later(begin: Any) -> Any:
    x, w, loss, train = _trained()
    session = begin()
    values = [session.run([loss, train], {x: X[:n]})[0] for n in (7, 4)]
    later = _sgd(loss)
    values += [session.run([w, tf.matmul(x, w)], {x: X})]
    values += [session.run([loss, later, train], {x: X})[0]]
    return [*values, session.run(w)]


@program()
def what_is_built_behind_the_session(begin: Any) -> Any:
    x = v1.placeholder(tf.float32, [None])
    w = tf.Variable(2.0)
    session, feed = begin(), {x: [1.0, 2.0, 6.0]}
    slopes = tf.gradients(tf.reduce_mean(w * x * x), [x, w])
    values = [session.run(one, feed) for one in (w * x, slopes, tf.sort(-x))]
    session.run(w.assign_sub(slopes[1]), feed)
    return [*values, session.run(w)]


@program()
def variables_made_after_the_session(begin: Any) -> Any:
    x, w, loss, _ = _trained()
    session = begin()
    before, known = session.run(loss, {x: X}), set(v1.global_variables())
    scale = v1.get_variable("scale", initializer=3.0)
    train = v1.train.MomentumOptimizer(0.1, 0.9).minimize(scale * loss)
    made = [v for v in v1.global_variables() if v not in known]
    session.run([v.initializer for v in made])
    for _ in range(2):
        session.run(train, {x: X / 10})
    return [before, session.run([w, scale]), len(made)]


@program()
def two_sessions(begin: Any) -> Any:
    w = tf.Variable(1.0)
    add = w.assign_add(1.0).op
    one, two = begin(), begin()
    for session in (one, one, two):
        session.run(add)
    return [one.run(w), two.run(w)]
