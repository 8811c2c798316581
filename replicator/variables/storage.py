# SPDX-License-Identifier: Apache-2.0
"""Holds a variable's components and moves them when a step needs another placement.

A variable that one replica owns cannot be used everywhere: XLA, for one, reaches only
what is on the device that it compiles for. Code that discovers this while building a
step calls `need_components`; each replica then gets a component, and the build starts
over. So a variable's placement is settled by the steps that use it, not at creation.
Eager steps traced earlier are retraced at their next call; code built into a user's own
tf.function or tf.Graph cannot be, and therefore settles the placement for good.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import tensorflow as tf

from replicator import context, errors
from replicator._tf import variables as tf_variables
from replicator.variables import locks
from replicator.variables.chooser import Description
from replicator.variables.placement import Mirrored, Placement

_MOST_NAMES = 3  # listed in one note


class User(Protocol):
    """Code that was traced with a variable's components and can be retraced."""

    @property
    def lock(self) -> locks.StepLock:
        """The lock that is held while it runs."""

    def trace_again(self) -> None:
        """Discards the trace, so that the next call retraces."""


class Settlement(NamedTuple):
    """Records that user code was built with a variable's current components.

    Attributes:
        line: The user's line at which it was built.
        graph: Returns the graph it was built into while that exists: the graphs that
            Keras builds to infer shapes vanish at once.
    """

    line: str
    graph: Callable[[], Any]


class Storage:
    """The components of one variable, and its description.

    Args:
        components: `components[r]` is replica r's plain variable. The variable they are
            copies of comes last if it is on a device of its own.
        description: How the components are placed and what they hold.
        move: Creates the components for a new placement and says which is the first.
        first: The component that was created first, by default number 0's.

    Attributes:
        first: The component that the variable was created with; the variable has its
            handle outside steps, wherever other components are.
        why_mirrored: For a variable that was to have one owner: what was found to need
            a component on each replica, and where; else None.
        settlement: Where user code was built with the components; None if none was.
        late: Whether components were created in a tf.Graph after the variable was.
    """

    def __init__(
        self,
        components: Sequence[tf.Variable],
        description: Description,
        move: Callable[[Any, Placement], tuple[Sequence[tf.Variable], tf.Variable]],
        first: tf.Variable | None = None,
    ) -> None:
        self.components = tuple(components)
        self.first = self.components[0] if first is None else first
        self.description = description
        self.why_mirrored: str | None = None
        self.settlement: Settlement | None = None
        self.late = False
        self._move = move
        self._users: weakref.WeakSet[User] = weakref.WeakSet()
        self._slots: list[weakref.ref[Any]] = []

    @property
    def placement(self) -> Placement:
        """How the components are placed and what they hold."""
        return self.description.placement

    @property
    def may_move(self) -> bool:
        """Whether a step may yet find that the components have to be elsewhere."""
        return self.placement.owner is not None or self.description.undecided

    def add_slot(self, slot: Any) -> None:
        """Notes a variable that an optimizer created as a slot of this one."""
        self._slots.append(weakref.ref(slot))

    def slots(self) -> list[Any]:
        """Returns the slots that optimizers have created for the variable."""
        return [slot for ref in self._slots if (slot := ref()) is not None]

    def add_user(self, user: User) -> None:
        """Notes code that must be retraced if the components move."""
        if self.may_move:
            self._users.add(user)

    def settle(self) -> None:
        """Notes that user code is being built with the current components."""
        if self.may_move and self.settled_at is None:
            graph = tf.compat.v1.get_default_graph()
            self.settlement = Settlement(errors.user_line(), weakref.ref(graph))

    @property
    def settled_at(self) -> str | None:
        """The line of user code that was built with the components and still exists."""
        if self.settlement is None or self.settlement.graph() is None:
            return None
        return self.settlement.line

    def relied_on(self) -> str | None:
        """Returns `settled_at`, after collecting graphs that nothing can reach."""
        if self.settled_at is not None:
            gc.collect()  # graphs are part of reference cycles
        return self.settled_at

    def mirror(self, variable: Any, why: str) -> None:
        """Gives each replica a component that starts with the owned one's value.

        Args:
            variable: The variable whose storage this is.
            why: What needs the components, and where; plans show it.
        """
        self.move(variable, Mirrored())
        self.why_mirrored = why

    def move(self, variable: Any, placement: Placement) -> None:
        """Creates components for a new placement, which start with the current value.

        Args:
            variable: The variable whose storage this is.
            placement: The new placement.
        """
        with self.moving(variable.lock):
            components, first = self._move(variable, placement)
            self.components = tuple(components)
            self.description = dataclasses.replace(
                self.description, placement=placement
            )
            if first is not self.first:
                self.first = first
                tf_variables.stand_for(variable, first)

    @contextlib.contextmanager
    def moving(self, lock: locks.StepLock) -> Iterator[None]:
        """Keeps steps that use the variable from running, and then retraces them.

        Args:
            lock: The variable's lock.
        """
        users = list(self._users)
        with contextlib.ExitStack() as stack:  # steps of other Replicators, too
            for lock_held in dict.fromkeys([lock, *(user.lock for user in users)]):
                stack.enter_context(lock_held.also_held())
            yield
            for user in users:
                user.trace_again()
            self._users.clear()


