# SPDX-License-Identifier: Apache-2.0
"""PerReplica: one value for each replica."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replicator import arguments, errors
from replicator._tf import nests

_BINARY = (
    "add sub mul truediv floordiv mod divmod pow matmul lshift rshift and_ or_ xor"
)
_UNARY = "neg pos invert abs"
_ORDER = "lt le gt ge"


class PerReplica(tuple):
    """A tuple of one value per replica, in replica order.

    It is a tuple, so `tf.reduce_mean(per_replica_loss)`, `np.mean(...)`, unpacking and
    indexing work as in the TF-Replicator paper (Buchlovsky et al. 2019, section 3). It
    survives `tf.nest` (which rebuilds tuple types from one list) and `session.run`
    (which rebuilds them from items).

    If all replicas hold the same bits, `float(loss)`, `f"{loss:.3f}"`, `loss.numpy()`
    and `loss.item()` use that value, and so do arithmetic and comparisons with numbers,
    NumPy arrays and other PerReplica: `total += loss`, `sum(losses)`, `max(losses)`.
    With tensors and tuples, which could mean all values, operators are refused.

    Example:
        >>> values = repl.run(lambda: tf.constant(repl.replica_id + 1.0))
        >>> float(values[1]), float(tf.reduce_mean(values))
        (2.0, 1.5)
        >>> total = repl.run(lambda: repl.all_reduce(1.0))  # equal on all replicas
        >>> f"{total:.1f}", total + 1
        ('2.0', 3.0)
    """

    __slots__ = ()

    def __new__(cls, *values: Any) -> PerReplica:
        """Takes the values one by one, or all of them as one list or plain tuple.

        A namedtuple is a value: `session.run` returns a SparseTensor as one.
        """
        if len(values) == 1 and type(values[0]) in (list, tuple):
            values = tuple(values[0])
        return super().__new__(cls, values)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (tuple(self),)

    def __tf_tracing_type__(self, context: Any) -> tf.types.experimental.TraceType:
        return nests.TupleType.of(self, context)  # functions would return a plain tuple

    def __repr__(self) -> str:
        return f"PerReplica({', '.join(map(_brief, self))})"

    # --- As one value, if all replicas hold the same ----------------------------------

    def numpy(self) -> Any:
        """Returns the value that all replicas hold, as tf.Tensor.numpy does.

        Example:
            >>> repl.run(lambda: repl.all_gather(repl.replica_id)).numpy()
            array([0, 1], dtype=int32)

        Raises:
            MismatchError: The replicas hold different values.
            PerReplicaError: The values are symbolic tensors of a graph, or neither
                tensors, numbers nor strings.
        """
        return _common(self, "numpy()")

    def item(self) -> Any:
        """Returns the scalar that all replicas hold, as a Python value.

        Example:
            >>> repl.run(lambda: repl.all_reduce(1.0)).item()
            2.0

        Raises:
            MismatchError: The replicas hold different values.
            PerReplicaError: The values are symbolic, or not scalars.
        """
        return _scalar(self, "item()")

    def __float__(self) -> float:
        return float(_scalar(self, "float"))

    def __int__(self) -> int:
        return int(_scalar(self, "int"))

    def __complex__(self) -> complex:
        return complex(_scalar(self, "complex"))

    def __round__(self, digits: int | None = None) -> Any:
        return round(_scalar(self, "round"), digits)

    def __format__(self, spec: str) -> str:
        return format(_scalar(self, f"{{:{spec}}}"), spec) if spec else str(self)

    def __bool__(self) -> bool:
        """Whether a condition holds; for other values, whether there are any."""
        if len(self) and all(map(_is_condition, self)):
            return bool(_scalar(self, "bool"))
        return len(self) > 0

    def __eq__(self, other: object) -> Any:
        if isinstance(other, _OPERANDS | tf.Tensor):
            return _operated(operator.eq, "==", self, other)
        return tuple.__eq__(self, other)

    def __ne__(self, other: object) -> Any:
        if isinstance(other, _OPERANDS | tf.Tensor):
            return _operated(operator.ne, "!=", self, other)
        return tuple.__ne__(self, other)

    __hash__ = tuple.__hash__

    def __array_ufunc__(
        self, ufunc: Any, method: str, *inputs: Any, **options: Any
    ) -> Any:
        """Applies NumPy's operators to the one value, its other functions to all."""
        is_operator = method == "__call__" and ufunc.__name__ in _UFUNCS

        def plain(values: PerReplica) -> Any:
            return _one(values, ufunc.__name__) if is_operator else np.asarray(values)

        plain_inputs = [plain(x) if isinstance(x, PerReplica) else x for x in inputs]
        return getattr(ufunc, method)(*plain_inputs, **options)


