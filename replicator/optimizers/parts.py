# SPDX-License-Identifier: Apache-2.0
"""Updates partitioned variables part by part, with slots in the same parts.

Gradients and variables are expanded together: the gradient of a whole is cut, each
piece is combined for its part, and a stand-in for the optimizer, which holds the parts
of the slots, updates them. So no device ever updates the whole.

That is right if updates are computed element by element. With an optimizer that is not
known to do so (LAMB, Adafactor, one of the user's own), the variable is updated as a
whole: its parts are read and joined, and what is written is split. The numbers are the
same. Gradients clipped by norm are clipped beforehand, by the norms of the wholes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator.graph.ir import shapes
from replicator.graph.ir.placeholder import NO_POLICY, OperandPolicy
from replicator.optimizers.accumulators import Gradient
from replicator.variables.partitioned import PartitionedVariable
from replicator.variables.replicated import ReplicatedVariable, plain

_KERAS = "SGD Adam AdamW Adamax Nadam RMSprop Adagrad Adadelta Ftrl Lion".split()
_V1 = (
    "GradientDescentOptimizer MomentumOptimizer AdamOptimizer AdagradOptimizer "
    "AdadeltaOptimizer RMSPropOptimizer FtrlOptimizer ProximalAdagradOptimizer "
    "ProximalGradientDescentOptimizer AdagradDAOptimizer"
).split()
# Optimizers whose updates are computed element by element, by package.
_ELEMENTWISE = {
    "keras": frozenset(_KERAS),
    "tf_keras": frozenset(_KERAS),
    "tensorflow": frozenset(_V1),
    "sonnet": frozenset(["SGD", "Momentum", "Adam", "RMSProp"]),
}
_NO_UPDATE = frozenset(["__init__", "get_config", "__module__", "__doc__"])


@dataclasses.dataclass(frozen=True)
class Division:
    """The pieces that the variables of one update are expanded to.

    Attributes:
        wholes: The variables, as the optimizer gets them.
        pieces: For each variable its parts, or the variable itself.
    """

    wholes: tuple[Any, ...]
    pieces: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(cls, optimizer: Any, variables: Sequence[Any]) -> Division:
        """Expands those variables that can be updated part by part."""
        in_parts = [isinstance(plain(v), PartitionedVariable) for v in variables]
        by_part = any(in_parts) and is_elementwise(optimizer)
        pieces: list[tuple[Any, ...]] = []
        for variable, is_divided in zip(variables, in_parts, strict=True):
            is_unconstrained = getattr(variable, "constraint", None) is None
            if is_divided and not (by_part and is_unconstrained):
                _refuse_handles(optimizer, plain(variable))
            variable_pieces = (
                plain(variable).parts
                if is_divided and by_part and is_unconstrained
                else (variable,)
            )
            pieces.append(variable_pieces)
        return cls(tuple(variables), tuple(pieces))

    @classmethod
    def undivided(cls, variables: Sequence[Any]) -> Division:
        """Returns a division in which each variable is updated as a whole."""
        return cls(tuple(variables), tuple((variable,) for variable in variables))

    @property
    def variables(self) -> list[Any]:
        """The pieces of all variables, in order."""
        return [piece for pieces in self.pieces for piece in pieces]

    def replicated(self) -> list[ReplicatedVariable]:
        """Returns all ReplicatedVariables to be written, parts of wholes included."""
        leaves = []
        for variable in map(plain, self.variables):
            parts = getattr(variable, "parts", (variable,))
            leaves += [part for part in parts if isinstance(part, ReplicatedVariable)]
        return leaves

    @property
    def divides(self) -> bool:
        """Whether any variable is updated part by part."""
        return bool(self.divided())

    def divided(self) -> list[tuple[Any, tuple[Any, ...]]]:
        """Returns the variables that are updated part by part, and their parts."""
        pairs = zip(self.wholes, self.pieces, strict=True)
        return [(whole, pieces) for whole, pieces in pairs if pieces[0] is not whole]

    def cut(self, gradient: Gradient | None, k: int) -> list[Gradient | None]:
        """Returns the gradients of the k-th variable's pieces."""
        pieces, whole = self.pieces[k], plain(self.wholes[k])
        if pieces[0] is self.wholes[k]:
            return [gradient]
        if gradient is None:
            return [None] * len(pieces)
        return list(_cut(gradient, whole))

    def cut_some(
        self, used: Sequence[int], grads: Sequence[Gradient | None]
    ) -> list[Gradient | None]:
        """Returns the gradients of the used variables' pieces."""
        pairs = zip(used, grads, strict=True)
        return [piece for k, gradient in pairs for piece in self.cut(gradient, k)]

    def spread(
        self, used: Sequence[int], grads: Sequence[Gradient]
    ) -> list[Gradient | None]:
        """Returns a gradient for every piece; None for variables that are not used."""
        remaining, used_set = iter(grads), frozenset(used)
        return [
            next(remaining) if k in used_set else None
            for k, pieces in enumerate(self.pieces)
            for _ in pieces
        ]

    def cut_all(self, grads: Sequence[Gradient | None]) -> list[Gradient | None]:
        """Returns the gradients of all pieces."""
        return self.cut_some(range(len(grads)), grads)

    def policies(self, k: int) -> list[OperandPolicy]:
        """Returns how the gradients of the k-th variable's pieces are communicated."""
        return [_policy(piece) for piece in self.pieces[k]]


