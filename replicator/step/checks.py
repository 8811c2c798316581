# SPDX-License-Identifier: Apache-2.0
"""Checks made once all replicas are built and before anything is rewired.

Each check takes what was built and returns nothing, or raises an error that says where
the replicas differ, or could come to differ, and what to do about it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator.graph.ir import placeholder, walk
from replicator.graph.ir.captures import Captures
from replicator.graph.ir.kinds import kind_of, resource_inputs
from replicator.graph.matching import control_flow
from replicator.graph.order import effects
from replicator.variables.creation import VariableFactory
from replicator.world import World


def check_outputs(outputs: Sequence[Any], world: World, step_fn: Any) -> None:
    """Raises MismatchError unless all replicas returned the same structure."""
    first = outputs[0]
    names = [
        f"replica {r} ({device})"
        for r, device in zip(world.local, world.devices, strict=True)
    ]
    # Not strict: copies, which have no outputs yet, return what replica 1 does.
    for name, other in zip(names[1:], outputs[1:], strict=False):
        try:
            tf.nest.assert_same_structure(first, other, expand_composites=True)
            is_equal = all(
                type(leaf) is type(other_leaf)
                or tf.is_tensor(leaf)
                and tf.is_tensor(other_leaf)
                for leaf, other_leaf in zip(
                    tf.nest.flatten(first), tf.nest.flatten(other), strict=True
                )
            )
        except (TypeError, ValueError):
            is_equal = False
        if not is_equal:
            raise errors.MismatchError(
                "step_fn returns different structures on different replicas.",
                [
                    f"{names[0]}: {_outline(first)}",
                    f"{name}: {_outline(other)}",
                    *errors.sites_of("step_fn", step_fn),
                ],
                "return the same structure on every replica; to return nothing on one, "
                "return None on all.",
            )


def _outline(structure: Any) -> str:
    """Describes a structure by the dtypes and shapes of its leaves."""

    def leaf(value: Any) -> str:
        if value is None or isinstance(value, tf.Operation):
            return type(value).__name__
        if not isinstance(value, tf.Tensor):  # ragged, sparse, of an extension type
            return str(tf.type_spec_from_value(value))
        return str(placeholder.Value.of(value))

    return str(tf.nest.map_structure(leaf, structure)).replace("'", "")


def check_writes(
    factory: VariableFactory,
    replicas: Sequence[Sequence[tf.Operation]],
    build: context.Build,
) -> None:
    """Raises ContextError if a step writes variables created outside the context."""
    owners = {**factory.owners(), **build.aliases.recorded()}
    initializers = factory.initializers
    outermost = Captures().outermost
    for replica_id, ops in zip(build.compared, replicas, strict=True):
        for op, resource in effects.find_writes(ops):
            if op in initializers or id(outermost(resource)) in owners:
                continue
            raise errors.ContextError(
                f"replica {replica_id} writes a variable that was created outside the "
                f"context ({_name(outermost(resource))}, by {op.type}); it would be "
                "written once per replica.",
                [f"at {errors.line_of(op)}"],
                "create it (or the model, optimizer, metric or generator that holds "
                "it) under `with repl.context():`, and then load its values.",
            )


def _name(handle: tf.Tensor) -> str:
    """Returns the name and shape of the variable behind a handle.

    An eager handle does not know its variable, so all live objects are searched. That
    is slow, and is done for error messages only.
    """
    if tf.is_symbolic_tensor(handle):
        return str(handle.op.name)
    for candidate in gc.get_objects():
        with contextlib.suppress(Exception):  # from half-built or half-freed objects
            if issubclass(type(candidate), tf.Variable) and candidate.handle is handle:
                return f"{candidate.name} {candidate.dtype.name}{candidate.shape}"
    return "of unknown name"


def check_places(
    replicas: Sequence[Sequence[tf.Operation]], build: context.Build
) -> None:
    """Raises DeviceError if a step places an op on the device of another process.

    TensorFlow would run it, and then fail in that process where Python runs.
    """
    if not build.world.processes:
        return
    here = set(map(_process_of, build.world.devices))
    for replica_id, ops in zip(build.compared, replicas, strict=True):
        for op in walk.at_any_depth(ops):
            if "/task:" in op.device and _process_of(op.device) not in here:
                raise errors.DeviceError(
                    f"replica {replica_id} places {op.type} on {op.device}, a device "
                    "of another host's program.",
                    [f"at {errors.line_of(op)}"],
                    "name a device of the replica's own host, such as CPU:0, and send "
                    "values to other replicas by repl.broadcast and its kin.",
                )


@functools.cache  # most ops are on a few devices
def _process_of(device: str) -> tuple[str | None, int | None]:
    """Returns the job and the task that a device's name says, which may say no more."""
    spec = tf.DeviceSpec.from_string(device)
    return spec.job, spec.task


def check_components(
    factory: VariableFactory,
    replicas: Sequence[Sequence[tf.Operation]],
    build: context.Build,
) -> None:
    """Raises ContextError if a replica uses another replica's component of a variable.

    This happens in functions that the step calls but that were traced elsewhere; no
    gradient would reach the replica's own component.
    """
    owners = {**factory.owners(), **build.aliases.recorded()}
    initializers = factory.initializers
    outermost = Captures().outermost
    for replica_id, ops in zip(build.compared, replicas, strict=True):
        for op in ops:
            if op in initializers:
                continue
            for _, resource in resource_inputs(op):
                handle = outermost(resource)
                variable = owners.get(id(handle))
                if variable is None:
                    continue
                own_handles = variable.placement.handles_on(
                    variable, replica_id, build.aliases
                )
                if any(handle is own_handle for own_handle in own_handles):
                    continue
                raise errors.ContextError(
                    f"replica {replica_id} uses another replica's component of "
                    f"variable {variable.name}, by {op.type}.",
                    [f"at {errors.line_of(op)}"],
                    "call the tf.function itself, which is traced per replica, not its "
                    "concrete function (a loaded SavedModel has no others). One with "
                    "jit_compile=True is traced once: create another one to call "
                    "outside steps, and take gradients of tf.recompute_grad inside it.",
                )


def check_circles(
    replicas: Sequence[Sequence[tf.Operation]], build: context.Build
) -> None:
    """Raises DeadlockError if replicas would wait for one another in a cycle."""
    shared = build.aliases.variables()

    def communicates(op: tf.Operation) -> bool:
        if placeholder.read(op) is not None or control_flow.calls_inside(op):
            return True
        # Writes of a variable with an owner are merged, too.
        return kind_of(op).calls and any(
            id(tensor) in shared and effects.writes(op, index)
            for index, tensor in resource_inputs(op)
        )

    link = effects.find_leak(replicas, communicates)
    if link is not None:
        taker, giver = link
        raise errors.DeadlockError(
            "a replica uses a tensor of another replica directly, and communicates "
            "with it: they could wait for one another.",
            [
                f"the tensor is created at {errors.line_of(giver)} ({giver.name})",
                f"and used at {errors.line_of(taker)} ({taker.name})",
            ],
            "do not keep tensors from one call of step_fn for the next; send them with "
            "broadcast or all_gather.",
        )
