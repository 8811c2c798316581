# SPDX-License-Identifier: Apache-2.0
"""Variables in parts are updated part by part; their slots are in parts, too.

Where gradient and variable meet, both are expanded: the gradient of a whole is cut,
each piece is combined for its part, and a stand-in for the optimizer, which has the
parts of the slots, updates them. So the update of the whole is never on one device.

That is right where an update is computed element by element. Of an optimizer that is
not known to do so (LAMB, Adafactor, one of the user's own), the variable is updated as
a whole: its parts are read and joined, and what is written is split. The numbers are
the same. Gradients that are clipped by their norms are clipped before, by the wholes'.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator.graph.ir.placeholder import NO_POLICY, OperandPolicy
from replicator.optimizers.accumulators import Gradient
from replicator.variables import split_writes
from replicator.variables.partitioned import PartitionedVariable
from replicator.variables.replicated import ReplicatedVariable, plain

_KERAS = "SGD Adam AdamW Adamax Nadam RMSprop Adagrad Adadelta Ftrl Lion".split()
_V1 = (
    "GradientDescentOptimizer MomentumOptimizer AdamOptimizer AdagradOptimizer "
    "AdadeltaOptimizer RMSPropOptimizer FtrlOptimizer ProximalAdagradOptimizer "
    "ProximalGradientDescentOptimizer AdagradDAOptimizer"
).split()
# Whose updates are computed element by element, by the packages that they are in.
_ELEMENTWISE = {
    "keras": frozenset(_KERAS),
    "tf_keras": frozenset(_KERAS),
    "tensorflow": frozenset(_V1),
    "sonnet": frozenset(["SGD", "Momentum", "Adam", "RMSProp"]),
}
_NO_UPDATE = frozenset(["__init__", "get_config", "__module__", "__doc__"])


@dataclasses.dataclass(frozen=True)
class Division:
    """What the variables of one update are expanded to.

    Attributes:
        wholes: The variables, as the optimizer is given them.
        pieces: For each of them its parts, or itself.
    """

    wholes: tuple[Any, ...]
    pieces: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(cls, optimizer: Any, variables: Sequence[Any]) -> Division:
        """Returns the parts of those variables that are updated part by part."""
        in_parts = [isinstance(plain(v), PartitionedVariable) for v in variables]
        by_part = any(in_parts) and is_elementwise(optimizer)
        pieces: list[tuple[Any, ...]] = []
        for variable, divided in zip(variables, in_parts, strict=True):
            free = getattr(variable, "constraint", None) is None
            if divided and not (by_part and free):
                _refuse_handles(optimizer, plain(variable))
            own = plain(variable).parts if divided and by_part and free else (variable,)
            pieces.append(own)
        return cls(tuple(variables), tuple(pieces))

    @property
    def variables(self) -> list[Any]:
        """All parts, and what is no part."""
        return [piece for own in self.pieces for piece in own]

    def replicated(self) -> list[ReplicatedVariable]:
        """Returns what is written in the end: variables, and parts also of wholes."""
        found = []
        for variable in map(plain, self.variables):
            own = getattr(variable, "parts", (variable,))
            found += [one for one in own if isinstance(one, ReplicatedVariable)]
        return found

    @property
    def divides(self) -> bool:
        """Whether a variable is updated part by part."""
        return bool(self.divided())

    def divided(self) -> list[tuple[Any, tuple[Any, ...]]]:
        """Returns the variables that are updated part by part, and their parts."""
        pairs = zip(self.wholes, self.pieces, strict=True)
        return [(whole, own) for whole, own in pairs if own[0] is not whole]

    def cut(self, gradient: Gradient | None, k: int) -> list[Gradient | None]:
        """Returns the gradients of the pieces of the k-th variable."""
        own, whole = self.pieces[k], plain(self.wholes[k])
        if own[0] is self.wholes[k]:
            return [gradient]
        if gradient is None:
            return [None] * len(own)
        return list(_cut(gradient, whole))

    def cut_some(
        self, used: Sequence[int], grads: Sequence[Gradient | None]
    ) -> list[Gradient | None]:
        """Returns the gradients of the pieces of those variables that are used."""
        pairs = zip(used, grads, strict=True)
        return [piece for k, gradient in pairs for piece in self.cut(gradient, k)]

    def spread(
        self, used: Sequence[int], grads: Sequence[Gradient]
    ) -> list[Gradient | None]:
        """Returns a gradient for each piece there is: None for what is not used."""
        left, known = iter(grads), frozenset(used)
        return [
            next(left) if k in known else None
            for k, own in enumerate(self.pieces)
            for _ in own
        ]

    def cut_all(self, grads: Sequence[Gradient | None]) -> list[Gradient | None]:
        """Returns the gradients of all pieces."""
        return self.cut_some(range(len(grads)), grads)

    def policies(self, k: int) -> list[OperandPolicy]:
        """Returns how the gradients of the k-th variable's pieces are communicated."""
        return [_policy(piece) for piece in self.pieces[k]]


