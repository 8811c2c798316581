# SPDX-License-Identifier: Apache-2.0
"""Finds ops that compute the same from the same inputs: they are built once.

TensorFlow finds them, too, but after the build: gradients repeat constants, shapes and
sums of rows, which each replica would build, convert and send again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from replicator._tf import copying
from replicator.forms.rule import UNUSED, OpPlan
from replicator.forms.sizes import Summed

_LARGE = 1000  # elements of constants that are not compared
# Their rules look at what uses them, which is not the same of twins.
_APART = ("Mean", "FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")


class Twins:
    """The ops of a graph so far, by what they compute."""

    def __init__(self) -> None:
        self._first: dict[Any, tf.Operation] = {}
        self._twins: dict[tf.Operation, tf.Operation] = {}

    def enter(self, op: tf.Operation) -> None:
        """Adds an op."""
        key = self._key(op)
        first = op if key is None else self._first.setdefault(key, op)
        if first is not op:
            self._twins[op] = first

    def of(self, op: tf.Operation) -> list[tf.Operation]:
        """Returns the first op that computes the same as a later one, if there is."""
        return [self._twins[op]] if op in self._twins else []

    def plan(
        self, op: tf.Operation, plans: Mapping[tf.Operation, OpPlan]
    ) -> OpPlan | None:
        """Returns the plan of an op that takes over the outputs of its twin, or None.

        It waits for the twin (`GraphPlan.before`), and so for what that takes. What was
        summed to a shape keeps its axes if only Reshapes use it, which is not known of
        others.

        Args:
            op: The op.
            plans: The plans of the ops before it.
        """
        if op not in self._twins:
            return None
        twin = self._twins[op]
        its = plans[twin]
        if its.bodies or any(isinstance(fact.numbers, Summed) for fact in its.makes):
            return None
        return dataclasses.replace(
            its,
            needs=[UNUSED] * len(its.needs),
            build=lambda replica, op, inputs: [replica.value(t) for t in twin.outputs],
            build_local=None,
            reads=twin.outputs,
        )

    def first(self, tensor: tf.Tensor) -> Any:
        """Returns the reference of the first tensor that is the same."""
        twin = self._twins.get(tensor.op)
        return tensor.ref() if twin is None else twin.outputs[tensor.value_index].ref()

    def _key(self, op: tf.Operation) -> Any:
        if not op.outputs or op.control_inputs or copying.has_state(op):
            return None
        if op.type in _APART:
            return None
        if op.type == "Const" and (op.outputs[0].shape.num_elements() or 0) > _LARGE:
            return None
        if any(t.dtype in (tf.resource, tf.variant) for t in op.outputs):
            return None
        inputs = tuple(self.first(t) for t in op.inputs)
        return op.type, inputs, copying.attributes_text(op)
