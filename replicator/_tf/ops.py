# SPDX-License-Identifier: Apache-2.0
"""Rewires and changes built ops, and finds the ops that wait for them.

The public API builds and inspects ops, but cannot change or remove one.
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


def add_control_inputs(
    op: tf.Operation, control_inputs: Sequence[tf.Operation]
) -> None:
    """Makes `op` wait for more ops; tf.control_dependencies only reaches new ones."""
    if control_inputs:
        op._add_control_inputs(list(control_inputs))


def set_int_attr(op: tf.Operation, name: str, value: int) -> None:
    """Changes an integer attribute of a built op; the public API only reads them."""
    op._set_attr(name, tf.compat.v1.AttrValue(i=value))


def set_ints_attr(op: tf.Operation, name: str, values: Sequence[int]) -> None:
    """Changes a list of integers of a built op; see `set_int_attr`."""
    value_list = tf.compat.v1.AttrValue.ListValue(i=values)
    op._set_attr(name, tf.compat.v1.AttrValue(list=value_list))


def set_text_attr(op: tf.Operation, name: str, value: str) -> None:
    """Changes a string attribute of a built op; see `set_int_attr`."""
    op._set_attr(name, tf.compat.v1.AttrValue(s=value.encode()))


def empty_constant(op: tf.Operation) -> None:
    """Frees the memory of an unused constant; the public API cannot remove an op.

    A single zero replaces the elements: the shape stays, as consumers rely on it.
    """
    constant = op.outputs[0]
    zero = np.zeros([], constant.dtype.as_numpy_dtype)
    empty = tf.make_tensor_proto(zero, constant.dtype, shape=constant.shape)
    op._set_attr("value", tf.compat.v1.AttrValue(tensor=empty))


def move_to_device(op: tf.Operation, device: str) -> None:
    """Moves a built op to a device, and ends its colocation with other ops.

    The public API places only new ops.
    """
    op._clear_attr("_class")
    op._set_device(device)


def replace(old: tf.Tensor, new: tf.Tensor) -> None:
    """Points all consumers of a tensor at another one; see `set_input`."""
    for consumer in old.consumers():
        for index, tensor in enumerate(consumer.inputs):
            if tensor is old:
                set_input(consumer, index, new)


def control_outputs(op: tf.Operation) -> list[tf.Operation]:
    """Returns the ops that wait for `op`; only its control inputs are public."""
    return list(op._control_outputs)


def move_control_outputs(old: tf.Operation, new: tf.Operation) -> None:
    """Makes ops that wait for `old` wait for `new` instead."""
    for consumer in list(old._control_outputs):
        other_inputs = [op for op in consumer.control_inputs if op is not old]
        consumer._remove_all_control_inputs()
        consumer._add_control_inputs([*other_inputs, new])


def set_read_only_inputs(op: tf.Operation, indices: Sequence[int]) -> None:
    """Marks the resources that a control flow op only reads, in its attribute."""
    value = tf.compat.v1.AttrValue
    attribute = value(list=value.ListValue(i=indices))
    op._set_attr(_acd_utils.READ_ONLY_RESOURCE_INPUTS_ATTR, attribute)


def resource_shape(handle: tf.Tensor) -> tf.TensorShape:
    """Returns the static shape of the variable behind a symbolic handle.

    The public API only returns it by adding an op that reads the variable.
    """
    shapes = handle_data_util.get_resource_handle_data(handle).shape_and_type
    return tf.TensorShape(shapes[0].shape if shapes else None)


def copy_handle_data(source: tf.Tensor, target: tf.Tensor) -> None:
    """Gives `target`, a resource or a variant, the shapes recorded for `source`."""
    handle_data_util.copy_handle_data(source, target)


class _Abandoned:
    """Mimics a while loop's context: automatic control dependencies skip its ops."""

    outer_context = None

    def IsWhileContext(self) -> bool:
        return True


def is_abandoned(op: tf.Operation) -> bool:
    """Whether `abandon` was called for an op."""
    return isinstance(op._get_control_flow_context(), _Abandoned)


def abandon(ops: Sequence[tf.Operation]) -> None:
    """Keeps functions from running `ops` for their effects.

    Ops cannot be removed from a graph. Ops that nothing fetches are pruned unless
    automatic control dependencies make them run; those skip ops inside (v1) while
    loops.
    """
    for op in ops:
        op._set_control_flow_context(_Abandoned())
