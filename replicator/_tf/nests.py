# SPDX-License-Identifier: Apache-2.0
"""Keeps a class of tuples through the arguments and results of tf.functions.

A tf.function takes subclasses of tuple other than namedtuples for plain tuples. What
else a class tells by `__tf_tracing_type__`, a public protocol, is a TraceType, of which
the one for tuples is private.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.function import trace_type as _trace_type
from tensorflow.core.function.trace_type import default_types as _types


class KeptTuple(_types.Tuple):
    """The trace type of tuples of a class, which stay of that class in functions.

    Args:
        kind: The class, which is made from a plain tuple.
        components: The trace types of its entries.
    """

    def __init__(
        self, kind: type[tuple[Any, ...]], *components: tf.types.experimental.TraceType
    ) -> None:
        super().__init__(*components)
        self._kind = kind

    @classmethod
    def of(cls, value: tuple[Any, ...], context: Any) -> KeptTuple:
        """Returns the trace type of a tuple, whose class it keeps.

        Args:
            value: The tuple.
            context: What `__tf_tracing_type__` was given.
        """
        return cls(type(value), *(_trace_type.from_value(x, context) for x in value))

    def is_subtype_of(self, other: tf.types.experimental.TraceType) -> bool:
        return self._is_alike(other) and super().is_subtype_of(other)

    def most_specific_common_supertype(
        self, others: Sequence[tf.types.experimental.TraceType]
    ) -> KeptTuple | None:
        if not all(map(self._is_alike, others)):
            return None
        plain = super().most_specific_common_supertype(others)
        return None if plain is None else KeptTuple(self._kind, *plain.components)

    def placeholder_value(self, placeholder_context: Any) -> Any:
        return self._kind(super().placeholder_value(placeholder_context))

    def from_tensors(self, tensors: Any) -> Any:
        return self._kind(super().from_tensors(tensors))

    def cast(self, value: Any, casting_context: Any) -> Any:
        return self._kind(super().cast(value, casting_context))

    def _is_alike(self, other: Any) -> bool:
        return isinstance(other, KeptTuple) and other._kind is self._kind

    def __eq__(self, other: object) -> bool:
        return self._is_alike(other) and super().__eq__(other) is True

    def __hash__(self) -> int:
        return hash((self._kind, self.components))