def _refuse_handles(optimizer: Any, variable: PartitionedVariable) -> None:
    """Raises UnsupportedError if an optimizer writes wholes where there is no whole.

    Those of tf.compat.v1, and the older ones of legacy Keras, do so by the handle.
    """
    if not hasattr(optimizer, "_resource_apply_dense"):
        return
    raise errors.UnsupportedError(
        errors.compose(
            f"{type(optimizer).__name__} is not known to update each element by what "
            f"belongs to it alone, and writes variables by their handles; but variable "
            f"{variable.name} is in {len(variable.parts)} parts.",
            [f"at {errors.user_line()}"],
            "use an optimizer of the library itself, without a constraint on the "
            "variable, or one of Keras 3; or a strategy that leaves this variable "
            "whole.",
        )
    )


def _policy(variable: Any) -> OperandPolicy:
    """Returns how a variable's gradient is communicated."""
    inside = plain(variable)
    known = isinstance(inside, ReplicatedVariable | PartitionedVariable)
    return inside.policy if known else NO_POLICY


def _cut(gradient: Gradient, whole: PartitionedVariable) -> list[Gradient]:
    """Returns what of a gradient is of each part."""
    if not isinstance(gradient, tf.IndexedSlices):
        return list(tf.split(gradient, whole.sizes, whole.axis))
    return split_writes.cut(
        gradient, whole.parts, whole.axis, whole.sizes, gradient.dtype
    )


def is_elementwise(optimizer: Any) -> bool:
    """Whether each element is updated by what belongs to it alone.

    Args:
        optimizer: A wrapped one.
    """
    if getattr(optimizer, "gradient_accumulation_steps", None):
        return False  # Keras', which keeps sums of wholes
    if getattr(optimizer, "clipnorm", None) and (
        getattr(optimizer, "loss_scale_factor", None) is not None
    ):
        return False  # it unscales between what is combined and what is clipped
    for cls in _original(optimizer).__mro__:
        package = cls.__module__.partition(".")[0]
        if cls.__name__ in _ELEMENTWISE.get(package, ()):
            return True
        if not _NO_UPDATE.issuperset(vars(cls)):
            return False
    return False


def stand_in(optimizer: Any, division: Division) -> Any:
    """Returns an optimizer that updates parts, with the parts of the optimizer's slots.

    Args:
        optimizer: A wrapped one, whose slots exist.
        division: What it updates.

    Returns:
        None if the optimizer itself can do that.
    """
    if not division.divides:
        return None
    made: Any = object.__new__(_original(optimizer))
    state = optimizer._expanded(dict(vars(optimizer)), division)
    state.update(dict.fromkeys({"clipnorm", "_clipnorm"} & state.keys()))  # see clipped
    object.__setattr__(made, "__dict__", state)
    return made


def clipped(optimizer: Any, division: Division, grads: Sequence[Any]) -> list[Any]:
    """Clips each variable's gradient by its norm, for an optimizer that would.

    Of what is in parts, by the norm of the whole: the parts' squares are added up where
    these are. The stand-in does not clip once more.

    Args:
        optimizer: The optimizer.
        division: What it updates.
        grads: One per piece.
    """
    limit = getattr(optimizer, "clipnorm", None)
    if not limit or not division.divides:
        return list(grads)
    left = iter(grads)
    made: list[Any] = []
    for own in division.pieces:
        pieces = [next(left) for _ in own]
        if all(piece is None for piece in pieces):
            made.extend(pieces)
            continue
        squares: list[tf.Tensor] = [
            _square(piece, _policy(variable).owner)
            for piece, variable in zip(pieces, own, strict=True)
        ]
        norm = tf.sqrt(tf.add_n(squares))
        made += [_scaled(piece, limit, tf.maximum(norm, limit)) for piece in pieces]
    return made


def _square(gradient: Gradient, owner: int | None) -> tf.Tensor:
    """Returns the sum of the squares, computed by the one who has the gradient."""
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
    """Expands what an optimizer has in lists with an entry per variable.

    Args:
        state: The optimizer's attributes.
        divided: For each variable that it was built for its parts, or None if it is
            updated as a whole.

    Returns:
        The attributes, with an entry per part.
    """

    def expanded(entries: Sequence[Any]) -> list[Any]:
        made: list[Any] = []
        for entry, own in zip(entries, divided, strict=True):
            inside = plain(entry)
            if own is None:
                made.append(entry)
            elif isinstance(inside, PartitionedVariable):
                made += inside.parts
            else:
                made += [entry] * len(own)
        return made

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
        division: What it updates.
        indices: The attribute with the number of each variable, by its key.
    """
    key = optimizer._var_key
    divided = division.divided()
    parts = {key(whole): own for whole, own in divided}
    numbers = getattr(optimizer, indices)
    keys = sorted(numbers, key=numbers.__getitem__)
    state = expand_lists(state, [parts.get(known) for known in keys])
    own = [[key(p) for p in parts[k]] if k in parts else [k] for k in keys]
    state[indices] = {k: n for n, k in enumerate(k for group in own for k in group)}
    decays = {
        key(part): optimizer._use_weight_decay(plain(whole))
        for whole, own_parts in divided
        for part in own_parts
    }
    # By the names, or the keys, of what the user excluded, which are those of wholes.
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
        division: What it updates.
    """
    places = {
        id(part): (whole, k)
        for whole, own in division.divided()
        for k, part in enumerate(own)
    }

    def get_slot(variable: Any, name: str) -> Any:
        if id(variable) not in places:
            return optimizer.get_slot(variable, name)
        whole, k = places[id(variable)]
        return optimizer.get_slot(whole, name).parts[k]

    state["get_slot"] = get_slot
    state["_create_slots"] = lambda variables: None  # there are those of the wholes
    return state
