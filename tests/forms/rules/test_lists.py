# SPDX-License-Identifier: Apache-2.0
"""The law of the rules of lists of tensors, and of optional values."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tests.forms import laws
from tests.forms.laws import WHOLE, Inputs, Sample

raw = tf.raw_ops
F = tf.float32


def empty(shape: Any = -1) -> tf.Tensor:
    return raw.EmptyTensorList(
        element_shape=shape, max_num_elements=-1, element_dtype=F
    )


def reserve(count: int, shape: Any = -1) -> tf.Tensor:
    return raw.TensorListReserve(
        element_shape=shape, num_elements=count, element_dtype=F
    )


def push(items: Any, *values: Any) -> tf.Tensor:
    for value in values:
        items = raw.TensorListPushBack(input_handle=items, tensor=value)
    return items


def put(items: Any, at: int, value: Any) -> tf.Tensor:
    return raw.TensorListSetItem(input_handle=items, index=at, item=value)


def stack(items: Any, shape: Any = -1) -> tf.Tensor:
    return raw.TensorListStack(
        input_handle=items, element_shape=shape, element_dtype=F, num_elements=-1
    )


def get(items: Any, at: int, shape: Any = -1) -> tf.Tensor:
    return raw.TensorListGetItem(
        input_handle=items, index=at, element_shape=shape, element_dtype=F
    )


def pop(items: Any, shape: Any = -1) -> Any:
    return raw.TensorListPopBack(
        input_handle=items, element_shape=shape, element_dtype=F
    )


def of_tensor(x: Any, shape: Any = -1) -> tf.Tensor:
    return raw.TensorListFromTensor(tensor=x, element_shape=shape)


def _popped(v: Inputs) -> list[tf.Tensor]:
    rest, last = pop(push(empty(), v.x, v.y), tf.shape(v.x))
    return [stack(rest), last]


def _gathered(v: Inputs) -> tf.Tensor:
    return raw.TensorListGather(
        input_handle=push(empty(), v.x, v.y, v.p),
        indices=[2, 0],
        element_shape=tf.shape(v.x),
        element_dtype=F,
    )


def _concatenated(v: Inputs) -> tf.Tensor:
    return raw.TensorListConcatV2(
        input_handle=push(empty(), v.x, v.y),
        element_shape=[-1, 3],
        leading_dims=tf.zeros([0], tf.int64),
        element_dtype=F,
    )[0]


def _scattered(v: Inputs) -> tf.Tensor:
    items = raw.TensorListScatterV2(
        tensor=tf.transpose(v.x), indices=[2, 0, 1], element_shape=-1, num_elements=-1
    )
    return stack(items)


def _scattered_v1(v: Inputs) -> tf.Tensor:
    x = tf.transpose(v.x)
    return stack(raw.TensorListScatter(tensor=x, indices=[2, 0, 1], element_shape=-1))


def _resized(v: Inputs) -> tf.Tensor:
    items = push(empty(), v.x, v.y)
    return stack(raw.TensorListResize(input_handle=items, size=1))


def _length(v: Inputs) -> tf.Tensor:
    return raw.TensorListLength(input_handle=push(empty(), v.x, v.y))


def _element_shape(v: Inputs) -> tf.Tensor:
    items = push(empty([-1, 3]), v.x)
    return raw.TensorListElementShape(input_handle=items, shape_type=tf.int32)


def _optional(v: Inputs) -> tf.Tensor:
    value = raw.OptionalFromValue(components=[v.x])
    (x,) = raw.OptionalGetValue(
        optional=value, output_types=[F], output_shapes=[[None, 3]]
    )
    return x


def _has_value(v: Inputs) -> tf.Tensor:
    value = raw.OptionalFromValue(components=[v.x])
    return raw.OptionalHasValue(optional=value)


SAMPLES = [
    Sample("TensorListStack", lambda v: stack(push(empty(), v.x, v.y))),
    Sample("EmptyTensorList", lambda v: stack(push(empty(tf.shape(v.x)), v.x)), WHOLE),
    Sample(
        "TensorListPushBack", lambda v: stack(push(empty(), v.x, v.y), tf.shape(v.x))
    ),
    Sample(
        "TensorListReserve",
        lambda v: stack(put(reserve(1, tf.shape(v.x)), 0, v.x)),
        WHOLE,
    ),
    Sample("TensorListSetItem", lambda v: stack(put(put(reserve(2), 1, v.x), 0, v.y))),
    Sample("TensorListSetItem", lambda v: stack(put(push(empty(), v.x, v.y), 0, v.p))),
    Sample("TensorListGetItem", lambda v: get(push(empty(), v.x, v.y), 1)),
    Sample("TensorListGather", _gathered),
    Sample("TensorListConcatV2", _concatenated),
    Sample("TensorListFromTensor", lambda v: stack(of_tensor(tf.transpose(v.x)))),
    Sample("TensorListFromTensor", lambda v: get(of_tensor(tf.transpose(v.x)), 1)),
    Sample("TensorListScatterV2", _scattered),
    Sample("TensorListScatter", _scattered_v1),
    Sample("TensorListPopBack", _popped),
    Sample("TensorListResize", _resized, grads=False),
    Sample("OptionalFromValue", _optional, grads=False),
    Sample("OptionalGetValue", _optional, grads=False),
]
OTHERS = [
    Sample("TensorListLength", _length, WHOLE),
    Sample("TensorListElementShape", _element_shape, WHOLE),
    Sample("OptionalHasValue", _has_value, WHOLE),
    Sample("TensorListFromTensor", lambda v: stack(of_tensor(v.x + 1.0)), WHOLE),
    Sample("TensorListPushBack", lambda v: stack(push(empty(), tf.ones([2]))), WHOLE),
    Sample("TensorListStack", lambda v: stack(empty([3])), WHOLE, grads=False),
]


def test_an_element_of_other_rows_than_the_first_fails() -> None:
    def items(v: Inputs) -> tf.Tensor:
        return get(push(empty(), v.x, tf.sort(v.x, 0)[:1]), 0)

    law = laws.Law([Sample("TensorListGetItem", items, grads=False)], 2)
    law.check(1)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="(?s)numbers of rows.*Fix:"
    ):
        law.check(5)
