# SPDX-License-Identifier: Apache-2.0
"""Preserves a class of tuples in the arguments and results of tf.functions.

A tf.function takes subclasses of tuple other than namedtuples for plain tuples. A class
can say otherwise by `__tf_tracing_type__`, a public protocol; but the type to return
can be saved, and made of any values, by private names only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.function import trace_type as _trace_type
from tensorflow.core.function.trace_type import default_types as _types
from tensorflow.core.function.trace_type import serialization as _serialization


class TupleType(tf.types.experimental.TraceType, _serialization.Serializable):
    """The trace type of tuples of a class, which functions preserve.

    It is not a subclass of the type of plain tuples, which would replace it.

    Args:
        kind: The class, which is made from a plain tuple.
        plain: The trace type of a plain tuple of the same entries.
    """

    def __init__(self, kind: type[tuple[Any, ...]], plain: Any) -> None:
        self._kind, self._plain = kind, plain

    @classmethod
    def of(cls, value: tuple[Any, ...], context: Any) -> TupleType:
        """Returns the trace type of a tuple, which preserves its class.

        Args:
            value: The tuple.
            context: The argument of `__tf_tracing_type__`.
        """
        entries = [_trace_type.from_value(entry, context) for entry in value]
        return cls(type(value), _types.Tuple(*entries))

    def is_subtype_of(self, other: Any) -> bool:
        return self._is_same_kind(other) and self._plain.is_subtype_of(other._plain)

    def most_specific_common_supertype(self, others: Sequence[Any]) -> Any:
        if not all(map(self._is_same_kind, others)):
            return None
        plains = [other._plain for other in others]
        plain = self._plain.most_specific_common_supertype(plains)
        return None if plain is None else TupleType(self._kind, plain)

    def placeholder_value(self, placeholder_context: Any) -> Any:
        return self._kind(self._plain.placeholder_value(placeholder_context))

    def to_tensors(self, value: Any) -> Any:
        return self._plain.to_tensors(value)

    def from_tensors(self, tensors: Any) -> Any:
        return self._kind(self._plain.from_tensors(tensors))

    def flatten(self) -> Any:
        return self._plain.flatten()

    def cast(self, value: Any, cast_context: Any) -> Any:
        return self._kind(self._plain.cast(value, cast_context))

    @classmethod
    def experimental_type_proto(cls) -> Any:
        return _types.Tuple.experimental_type_proto()

    @classmethod
    def experimental_from_proto(cls, proto: Any) -> Any:
        return _types.Tuple.experimental_from_proto(proto)  # whose class is not saved

    def experimental_as_proto(self) -> Any:
        return self._plain.experimental_as_proto()

    def _is_same_kind(self, other: Any) -> bool:
        return isinstance(other, TupleType) and other._kind is self._kind

    def __eq__(self, other: object) -> bool:
        return self._is_same_kind(other) and bool(self._plain == other._plain)  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((self._kind, self._plain))

    def __repr__(self) -> str:
        return f"{self._kind.__name__}({self._plain!r})"
