"""ReplicatedVariable: one component per device, seen as one tf.Variable.

Inside a step its `handle` is the component of the replica being built; that one override
makes layers, tapes and optimizers of every family work. Outside a step it reads as one
variable and `assign` writes every component. Which values the components may take is
decided here, so that replicas cannot drift apart unseen:

- mirrored (the default): equal on all replicas. What a step assigns is made equal first:
  by the variable's `aggregation`, else by the mean (floats); integers, bools and strings
  are taken as equal (and checked under `Replicator(check=True)`). Updates by a wrapped
  optimizer are equal by construction and cost nothing.
- ON_READ (metrics, counters): each replica keeps its own; aggregated when read outside.
- seeds of random generators: as given on replica 0, offset on the others, so that every
  replica draws different numbers.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf, context, errors
from replicator.primitives import all_gather, all_reduce, base, broadcast

_do_not_convert = tf.autograph.experimental.do_not_convert

VALUE_KEY = "VARIABLE_VALUE"  # what tf.train.Checkpoint calls a variable's value

_SEED_OFFSET = 1_000_003  # between replicas; a prime, far from small differences


@dataclasses.dataclass(frozen=True)
class Seed:
    """How the state of a random generator holds its seed.

    Attributes:
        position: Where the seed stands in the state, an integer vector.
        resets: Whether a step that assigns a state sets a new seed, which has to be
            offset, rather than goes on from the replica's own.
    """

    position: int
    resets: bool

    def offset(self, like: tf.Variable, replica_id: int) -> tf.Tensor:
        """Returns what to add to the state on a replica, shaped as the variable."""
        offset = [0] * like.shape.num_elements()
        offset[self.position] = replica_id * _SEED_OFFSET
        return tf.constant(offset, like.dtype)


# By the names that Keras' SeedGenerator and tf.random.Generator give to their variables.
_SEEDS = {
    "seed_generator_state": Seed(position=0, resets=False),
    "StateVar": Seed(position=-1, resets=True),
}

_SUM = tf.VariableAggregation.SUM
_MEAN = tf.VariableAggregation.MEAN
_FIRST = tf.VariableAggregation.ONLY_FIRST_REPLICA


class ReplicatedVariable(_tf.HandleVariable):
    """A tf.Variable with one component per replica.

    Made by creating any variable under `Replicator.context()` or inside a step_fn.
    `components[r]` is replica r's plain variable, for inspection.
    """

    def __init__(
        self,
        *,
        components: Sequence[tf.Variable],
        devices: Sequence[str],
        seed: Seed | None,
        **facts: Any,
    ) -> None:
        super().__init__(like=components[0], **facts)
        self.components = tuple(components)
        self._devices = tuple(devices)
        self._seed = seed
        if self._in_graph_mode and self.differs:
            self._graph_element = self._aggregated()

    # --- Which component ---------------------------------------------------------------

    @property
    def handle(self) -> tf.Tensor:
        """The handle of the component of the replica being built; else component 0's."""
        replica = context.current()
        if replica is None:
            return self._handle
        if replica.build.devices != self._devices:
            raise errors.ContextError(
                errors.compose(
                    f"variable {self.name} has its components on {list(self._devices)}, "
                    f"but the step runs on {list(replica.build.devices)}.",
                    [f"at {errors.user_line()}"],
                    "create it under the context() of the Replicator that runs the step.",
                )
            )
        return self.components[replica.replica_id].handle

    @property
    def op(self) -> tf.Operation:
        """Component 0's op, also inside a step: v1 optimizers key their slots by it."""
        return self._handle.op

    def _distributed_container(self) -> ReplicatedVariable:
        """The variable that optimizers shall key their slots by."""
        return self

    @property
    def differs(self) -> bool:
        """Whether the components are meant to differ: ON_READ, and generators' seeds."""
        on_read = self.synchronization == tf.VariableSynchronization.ON_READ
        return on_read or self._seed is not None

    # --- Reading -------------------------------------------------------------------------

    def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
        if context.current() is None and self.differs:
            return self._aggregated()
        return _tf.HandleVariable._read_variable_op(self, no_copy)

    @_do_not_convert
    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Gathers rows `indices` of the value."""
        if context.current() is None and self.differs:
            return tf.gather(self._aggregated(), indices, name=name)
        return _tf.HandleVariable.sparse_read(self, indices, name)

    def _aggregated(self) -> tf.Tensor:
        """What the components are together, read outside a step."""
        values = [component.read_value() for component in self.components]
        if self.synchronization == tf.VariableSynchronization.ON_READ:
            if self.aggregation in (_SUM, _MEAN) and len(values) > 1:
                total = tf.add_n(values)
                if self.aggregation == _SUM:
                    return total
                return tf.cast(total / len(values), total.dtype)
        return values[0]

    # --- Writing -------------------------------------------------------------------------

    @_do_not_convert
    def assign(
        self,
        value: Any,
        use_locking: bool | None = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Sets the value; see the module's docstring for what happens inside a step."""
        return self._write("assign", value, name, read_value)

    @_do_not_convert
    def assign_add(
        self,
        delta: Any,
        use_locking: bool | None = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Adds `delta`."""
        return self._write("assign_add", delta, name, read_value)

    @_do_not_convert
    def assign_sub(
        self,
        delta: Any,
        use_locking: bool | None = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Subtracts `delta`."""
        return self._write("assign_sub", delta, name, read_value)

    def _write(
        self, method: str, value: Any, name: str | None, read_value: bool
    ) -> Any:
        replica = context.current()
        if replica is None:
            return self._write_all(
                lambda component, r: getattr(component, method)(
                    self._part(value, r, method), name=name, read_value=False
                ),
                read_value,
            )
        write = getattr(_tf.HandleVariable, method)
        with replica.build.ledger.agreed():
            if self._seed is not None and self._seed.resets:
                agreed = self._part(value, replica.replica_id, method)
            else:
                agreed = self._agree(value, replica)
            return write(self, agreed, name=name, read_value=read_value)

    def _write_all(
        self, write: Callable[[tf.Variable, int], Any], read_value: bool
    ) -> Any:
        """Writes every component, outside a step."""
        done = [write(component, r) for r, component in enumerate(self.components)]
        if tf.executing_eagerly():
            return self if read_value else None
        with tf.control_dependencies(done):
            return tf.identity(self.value()) if read_value else tf.no_op()

    def _part(self, value: Any, replica_id: int, method: str = "assign") -> Any:
        """Returns what component `replica_id` gets of a value written outside a step."""
        if replica_id and self._seed is not None and method == "assign":
            value = tf.convert_to_tensor(value, self.dtype)
            return value + self._seed.offset(self, replica_id)
        on_read = self.synchronization == tf.VariableSynchronization.ON_READ
        if replica_id and on_read and self.aggregation == _SUM:
            return tf.zeros_like(tf.convert_to_tensor(value, self.dtype))
        return value

    def _agree(self, value: Any, replica: context.ReplicaContext) -> Any:
        """Makes a value that a step assigns equal on all replicas."""
        if self.differs or replica.updating or replica.num_replicas == 1:
            return value
        _refuse_unwrapped(self)
        value = tf.convert_to_tensor(value, dtype=self.dtype)
        if self.aggregation == _SUM:
            return all_reduce.all_reduce(value, "sum")
        if self.aggregation == _FIRST:
            return broadcast.broadcast(value, root=0)
        if self.aggregation == _MEAN or self.dtype.is_floating or self.dtype.is_complex:
            return all_reduce.all_reduce(value, "mean")
        return _checked_equal(value, self.name) if replica.build.check else value

    def _export_to_saved_model_graph(
        self,
        object_map: Any = None,
        tensor_map: Any = None,
        options: Any = None,
        **kw: Any,
    ) -> list[tf.Tensor]:
        """Exports one plain variable that stands for all components."""
        _tf.HandleVariable._export_to_saved_model_graph(
            self, object_map, tensor_map, options, **kw
        )
        for component in self.components:
            tensor_map[component.handle] = object_map[self].handle
        return [component.handle for component in self.components]

    # --- Checkpoints ---------------------------------------------------------------------

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return {VALUE_KEY: self.read_value()}

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> Any:
        return self.restore(restored[VALUE_KEY])

    def restore(self, value: tf.Tensor) -> Any:
        """Writes a checkpoint's value into every component.

        Args:
            value: Of the variable's shape and dtype.

        Returns:
            The op that does it, in a graph; None when executing eagerly.

        Raises:
            ValueError: The shape does not fit.
        """
        if not self.shape.is_compatible_with(value.shape):
            raise ValueError(
                f"A checkpoint's tensor of shape {value.shape} does not fit variable "
                f"{self.name} of shape {self.shape}."
            )
        with context.building(None):
            done = [
                component.assign(self._part(value, r), read_value=False)
                for r, component in enumerate(self.components)
            ]
        return None if tf.executing_eagerly() else tf.group(*done)

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        """Asked by the v1 Saver, which would otherwise restore component 0 only."""
        return {VALUE_KEY: lambda name=self._shared_name: _Saveable(self, name)}

    def __deepcopy__(self, memo: dict[int, Any]) -> tf.Variable:
        raise errors.ReplicatorError(
            f"the replicated variable {self.name} cannot be copied. Fix: create the copy "
            "under Replicator.context() and assign its value."
        )


def _sparse_writer(method: str) -> Callable[..., Any]:
    """Returns the replicated version of a method that writes parts of a variable."""

    def write_part(self: ReplicatedVariable, *args: Any, **kwargs: Any) -> Any:
        replica = context.current()
        borrowed = getattr(_tf.HandleVariable, method)
        if replica is None:
            if self.differs and self.aggregation == _SUM:
                self = self.components[0]
                return getattr(self, method)(*args, **kwargs)
            return self._write_all(
                lambda component, _: getattr(component, method)(*args, **kwargs), True
            )
        if self.differs or replica.updating or replica.num_replicas == 1:
            with replica.build.ledger.agreed():
                return borrowed(self, *args, **kwargs)
        _refuse_unwrapped(self)
        if self.aggregation == _SUM:
            raise base.bad_argument(
                f"{method} of variable {self.name}, whose aggregation is SUM,",
                "has no meaning in a step",
                "all_reduce what is written, or assign the whole value.",
            )
        # Write the own part, then make the whole value equal: its mean over the
        # replicas is what they agree on, whichever rows each of them wrote.
        with replica.build.ledger.agreed():
            written = borrowed(self, *args, **kwargs)
            with tf.control_dependencies([written]):
                return self.assign(self.read_value())

    write_part.__name__ = method
    write_part.__doc__ = f"As tf.Variable.{method}, on every component."
    return _do_not_convert(write_part)


for _method in (
    "scatter_add scatter_sub scatter_update scatter_max scatter_min scatter_mul "
    "scatter_div batch_scatter_update scatter_nd_add scatter_nd_sub scatter_nd_update "
    "scatter_nd_max scatter_nd_min _strided_slice_assign"
).split():
    setattr(ReplicatedVariable, _method, _sparse_writer(_method))


def _to_tensor(
    variable: ReplicatedVariable,
    dtype: Any = None,
    name: Any = None,
    as_ref: bool = False,
) -> Any:
    """Reads the variable where a tensor is expected."""
    if as_ref:  # only the v1 Saver asks so, if it was given {name: variable}
        raise errors.ReplicatorError(
            f"a Saver cannot rename the replicated variable {variable.name}. "
            "Fix: give it a list of variables instead of a dictionary."
        )
    return variable._dense_var_to_tensor(dtype, name)


tf.register_tensor_conversion_function(ReplicatedVariable, _to_tensor)


class _Saveable(_tf.SaveableObject):
    """How the v1 Saver saves and restores a ReplicatedVariable: as a plain one."""

    def __init__(self, variable: ReplicatedVariable, name: str) -> None:
        self._variable = variable
        value = (
            variable.read_value if tf.executing_eagerly() else variable._graph_element
        )
        spec = _tf.SaveSpec(
            value, "", name, dtype=variable.dtype, device=variable._handle.device
        )
        super().__init__(variable, [spec], name)

    def restore(
        self, restored_tensors: Sequence[tf.Tensor], restored_shapes: Any
    ) -> Any:
        value = restored_tensors[0]
        if restored_shapes is not None:
            value = tf.reshape(value, restored_shapes[0])
        return self._variable.restore(value)


def _refuse_unwrapped(variable: ReplicatedVariable) -> None:
    """Raises if an optimizer that nobody wrapped is updating `variable` in a step."""
    optimizer = _tf.applying_optimizer()
    if optimizer is not None:
        raise errors.ContextError(
            errors.compose(
                f"the optimizer {optimizer} updates variable {variable.name} in a step, "
                "but does not combine the gradients of the replicas.",
                [f"at {errors.user_line()}"],
                "wrap it once, where you make it: "
                "optimizer = repl.wrap_optimizer(optimizer).",
            )
        )


def _checked_equal(value: tf.Tensor, name: str) -> tf.Tensor:
    """Returns `value`, after asserting that all replicas hand in the same one."""
    line = errors.user_line()
    everyone = all_gather.all_gather(value)
    with tf.control_dependencies(
        [
            tf.debugging.Assert(
                tf.reduce_all(tf.equal(everyone, value)),
                [
                    f"the replicas assign different values to variable {name} at {line}; "
                    "give the variable an aggregation, or all_reduce the value:",
                    everyone,
                ],
            )
        ]
    ):
        return tf.identity(value)


class VariableFactory:
    """Creates replicated variables; the variable creator of one Replicator.

    Variables made inside a step_fn are kept here: every replica's k-th creation at a
    place of the step's code is one variable, in all builds of that step.

    Attributes:
        initializers: All ops made for the creation of variables in graphs. They may
            stand amid a step's ops, but are no part of the step.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = tuple(devices)
        self._made: dict[Any, ReplicatedVariable] = {}
        self._all: weakref.WeakValueDictionary[int, ReplicatedVariable]
        self._all = weakref.WeakValueDictionary()
        self.initializers: set[tf.Operation] = set()

    def creator(self, next_creator: Any, **kwargs: Any) -> ReplicatedVariable:
        """What tf.variable_creator_scope calls for each new variable."""
        replica = context.current()
        if replica is None:
            return self._create(kwargs, scope=None)
        place = (replica.step_key, _tf.stack_since(replica.depth))
        key = (place, replica.count(place))
        if key in self._made:
            return self._again(self._made[key], kwargs)
        scope = tf.compat.v1.get_default_graph().get_name_scope() + "/"
        variable = self._create(kwargs, scope=scope.removeprefix(replica.scope))
        self._made[key] = variable
        return variable

    def owners(self) -> dict[int, ReplicatedVariable]:
        """Returns the variable behind each component's handle, by the handle's id."""
        return {
            id(component.handle): variable
            for variable in self._all.values()
            for component in variable.components
        }

    def _again(self, variable: ReplicatedVariable, kwargs: Any) -> ReplicatedVariable:
        """Returns the variable that another replica made at the same place."""
        dtype, shape = kwargs.get("dtype"), kwargs.get("shape")
        value = kwargs.get("initial_value")
        if value is not None and not callable(value) and shape is None:
            shape = tf.convert_to_tensor(value, dtype).shape
        same_dtype = dtype is None or tf.as_dtype(dtype) == variable.dtype
        if not same_dtype or not variable.shape.is_compatible_with(
            tf.TensorShape(shape)
        ):
            raise errors.MismatchError(
                errors.compose(
                    f"replicas create different variables at {errors.user_line()}: "
                    f"{variable.dtype.name}{variable.shape} first, then "
                    f"{tf.as_dtype(dtype or variable.dtype).name}{tf.TensorShape(shape)}.",
                    fix="let every replica create the same variables in the same order.",
                )
            )
        return variable

    def _create(self, kwargs: dict[str, Any], scope: str | None) -> ReplicatedVariable:
        kwargs = {k: v for k, v in kwargs.items() if v is not None}
        kwargs["initial_value"] = _lifted(kwargs.get("initial_value"))
        collections = kwargs.pop("collections", None)
        with (
            tf.init_scope(),
            context.building(None),
            tf.compat.v1.get_default_graph().colocate_with(None, ignore_existing=True),
        ):
            graph = tf.compat.v1.get_default_graph()
            start = _tf.operation_count(graph)
            if scope is None:
                components = self._components(kwargs)
            else:
                with tf.name_scope(scope if scope != "/" else ""):
                    components = self._components(kwargs)
            variable = self._combine(components, kwargs, collections)
            if not tf.executing_eagerly():
                self.initializers.update(graph.get_operations()[start:])
            return variable

    def _components(self, kwargs: dict[str, Any]) -> list[tf.Variable]:
        """Creates one plain variable per device, with component 0's initial value."""
        names = ("initial_value", "name", "dtype", "shape", "validate_shape")
        own = {k: kwargs[k] for k in names if k in kwargs}
        with tf.device(self._devices[0]):
            first = _tf.ResourceVariable(trainable=False, collections=[], **own)
        seed = _seed_of(first)
        components = [first]
        for r, device in enumerate(self._devices[1:], 1):

            def initial_value(r: int = r) -> tf.Tensor:
                eager = tf.executing_eagerly()
                value = first.read_value() if eager else first.initial_value
                if seed is not None:
                    value = value + seed.offset(first, r)
                return tf.identity(value)

            own["initial_value"] = initial_value
            own["dtype"] = first.dtype
            own["name"] = f"{first.name.partition(':')[0].split('/')[-1]}/replica_{r}"
            with tf.device(device):
                components.append(
                    _tf.ResourceVariable(trainable=False, collections=[], **own)
                )
        return components

    def _combine(
        self,
        components: Sequence[tf.Variable],
        kwargs: dict[str, Any],
        collections: Sequence[str] | None,
    ) -> ReplicatedVariable:
        facts = {
            name: kwargs[name]
            for name in ("trainable", "synchronization", "aggregation", "constraint")
            if name in kwargs
        }
        graph_mode = not tf.executing_eagerly()
        if graph_mode:
            initializers = [component.initializer for component in components]
            facts["initializer_op"] = tf.group(*initializers, name="initialize")
        variable = ReplicatedVariable(
            components=components,
            devices=self._devices,
            seed=_seed_of(components[0]),
            **facts,
        )
        self._all[id(variable)] = variable
        if graph_mode:
            if collections is None:
                collections = [tf.compat.v1.GraphKeys.GLOBAL_VARIABLES]
            if variable.trainable:
                trainable = tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES
                collections = list(dict.fromkeys([*collections, trainable]))
            variable.graph.add_to_collections(collections, variable)
        return variable


def _seed_of(component: tf.Variable) -> Seed | None:
    """Returns where the seed stands, if the variable is a random generator's state."""
    if not component.dtype.is_integer or component.shape.rank != 1:
        return None
    return _SEEDS.get(component.name.partition(":")[0].split("/")[-1])


def _lifted(initial_value: Any) -> Any:
    """Returns an initial value that can be used outside the function being traced."""
    if callable(initial_value) or not tf.is_tensor(initial_value):
        return initial_value
    if isinstance(initial_value, tf.Variable) or not tf.is_symbolic_tensor(
        initial_value
    ):
        return initial_value
    with tf.init_scope():
        outside = tf.compat.v1.get_default_graph()
        if not tf.executing_eagerly() and initial_value.graph is outside:
            return initial_value
    try:
        return _tf.lift_initial_value(initial_value)
    except _tf.UnliftableError as error:
        raise errors.ContextError(
            errors.compose(
                "the initial value of a variable created in a step depends on the step's "
                "inputs or state.",
                [f"at {errors.user_line()}"],
                "hand in a function without arguments, lambda: ..., or a value that does "
                "not depend on the batch.",
            )
        ) from error
