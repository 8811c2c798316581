# SPDX-License-Identifier: Apache-2.0
"""Creates replicated variables: the variable creator of a Replicator.

Runs whenever TensorFlow or Keras makes a variable under `Replicator.context()` or
inside a step_fn. Makes one plain variable per device, all with the same initial value,
and one ReplicatedVariable around them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator._tf import callers, frames, graphs
from replicator.cluster.peers import Peers
from replicator.variables import division, in_graphs, initial_values, locks
from replicator.variables.chooser import Chooser, Description
from replicator.variables.components import Components, Store
from replicator.variables.decisions import Decisions, undecided
from replicator.variables.partitioned import PartitionedVariable
from replicator.variables.placement import Placement
from replicator.variables.replicated import ReplicatedVariable, plain
from replicator.variables.storage import Storage, User
from replicator.world import World

Variable = ReplicatedVariable | PartitionedVariable


@dataclasses.dataclass
class _Kept:
    """What a factory has created in one graph, or eagerly.

    Attributes:
        made: The variables made inside step_fns: weakly by the object that represents
            the step_fn, then by their places in its code.
        initializers: All ops that create variables.
        asked: Counts the variables that a strategy is asked about.
        paths: The existing variables by their paths.
    """

    made: weakref.WeakKeyDictionary[Any, dict[Any, ReplicatedVariable]] = (
        dataclasses.field(default_factory=weakref.WeakKeyDictionary)
    )
    initializers: set[tf.Operation] = dataclasses.field(default_factory=set)
    asked: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    paths: weakref.WeakValueDictionary[str, Variable] = dataclasses.field(
        default_factory=weakref.WeakValueDictionary
    )


class VariableFactory:
    """Creates replicated variables; the variable creator of one Replicator.

    Variables made inside a step_fn live as long as it does: every replica's k-th
    creation at one place in its code is the same variable, in all builds of the
    step_fn. Variables of a tf.Graph are held by the graph and go with it.
    """

    def __init__(
        self,
        world: World,
        lock: locks.StepLock,
        variables: str = "mirrored",
        peers: Peers | None = None,
        strategy: Chooser | None = None,
        store: Store | None = None,
    ) -> None:
        self._world = world
        self._peers = peers  # the processes that build the other replicas
        self._count = itertools.count()
        self._lock = lock  # of the steps that use the variables
        self._decisions = Decisions(world, variables, strategy)
        self._components = Components(world, peers, store)
        self._eager = _Kept()
        self._all: weakref.WeakValueDictionary[int, ReplicatedVariable]
        self._all = weakref.WeakValueDictionary()
        self._in_parts: list[weakref.ref[PartitionedVariable]] = []
        self._all_lock = threading.Lock()  # `_all` may grow while a thread iterates

    @property
    def initializers(self) -> set[tf.Operation]:
        """All ops in the current graph that create variables.

        They may lie among a step's ops, but are no part of the step.
        """
        return self._kept().initializers

    def _kept(self) -> _Kept:
        """Returns the record of where variables are created now."""
        with tf.init_scope():
            if tf.executing_eagerly():
                return self._eager
            # The key is no string, like those of TensorFlow's private collections.
            graph = tf.compat.v1.get_default_graph()
            collection = graph.get_collection_ref((_Kept, self))
            if not collection:
                collection.append(_Kept())
            return collection[0]

    def creator(self, next_creator: Any, **kwargs: Any) -> ReplicatedVariable:
        """Creates a variable; called by tf.variable_creator_scope.

        Direct callers may add `slot_of`, the variable whose slot this one is, and
        `description`, where it is.
        """
        replica = context.current()
        if replica is None:
            return self._create(kwargs, scope=None)
        variables = self._kept().made.setdefault(replica.build.step_key, {})
        place = frames.stack_since(replica.depth)
        key = (place, replica.count(place))
        if key in variables:
            variable = self._again(variables[key], kwargs)
            replica.build.create(variable, new=False)
            return variable
        scope = tf.compat.v1.get_default_graph().get_name_scope() + "/"
        variable = self._create(kwargs, scope=scope.removeprefix(replica.scope))
        replica.build.create(variable, new=True)
        variables[key] = variable
        return variable

    def owners(self) -> dict[int, ReplicatedVariable]:
        """Returns the variable behind each component's handle, by the handle's id."""
        return {
            id(component.handle): variable
            for variable in self._variables()
            for component in variable.components
        }

    def trained(self) -> dict[str, Variable]:
        """Returns the variables that strategies decide on, by their paths."""
        return {
            path: variable
            for path, variable in self._kept().paths.items()
            if variable.dtype.is_floating and variable.shape.is_fully_defined()
        }

    def in_parts(self) -> dict[int, PartitionedVariable]:
        """Returns the variables in parts, by the ids of their handles."""
        variables = [ref() for ref in self._in_parts]
        return {
            id(variable.handle): variable
            for variable in variables
            if variable is not None
        }

    def _variables(self) -> list[ReplicatedVariable]:
        with self._all_lock:
            return list(self._all.values())

    @contextlib.contextmanager
    def traced_by(self, user: User) -> Iterator[None]:
        """Traces functions in this block on behalf of `user`, which can retrace them.

        Functions traced here settle no variable's placement.
        """
        settlements = {
            variable.key: variable.storage.settlement for variable in self._variables()
        }
        try:
            yield
        finally:
            for variable in self._variables():
                settlement = settlements.get(variable.key)
                if variable.storage.settlement != settlement:
                    variable.storage.settlement = settlement
                    variable.storage.add_user(user)

    def _again(
        self, variable: ReplicatedVariable, kwargs: dict[str, Any]
    ) -> ReplicatedVariable:
        """Returns the variable that another replica made at the same place."""
        dtype, shape = initial_values.dtype_and_shape(kwargs)
        if dtype != variable.dtype or not variable.shape.is_compatible_with(shape):
            raise errors.MismatchError(
                f"replicas create different variables at {errors.user_line()}: "
                f"{variable.dtype.name}{variable.shape} first, then "
                f"{dtype.name}{shape}.",
                fix="let all replicas create the same variables in the same order.",
            )
        return variable

    def _create(self, kwargs: dict[str, Any], scope: str | None) -> ReplicatedVariable:
        kwargs = {k: v for k, v in kwargs.items() if v is not None}
        if "initial_value" not in kwargs and "shape" in kwargs:
            kwargs["initial_value"] = initial_values.placeholder(kwargs)
        kwargs["initial_value"] = initial_values.lifted(kwargs.get("initial_value"))
        collections = kwargs.pop("collections", None)
        primary = kwargs.pop("slot_of", None)
        description, path = kwargs.pop("description", None), ""
        if primary is None:
            primary = plain(callers.variable_of_slot())
        name_scope = contextlib.nullcontext()
        if scope is not None:
            name_scope = tf.name_scope(scope if scope != "/" else "")
        with self._creating():
            with name_scope:
                if description is None:
                    description, path = self._decided(kwargs, primary)
                if description.layout is None:
                    new = self._components.new(kwargs, description.placement)
                else:
                    variable = self._divide(kwargs, collections, description, primary)
            if description.layout is None:
                components, placement = new
                description = dataclasses.replace(description, placement=placement)
                variable = self._combine(components, kwargs, collections, description)
                if isinstance(primary, ReplicatedVariable):
                    primary.storage.add_slot(variable)
            if path:
                self._kept().paths[path] = variable
        storage = undecided(variable)
        if storage is not None:
            storage.settlement = None  # to create it relies on nothing
        return variable

    def _decided(self, kwargs: dict[str, Any], primary: Any) -> tuple[Description, str]:
        """Returns the decision on a variable, and its path ("" if it needs none)."""
        record = self._kept()
        if primary is not None or not self._decisions.has_path(kwargs):
            return self._decisions.on(kwargs, primary, "", record.asked), ""
        scope, name = tf.get_current_name_scope(), kwargs.get("name", "Variable")
        path = f"{scope}/{name}" if scope else name
        for number in itertools.count(1):
            if path not in record.paths:
                break
            path = f"{path.rpartition('_')[0] if number > 1 else path}_{number}"
        return self._decisions.on(kwargs, None, path, record.asked), path

    def divide_again(
        self, variable: PartitionedVariable, description: Description
    ) -> None:
        """Divides a variable and its slots into the parts that were decided on.

        Args:
            variable: The variable, already in parts.
            description: A strategy's decision.
        """
        slots = [slot for ref in variable.slots if (slot := ref()) is not None]
        with contextlib.ExitStack() as stack, self._creating():
            for divided in (variable, *slots):
                stack.enter_context(divided.parts[0].storage.moving(self._lock))
            division.divide_again(self._make_part, variable, description)
            for slot in slots:  # they have the variable's shape
                division.divide_again(self._make_part, slot, variable.description.slot)
                for part, slot_part in zip(variable.parts, slot.parts, strict=True):
                    part.storage.add_slot(slot_part)

    def _make_part(self, own: dict[str, Any], part: Description) -> ReplicatedVariable:
        """Creates a part of a variable."""
        components, _ = self._components.new(own, part.placement)
        return self._combine(components, own, [], part)

    def _divide(
        self,
        kwargs: dict[str, Any],
        collections: Sequence[str] | None,
        description: Description,
        primary: Any,
    ) -> PartitionedVariable:
        """Creates a variable in parts."""
        dtype, shape = initial_values.dtype_and_shape(kwargs)
        variable = division.create(
            self._make_part, kwargs, description, dtype, shape, self._world, self._lock
        )
        variable.creator = self.creator
        in_graphs.collect(variable, collections)
        self._in_parts.append(weakref.ref(variable))
        division.add_slot(primary, variable)
        return variable

    def move(
        self, variable: ReplicatedVariable, placement: Placement
    ) -> tuple[list[tf.Variable], tf.Variable]:
        """Creates a variable's components for a new placement.

        Args:
            variable: The variable, whose components are equal.
            placement: The new placement.

        Returns:
            The components, and which of them is the first.
        """
        with self._creating():
            return self._components.moved(variable, placement)

    @contextlib.contextmanager
    def _creating(self) -> Iterator[None]:
        """Lifts the creation of components out of whatever is being built."""
        with (
            tf.init_scope(),
            context.building(None),
            tf.compat.v1.get_default_graph().colocate_with(None, ignore_existing=True),
        ):
            graph = tf.compat.v1.get_default_graph()
            start = graphs.operation_count(graph)
            yield
            if not tf.executing_eagerly():
                self._kept().initializers.update(graph.get_operations()[start:])

    def _combine(
        self,
        components: Sequence[tf.Variable],
        kwargs: dict[str, Any],
        collections: Sequence[str] | None,
        description: Description,
    ) -> ReplicatedVariable:
        facts: dict[str, Any] = {
            name: kwargs[name]
            for name in ("trainable", "synchronization", "aggregation", "constraint")
            if name in kwargs
        }
        graph_mode = not tf.executing_eagerly()
        if graph_mode:
            facts["initializer_op"] = in_graphs.initializer(components)
        first = description.placement.first(components, self._world)
        variable = ReplicatedVariable(
            storage=Storage(components, description, self.move, first),
            world=self._world,
            lock=self._lock,
            # Equal in all processes; TensorFlow's own key is not.
            key=None if self._peers is None else f"variable {next(self._count)}",
            peers=self._peers,
            **facts,
        )
        variable.creator = self.creator
        with self._all_lock:
            self._all[id(variable)] = variable
        in_graphs.collect(variable, collections)
        return variable
