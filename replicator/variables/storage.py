# SPDX-License-Identifier: Apache-2.0
"""Where the components of a variable are, and how that changes when it has to.

What one replica owns for all cannot be used everywhere: XLA reaches only what is on the
device that it compiles for, say. Whoever finds that out while a step is built calls
`need_components`; each replica gets a component then, and the build starts over. So the
placement of a variable is settled by the steps that use it, not when it is created.
Eager steps that were traced before are traced again at their next call; what was built
into a user's own tf.function or tf.Graph cannot be, and settles it for good.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import tensorflow as tf

from replicator import _tf, context, errors
from replicator.variables import locks
from replicator.variables.placement import Mirrored, Placement
from replicator.variables.synchronizer import AllReduce, Synchronizer

_MOST_NAMES = 3  # that a note lists
_NEEDS = "components needed"  # a finding of builds


class User(Protocol):
    """What was traced with a variable's components, and can be traced again."""

    @property
    def lock(self) -> locks.StepLock:
        """What is held while it runs."""

    def trace_again(self) -> None:
        """Forgets what was traced."""


class Settlement(NamedTuple):
    """That code of the user's reaches a variable's components as they are.

    Attributes:
        line: The user's line at which it was built.
        graph: Returns the graph that it was built into, as long as that is there: what
            Keras builds to find out a shape is gone at once.
    """

    line: str
    graph: Callable[[], Any]


class Storage:
    """The components of one variable, and their placement.

    Args:
        components: `components[r]` is replica r's plain variable. What they are copies
            of comes last, if it is on another device than theirs.
        placement: What they hold, and all that follows from it.
        move: Makes the components of another placement, and says which is the first.
        first: The component that was created first, by default number 0's.

    Attributes:
        synchronizer: How gradients, and what is assigned in steps, are made equal.
        path: By which a strategy knows the variable; "" if it was not asked.
        undecided: Whether a strategy will decide on it when a step is built.
        first: The component that the variable was created with, and whose handle it has
            outside of steps, wherever others are.
        why_mirrored: For a variable that was to have one owner: what has been found to
            need a component on each replica, and where; else None.
        settlement: Where it was built into code of the user's; None if it was not.
    """

    def __init__(
        self,
        components: Sequence[tf.Variable],
        placement: Placement,
        move: Callable[[Any, Placement], tuple[Sequence[tf.Variable], tf.Variable]],
        first: tf.Variable | None = None,
    ) -> None:
        self.components = tuple(components)
        self.first = self.components[0] if first is None else first
        self.placement = placement
        self.synchronizer: Synchronizer = AllReduce()
        self.path = ""
        self.undecided = False
        self.why_mirrored: str | None = None
        self.settlement: Settlement | None = None
        self._move = move
        self._users: weakref.WeakSet[User] = weakref.WeakSet()
        self._slots: list[weakref.ref[Any]] = []

    def add_slot(self, slot: Any) -> None:
        """Notes what an optimizer has created to go with the variable."""
        self._slots.append(weakref.ref(slot))

    def slots(self) -> list[Any]:
        """Returns what optimizers have created to go with the variable."""
        return [slot for ref in self._slots if (slot := ref()) is not None]

    def add_user(self, user: User) -> None:
        """Notes what has to be traced again if the components move."""
        if self.placement.owner is not None or self.undecided:
            self._users.add(user)

    def settle(self) -> None:
        """Notes that code of the user's reaches the components as they are now."""
        may_move = self.placement.owner is not None or self.undecided
        if may_move and self.settled_at is None:
            graph = tf.compat.v1.get_default_graph()
            self.settlement = Settlement(errors.user_line(), weakref.ref(graph))

    @property
    def settled_at(self) -> str | None:
        """The user's line at which it was built into code that is still there."""
        if self.settlement is None or self.settlement.graph() is None:
            return None
        return self.settlement.line

    def relied_on(self) -> str | None:
        """Returns that line after Python has let go of what nobody can reach."""
        if self.settled_at is not None:
            gc.collect()  # graphs are in circles of references
        return self.settled_at

    def mirror(self, variable: Any, why: str) -> None:
        """Gives each replica a component, which begins with what the one holds now.

        Args:
            variable: The variable that this is the storage of.
            why: What needs it, and where, for plans.
        """
        self.move(variable, Mirrored())
        self.why_mirrored = why

    def move(self, variable: Any, placement: Placement) -> None:
        """Makes the components of another placement, which begin with what is held now.

        Args:
            variable: The variable that this is the storage of.
            placement: Where it will be.
        """
        with self.moving(variable.lock):
            components, first = self._move(variable, placement)
            self.components, self.placement = tuple(components), placement
            if first is not self.first:
                self.first = first
                _tf.stand_for(variable, first)

    @contextlib.contextmanager
    def moving(self, lock: locks.StepLock) -> Iterator[None]:
        """In this block, no step runs that uses it; behind it, they are traced again.

        Args:
            lock: The variable's.
        """
        users = list(self._users)
        with contextlib.ExitStack() as stack:  # steps of other Replicators, too
            for held in dict.fromkeys([lock, *(user.lock for user in users)]):
                stack.enter_context(held.also_held())
            yield
            for user in users:
                user.trace_again()
            self._users.clear()


