# SPDX-License-Identifier: Apache-2.0
"""The arguments of a call of a function of AutoDist.

Arrays and tensors are arguments of a trace. All other values are constants of it, as in
a tf.function. Sparse, ragged and other composite tensors are the tensors that they
consist of, of which each replica has all.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replicator import errors
from replicator._tf import autograph
from replicator.forms.traced import Specs, filled
from replicator.graph.ir import shapes

_ARRAYS = tf.Tensor, np.ndarray, np.generic
_NUMBERS = int, float, complex


class Arguments:
    """The arguments of one call.

    Args:
        name: The function's name, for messages.
        args: The positional arguments.
        kwargs: The keyword arguments.
        declared: Specs of the positional arguments, if they are declared.

    Attributes:
        tensors: Those that are tensors.
        kind: Equal for calls that may share a trace, if their specs agree.
        numbers: The Python numbers among the others.

    Raises:
        ArgumentError: An argument is neither an array nor hashable, or arrays cannot be
            split alike, or arguments are not as declared.
    """

    def __init__(
        self, name: str, args: Any, kwargs: Any, declared: Specs | None = None
    ) -> None:
        self._name, given = name, (args, kwargs)
        leaves: list[Any] = self._tried(tf.nest.flatten, given)
        self._declared = declared or ()
        if declared is not None:
            count = len(tf.nest.flatten(args))
            leaves[:count] = self._as_declared(leaves[:count])
        self._indices = [k for k, leaf in enumerate(leaves) if _is_array(leaf)]
        tensors = [self._tried(_tensor, leaves[k]) for k in self._indices]
        for k in self._indices:
            leaves[k] = None
        self._given, self._leaves = given, leaves
        self.tensors = _of_equal_sizes(tensors)
        self.numbers = [x for x in leaves if type(x) in _NUMBERS]
        self.kind = self._kind()

    def _tried(self, function: Callable[[Any], Any], what: Any) -> Any:
        try:
            return function(what)
        except (TypeError, ValueError, NotImplementedError, RecursionError) as error:
            raise errors.ArgumentError(
                f"{self._name} cannot be called with {errors.repr_of(what)}: "
                f"{errors.summary(error)}.",
                fix="pass numbers, strings, and arrays and tensors of these; refer to "
                "other objects inside the function.",
            ) from error

    def _as_declared(self, leaves: list[Any]) -> list[Any]:
        """Returns positional arguments as tensors of their specs."""
        tensors = [
            self._tried(functools.partial(tf.convert_to_tensor, dtype=spec.dtype), leaf)
            if type(spec) is tf.TensorSpec
            else leaf
            for leaf, spec in zip(leaves, self._declared, strict=False)
        ]
        pairs = zip(tensors, self._declared, strict=False)
        are_fit = all(spec.is_compatible_with(x) for x, spec in pairs)
        if len(leaves) != len(self._declared) or not are_fit:
            raise errors.ArgumentError(
                f"{self._name} was given {errors.repr_of(leaves)}, but its "
                f"input_signature is {list(self._declared)}.",
                fix="pass positional arguments of these shapes and types.",
            )
        return tensors

    def _kind(self) -> tuple[Any, ...]:
        structure = repr(tf.nest.map_structure(lambda _: 0, self._given))
        others = tuple([(type(x), self._tried(_hashed, x)) for x in self._leaves])
        kinds = tuple([(type(t), t.dtype, t.shape.rank) for t in self.tensors])
        return structure, tuple(self._indices), others, kinds

    @property
    def but_numbers(self) -> Hashable:
        """The same for calls that differ in nothing but Python numbers."""
        structure, indices, others, kinds = self.kind
        return (
            structure,
            indices,
            kinds,
            tuple((one, None if one in _NUMBERS else x) for one, x in others),
        )

    @property
    def key(self) -> Hashable:
        """All that is known of the arguments but for their numbers of rows."""
        sizes = tuple([(shapes.static(t) or ())[1:] for t in self.tensors])
        return self.kind, sizes

    @property
    def specs(self) -> Specs:
        """Specs of the tensors, of any number of rows."""
        others = self.tensors[len(self._declared) :]
        specs = [*self._declared, *map(tf.type_spec_from_value, others)]
        return tuple(map(shapes.of_any_rows, specs))

    @property
    def flat(self) -> list[tf.Tensor]:
        """The tensors that the tensors consist of."""
        if all(isinstance(t, tf.Tensor) for t in self.tensors):
            return self.tensors
        return list(tf.nest.flatten(self.tensors, expand_composites=True))

    def caller(self, call: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        """Returns a function of the tensors alone.

        Args:
            call: Is given such positional and keyword arguments.
        """
        indices = self._indices
        structure = tf.nest.pack_sequence_as(self._given, self._leaves)
        return autograph.not_converted(
            lambda *tensors: call(*filled(structure, indices, tensors))
        )


def declared(signature: Sequence[Any] | None) -> Specs | None:
    """Returns the specs of an `input_signature`.

    Raises:
        ArgumentError: It consists of something else.
    """
    if signature is None:
        return None
    specs = tuple(tf.nest.flatten(signature))
    is_list = isinstance(signature, list | tuple)
    if is_list and all(isinstance(spec, tf.TypeSpec) for spec in specs):
        return specs
    raise errors.ArgumentError(
        f"AutoDist.function was given input_signature={errors.repr_of(signature)}.",
        fix="pass a list of tf.TensorSpec, of the positional arguments.",
    )


def _is_array(leaf: Any) -> bool:
    if type(leaf) in _NUMBERS:
        return False
    if isinstance(leaf, _ARRAYS):
        return True
    is_variable = isinstance(leaf, tf.Variable)  # which is a constant of a trace
    return tf.is_tensor(leaf) and not is_variable


def _tensor(leaf: Any) -> Any:
    return tf.convert_to_tensor(leaf) if isinstance(leaf, _ARRAYS) else leaf


def _hashed(value: Any) -> Any:
    """Returns what stands for a value in a key: variables are compared as objects."""
    key = value.ref() if isinstance(value, tf.Variable) else value
    hash(key)  # which not all values have
    return key


def _of_equal_sizes(tensors: Sequence[Any]) -> list[Any]:
    """Returns tensors of equally many rows; asserts it where sizes are not static.

    Raises:
        ArgumentError: The numbers of rows differ or are 0, or a rank is unknown.
    """
    batches = [tensor for tensor in tensors if _has_rows(tensor)]
    static_shapes = [shapes.static(tensor) for tensor in batches]
    sizes = {None if shape is None else shape[0] for shape in static_shapes}
    if len(sizes) < 2 and not sizes & {0, None}:
        return list(tensors)
    if None in static_shapes or 0 in sizes or len(sizes - {None}) > 1:
        raise errors.ArgumentError(_compose_sizes_differ(static_shapes))
    first, *others = [tf.shape(tensor)[0] for tensor in batches]
    checks = [
        tf.debugging.assert_equal(first, other, _compose_sizes_differ(static_shapes))
        for other in others
    ]
    with tf.control_dependencies(checks):
        return [tf.identity(x) if _has_rows(x) else x for x in tensors]


def _has_rows(tensor: Any) -> bool:
    return isinstance(tensor, tf.Tensor) and tensor.shape.rank != 0


def _compose_sizes_differ(shapes_known: Sequence[Any]) -> str:
    return errors.compose(
        "the arguments of a function of AutoDist are split along their first axis, "
        f"but their shapes are {shapes_known}.",
        fix="pass the same number of rows in each, at least one; to give every "
        "replica all of a value, refer to it inside the function.",
    )


def check_loss(loss: Any, where: str) -> None:
    """Warns that a declared loss changes nothing; raises if it is none.

    Raises:
        ArgumentError: It is not "mean" or "sum".
    """
    if loss is None:
        return
    if not isinstance(loss, str) or loss not in ("mean", "sum"):
        raise errors.ArgumentError(
            f"loss={errors.repr_of(loss)} does not say how a loss combines examples.",
            fix="pass nothing: every loss is that of one device.",
        )
    warnings.warn(
        f"loss= of {where} is deprecated since replicator 0.1 and will be removed in "
        "0.3. Leave it out: every loss is that of one device.",
        DeprecationWarning,
        stacklevel=3,  # who calls the method of AutoDist
    )
