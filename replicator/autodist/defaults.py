# SPDX-License-Identifier: Apache-2.0
"""Finds the defaults of unfed placeholders that a session has to split like feeds.

A placeholder whose first dimension is unknown is assumed to have a row for each
example. So is its default, if all replicas compute the same: rows that are not split
would count once per replica.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import tensorflow as tf

from replicator import errors
from replicator.autodist import flows, pulled, tables
from replicator.autodist.program import Program
from replicator.graph.ir import shapes
from replicator.graph.ir.kinds import has_effect


class Defaults:
    """The defaults of a program that are the same on all replicas.

    Args:
        program: The single-device graph.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        ops = program.graph.get_operations()[: program.count]
        # None: the value is unknown until the session runs.
        self._values: dict[tf.Operation, np.ndarray | None] = {}
        for op in [op for op in ops if op.type == "PlaceholderWithDefault"]:
            if program.gives_own(op) and op.inputs[0].op not in program.differing():
                value = tf.get_static_value(op.inputs[0])
                self._values[op] = None if value is None else np.asarray(value)
        self._sources_by_run: dict[
            tuple[tf.Operation, frozenset[tf.Operation]], list[tf.Operation]
        ] = {}

    def needed(
        self, fetched: Iterable[tf.Operation], fed: Collection[tf.Operation]
    ) -> dict[tf.Tensor, np.ndarray]:
        """Returns the defaults to split in one run, by their placeholders.

        No default is split in a run that uses iterators. Their elements are batches of
        one replica, which needs whole defaults, as one device does for each element.

        Args:
            fetched: The fetched ops, and those of the fetched tensors.
            fed: The ops whose results are fed.

        Raises:
            ArgumentError: The value of a default is unknown before the run.
        """
        if not self._values:
            return {}
        sources = [op for f in fetched for op in self._sources(f, frozenset(fed))]
        if any(map(pulled.pulls, sources)):
            return {}
        values = {op: self._values[op] for op in dict.fromkeys(sources)}
        unknown = [op for op, value in values.items() if value is None]
        if unknown:
            raise _unknown_rows(unknown[0])
        return {
            op.outputs[0]: value
            for op, value in values.items()
            if value is not None and value.ndim
        }

    def _sources(
        self, fetched: tf.Operation, fed: frozenset[tf.Operation]
    ) -> list[tf.Operation]:
        """Returns the iterators and the unfed defaults that a fetch needs."""
        key = fetched, fed
        if key not in self._sources_by_run:
            needed = list(flows.needed(fetched, fed))
            sources = [op for op in needed if op in self._values or pulled.pulls(op)]
            if any(op in self._values for op in sources):
                roots = [fetched, *filter(has_effect, needed)]
                inputs = [tensor for op in roots for tensor in op.inputs]
                used = {*roots, *flows.upstream(inputs, lambda op: op in fed)}
                sources = [op for op in sources if not self._is_broadcast(op, used)]
            self._sources_by_run[key] = sources
        return self._sources_by_run[key]

    def _is_broadcast(self, op: tf.Operation, used: set[tf.Operation]) -> bool:
        """Whether TensorFlow broadcasts a default of one row to all examples.

        It does if all consumers combine the default with rows of examples, element by
        element. Each replica can then have the whole default.

        Args:
            op: A placeholder with a default, or an iterator.
            used: The ops of the run whose results are used.
        """
        value = self._values.get(op)
        if value is None or not value.ndim or len(value) != 1:
            return False
        consumers = used.intersection(op.outputs[0].consumers())
        return all(self._broadcasts(consumer, value, used) for consumer in consumers)

    def _broadcasts(
        self, consumer: tf.Operation, row: np.ndarray, used: set[tf.Operation]
    ) -> bool:
        """Whether a consumer broadcasts a row to all examples."""
        if consumer.type == "Shape":  # used in the gradient of such a consumer
            shape_consumers = used.intersection(consumer.outputs[0].consumers())
            return all(op.type == "BroadcastGradientArgs" for op in shape_consumers)
        return consumer.type in tables.ELEMENTWISE and any(
            self._has_rows(tensor, row) for tensor in consumer.inputs
        )

    def _has_rows(self, tensor: tf.Tensor, row: np.ndarray) -> bool:
        """Whether a tensor has rows of fed examples where a default has its row."""
        shape = shapes.static(tensor)
        if not shape or shape[0] is not None:
            return False
        if row.size > 1 and len(shape) != row.ndim:
            return False
        return any(
            op.type in ("Placeholder", "PlaceholderV2") and self._program.gives_own(op)
            for op in flows.upstream([tensor], lambda op: False)
        )


def _unknown_rows(op: tf.Operation) -> errors.ArgumentError:
    return errors.ArgumentError(
        errors.compose(
            f"{op.name} was not fed and is assumed to have a row for each example, but "
            "how many rows its default has is unknown before the session runs.",
            [f"created at {errors.line_of(op)}"],
            "feed it; make its default a constant; or, if every replica is to get all "
            "of it, give it a static first dimension.",
        )
    )
