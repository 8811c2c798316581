# SPDX-License-Identifier: Apache-2.0
"""Writes to a part of a replicated variable: scatters and v[i].assign."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replicator import context
from replicator._tf import autograph, variables
from replicator.variables import (
    agreement,
    in_graphs,
    part_values,
    python_calls,
    single_device,
    unbuilt,
)

_SUM = tf.VariableAggregation.SUM


class PartWriter(variables.HandleVariable):
    """Gives ReplicatedVariable the methods that write a part of the value."""

    @autograph.not_converted
    def count_up_to(self, limit: int) -> tf.Tensor:
        """Adds 1 and returns the value before, up to `limit`; see tf.Variable's."""
        if context.current() is not None or single_device.view() is not None:
            return variables.HandleVariable.count_up_to(self, limit)
        before = tf.identity(self.read_value())
        eager = tf.executing_eagerly()
        with tf.control_dependencies(None if eager else [before]):
            written = self._write_piece("count_up_to", limit)
        with tf.control_dependencies(None if eager else [written.op]):
            return tf.identity(before)

    def _write_piece(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Writes a part of the value."""
        if context.current() is None:
            python_calls.refuse_write(self)
            return self._write_part_of_all(method, *args, **kwargs)
        return self._write_part(method, *args, **kwargs)

    def _write_part_of_all(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Writes a part of the value, outside a step."""
        assignments = []
        if self.placement.is_aggregated:
            # The write needs the aggregated value in place, so assign that first.
            with in_graphs.known_before(args, kwargs):
                assignment = self.assign(self._aggregated(), read_value=False)
            assignments = [] if assignment is None else [assignment]
        with in_graphs.known_before(args, kwargs), tf.control_dependencies(assignments):
            return self._write_all(
                lambda component, r: (
                    tf.no_op()
                    if r and self.placement.adds_up
                    else self._write_component(component, method, *args, **kwargs)
                ),
                True,
            )

    def _write_component(
        self, component: tf.Variable, method: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Writes a part of a component; only the first write gets the op's name."""
        if component is not self.outside[0]:
            args, kwargs = args[:2], {**kwargs}
            if "name" in kwargs:
                kwargs["name"] = None
        return getattr(component, method)(*args, **kwargs)

    def _write_part(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Writes a part of the value, inside a step."""
        replica = context.require(method)
        unbuilt.is_done(self, replica)
        claim = agreement.claim(self, replica)
        write = getattr(variables.HandleVariable, method)
        if claim is not None or agreement.is_equal(self, replica):
            with self._entered(replica, claim):
                return write(self, *args, **kwargs)
        with replica.agreeing_on(self.name, method, self.key):
            # The replicas agree on the mean of the whole value, whichever parts each of
            # them writes. If agreeing fails, nothing has been written.
            sums = self.aggregation == _SUM and not replica.mode.updating
            computes = self.placement.owner is not None or part_values.has_value(method)
            if computes or sums:
                return part_values.write(self, method, *args, **kwargs)
            with self._entered(replica, None):
                written = write(self, *args, **kwargs)
                with tf.control_dependencies([written.op]):
                    return self.assign(self.read_value())
