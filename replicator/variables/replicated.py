# SPDX-License-Identifier: Apache-2.0
"""ReplicatedVariable: one component per device, seen as one tf.Variable.

Inside a step its `handle` is the component of the replica being built; that one
override makes layers, tapes and optimizers of every family work. Outside a step it
reads as one variable and `assign` writes every component. This module also decides
which values the components may take, so that replicas cannot drift apart unseen:

- mirrored (the default): equal on all replicas. A value assigned in a step is first
  made equal: by the variable's `aggregation`, else by the mean (floats). Integers and
  bools must be equal already, which is proven once the step is built or else compared
  in each step; strings are assumed to be equal (and compared under
  `Replicator(check=True)`). Optimizer updates from equal gradients are equal by
  construction, which is also proven, and cost nothing. Writing a part (scatter,
  v[i].assign) assigns the whole value.
- ON_READ (metrics, counters): each replica keeps its own value; reads outside a step
  aggregate them.
- seeds of random generators: unchanged on replica 0 and offset on the others, so that
  every replica draws different numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import arguments, context, errors
from replicator._tf import callers, choice, state, variables
from replicator.cluster.peers import Peers
from replicator.graph.ir.placeholder import OperandPolicy
from replicator.graph.order import effects
from replicator.graph.passes.reads import Recent
from replicator.variables import (
    additions,
    agreement,
    compiled,
    copies,
    elsewhere,
    handles,
    in_graphs,
    keras_loops,
    locks,
    metric_state,
    part_writes,
    python_calls,
    seen_as_one,
    single_device,
    unbuilt,
)
from replicator.variables.chooser import Description
from replicator.variables.placement import Placement, Write
from replicator.variables.storage import Storage
from replicator.world import World


class ReplicatedVariable(
    part_writes.PartWriter, copies.CopyWriter, seen_as_one.SeenAsOne
):
    """A tf.Variable with one component per replica.

    Creating any variable under `Replicator.context()` or inside a step_fn makes one.

    Example:
        >>> with repl.context():
        ...     v = tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN)
        >>> _ = repl.run(lambda: v.assign_add(repl.replica_id + 1.0))  # mean: 1.5
        >>> [float(component) for component in v.components]
        [2.5, 2.5]
    """

    def __init__(
        self,
        *,
        storage: Storage,
        world: World,
        lock: locks.StepLock,
        key: str | None = None,
        peers: Peers | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(like=storage.first, **facts)
        self._key, self._peers = key, peers
        self.storage = storage  # holds the components
        self.world = world  # the replicas that use it; those built here have components
        self._lock = lock  # keeps steps from running during an assignment
        # The error that steps using the variable raise while an assignment to it is
        # missing.
        self.unbuilt: tuple[str, Sequence[str], str] | None = None
        if self._in_graph_mode and storage.placement.differs:
            self._graph_element = self._aggregated()

    @property
    def components(self) -> tuple[tf.Variable, ...]:
        """The plain variables, for inspection: `components[r]` is replica r's.

        If one replica owns the variable, every entry is that same component.

        Example:
            >>> with repl.context():
            ...     v = tf.Variable([1.0, 2.0])
            >>> [component.shape.as_list() for component in v.components]
            [[2], [2]]
        """
        return self.storage.components

    @property
    def placement(self) -> Placement:
        """How the components are placed and what they hold."""
        return self.storage.placement

    @property
    def lock(self) -> locks.StepLock:
        """The lock that is held while components are written."""
        return self._lock

    @property
    def policy(self) -> OperandPolicy:
        """How values reduced for this variable are communicated."""
        return self.storage.description.policy(self.key)

    @property
    def description(self) -> Description:
        """Where the variable is and how its gradients are made equal."""
        return self.storage.description

    @property
    def owner(self) -> int | None:
        """The replica that owns the only component; None if each replica has one.

        Example:
            >>> repl = replicator.Replicator(["CPU:0", "CPU:1"], variables="mirrored")
            >>> with repl.context():
            ...     v = tf.Variable(1.0)
            >>> print(v.owner)
            None
        """
        return self.placement.owner

    # --- Which component --------------------------------------------------------------

    @property
    def handle(self) -> tf.Tensor:
        """The built replica's component's handle; outside a step, component 0's."""
        view = single_device.view()
        if view is not None:
            return view.enter(self, self._handle)
        replica = context.current()
        if replica is None:
            why = ""
            if len(self.outside) > 1:
                why = "but what is written by it reaches replica 0 only"
            if handles.may_write(self, why):
                self._settle_in_graph()
            self.settle_if_undecided()
            compiled_handle = compiled.outside_handle(self)
            return self._handle if compiled_handle is None else compiled_handle
        if replica.build.world != self.world:
            raise errors.ContextError(
                f"variable {self.name} has its components on "
                f"{list(self.world.devices)}, but the step runs on "
                f"{list(replica.build.world.devices)}.",
                fix="create it under the context() of the Replicator that runs it.",
            )
        compiled.note_use(self)
        unbuilt.refuse_use(self)
        function = compiled.function_around()
        if function is not None:
            return compiled.handle_by_call(function, self, self._unique_id)
        return self.placement.handle(self, replica)

    @property
    def device(self) -> str:
        """The component's device; "" where what is built must not differ by it."""
        is_hidden = context.will_be_copied() or self._is_plain()
        return "" if is_hidden else str(super().device)

    @property
    def op(self) -> tf.Operation:
        """Component 0's op, even inside a step: v1 optimizers key their slots by it.

        tf.custom_gradient gets the op that it looks for, if it is another component's.
        """
        name = callers.searched_op()
        ops = (component.op for component in self.components if name is not None)
        return next((op for op in ops if op.name == name), self._handle.op)

    @property
    def key(self) -> str:
        """A key that is unique to the variable, whatever its name."""
        return self._key or self._unique_id

    @property
    def outside(self) -> tuple[tf.Variable, ...]:
        """The components that exist where code outside a step will run.

        A SavedModel has one plain variable instead of the components; TensorFlow
        retraces all tf.functions for it.
        """
        if state.in_save_context():
            return (self.storage.first,)
        return self.placement.outside(self.components)

    # --- Reading ----------------------------------------------------------------------

    def _read(self, no_copy: bool) -> tf.Tensor:
        with self._afterwards():
            replica = context.current()
            if replica is None and self.placement.differs:
                return self._aggregated()
            value = self._read_once(no_copy)
            if metric_state.is_for_result(self, replica):
                return metric_state.aggregate(self, value)
            return value

    def _read_once(self, no_copy: bool) -> tf.Tensor:
        """Reads the variable, reusing the replica's earlier read if it still holds."""
        replica = context.current()
        if replica is None or no_copy or tf.executing_eagerly():
            return variables.HandleVariable._read_variable_op(self, no_copy)
        handle = self.handle
        value = replica.states.of(Recent).value(handle)
        if value is None:
            value = choice.read_quickly(self)
            if value is None:
                value = variables.HandleVariable._read_variable_op(self, no_copy)
            replica.states.of(Recent).enter(handle, value.op, self.shape)
        return value

    def _read_rows(self, indices: Any, name: str | None) -> tf.Tensor:
        with self._afterwards():
            if context.current() is None and self.placement.differs:
                return tf.gather(self._aggregated(), indices, name=name)
            return variables.HandleVariable.sparse_read(self, indices, name)

    def _read_slices(self, indices: Any, name: str | None) -> tf.Tensor:
        with self._afterwards():
            if context.current() is None and self.placement.differs:
                return tf.gather_nd(self._aggregated(), indices, name=name)
            return variables.HandleVariable.gather_nd(self, indices, name)

    def _aggregated(self) -> tf.Tensor:
        """Returns the components' aggregated value, for reads outside a step."""
        return self.placement.read(elsewhere.all_values(self, self._peers))

    # --- Writing ----------------------------------------------------------------------

    def _write_whole(
        self, method: str, value: Any, name: str | None, read_value: bool
    ) -> Any:
        method, value = additions.as_addition(self, method, value)
        replica = context.current()
        is_done = None if replica is None else unbuilt.is_done(self, replica)
        if is_done:
            return self if read_value else None
        if replica is None or is_done is not None:
            python_calls.refuse_write(self)
            with self._afterwards():
                return self._assign_all(value, method, name, read_value)
        claim = agreement.claim(self, replica)
        with self._entered(replica, claim), self._afterwards():
            if self.placement.differs:
                metric_state.check_write(self, value, replica, method)
                write = Write.by(replica, self, method)
                value = self.placement.assigned(value, write)
                value = agreement.of_examples(self, value, replica, method)
                metric_state.doubt_share(self, value, replica)
            elif claim is None:
                value = agreement.agree(self, value, replica, method)
            written = self._write_own(method, value, name, read_value)
            op = written.op if read_value and not tf.executing_eagerly() else written
            self._write_copied(method, value, op, replica)
        if not tf.executing_eagerly():
            replica.states.of(Recent).enter(self.handle, op, self.shape)
        return written

    def _entered(
        self, replica: context.ReplicaContext, claim: effects.Claim | None
    ) -> contextlib.AbstractContextManager[None]:
        """Returns a block that marks writes as agreed on, or as to be proven equal."""
        if agreement.is_equal(self, replica):
            return contextlib.nullcontext()
        return replica.build.ledger.agreed(claim)

    def _write_own(
        self, method: str, value: Any, name: str | None, read_value: bool
    ) -> Any:
        """Writes the component of the replica being built."""
        op = choice.write_quickly(self, method, value, name)
        if op is not None:
            return self._lazy_read(op) if read_value else op
        write = getattr(variables.HandleVariable, method)
        return write(self, value, name=name, read_value=read_value)

    def _assign_all(
        self,
        value: Any,
        method: str = "assign",
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Writes every component's share of `value`, outside a step."""
        written, first = self.placement.written, self.outside[0]
        if not tf.executing_eagerly():
            value = tf.convert_to_tensor(arguments.native(value), self.dtype)
        with in_graphs.known_before(value):
            return self._write_all(
                lambda component, r: getattr(component, method)(
                    written(value, Write(self, r, method)),
                    # "scope/" is a whole name: TensorFlow does not make it unique.
                    name=name if component is first else None,
                    read_value=False,
                ),
                read_value,
            )

    def _write_all(
        self, write: Callable[[tf.Variable, int], Any], read_value: bool
    ) -> Any:
        """Writes every component, outside a step."""
        compiled.check_write(self)
        keras_loops.warn_of_one_device(self)
        self._settle_in_graph()
        with self._exclusively():
            # The first id also serves an owner's component, and the source of copies.
            ids = [*self.world.local, self.world.local[0]]
            writes = [write(*target) for target in zip(self.outside, ids, strict=False)]
        self.unbuilt = None
        if tf.executing_eagerly():
            return self if read_value else None
        writes = tf.group(*writes)
        return _Written(self, writes) if read_value else writes

    def _lazy_read(self, op: tf.Operation) -> ReplicatedVariable:
        """Returns the written variable; called after `op` wrote to `handle`."""
        return self if tf.executing_eagerly() else _Written(self, op)


class _Written(seen_as_one.Written, ReplicatedVariable):
    """A ReplicatedVariable as an assignment returns it."""


def plain(variable: Any) -> Any:
    """Returns the tf.Variable inside a Keras variable, or the variable itself."""
    inner = getattr(variable, "value", variable)
    return variable if callable(inner) else inner
