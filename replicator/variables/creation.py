"""How replicated variables come to be: the variable creator of a Replicator.

Runs whenever TensorFlow or Keras makes a variable under `Replicator.context()` or
inside a step_fn. Makes one plain variable per device, all of one initial value, and one
ReplicatedVariable around them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf, context, errors
from replicator.cluster.peers import Peers
from replicator.variables import (
    division,
    elsewhere,
    in_graphs,
    initial_values,
    locks,
)
from replicator.variables.chooser import Chooser, Chosen, Part, VariableFacts
from replicator.variables.partitioned import PartitionedVariable
from replicator.variables.placement import (
    Aggregated,
    Mirrored,
    Owned,
    Placement,
    Seeded,
)
from replicator.variables.replicated import ReplicatedVariable, plain
from replicator.variables.seeds import Seed
from replicator.variables.storage import Storage, User
from replicator.world import World


@dataclasses.dataclass
class _Kept:
    """What a factory has made in one graph, or eagerly.

    Attributes:
        made: The variables made inside step_fns, by what stands for each and goes with
            it, and by their places.
        initializers: All ops made for the creation of variables.
    """

    made: weakref.WeakKeyDictionary[Any, dict[Any, ReplicatedVariable]] = (
        dataclasses.field(default_factory=weakref.WeakKeyDictionary)
    )
    initializers: set[tf.Operation] = dataclasses.field(default_factory=set)


class VariableFactory:
    """Creates replicated variables; the variable creator of one Replicator.

    Variables made inside a step_fn are kept as long as it is: every replica's k-th
    creation at a place of its code is one variable, in all builds of it. Those of a
    tf.Graph are kept by the graph, and go with it.
    """

    def __init__(
        self,
        world: World,
        lock: locks.StepLock,
        sharded: bool = False,
        peers: Peers | None = None,
        strategy: Chooser | None = None,
    ) -> None:
        self._world = world
        self._strategy = strategy
        self._peers = peers  # the processes that build the other replicas
        self._count = itertools.count()
        self._lock = lock  # of the steps that the variables are used in
        self._sharded = sharded and world.num_replicas > 1
        self._bytes = dict.fromkeys(world.local, 0)  # that each replica owns
        self._last_owner: int | None = None
        self._eager = _Kept()
        self._all: weakref.WeakValueDictionary[int, ReplicatedVariable]
        self._all = weakref.WeakValueDictionary()
        self._in_parts: list[weakref.ref[PartitionedVariable]] = []
        self._all_lock = threading.Lock()  # it may grow while a thread goes through it

    @property
    def initializers(self) -> set[tf.Operation]:
        """All ops made for the creation of variables in the graph at hand.

        They may stand amid a step's ops, but are no part of the step.
        """
        return self._kept().initializers

    def _kept(self) -> _Kept:
        """Returns what was made where variables are made now."""
        with tf.init_scope():
            if tf.executing_eagerly():
                return self._eager
            # By a key that is no string, as private collections of TensorFlow are.
            graph = tf.compat.v1.get_default_graph()
            collection = graph.get_collection_ref((_Kept, self))
            if not collection:
                collection.append(_Kept())
            return collection[0]

    def creator(self, next_creator: Any, **kwargs: Any) -> ReplicatedVariable:
        """What tf.variable_creator_scope calls for each new variable."""
        replica = context.current()
        if replica is None:
            return self._create(kwargs, scope=None)
        made = self._kept().made.setdefault(replica.build.step_key, {})
        place = _tf.stack_since(replica.depth)
        key = (place, replica.count(place))
        if key in made:
            variable = self._again(made[key], kwargs)
            replica.build.create(variable, new=False)
            return variable
        scope = tf.compat.v1.get_default_graph().get_name_scope() + "/"
        variable = self._create(kwargs, scope=scope.removeprefix(replica.scope))
        replica.build.create(variable, new=True)
        made[key] = variable
        return variable

    def owners(self) -> dict[int, ReplicatedVariable]:
        """Returns the variable behind each component's handle, by the handle's id."""
        return {
            id(component.handle): variable
            for variable in self._variables()
            for component in variable.components
        }

    def in_parts(self) -> dict[int, PartitionedVariable]:
        """Returns the variables in parts, by the ids of their handles."""
        known = [ref() for ref in self._in_parts]
        return {id(one.handle): one for one in known if one is not None}

    def _variables(self) -> list[ReplicatedVariable]:
        with self._all_lock:
            return list(self._all.values())

    @contextlib.contextmanager
    def traced_by(self, user: User) -> Iterator[None]:
        """In this block, functions are traced that `user` can trace again.

        What is built into them settles no variable.
        """
        before = {one.key: one.storage.settled_at for one in self._variables()}
        try:
            yield
        finally:
            for variable in self._variables():
                settled = before.get(variable.key)
                if variable.storage.settled_at != settled:
                    variable.storage.settled_at = settled
                    variable.storage.add_user(user)

    def _again(
        self, variable: ReplicatedVariable, kwargs: dict[str, Any]
    ) -> ReplicatedVariable:
        """Returns the variable that another replica made at the same place."""
        dtype, shape = initial_values.dtype_and_shape(kwargs)
        if dtype != variable.dtype or not variable.shape.is_compatible_with(shape):
            raise errors.MismatchError(
                errors.compose(
                    f"replicas create different variables at {errors.user_line()}: "
                    f"{variable.dtype.name}{variable.shape} first, then "
                    f"{dtype.name}{shape}.",
                    fix="let all replicas create the same variables in the same order.",
                )
            )
        return variable

    def _create(self, kwargs: dict[str, Any], scope: str | None) -> ReplicatedVariable:
        kwargs = {k: v for k, v in kwargs.items() if v is not None}
        if "initial_value" not in kwargs and "shape" in kwargs:
            kwargs["initial_value"] = initial_values.placeholder(kwargs)
        kwargs["initial_value"] = initial_values.lifted(kwargs.get("initial_value"))
        collections = kwargs.pop("collections", None)
        primary = plain(_tf.variable_of_slot())
        name_scope = contextlib.nullcontext()
        if scope is not None:
            name_scope = tf.name_scope(scope if scope != "/" else "")
        chosen = self._chosen(kwargs, primary)
        if chosen is not None and chosen.parts:
            with self._creating(), name_scope:
                return self._divide(kwargs, collections, chosen, primary)
        with self._creating():
            with name_scope:
                components, placement = self._components(kwargs, primary)
            variable = self._combine(components, kwargs, collections, placement)
        if isinstance(primary, ReplicatedVariable):
            primary.storage.add_slot(variable)
        return variable

    def _chosen(self, kwargs: dict[str, Any], primary: Any) -> Chosen | None:
        """Returns what the strategy says of a variable, or its primary for a slot."""
        if self._strategy is None:
            return None
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            return None
        dtype, shape = initial_values.dtype_and_shape(kwargs)
        if primary is not None:
            return division.of_slot(primary, shape)
        if not dtype.is_floating or not kwargs.get("trainable", True):
            return None
        scope = tf.compat.v1.get_default_graph().get_name_scope()
        path = "/".join(filter(None, [scope, kwargs.get("name", "Variable")]))
        size = shape.num_elements() or 0
        return self._strategy.choose(
            VariableFacts(
                path, tuple(shape.as_list()), dtype.name, nbytes=size * dtype.size
            )
        )

    def _divide(
        self,
        kwargs: dict[str, Any],
        collections: Sequence[str] | None,
        chosen: Chosen,
        primary: Any,
    ) -> PartitionedVariable:
        """Creates a variable in parts."""

        def make(own: dict[str, Any], part: Part) -> ReplicatedVariable:
            components, _ = self._components(own, None, part.placement)
            made = self._combine(components, own, [], part.placement)
            made.storage.synchronizer = part.synchronizer
            return made

        dtype, shape = initial_values.dtype_and_shape(kwargs)
        variable = division.create(
            make, kwargs, chosen, dtype, shape, self._world, self._lock
        )
        in_graphs.collect(variable, collections)
        self._in_parts.append(weakref.ref(variable))
        division.add_slot(primary, variable)
        return variable

    def _owner(self, kwargs: dict[str, Any], primary: Any) -> int | None:
        """Returns the replica that shall own a variable; None if each gets its own.

        Replicas own about the same number of bytes, and what is an optimizer's slot is
        owned with its variable, what is a vector with the variable before it: a bias
        with its layer's weights, whose gradient is computed from the same. What is not
        shared are integers, which a step may count with in its own way, and scalars,
        which would cost a transfer to save a few bytes.
        """
        if not self._sharded:
            return None
        value = kwargs.get("initial_value")
        if callable(value):
            value = value()
            if not hasattr(value, "checkpoint_position"):
                kwargs["initial_value"] = value
        value = tf.convert_to_tensor(
            getattr(value, "wrapped_value", value), kwargs.get("dtype")
        )
        inexact = value.dtype.is_floating or value.dtype.is_complex
        if not inexact or not value.shape.rank:
            return None
        owner = self._last_owner if value.shape.rank == 1 else None
        if isinstance(primary, ReplicatedVariable):
            owner = primary.placement.owner
            if owner is None:
                return None
        if owner is None:
            owner = min(self._bytes, key=self._bytes.__getitem__)
        self._bytes[owner] += (value.shape.num_elements() or 0) * value.dtype.size
        self._last_owner = owner
        return owner

    def _placement(self, kwargs: dict[str, Any], primary: Any) -> Placement:
        """Returns how a variable is placed that is about to be created."""
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            return Aggregated(kwargs.get("aggregation", tf.VariableAggregation.NONE))
        owner = self._owner(kwargs, primary)
        return Mirrored() if owner is None else Owned(owner)

    def _components(
        self, kwargs: dict[str, Any], primary: Any, placement: Placement | None = None
    ) -> tuple[list[tf.Variable], Placement]:
        """Creates one plain variable per device, or one in place of all.

        They begin with what each gets of component 0's initial value.
        """
        if placement is None:
            placement = self._placement(kwargs, primary)
        names = ("initial_value", "name", "dtype", "shape", "validate_shape")
        own = {k: kwargs[k] for k in names if k in kwargs}
        with tf.device(placement.device(self._world)):
            first = _tf.ResourceVariable(trainable=False, collections=[], **own)
        if self._peers is not None:
            elsewhere.adopt(self._peers, first)
        if placement.owner is not None:
            return [first] * self._world.num_local, placement
        seed = Seed.of(first)
        if seed is not None:
            placement = Seeded(seed)
        del own["initial_value"]

        def initial_value(r: int) -> Any:
            eager = tf.executing_eagerly()
            value = first.read_value() if eager else first.initial_value
            return placement.written(value, first, r)

        others = [
            self._component(first, functools.partial(initial_value, r), r, **own)
            for r in self._world.local[1:]
        ]
        if self._peers is not None and placement.differs:
            value = first.read_value()  # which would be that of replica 0
            first.assign(placement.written(value, first, self._world.local[0]))
        return [first, *others], placement

    def _component(
        self,
        first: tf.Variable,
        initial_value: Callable[[], Any],
        replica_id: int,
        **own: Any,
    ) -> tf.Variable:
        """Creates a replica's component of a variable that has one already."""
        name = first.name.partition(":")[0].split("/")[-1]
        own.update(name=f"{name}/replica_{replica_id}", dtype=first.dtype)
        with tf.device(self._world.device(replica_id)):
            return _tf.ResourceVariable(
                lambda: tf.identity(initial_value()),
                trainable=False,
                collections=[],
                **own,
            )

    def mirrored(self, variable: ReplicatedVariable) -> list[tf.Variable]:
        """Creates the components of a variable that one replica has owned so far.

        They begin with what that one holds, or in a tf.Graph will hold at first.

        Args:
            variable: Has an owner.
        """
        first, owner = variable.components[0], variable.placement.owner
        with self._creating():
            eager = tf.executing_eagerly()
            value = first.read_value() if eager else first.initial_value
            components = [
                first
                if r == owner
                else self._component(first, lambda: value, r, shape=first.shape)
                for r in self._world.local
            ]
            if not eager:  # what initializes the variable may be known elsewhere by now
                added = [one.initializer for one in components if one is not first]
                _tf.add_control_inputs(variable.initializer, added)
        return components

    @contextlib.contextmanager
    def _creating(self) -> Iterator[None]:
        """In this block, components are created, wherever the program is."""
        with (
            tf.init_scope(),
            context.building(None),
            tf.compat.v1.get_default_graph().colocate_with(None, ignore_existing=True),
        ):
            graph = tf.compat.v1.get_default_graph()
            start = _tf.operation_count(graph)
            yield
            if not tf.executing_eagerly():
                self._kept().initializers.update(graph.get_operations()[start:])

    def _combine(
        self,
        components: Sequence[tf.Variable],
        kwargs: dict[str, Any],
        collections: Sequence[str] | None,
        placement: Placement,
    ) -> ReplicatedVariable:
        facts: dict[str, Any] = {
            name: kwargs[name]
            for name in ("trainable", "synchronization", "aggregation", "constraint")
            if name in kwargs
        }
        graph_mode = not tf.executing_eagerly()
        if graph_mode:
            facts["initializer_op"] = in_graphs.initializer(components)
        variable = ReplicatedVariable(
            storage=Storage(components, placement, self.mirrored),
            world=self._world,
            lock=self._lock,
            # Alike in all processes, as TensorFlow's own is not.
            key=None if self._peers is None else f"variable {next(self._count)}",
            peers=self._peers,
            **facts,
        )
        with self._all_lock:
            self._all[id(variable)] = variable
        in_graphs.collect(variable, collections)
        return variable
