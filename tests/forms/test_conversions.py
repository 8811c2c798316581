# SPDX-License-Identifier: Apache-2.0
"""Copies of one form become copies of another, of the same value of one device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import PerReplica, errors
from replicator.forms import engine, sizes
from replicator.forms.conversions import Conversions
from replicator.forms.forms import REPLICATED, UNSET, Form, Layout, Partial, Sharded
from tests.forms import helpers

LAYOUT = Layout("batch")
COMBINED = {"sum": np.add, "max": np.maximum, "min": np.minimum}
COMBINED |= {"any": np.logical_or, "all": np.logical_and}


def parts(whole: np.ndarray, form: Form, rows: Sequence[int]) -> list[np.ndarray]:
    """Returns copies of a form that make up a value."""
    rng = np.random.default_rng(len(rows))
    if isinstance(form, Partial):
        if form.how == "sum":
            own = [rng.integers(-5, 5, whole.shape) for _ in rows[1:]]
            return [whole - sum(own), *own]
        others = [rng.permutation(whole.ravel()).reshape(whole.shape) for _ in rows[1:]]
        combine = COMBINED[form.how]
        if combine in (np.logical_or, np.logical_and):
            others = [combine(whole, one) == whole for one in others]
        return [
            whole,
            *[np.where(combine(whole, o) == whole, o, whole) for o in others],
        ]
    if not isinstance(form, Sharded):
        return [whole] * len(rows)
    axis, total = form.axis, sum(rows)
    outer = form.outer or whole.shape[axis] // (total * (form.inner or 1))
    inner = whole.shape[axis] // (total * outer)
    shape = whole.shape
    apart = whole.reshape(*shape[:axis], outer, total, inner, *shape[axis + 1 :])
    ends = np.cumsum([0, *rows])
    own = [
        np.take(apart, range(*pair), axis + 1)
        for pair in zip(ends, ends[1:], strict=False)
    ]
    return [x.reshape(*shape[:axis], -1, *shape[axis + 1 :]) for x in own]


def converted(
    whole: np.ndarray, have: Form, want: Form, rows: Sequence[int], **options: Any
) -> list[np.ndarray]:
    """Returns what becomes of each replica's copy."""
    repl = replicator.Replicator(helpers.devices(len(rows)), **options)

    def step(x: tf.Tensor, own: Any) -> tf.Tensor:
        conversions = Conversions(repl)
        conversions.define(LAYOUT, own)
        return conversions.convert(x, have, want)

    copies = [tf.constant(x, whole.dtype) for x in parts(whole, have, rows)]
    args = PerReplica(copies), PerReplica(rows)
    return [np.asarray(x) for x in repl.run(step, args=args)]


FORMS = {
    "rows": (Sharded(0, LAYOUT), [4, 3]),
    "columns": (Sharded(1, LAYOUT), [3, 4]),
    "blocks": (Sharded(0, LAYOUT, 2), [8, 3]),
    "wide rows": (Sharded(1, LAYOUT, 1, 3), [2, 12]),
    "wide rows in blocks": (Sharded(0, LAYOUT, 2, 3), [24, 2]),
    "unknown blocks": (Sharded(0, LAYOUT, None, 2), [24, 2]),
    "rows of unknown width": (Sharded(0, LAYOUT, 2, None), [24, 2]),
}


@pytest.mark.parametrize("rows", [(1, 3), (4, 0)], ids=["both", "one"])
@pytest.mark.parametrize("name", FORMS)
def test_parts_are_joined_and_a_whole_is_divided(name, rows):
    form, shape = FORMS[name]
    whole = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    for copy in converted(whole, form, REPLICATED, rows):
        np.testing.assert_array_equal(copy, whole)
    found = converted(whole, REPLICATED, form, rows)
    for copy, want in zip(found, parts(whole, form, rows), strict=True):
        np.testing.assert_array_equal(copy, want)


@pytest.mark.parametrize("how", COMBINED)
def test_sums_are_combined_and_a_whole_is_a_sum(how):
    dtype = bool if how in ("any", "all") else np.int32
    whole = np.arange(6).reshape(2, 3).astype(dtype)
    form, rows = Partial(how), (1, 3)
    for copy in converted(whole, form, REPLICATED, rows):
        np.testing.assert_array_equal(copy, whole)
    found = converted(whole, REPLICATED, form, rows)
    combined = functools.reduce(COMBINED[how], found)
    np.testing.assert_array_equal(combined, whole)


