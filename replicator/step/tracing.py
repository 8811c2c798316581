# SPDX-License-Identifier: Apache-2.0
"""Calls step_fn for one replica, under its device, name scope, seeds and context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator._tf import autograph, frames, traces
from replicator.graph.passes import random
from replicator.interop import distribute
from replicator.step import constants, outputs, scopes


def build_replica(
    step_fn: Callable[..., Any],
    arguments: Sequence[Any],
    build: context.Build,
    replica_id: int,
    large: constants.Constants,
    shard: Any = None,
) -> tuple[Any, str]:
    """Calls step_fn for one replica; returns its outputs as tensors, and its scope.

    Args:
        step_fn: The user's function.
        arguments: Its arguments.
        build: The state shared by the replicas.
        replica_id: The replica.
        large: Moves large constants out of the graph.
        shard: The replica's part of a global batch, an `inputs.shards.Shard`.
    """
    graph = build.graph
    function = autograph.function_of(step_fn)
    with (
        scopes.restored_caching_device(),
        graph.device(_placer(build, replica_id, large)),
        tf.name_scope(f"replica_{replica_id}") as scope,
        random.separate_seeds(graph, replica_id),
        traces.separate_traces(graph, replica_id, build.traces) as trace_anew,
        scopes.shared_variables(build, replica_id),
        scopes.own_collections(build, scope),
    ):
        replica = context.ReplicaContext(
            build,
            replica_id,
            scope=scope,
            depth=frames.stack_depth(),
            trace_anew=trace_anew,
            shard=shard,
        )
        with (
            context.building(replica),
            distribute.answering(replica),
            scopes.summaries_once(replica),
        ):
            try:
                if graph.building_function:
                    returned = autograph.call_converted(function, arguments)
                else:
                    returned = function(*arguments)
            except Exception as error:
                if isinstance(error, TypeError):
                    _refuse_uncallable(step_fn, arguments, error)
                _note_no_examples(error, replica_id, shard)
                raise
            return outputs.as_outputs(returned, step_fn), scope


def _note_no_examples(error: Exception, replica_id: int, shard: Any) -> None:
    """Adds a note to what step_fn raised if the replica is known to have no examples.

    Some of TensorFlow's functions cannot be built for tensors without rows, and do not
    say so: GradientTape.batch_jacobian divides by their number.
    """
    if shard is None or tf.get_static_value(shard.count) != 0:
        return
    error.add_note(
        f"replica {replica_id} has none of the {tf.get_static_value(shard.total)} "
        "examples of this batch: its tensors have 0 rows. Feed batches with an example "
        "for each replica, e.g. by dataset.batch(..., drop_remainder=True), or skip "
        "what cannot be computed of 0 rows."
    )


_LIBRARIES = ("keras", "sonnet", "tensorflow", "tf_keras")


def _refuse_uncallable(
    step_fn: Callable[..., Any], arguments: Sequence[Any], error: TypeError
) -> None:
    """Raises ArgumentError if step_fn is another library's and needs other arguments.

    Its signature may accept anything, as those of Keras layers and metrics do.

    Args:
        step_fn: The callable.
        arguments: The arguments that it was called with.
        error: What it raised; the user's own error, if any line of it is the user's.
    """
    library = type(step_fn).__module__.partition(".")[0] in _LIBRARIES
    library &= not isinstance(step_fn, tf.types.experimental.PolymorphicFunction)
    if frames.passed_user_code(error) and not library:
        return
    raise errors.ArgumentError(
        f"step_fn {errors.repr_of(step_fn)} cannot be called with {len(arguments)} "
        f"arguments: {errors.summary(error)}",
        fix="pass a function of your own that calls it with the right arguments.",
    ) from error


class Placed(set[tf.Operation]):
    """Ops that the user's tf.device placed where the replica is anyway."""


def _placer(
    build: context.Build, replica_id: int, large: constants.Constants
) -> Callable[[tf.Operation], str]:
    """Returns a device function that fills in what the user's tf.device left open.

    A function rather than a string: in a tf.Graph, a tf.function called inside the step
    is traced anew for each device function, so it gets each replica's own variables and
    communicates in each build by itself. Where the step itself is a function,
    `_tf.traces.separate_traces` ensures that.
    """
    device, aliases = build.world.device(replica_id), build.aliases
    placed = build.states.of(Placed)
    default = tf.DeviceSpec.from_string(device)
    merged = {"": device}

    def place(op: tf.Operation) -> str:
        large.note(op)
        at_owner = aliases.device_for(op)
        if at_owner is not None:
            return at_owner
        user_device = op.device
        if user_device not in merged:
            spec = default.make_merged_spec(tf.DeviceSpec.from_string(user_device))
            merged[user_device] = spec.to_string()
        if user_device and merged[user_device] == device:
            placed.add(op)
        return merged[user_device]

    return place
