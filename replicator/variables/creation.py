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
from replicator.variables import elsewhere, initial_values, locks
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
    ) -> None:
        self._world = world
        self._peers = peers  # the processes that build the other replicas
        self._count = itertools.count()
        self._lock = lock  # of the steps that the variables are used in
        self._sharded = sharded and world.num_replicas > 1
        self._bytes = dict.fromkeys(world.local, 0)  # that each replica owns
        self._last_owner: int | None = None
        self._eager = _Kept()
        self._all: weakref.WeakValueDictionary[int, ReplicatedVariable]
        self._all = weakref.WeakValueDictionary()
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
        """What tf.variable_creator_scope calls for each new variable.

        Called otherwise, it may be given `slot_of`, whose slot the variable is.
        """
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
        primary = kwargs.pop("slot_of", None)
        if primary is None:
            primary = plain(_tf.variable_of_slot())
        name_scope = contextlib.nullcontext()
        if scope is not None:
            name_scope = tf.name_scope(scope if scope != "/" else "")
        with self._creating():
            with name_scope:
                components, placement = self._components(kwargs, primary)
            variable = self._combine(components, kwargs, collections, placement)
        if isinstance(primary, ReplicatedVariable):
            primary.storage.add_slot(variable)
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
        self, kwargs: dict[str, Any], primary: Any
    ) -> tuple[list[tf.Variable], Placement]:
        """Creates one plain variable per device, or one in place of all.

        They begin with what each gets of component 0's initial value.
        """
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
            facts["initializer_op"] = _initializer(components)
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
        if graph_mode:
            if collections is None:
                collections = [tf.compat.v1.GraphKeys.GLOBAL_VARIABLES]
            if variable.trainable:
                trainable = tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES
                collections = list(dict.fromkeys([*collections, trainable]))
            variable.graph.add_to_collections(collections, variable)
        return variable


def _initializer(components: Sequence[tf.Variable]) -> tf.Operation:
    """Returns the op that initializes all components, in a tf.Graph."""
    initializers = dict.fromkeys(one.initializer for one in components)
    return tf.group(*initializers, name="initialize")