@pytest.mark.parametrize("build", ["trace", "clone"])
def test_something_of_one_row_is_repeated_along_a_batch(build):
    whole = np.array([[1, 2]], np.int32)
    found = converted(whole, REPLICATED, Sharded(0, LAYOUT), (1, 3), build=build)
    assert [x.tolist() for x in found] == [[[1, 2]], [[1, 2]] * 3]


def test_other_forms_are_converted_by_way_of_the_whole():
    whole = np.arange(12, dtype=np.int32).reshape(4, 3)
    for have in (Sharded(0, LAYOUT), Partial()):
        want = Partial() if isinstance(have, Sharded) else Sharded(0, LAYOUT)
        found = converted(whole, have, want, (1, 3))
        joined = sum(found) if want == Partial() else np.concatenate(found)
        np.testing.assert_array_equal(joined, whole)


def test_rows_are_dealt_and_counted():
    repl = replicator.Replicator(helpers.devices(3))
    dealt, fixed = Layout("dealt"), Layout("of 5")

    def step(total: Any) -> Any:
        conversions = Conversions(repl)
        conversions.deal(dealt, total)
        conversions.deal(fixed, 5)
        numbers = [
            (conversions.own_rows(one), conversions.offset(one), conversions.rows(one))
            for one in (dealt, fixed)
        ]
        return tf.stack([tf.stack(one) for one in numbers])

    first, second = zip(
        *(x.numpy().tolist() for x in repl.run(step, args=(7,))), strict=True
    )
    assert list(first) == [[3, 0, 7], [2, 3, 7], [2, 5, 7]]
    assert list(second) == [[2, 0, 5], [2, 2, 5], [1, 4, 5]]


def test_a_shape_of_parts_becomes_that_of_the_whole():
    repl = replicator.Replicator(helpers.devices(2))

    def step(x: tf.Tensor) -> Any:
        conversions = Conversions(repl)
        conversions.define(LAYOUT, tf.shape(x)[0])
        elements = sizes.array([sizes.Size(LAYOUT, 1), 3, sizes.Size(LAYOUT)])
        local = tf.stack([tf.shape(x)[0], 3, 5 * tf.shape(x)[0]])
        scalar = sizes.array([sizes.Size(LAYOUT, 2)], ())
        return (
            conversions.whole_sizes(elements, local),
            conversions.whole_sizes(scalar, 2 * tf.shape(x)[0]),
            conversions.length(Sharded(0, LAYOUT, None, 1), x),
        )

    args = (PerReplica([tf.zeros([1]), tf.zeros([3])]),)
    for shape, size, length in zip(*repl.run(step, args=args), strict=True):
        assert (shape.numpy().tolist(), int(size), int(length)) == ([4, 3, 20], 8, 4)


def test_a_list_that_is_in_parts_is_not_communicated():
    repl = replicator.Replicator(helpers.devices(2))

    def step() -> Any:
        conversions = Conversions(repl)
        items = tf.raw_ops.EmptyTensorList(
            element_shape=-1, max_num_elements=2, element_dtype=tf.float32
        )
        assert conversions.convert(items, UNSET, REPLICATED) is items
        return conversions.convert(items, Sharded(0, LAYOUT), REPLICATED)

    with pytest.raises(
        errors.UnsupportedError, match="(?s)a list of tensors .*Fix: stack"
    ):
        repl.run(step)


def test_another_length_than_the_batch_s_is_named():
    repl = replicator.Replicator(["cpu:0", "cpu:1"])
    spec = [tf.TensorSpec([None, 3])]
    run = engine.WholeBatchFunction(
        lambda x: tf.concat([x, tf.ones([5, 2])], 1), repl, spec
    )
    assert run(tf.ones([5, 3])).shape == [5, 5]
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        run(tf.ones([4, 3]))
    message = str(raised.value)
    assert "axis 0" in message and "used along with the rows of a batch" in message
    assert "test_conversions.py" in message and "Fix: give axes" in message