def _refuse_handles(optimizer: Any, variable: PartitionedVariable) -> None:
    """Raises UnsupportedError if an optimizer writes by the handles of wholes.

    Those of tf.compat.v1 and the older ones of legacy Keras do; a whole has no value
    behind its handle.
    """
    if not hasattr(optimizer, "_resource_apply_dense"):
        return
    raise errors.UnsupportedError(
        f"{type(optimizer).__name__} is not known to update each element from its own "
        "values alone, and writes variables by their handles; but variable "
        f"{variable.name} {variable.how_split}.",
        fix="use one of the library's own optimizers, without a constraint on the "
        "variable, or one of Keras 3; or a strategy that leaves this variable whole.",
    )


def _policy(variable: Any) -> OperandPolicy:
    """Returns how a variable's gradient is communicated."""
    inner = plain(variable)
    has_policy = isinstance(inner, ReplicatedVariable | PartitionedVariable)
    return inner.policy if has_policy else NO_POLICY


def _cut(gradient: Gradient, whole: PartitionedVariable) -> list[Gradient]:
    """Divides a gradient among the parts."""
    if not isinstance(gradient, tf.IndexedSlices):
        return list(whole.layout.split(gradient))
    return list(whole.layout.cut(gradient, shapes.defined(whole), gradient.dtype))


def is_elementwise(optimizer: Any) -> bool:
    """Whether an optimizer updates each element using only that element's state.

    Args:
        optimizer: A wrapped optimizer.
    """
    if getattr(optimizer, "gradient_accumulation_steps", None):
        return False  # Keras' own accumulation keeps sums of wholes
    if getattr(optimizer, "clipnorm", None) and (
        getattr(optimizer, "loss_scale_factor", None) is not None
    ):
        return False  # gradients are unscaled between combining and clipping
    for cls in _original(optimizer).__mro__:
        package = cls.__module__.partition(".")[0]
        if cls.__name__ in _ELEMENTWISE.get(package, ()):
            return True
        if not _NO_UPDATE.issuperset(vars(cls)):
            return False
    return False


def optimizer_of_parts(optimizer: Any, division: Division) -> Any:
    """Returns an optimizer for the parts, which holds the parts of the slots.

    Args:
        optimizer: A wrapped optimizer, whose slots exist.
        division: The pieces to update.

    Returns:
        None if nothing is divided, so that the optimizer itself can update.
    """
    if not division.divides:
        return None
    part_optimizer: Any = object.__new__(_original(optimizer))
    state = optimizer._expanded(dict(vars(optimizer)), division)
    state.update(dict.fromkeys({"clipnorm", "_clipnorm"} & state.keys()))  # see clipped
    object.__setattr__(part_optimizer, "__dict__", state)
    return part_optimizer