def is_in(nest: Any) -> bool:
    """Whether a nest of tuples, lists and dicts contains a PerReplica."""
    if isinstance(nest, PerReplica):
        return True
    if isinstance(nest, Mapping):
        return any(map(is_in, nest.values()))
    return isinstance(nest, tuple | list) and any(map(is_in, nest))


def select(nest: Any, replica: int) -> Any:
    """Returns a nest with the value of one replica in place of each PerReplica.

    Args:
        nest: A nest of tuples, lists and dicts.
        replica: Its position in each PerReplica.

    Raises:
        ArgumentError: A PerReplica has no such value.
    """
    if isinstance(nest, PerReplica):
        if not arguments.is_whole(replica, 0, len(nest) - 1):
            raise errors.ArgumentError(
                f"select was given replica {errors.repr_of(replica)} of {len(nest)}.",
                fix=f"0 <= replica < {len(nest)}, a Python int.",
            )
        return nest[replica]
    if isinstance(nest, Mapping):
        return {key: select(value, replica) for key, value in nest.items()}
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(select(value, replica) for value in nest))
    if isinstance(nest, list | tuple):
        return type(nest)(select(value, replica) for value in nest)
    return nest


def _brief(value: Any) -> str:
    """Returns a value in one short line: a tensor as NumPy prints its numbers."""
    is_array = isinstance(value, tf.Tensor | np.ndarray | np.generic)
    if not is_array or tf.is_symbolic_tensor(value):
        return repr(value)
    array = np.asarray(value)
    if not array.shape:
        return str(array[()])
    text = np.array2string(array, separator=", ", threshold=8, edgeitems=2)
    return " ".join(text.split())


_UFUNCS = frozenset(
    "add subtract multiply divide true_divide floor_divide remainder divmod power "
    "matmul less less_equal greater greater_equal equal not_equal negative positive "
    "absolute invert left_shift right_shift bitwise_and bitwise_or bitwise_xor".split()
)


_OPERANDS = numbers.Number | np.ndarray | np.generic  # besides PerReplica


def _operated(
    operate: Callable[..., Any], name: str, self: PerReplica, *others: Any
) -> Any:
    """Applies an operator to the one value that all replicas hold."""
    if not all(isinstance(other, _OPERANDS | PerReplica) for other in others):
        raise _refused(name, self)
    return operate(
        _one(self, name),
        *(_one(x, name) if isinstance(x, PerReplica) else x for x in others),
    )


def _one(values: PerReplica, operation: str) -> Any:
    """Returns the value that all replicas hold; a number as a Python number."""
    value = np.asarray(_common(values, operation))
    is_number = not value.shape and value.dtype not in (np.bool_, np.object_)
    return value.item() if is_number else value[()]


def _method(name: str, reflected: bool = False) -> Callable[..., Any]:
    """Returns the method of an operator."""
    function: Callable[..., Any] = getattr(operator, name, None) or divmod

    def method(self: PerReplica, *others: Any) -> Any:
        if reflected:
            return _operated(
                lambda one, other: function(other, one), name, self, *others
            )
        return _operated(function, name, self, *others)

    method.__name__ = f"__{'r' if reflected else ''}{name.strip('_')}__"
    return method


for _name in f"{_BINARY} {_UNARY} {_ORDER}".split():
    setattr(PerReplica, f"__{_name.strip('_')}__", _method(_name))
for _name in _BINARY.split():
    setattr(PerReplica, f"__r{_name.strip('_')}__", _method(_name, reflected=True))


def _refused(operation: str, values: PerReplica) -> errors.PerReplicaError:
    """Returns the error for an operation on one value per replica."""
    return errors.PerReplicaError(
        f"{operation} of a PerReplica, which is a tuple of {len(values)} values, one "
        "per replica.",
        fix="use one of them, loss[0]; or all, tf.reduce_mean(loss) or np.mean(loss); "
        "or return a value from step_fn that is equal on all replicas, "
        'repl.all_reduce(loss, "mean"), and use float(loss).',
    )


def _is_condition(value: Any) -> bool:
    """Whether a value is a boolean scalar with a known value."""
    if tf.is_tensor(value):
        is_concrete = isinstance(value, tf.Tensor) and not tf.is_symbolic_tensor(value)
        return is_concrete and value.dtype == tf.bool and value.shape.rank == 0
    return isinstance(value, bool | np.bool_)


