# SPDX-License-Identifier: Apache-2.0
"""What is known of integers from shapes holds for the whole and for each part of it.

The law: an element that is a number is this number in both versions; one that is known
at run time is the same in both; a size is a multiple of the number of rows in both.
"""

from __future__ import annotations

import operator
from typing import Any

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from replicator.forms import evaluation, sizes
from replicator.forms.forms import Fact, Layout, Sharded
from replicator.forms.propagate import GraphPlan, Scope
from replicator.forms.sizes import UNKNOWN, WHOLE, Size

LAYOUT, OTHER = Layout("batch"), Layout("other")
OPERATIONS = (
    operator.add,
    operator.sub,
    operator.mul,
    operator.floordiv,
    operator.mod,
)
# What is known, its value of the whole, and of one replica's part: 12 rows, and 5 of
# them; 6 and 2 in another layout.
LEAVES = [
    *((n, n, n) for n in (-1, 0, 1, 2, 3, 4)),
    (UNKNOWN, 7, 7),
    (Size(LAYOUT, 1), 12, 5),
    (Size(LAYOUT, 2), 24, 10),
    (Size(OTHER, 3), 18, 6),
]
ROWS = {LAYOUT: (12, 5), OTHER: (6, 2)}


def check(known: Any, whole: int, local: int) -> None:
    if isinstance(known, int):
        assert (whole, local) == (known, known)
    elif known is UNKNOWN:
        assert whole == local
    elif isinstance(known, Size):
        of_all, own = ROWS[known.layout]
        factor = whole // of_all if known.factor is None else known.factor
        assert (whole, local) == (factor * of_all, factor * own)
    else:
        assert known is WHOLE


@hypothesis.given(
    st.recursive(
        st.sampled_from(LEAVES),
        lambda inner: st.tuples(st.sampled_from(OPERATIONS), inner, inner),
        max_leaves=6,
    )
)
@hypothesis.settings(max_examples=300, deadline=None)
def test_arithmetic_on_elements_holds_in_both_versions(expression):
    def value(one: Any) -> Any:
        if not callable(one[0]):
            return one
        function, a, b = one[0], value(one[1]), value(one[2])
        return tuple(function(x, y) for x, y in zip(a, b, strict=True))

    try:
        known, whole, local = value(expression)
    except ZeroDivisionError:
        return
    check(known, whole, local)


def _broadcast_shape(x: tf.Tensor) -> tf.Tensor:
    return tf.broadcast_dynamic_shape(tf.shape(x), tf.constant([1, 4, 1]))


PROGRAMS = {
    "shape": tf.shape,
    "shape in int64": lambda x: tf.shape(x, tf.int64),
    "first": lambda x: tf.shape(x)[0],
    "last two": lambda x: tf.shape(x)[-2:],
    "new axis": lambda x: tf.shape(x)[tf.newaxis, ..., 0],
    "size": tf.size,
    "rank": tf.rank,
    "flattened": lambda x: tf.stack([tf.shape(x)[0], tf.reduce_prod(tf.shape(x)[1:])]),
    "flat": lambda x: tf.reduce_prod(tf.shape(x), keepdims=True),
    "of none": lambda x: tf.reduce_prod(tf.shape(x)[1:1], keepdims=True),
    "sum": lambda x: tf.reduce_sum(tf.shape(x)[1:]),
    "with ones": lambda x: tf.concat([tf.shape(x)[:1], [1, 1], tf.shape(x)[2:]], 0),
    "halves": lambda x: (2 * tf.shape(x)) // 2,
    "one more": lambda x: tf.shape(x) + 1,
    "gathered": lambda x: tf.gather(tf.shape(x), [2, 0]),
    "reversed": lambda x: tf.reverse(tf.shape(x), [0]),
    "unstacked": lambda x: tf.stack(tf.unstack(tf.shape(x))[::-1]),
    "split": lambda x: tf.split(tf.shape(x), 3)[0],
    "sliced": lambda x: tf.slice(tf.shape(x), [1], [-1]),
    "larger": lambda x: tf.maximum(tf.shape(x), 2),
    "remainder": lambda x: tf.shape(x) % 3,
    "range": lambda x: tf.range(tf.rank(x)),
    "filled": lambda x: tf.fill([tf.rank(x)], tf.shape(x)[0]),
    "permuted": lambda x: tf.gather(tf.shape(x), tf.math.invert_permutation([1, 2, 0])),
    "broadcast": _broadcast_shape,
    "stitched": lambda x: tf.dynamic_stitch([[0, 1], [2]], [[3, 4], tf.shape(x)[:1]]),
    "reshaped": lambda x: tf.squeeze(tf.reshape(tf.shape(x), [1, 3]), 0),
    "cast": lambda x: tf.cast(tf.shape(x), tf.int64),
    "zeros": lambda x: tf.zeros_like(tf.shape(x)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_ops_on_shapes_are_known_in_both_versions(name):
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 4, None])
        out = PROGRAMS[name](x)
        found = out
    plan = GraphPlan([x], [Fact(Sharded(0, LAYOUT))])
    Scope().extend(plan, [out.op])
    known = plan.fact(out).numbers
    assert known is not None
    with tf.compat.v1.Session(graph=graph) as session:
        whole, local = (
            session.run(found, {x: np.zeros([rows, 4, 7])}) for rows in ROWS[LAYOUT]
        )
    assert known.shape == whole.shape == local.shape
    for one in zip(known.flat, whole.flat, local.flat, strict=True):
        check(one[0], *map(int, one[1:]))