def clipped(optimizer: Any, division: Division, grads: Sequence[Any]) -> list[Any]:
    """Clips each gradient by its norm, if the optimizer would do so.

    A gradient in parts is clipped by the norm of the whole: the sum of squares of each
    part is computed where the part is. The stand-in does not clip again.

    Args:
        optimizer: The optimizer.
        division: The pieces to update.
        grads: The gradients, one per piece.
    """
    limit = getattr(optimizer, "clipnorm", None)
    if not limit or not division.divides:
        return list(grads)
    remaining = iter(grads)
    clipped_grads: list[Any] = []
    for variables in division.pieces:
        pieces = [next(remaining) for _ in variables]
        if all(piece is None for piece in pieces):
            clipped_grads.extend(pieces)
            continue
        squares: list[tf.Tensor] = [
            _square(piece, _policy(variable).owner)
            for piece, variable in zip(pieces, variables, strict=True)
        ]
        norm = tf.sqrt(tf.add_n(squares))
        clipped_grads += [
            _scaled(piece, limit, tf.maximum(norm, limit)) for piece in pieces
        ]
    return clipped_grads


def _square(gradient: Gradient, owner: int | None) -> tf.Tensor:
    """Returns the sum of a gradient's squares, computed where the gradient is."""
    replica = context.current()
    place: Any = contextlib.nullcontext()
    if replica is not None and owner is not None:
        place = tf.device(replica.build.world.device(owner))
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    with place:
        return tf.reduce_sum(values * values)


def _scaled(gradient: Gradient, limit: float, divisor: tf.Tensor) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        values = _scaled(gradient.values, limit, divisor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(limit, gradient.dtype) / divisor


def _original(optimizer: Any) -> type:
    """Returns the class of an optimizer before it was wrapped."""
    original: type = type(optimizer).__bases__[1]
    return original


def expand_lists(
    state: dict[str, Any], divided: Sequence[Sequence[Any] | None]
) -> dict[str, Any]:
    """Expands an optimizer's lists that have an entry per variable.

    Args:
        state: The optimizer's attributes.
        divided: For each variable that the optimizer was built for, its parts, or None
            if it is updated as a whole.

    Returns:
        The attributes, whose lists have an entry per part.
    """

    def expanded(entries: Sequence[Any]) -> list[Any]:
        result: list[Any] = []
        for entry, parts in zip(entries, divided, strict=True):
            inner = plain(entry)
            if parts is None:
                result.append(entry)
            elif isinstance(inner, PartitionedVariable):
                result += inner.parts
            else:
                result += [entry] * len(parts)
        return result

    return {
        name: expanded(value)
        if isinstance(value, list | tuple) and len(value) == len(divided)
        else value
        for name, value in state.items()
    }


def expand_keyed(
    optimizer: Any, state: dict[str, Any], division: Division, indices: str
) -> dict[str, Any]:
    """Expands the attributes of an optimizer that numbers variables by their keys.

    Args:
        optimizer: The optimizer, of Keras 3 or the newer ones of legacy Keras.
        state: Its attributes.
        division: The pieces to update.
        indices: The attribute that maps each variable's key to its number.
    """
    key = optimizer._var_key
    divided = division.divided()
    parts = {key(whole): pieces for whole, pieces in divided}
    numbers = getattr(optimizer, indices)
    keys = sorted(numbers, key=numbers.__getitem__)
    state = expand_lists(state, [parts.get(k) for k in keys])
    groups = [[key(p) for p in parts[k]] if k in parts else [k] for k in keys]
    state[indices] = {k: n for n, k in enumerate(k for group in groups for k in group)}
    decays = {
        key(part): optimizer._use_weight_decay(plain(whole))
        for whole, pieces in divided
        for part in pieces
    }
    # Users exclude variables from weight decay by names or keys, which the wholes have.
    state["_use_weight_decay"] = lambda variable: (
        decays[key(variable)]
        if key(variable) in decays
        else optimizer._use_weight_decay(variable)
    )
    return state


def expand_slots(
    optimizer: Any, state: dict[str, Any], division: Division
) -> dict[str, Any]:
    """Expands the attributes of an optimizer that finds slots by variable and name.

    Args:
        optimizer: The optimizer, of tf.compat.v1 or the older ones of legacy Keras.
        state: Its attributes.
        division: The pieces to update.
    """
    places = {
        id(part): (whole, k)
        for whole, pieces in division.divided()
        for k, part in enumerate(pieces)
    }

    def get_slot(variable: Any, name: str) -> Any:
        if id(variable) not in places:
            return optimizer.get_slot(variable, name)
        whole, k = places[id(variable)]
        return optimizer.get_slot(whole, name).parts[k]

    state["get_slot"] = get_slot
    state["_create_slots"] = lambda variables: None  # the slots of the wholes exist
    return state
