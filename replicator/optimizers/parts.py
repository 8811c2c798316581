"""Variables in parts are updated part by part, with slots that are in parts as they are.

Where gradient and variable meet, both are expanded: the gradient of a whole is cut, each
piece is combined for the part that it is of, and a stand-in for the optimizer, whose
slots are those of the parts, updates them. So neither a gradient nor an update of the
whole is ever on one device.

That is right where an update is computed element by element. Of an optimizer that is
not known to do so (LAMB, Adafactor, one of the user's own), or that clips each gradient
by its norm, the variable is updated as a whole: its parts are read and joined, and what
is written is split. The numbers are the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

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
        by_part = None
        pieces = []
        for variable in variables:
            inside = plain(variable)
            own: tuple[Any, ...] = (variable,)
            if isinstance(inside, PartitionedVariable):
                if by_part is None:
                    by_part = is_elementwise(optimizer)
                if by_part and getattr(variable, "constraint", None) is None:
                    own = inside.parts
            pieces.append(own)
        return cls(tuple(variables), tuple(pieces))

    @property
    def variables(self) -> list[Any]:
        """All parts, and what is no part."""
        return [piece for own in self.pieces for piece in own]

    @property
    def divides(self) -> bool:
        """Whether a variable is updated part by part."""
        return len(self.variables) > len(self.wholes) or any(
            own[0] is not whole
            for own, whole in zip(self.pieces, self.wholes, strict=True)
        )

    def cut(self, gradient: Gradient | None, k: int) -> list[Gradient | None]:
        """Returns the gradients of the pieces of the k-th variable."""
        own, whole = self.pieces[k], plain(self.wholes[k])
        if own[0] is self.wholes[k]:
            return [gradient]
        if gradient is None:
            return [None] * len(own)
        return list(_cut(gradient, whole))

    def cut_all(self, grads: Sequence[Gradient | None]) -> list[Gradient | None]:
        """Returns the gradients of all pieces."""
        return [piece for k, g in enumerate(grads) for piece in self.cut(g, k)]

    def policies(self, k: int) -> list[OperandPolicy]:
        """Returns how the gradients of the k-th variable's pieces are communicated."""
        return [_policy(piece) for piece in self.pieces[k]]


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
    if getattr(optimizer, "clipnorm", None):
        return False
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
    """
    if not division.divides:
        return None
    original = _original(optimizer)
    state = dict(vars(optimizer))
    parts = {
        _key(optimizer, whole): own
        for whole, own in zip(division.wholes, division.pieces, strict=True)
        if own[0] is not whole
    }
    made = object.__new__(original)
    object.__setattr__(made, "__dict__", optimizer._expanded(state, parts))
    return made


def _original(optimizer: Any) -> type:
    """Returns the class of an optimizer before it was wrapped."""
    return type(optimizer).__bases__[1]


def _key(optimizer: Any, variable: Any) -> Any:
    key = getattr(optimizer, "_var_key", None)
    return key(variable) if key is not None else id(variable)


def expand_lists(
    state: dict[str, Any], wholes: Sequence[Any], parts: dict[Any, Any], key: Any
) -> dict[str, Any]:
    """Expands what an optimizer has in lists with an entry per variable.

    Args:
        state: Its attributes.
        wholes: The variables that it was built for.
        parts: The parts of those that are updated part by part, by their keys.
        key: Returns the key of a variable.

    Returns:
        The attributes, with an entry per part.
    """
    divided = [parts.get(key(variable)) for variable in wholes]

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
