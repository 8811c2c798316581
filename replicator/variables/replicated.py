# SPDX-License-Identifier: Apache-2.0
"""ReplicatedVariable: one component per device, seen as one tf.Variable.

Inside a step its `handle` is the component of the replica being built; that one
override makes layers, tapes and optimizers of every family work. Outside a step it
reads as one variable and `assign` writes every component. Which values the components
may take is decided here, so that replicas cannot drift apart unseen:

- mirrored (the default): equal on all replicas. What a step assigns is made equal
  first: by the variable's `aggregation`, else by the mean (floats); integers and
  bools must be equal, which is proven once the step is built, or compared in each step;
  strings are taken as equal (and compared under `Replicator(check=True)`). Updates by
  an optimizer of equal gradients are equal by construction, which is proven as well,
  and cost nothing. A part that is written (scatter, v[i].assign) makes the
  whole value be assigned.
- ON_READ (metrics, counters): each replica keeps its own; aggregated when read outside.
- seeds of random generators: as given on replica 0, offset on the others, so that every
  replica draws different numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from replicator import _tf, context, errors
from replicator.cluster.peers import Peers
from replicator.graph.ir.placeholder import OperandPolicy
from replicator.graph.order import effects
from replicator.variables import (
    additions,
    agreement,
    compiled,
    copies,
    elsewhere,
    locks,
    part_writes,
    python_calls,
    seen_as_one,
    synchronized,
    unbuilt,
)
from replicator.variables.placement import Placement, Write
from replicator.variables.storage import Storage
from replicator.world import World


class ReplicatedVariable(
    part_writes.PartWriter, copies.CopyWriter, seen_as_one.SeenAsOne
):
    """A tf.Variable with one component per replica.

    Made by creating any variable under `Replicator.context()` or inside a step_fn.

    Example:
        >>> with repl.context():
        ...     v = tf.Variable(1.0)
        >>> _ = repl.run(lambda: v.assign_add(repl.replica_id + 1.0))  # mean: 1.5
        >>> [float(component) for component in v.components]
        [2.5, 2.5]

    Attributes:
        storage: Where its components are.
        world: The replicas that use it; those that are built here have components.
        unbuilt: The error of steps that use the variable, if it lacks what it was to be
            assigned; else None.
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
        self.storage, self.world = storage, world
        self._lock = lock  # no step runs amid an assignment
        self.unbuilt: tuple[str, Sequence[str], str] | None = None
        if self._in_graph_mode and storage.placement.differs:
            self._graph_element = self._aggregated()

    @property
    def components(self) -> tuple[tf.Variable, ...]:
        """Replica r's plain variable is `components[r]`, for inspection.

        All are the same one where a replica owns the variable for all.
        """
        return self.storage.components

    @property
    def placement(self) -> Placement:
        """What the components hold, and all that follows from it."""
        return self.storage.placement

    @property
    def lock(self) -> locks.StepLock:
        """What is held while components are written."""
        return self._lock

    @property
    def policy(self) -> OperandPolicy:
        """How what is reduced for the variable is communicated."""
        how = self.storage.synchronizer
        return OperandPolicy(self.key, self.owner, how.algorithm, how.bucket)

    @property
    def owner(self) -> int | None:
        """The replica that has the variable for all; None if each has a component."""
        return self.placement.owner

    # --- Which component --------------------------------------------------------------

    @property
    def handle(self) -> tf.Tensor:
        """The handle of the built replica's component; outside a step, number 0's."""
        replica = context.current()
        if replica is None:
            if len(self.outside) > 1:
                if _tf.v1_optimizer_applying():
                    self._refuse_update("tf.compat.v1.train")
                if _tf.older_optimizer_asks():
                    self._refuse_update("legacy Keras, of the older kind,")
            if _tf.asked_by_writer():
                python_calls.refuse_write(self)
                self._settle_in_graph()
            self.settle_if_undecided()
            compiled_for = compiled.outside_handle(self)
            return self._handle if compiled_for is None else compiled_for
        if replica.build.world != self.world:
            raise errors.ContextError(
                errors.compose(
                    f"variable {self.name} has its components on "
                    f"{list(self.world.devices)}, but the step runs on "
                    f"{list(replica.build.world.devices)}.",
                    [f"at {errors.user_line()}"],
                    "create it under the context() of the Replicator that runs it.",
                )
            )
        compiled.note_use(self)
        unbuilt.refuse_use(self)
        function = compiled.function_around()
        if function is not None:
            return compiled.handle_by_call(function, self, self._unique_id)
        own = replica.reading.get(self.key)
        return self.placement.handle(self, replica) if own is None else own

    def _refuse_update(self, family: str) -> NoReturn:
        """Raises where an optimizer is about to write one component alone."""
        raise errors.ContextError(
            errors.compose(
                f"an optimizer of {family} updates variable {self.name} outside a "
                "step, where it would reach replica 0 only.",
                [f"at {errors.user_line()}"],
                "apply its gradients inside a step_fn.",
            )
        )

    @property
    def op(self) -> tf.Operation:
        """Component 0's op, also inside a step: v1 optimizers key their slots by it."""
        return self._handle.op

    @property
    def key(self) -> str:
        """What tells the variable from all others, whatever they are called."""
        return self._key or self._unique_id

    @property
    def outside(self) -> tuple[tf.Variable, ...]:
        """The components that exist where code outside a step will run.

        A SavedModel has one plain variable in place of all; TensorFlow traces all
        tf.functions anew for it.
        """
        if _tf.in_save_context():
            return (self.storage.first,)
        return self.placement.outside(self.components)

    # --- Reading ----------------------------------------------------------------------

    def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
        with self._afterwards(), synchronized.read(self):
            if context.current() is None and self.placement.differs:
                return self._aggregated()
            return self._read_once(no_copy)

    def _read_once(self, no_copy: bool) -> tf.Tensor:
        """Reads, unless what a replica has read before is still the value."""
        replica = context.current()
        if replica is None or no_copy or replica.reading or tf.executing_eagerly():
            return _tf.HandleVariable._read_variable_op(self, no_copy)
        handle = self.handle
        value = replica.reads.value(handle)
        if value is None:
            value = _tf.read_quickly(self)
            if value is None:
                value = _tf.HandleVariable._read_variable_op(self, no_copy)
            replica.reads.enter(handle, value.op, self.shape)
        return self._brought(value)

    def _brought(self, value: tf.Tensor) -> tf.Tensor:
        """Returns what was read where the ops of the replica being built expect it."""
        replica = context.current()
        if replica is None or tf.executing_eagerly():
            return value
        return self.placement.brought(value, replica)

    @_tf.not_converted
    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Gathers rows `indices` of the value."""
        with self._afterwards(), synchronized.read(self):
            if context.current() is None and self.placement.differs:
                return tf.gather(self._aggregated(), indices, name=name)
            return self._brought(_tf.HandleVariable.sparse_read(self, indices, name))

    @_tf.not_converted
    def gather_nd(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Gathers slices `indices` of the value."""
        with self._afterwards(), synchronized.read(self):
            if context.current() is None and self.placement.differs:
                return tf.gather_nd(self._aggregated(), indices, name=name)
            return self._brought(_tf.HandleVariable.gather_nd(self, indices, name))

    def _aggregated(self) -> tf.Tensor:
        """What the components are together, read outside a step."""
        return self.placement.read(elsewhere.all_values(self, self._peers))

    # --- Writing ----------------------------------------------------------------------

    def _write(
        self, method: str, value: Any, name: str | None, read_value: bool
    ) -> Any:
        if method == "assign" and self.placement.shared:
            added = additions.addend(self, value)
            if added is not None:
                method, value = "assign_add", added
        replica = context.current()
        done = None if replica is None else unbuilt.is_done(self, replica)
        if done:
            return self if read_value else None
        if replica is None or done is not None:
            python_calls.refuse_write(self)
            with self._afterwards():
                return self._assign_all(value, method, name, read_value)
        claim = agreement.claim(self, replica)
        with self._entered(replica, claim), self._afterwards():
            if self.placement.differs:
                value = self.placement.assigned(
                    value, Write(self, replica.replica_id, method)
                )
                value = agreement.of_examples(self, value, replica, method)
            elif claim is None:
                value = agreement.agree(self, value, replica, method)
            written = self._write_own(method, value, name, read_value)
            op = written.op if read_value and not tf.executing_eagerly() else written
            self._write_copied(method, value, op, replica)
        if not tf.executing_eagerly():
            replica.reads.enter(self.handle, op, self.shape)
        return written

    def _entered(
        self, replica: context.ReplicaContext, claim: effects.Claim | None
    ) -> contextlib.AbstractContextManager[None]:
        """Returns a block in which writes are entered as agreed on, or to be proven."""
        if agreement.is_equal(self, replica):
            return contextlib.nullcontext()
        return replica.build.ledger.agreed(claim)

    def _write_own(
        self, method: str, value: Any, name: str | None, read_value: bool
    ) -> Any:
        """Writes the component of the replica being built."""
        op = _tf.write_quickly(self, method, value, name)
        if op is not None:
            return self._lazy_read(op) if read_value else op
        write = getattr(_tf.HandleVariable, method)
        return write(self, value, name=name, read_value=read_value)

    def _assign_all(
        self,
        value: Any,
        method: str = "assign",
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Gives every component, outside a step, what is its own of a value."""
        written = self.placement.written
        return self._write_all(
            lambda component, r: getattr(component, method)(
                written(value, Write(self, r, method)), name=name, read_value=False
            ),
            read_value,
        )

    def _write_all(
        self, write: Callable[[tf.Variable, int], Any], read_value: bool
    ) -> Any:
        """Writes every component, outside a step."""
        self._settle_in_graph()
        with self._exclusively():
            # The first stands for an owner, and for what there are copies of.
            ids = [*self.world.local, self.world.local[0]]
            done = [write(*own) for own in zip(self.outside, ids, strict=False)]
        self.unbuilt = None
        if tf.executing_eagerly():
            return self if read_value else None
        done = tf.group(*done)
        return _Written(self, done) if read_value else done

    def _lazy_read(self, op: tf.Operation) -> ReplicatedVariable:
        """Called after `op` has written what is behind `handle`."""
        if context.current() is None:
            # TensorFlow's own code wrote component 0, tf.compat.v1.scatter_add say.
            with tf.control_dependencies(None if tf.executing_eagerly() else [op]):
                return self._assign_all(self._read_once(no_copy=False))
        return self if tf.executing_eagerly() else _Written(self, op)


class _Written(seen_as_one.Written, ReplicatedVariable):
    """One that has been written."""


def plain(variable: Any) -> Any:
    """Returns the tf.Variable inside a Keras variable, or the variable itself."""
    inside = getattr(variable, "value", variable)
    return variable if callable(inside) else inside