def _many() -> tf.Tensor:
    return tf.range(100) * 2


def _overflowing() -> tf.Tensor:
    return (tf.constant(2**62, tf.int64) * 4 + tf.constant(2**31 - 1, tf.int64)) // 3


def _wrapped() -> tf.Tensor:
    return (tf.constant(123456789) * 1103515245) // 7


def _per_row() -> tf.Tensor:
    return tf.gather(tf.constant([[1, 2], [3, 4]]), [[0], [1]], batch_dims=1)


@pytest.mark.parametrize("make", [_many, _overflowing, _wrapped, _per_row])
def test_what_is_known_of_constants_is_what_tensorflow_computes(make):
    with tf.Graph().as_default() as graph:
        out = make()
    plan = GraphPlan()
    Scope().extend(plan, [out.op])
    known = plan.fact(out).numbers
    if known is None:
        return
    with tf.compat.v1.Session(graph=graph) as session:
        value = session.run(out)
    assert known.shape == value.shape and known.size <= sizes.SMALL
    for one, other in zip(known.flat, value.flat, strict=True):
        assert one is UNKNOWN or one == other


@pytest.mark.parametrize("shape", [[None, 4], [4], [1, 4], [None, 1], []])
def test_gradients_of_broadcasting_know_to_which_sizes_they_sum(shape):
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, 4])
        y = tf.compat.v1.placeholder(tf.float32, shape)
        axes = tf.raw_ops.BroadcastGradientArgs(s0=tf.shape(x), s1=tf.shape(y))
    is_batch = bool(shape) and shape[0] is None
    forms = (
        [Sharded(0, LAYOUT), Sharded(0, LAYOUT)] if is_batch else [Sharded(0, LAYOUT)]
    )
    facts = [*map(Fact, forms), *[Fact()] * (2 - len(forms))]
    plan = GraphPlan([x, y], facts)
    Scope().extend(plan, [axes[0].op])
    to_x, to_y = (plan.fact(one).numbers for one in axes)
    wanted = [Size(LAYOUT, 1) if size is None else size for size in shape]
    is_none = shape == [None, 4]  # then the gradient has these sizes as it is
    flags = not is_none, is_none
    assert to_x == sizes.SumTo((Size(LAYOUT, 1), 4), 2, *flags)
    assert to_y == sizes.SumTo(tuple(wanted), 2, *flags)
    assert sizes.ints(plan.fact(axes[0])) == ([] if is_none else None)


def test_gradients_of_a_part_and_of_a_whole_are_not_known():
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, 4])
        y = tf.compat.v1.placeholder(tf.float32, [None, 4])
        axes = tf.raw_ops.BroadcastGradientArgs(s0=tf.shape(x), s1=tf.shape(y))
        shapes = [t.op for t in axes[0].op.inputs]
    facts = [
        Fact(numbers=sizes.array([Size(LAYOUT, 1), 4])),
        Fact(numbers=sizes.array([UNKNOWN, 4])),
    ]
    assert [op.type for op in shapes] == ["Shape", "Shape"]
    assert evaluation.evaluate(axes[0].op, facts) == [None, None]


@pytest.mark.parametrize(
    ("a", "b", "joined"),
    [
        (3, 3, 3),
        (3, 4, UNKNOWN),
        (UNKNOWN, 3, UNKNOWN),
        (Size(LAYOUT, 1), Size(LAYOUT, 1), Size(LAYOUT, 1)),
        (Size(LAYOUT, 1), Size(LAYOUT, 2), WHOLE),
        (Size(LAYOUT, 1), 3, WHOLE),
        (WHOLE, WHOLE, WHOLE),
    ],
)
def test_elements_of_a_tensor_that_is_one_or_the_other(a, b, joined):
    for one, other in ((a, b), (b, a)):
        facts = [Fact(numbers=sizes.array([x])) for x in (one, other)]
        (found,) = sizes.joined(*facts)
        assert found == joined