def _scalar(values: PerReplica, operation: str) -> Any:
    """Returns the one scalar that all replicas hold, as a Python value."""
    value = np.asarray(_common(values, operation))
    if value.size != 1:
        raise errors.PerReplicaError(
            f"{operation} of a PerReplica of arrays of shape {[*np.shape(value)]}.",
            fix="reduce them to scalars, tf.reduce_mean(values[0]), or use .numpy().",
        )
    return value.item()


def _common(values: PerReplica, operation: str) -> Any:
    """Returns the one value that all replicas hold, as a NumPy value."""
    replica_values = [_as_numpy(value, operation) for value in values]
    arrays = [np.asarray(value) for value in replica_values]
    for r, array in enumerate(arrays[1:], 1):
        if not _same_bits(arrays[0], array):
            raise errors.MismatchError(
                f"{operation} of a PerReplica whose replicas hold different values.",
                [
                    f"replica 0: {_short(replica_values[0])}",
                    f"replica {r}: {_short(replica_values[r])}",
                    f"at {errors.user_line()}",
                ],
                "use one of them, loss[0]; or all, tf.reduce_mean(loss); or let "
                'step_fn return repl.all_reduce(loss, "mean").',
            )
    if not replica_values:
        raise _refused(operation, values)
    return replica_values[0]


def _as_numpy(value: Any, operation: str) -> Any:
    """Converts a value to a NumPy value."""
    symbolic = tf.is_tensor(value) and any(
        map(tf.is_symbolic_tensor, tf.nest.flatten(value, expand_composites=True))
    )
    if not symbolic and hasattr(value, "numpy"):
        return value.numpy()
    if isinstance(value, numbers.Number | np.ndarray | np.generic | str | bytes):
        return value
    kind = (
        "symbolic tensors, which have no value yet"
        if symbolic
        else type(value).__name__
    )
    raise errors.PerReplicaError(
        f"{operation} of a PerReplica of {kind}.",
        fix="in a graph, run it first (session.run, or return it from the "
        "tf.function); else use the values one by one, values[0].",
    )


def _same_bits(one: np.ndarray, two: np.ndarray) -> bool:
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    if one.dtype == object:  # strings
        return bool((one == two).all())
    return one.tobytes() == two.tobytes()


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _MOST_TEXT else text[:_MOST_TEXT] + "..."


_MOST_TEXT = 100  # characters of a value in a message


def transpose(structures: Sequence[Any]) -> Any:
    """Turns one structure per replica into one structure of PerReplica leaves.

    Args:
        structures: `structures[r]` is what replica r returned; all of one structure.

    Returns:
        The same structure with a PerReplica of `len(structures)` values at each leaf.
    """
    leaves = [tf.nest.flatten(structure) for structure in structures]
    columns = [PerReplica(column) for column in zip(*leaves, strict=True)]
    return pack(structures[0], columns)


def pack(structure: Any, leaves: Sequence[Any]) -> Any:
    """Packs leaves that may be tuples themselves, in which tf.nest would see structure.

    Args:
        structure: A nest with `len(leaves)` leaves.
        leaves: The new leaves, in tf.nest's order.

    Returns:
        `structure` with its leaves replaced.
    """
    remaining: Callable[[], Any] = iter(leaves).__next__
    return tf.nest.map_structure(lambda _: remaining(), structure)


def packer(structure: Any) -> Callable[[Sequence[Any]], Any]:
    """Returns a function that does `pack(structure, leaves)` repeatedly.

    For tuples, lists and dicts it does not use tf.nest, which takes as long as a step.
    """
    places = pack(structure, range(len(tf.nest.flatten(structure))))
    if _of_builtins(places):
        return lambda leaves: _fill(places, leaves)
    return lambda leaves: pack(structure, leaves)


def _of_builtins(places: Any) -> bool:
    if type(places) is dict:
        return all(map(_of_builtins, places.values()))
    if type(places) in (list, tuple):
        return all(map(_of_builtins, places))
    return type(places) is int


def _fill(places: Any, leaves: Sequence[Any]) -> Any:
    """Replaces each index in a nest by the leaf with that index."""
    kind = type(places)
    if kind is int:
        return leaves[places]
    if kind is dict:
        return {key: _fill(place, leaves) for key, place in places.items()}
    return kind([_fill(place, leaves) for place in places])