@dataclasses.dataclass(frozen=True)
class Need:
    """Records that each replica needs a component of a variable that one owns.

    Attributes:
        variable: The ReplicatedVariable.
        why: What needs them, e.g. "used in a function with jit_compile=True".
        line: The user's line.
    """

    variable: Any
    why: str
    line: str


def need_of(variable: Any, why: str, op: tf.Operation) -> Need:
    """Returns the need that arises because an op writes a variable.

    Args:
        variable: The variable.
        why: As for `Need`.
        op: The op.
    """
    return Need(variable, why, errors.line_of(op))


class _Needs(dict[str, Need]):
    """The variables of which a build needs components, by their keys."""


def need_components(variable: Any, why: str) -> None:
    """Notes that each replica needs a component of a variable that one of them owns.

    The build goes on, to find what else it needs; its result is discarded.

    Args:
        variable: The variable.
        why: As for `Need`.
    """
    replica = context.current()
    assert replica is not None, "outside of steps the one component is reached"
    needs = replica.build.states.of(_Needs)
    needs.setdefault(variable.key, Need(variable, why, errors.user_line()))


def meet_needs(build: context.Build) -> None:
    """Gives each replica the components that the build was found to need.

    Raises:
        BuildAgain: Some were needed, so the build starts over with them.
        UnsupportedError: Code that was built before relies on the owner's component.
    """
    needs = build.states.of(_Needs)
    if needs:
        mirror(build, needs.values())


def mirror(build: context.Build, needs: Iterable[Need]) -> NoReturn:
    """Gives each replica components of some variables and restarts the build.

    Raises:
        BuildAgain: Always, so that the step is built with them.
        UnsupportedError: Code that was built before relies on the owner's component.
    """
    for variable in mirror_all(needs):
        build.knowledge["mirrored", variable.key] = True
    raise context.BuildAgain


def mirror_all(needs: Iterable[Need]) -> list[Any]:
    """Gives each replica a component of some variables, and of their slots.

    Returns:
        The variables that had an owner until now.

    Raises:
        UnsupportedError: Code that was built before relies on the owner's component.
    """
    owned = {
        variable.key: (variable, need)
        for need in needs
        for variable in (need.variable, *need.variable.storage.slots())
        if variable.placement.owner is not None
    }
    for variable, need in owned.values():
        settled_at = variable.storage.relied_on()
        if settled_at is not None:
            raise errors.UnsupportedError(
                f"variable {variable.name} is {need.why}, for which each replica needs "
                f"a component. But replica {variable.placement.owner} owns it, and "
                "code that was built before relies on that.",
                [f"at {need.line}", f"built before at {settled_at}"],
                'build this step first, or use variables="mirrored".',
            )
    for variable, need in owned.values():
        variable.storage.mirror(variable, f"{need.why}, at {need.line}")
    return [variable for variable, _ in owned.values()]


def notes(variables: Iterable[Any]) -> tuple[str, ...]:
    """Returns a note per reason why variables meant to have an owner are mirrored."""
    names: dict[str, list[str]] = {}
    for variable in variables:
        why = variable.storage.why_mirrored
        if why is not None:
            names.setdefault(why, []).append(variable.name)
    return tuple(
        f"Not sharded, as {why}: {_listed(variable_names)}."
        for why, variable_names in names.items()
    )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
