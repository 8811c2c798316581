# SPDX-License-Identifier: Apache-2.0
"""Rewires and changes ops that are built already; what waits for them.

The public API builds ops and looks at them, and lets none be changed or removed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils as _acd_utils
from tensorflow.python.ops import handle_data_util


def set_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Makes `tensor` input `index` of `op`; no public call rewires a built op."""
    op._update_input(index, tensor)


def add_control_inputs(op: tf.Operation, before: Sequence[tf.Operation]) -> None:
    """Makes `op` run after `before`; tf.control_dependencies only reaches new ops."""
    if before:
        op._add_control_inputs(list(before))


def set_int_attr(op: tf.Operation, name: str, value: int) -> None:
    """Changes an integer attribute of a built op; the public API only reads them."""
    op._set_attr(name, tf.compat.v1.AttrValue(i=value))


def set_text_attr(op: tf.Operation, name: str, value: str) -> None:
    """Changes a text attribute of a built op; see `set_int_attr`."""
    op._set_attr(name, tf.compat.v1.AttrValue(s=value.encode()))


def empty_constant(op: tf.Operation) -> None:
    """Frees what an unused constant holds; the public API cannot remove an op.

    One zero in place of all elements: the shape is still what others know of it.
    """
    constant = op.outputs[0]
    zero = np.zeros([], constant.dtype.as_numpy_dtype)
    empty = tf.make_tensor_proto(zero, constant.dtype, shape=constant.shape)
    op._set_attr("value", tf.compat.v1.AttrValue(tensor=empty))


def replace(old: tf.Tensor, new: tf.Tensor) -> None:
    """Points all consumers of a tensor at another one; see `set_input`."""
    for consumer in old.consumers():
        for index, tensor in enumerate(consumer.inputs):
            if tensor is old:
                set_input(consumer, index, new)


def control_outputs(op: tf.Operation) -> list[tf.Operation]:
    """Returns the ops that wait for `op`; the public API only has what it waits for."""
    return list(op._control_outputs)


def move_control_outputs(old: tf.Operation, new: tf.Operation) -> None:
    """Makes what runs after `old` run after `new` instead."""
    for consumer in list(old._control_outputs):
        kept = [op for op in consumer.control_inputs if op is not old]
        consumer._remove_all_control_inputs()
        consumer._add_control_inputs([*kept, new])


def set_read_only_inputs(op: tf.Operation, indices: Sequence[int]) -> None:
    """Says which resources `op` only reads; control flow ops say so in an attribute."""
    value = tf.compat.v1.AttrValue
    listed = value(list=value.ListValue(i=indices))
    op._set_attr(_acd_utils.READ_ONLY_RESOURCE_INPUTS_ATTR, listed)


def resource_shape(handle: tf.Tensor) -> tf.TensorShape:
    """Returns the static shape of the variable behind a handle in a graph.

    The public API says what is behind a handle only by adding an op that reads it.
    """
    known = handle_data_util.get_resource_handle_data(handle).shape_and_type
    return tf.TensorShape(known[0].shape if known else None)


def copy_handle_data(source: tf.Tensor, target: tf.Tensor) -> None:
    """Tells `target`, a resource or a variant, the shapes that `source` knows of."""
    handle_data_util.copy_handle_data(source, target)


class _Abandoned:
    """Looks like a while loop's context, whose ops automatic control leaves alone."""

    outer_context = None

    def IsWhileContext(self) -> bool:
        return True


def is_abandoned(op: tf.Operation) -> bool:
    """Whether `abandon` was called for an op."""
    return isinstance(op._get_control_flow_context(), _Abandoned)


def abandon(ops: Sequence[tf.Operation]) -> None:
    """Makes sure that no function runs `ops` for their effects.

    Ops cannot be removed from a graph. What nothing fetches is pruned, unless automatic
    control dependencies make it run; they skip ops inside (v1) while loops.
    """
    for op in ops:
        op._set_control_flow_context(_Abandoned())