@dataclasses.dataclass(frozen=True)
class Need:
    """That each replica needs a component of a variable which one of them owns.

    Attributes:
        variable: The ReplicatedVariable.
        why: What needs it, e.g. "used in a function with jit_compile=True".
        line: The user's line.
    """

    variable: Any
    why: str
    line: str


def need_of(variable: Any, why: str, op: tf.Operation) -> Need:
    """Returns the need of a variable that an op was found to write.

    Args:
        variable: The variable.
        why: As for `Need`.
        op: The op.
    """
    return Need(variable, why, errors.line_of(op))


def need_components(variable: Any, why: str) -> None:
    """Notes that each replica needs a component of a variable which one of them owns.

    The build goes on, to find out what else it needs; what comes of it is discarded.

    Args:
        variable: The variable.
        why: As for `Need`.
    """
    replica = context.current()
    assert replica is not None, "outside of steps the one component is reached"
    needs = replica.build.findings.setdefault(_NEEDS, {})
    needs.setdefault(variable.key, Need(variable, why, errors.user_line()))


def meet_needs(build: context.Build) -> None:
    """Gives each replica the components that were found to be needed in a build.

    Raises:
        BuildAgain: There were such.
        UnsupportedError: What was built before reaches the one component there is.
    """
    needs = build.findings.get(_NEEDS)
    if needs:
        mirror(build, needs.values())


def mirror(build: context.Build, needs: Iterable[Need]) -> NoReturn:
    """Gives each replica a component of some variables, for a build that needs them.

    Raises:
        BuildAgain: To build with these.
        UnsupportedError: What was built before reaches the one component there is.
    """
    for variable in mirror_all(needs):
        build.knowledge["mirrored", variable.key] = True
    raise context.BuildAgain


def mirror_all(needs: Iterable[Need]) -> list[Any]:
    """Gives each replica a component of some variables, and of their slots.

    Returns:
        Those that had an owner.

    Raises:
        UnsupportedError: What was built before reaches the one component there is.
    """
    owned = {
        one.key: (one, need)
        for need in needs
        for one in (need.variable, *need.variable.storage.slots())
        if one.placement.owner is not None
    }
    for variable, need in owned.values():
        settled = variable.storage.relied_on()
        if settled is not None:
            raise errors.UnsupportedError(
                errors.compose(
                    f"variable {variable.name} is {need.why}, for which each replica "
                    f"needs a component. But replica {variable.placement.owner} owns "
                    "it, and code that was built before relies on that.",
                    [f"at {need.line}", f"built before at {settled}"],
                    'build this step first, or use variables="mirrored".',
                )
            )
    for variable, need in owned.values():
        variable.storage.mirror(variable, f"{need.why}, at {need.line}")
    return [variable for variable, _ in owned.values()]


def notes(variables: Iterable[Any]) -> tuple[str, ...]:
    """Returns which variables are mirrored that were to have an owner, and why."""
    names: dict[str, list[str]] = {}
    for variable in variables:
        why = variable.storage.why_mirrored
        if why is not None:
            names.setdefault(why, []).append(variable.name)
    return tuple(
        f"Not sharded, as {why}: {_listed(found)}." for why, found in names.items()
    )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
