# SPDX-License-Identifier: Apache-2.0
"""Variables whose gradients are made one by themselves, for programs of one device.

Where a replica says so, a variable is read through an identity of its handle, whose
gradient is that of all replicas: any optimizer is given it, one written by hand, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from replicator import _tf, context
from replicator.primitives import all_reduce

_TYPE = "ReplicatorSynchronizedRead"
_BACK_TYPE = "ReplicatorSynchronizedGradient"
_VARIABLE = "_replicator_synchronized"  # of such an identity: the variable's key
_MADE = "stand-ins"  # of a replica: its identities, with what they stand for
_SHARED = "shared reads"  # of a replica: the identities that no tape has to record


@contextlib.contextmanager
def read(variable: Any) -> Iterator[None]:
    """In this block, a variable is read so that its gradient is that of all replicas.

    Args:
        variable: A ReplicatedVariable.
    """
    replica = context.current()
    key = variable.key
    if (
        replica is None
        or replica.synchronizes is None
        or key in replica.reading
        or not _has_gradient(variable)
        or tf.executing_eagerly()
    ):
        yield
        return
    identity = _identity(variable, replica)
    replica.reading[key] = identity
    try:
        yield
    finally:
        del replica.reading[key]


def _has_gradient(variable: Any) -> bool:
    inexact = variable.dtype.is_floating or variable.dtype.is_complex
    return bool(inexact and not variable.placement.differs)


def _identity(variable: Any, replica: context.ReplicaContext) -> tf.Tensor:
    """Returns an identity of the handle, in the graph of the step.

    A tape has to see one of its own, made after the variable was watched.
    """
    if tf.compat.v1.get_default_graph() is not replica.build.graph:
        replica.trace_anew()  # a trace would keep that of another tape
    elif _tf.place_of_reads() is not None:
        shared = replica.build.findings.setdefault((_SHARED, replica.replica_id), {})
        if variable.key not in shared:
            shared[variable.key] = _made(variable, replica)
        identity: tf.Tensor = shared[variable.key]
        return identity
    _tf.note_read(variable)
    return _made(variable, replica)


def _made(variable: Any, replica: context.ReplicaContext) -> tf.Tensor:
    graph = replica.build.graph

    def combined(gradient: Any) -> Any:
        return _combined(variable, gradient)

    with (
        graph.as_default(),
        tf.control_dependencies(None),
        graph.gradient_override_map({"Identity": _TYPE}),
    ):
        handle = variable.handle
        if graph.building_function:
            handle = graph.capture(handle)
        with _tf.stop_recording():
            identity = tf.identity(handle)
        _tf.copy_handle_data(handle, identity)
        _tf.set_text_attr(identity.op, _VARIABLE, variable.key)
        _tf.record_gradient("Identity", [identity], [handle], lambda d: [combined(d)])
    known = replica.build.findings.setdefault(_VARIABLE, {})
    known[variable.key] = variable
    _note_stand_in(replica, identity, handle)
    return identity


def resolve(replica: context.ReplicaContext) -> None:
    """Replaces the identities by what they stand for, once no gradient is taken.

    What orders effects, and finds out which values are equal, knows handles; and each
    op less is one less to copy for every replica.
    """
    noted = replica.build.findings.get((_MADE, replica.replica_id), ())
    for identity, tensor in noted:
        _tf.replace(identity, tensor)
    # That of a handle is nothing that happens in the step.
    handles = [one.op for one, tensor in noted if tensor.dtype == tf.resource]
    _tf.abandon(handles)


@tf.RegisterGradient(_TYPE)
def _of_read(op: tf.Operation, gradient: Any) -> Any:
    """Called by tf.gradients."""
    replica = context.require("the gradient of a variable")
    known = replica.build.findings[_VARIABLE]
    return _combined(known[op.get_attr(_VARIABLE).decode()], gradient)


def _combined(variable: Any, gradient: Any) -> Any:
    """Returns the sum over all replicas, each weighed as it says."""
    if gradient is None:
        return None
    replica = context.require("the gradient of a variable")
    assert replica.synchronizes is not None, "it was so when the variable was read"
    gradient = replica.synchronizes(gradient, False)
    if isinstance(gradient, tf.IndexedSlices):
        (made,) = all_reduce.combine([gradient], "sum", None, [variable.policy])
    else:
        # There is one for each variable: small ones are to travel together.
        (made,) = all_reduce.reduce_dense(
            *([tf.convert_to_tensor(gradient)], "sum"),
            policies=[variable.policy],
            together=_is_outermost(replica),
        )
    if isinstance(made, tf.IndexedSlices):
        values = _seen_back(made.values)
        return tf.IndexedSlices(values, made.indices, made.dense_shape)
    return _seen_back(made)


def _is_outermost(replica: context.ReplicaContext) -> bool:
    return tf.compat.v1.get_default_graph() is replica.build.graph


def _seen_back(made: tf.Tensor) -> tf.Tensor:
    """Returns a gradient of all replicas, which tells if it is differentiated.

    What then comes back is that of one replica, and weighs what its loss does.
    """
    replica = context.require("the gradient of a variable")
    graph = tf.compat.v1.get_default_graph()
    with _tf.stop_recording(), graph.gradient_override_map({"Identity": _BACK_TYPE}):
        seen = tf.identity(made)
    _tf.record_gradient("Identity", [seen], [made], lambda d: [_back(d)])
    if _is_outermost(replica):
        _note_stand_in(replica, seen, made)
    return seen


def _note_stand_in(
    replica: context.ReplicaContext, identity: tf.Tensor, tensor: tf.Tensor
) -> None:
    """Notes an identity that is there for gradients only; `resolve` removes it."""
    noted = replica.build.findings.setdefault((_MADE, replica.replica_id), [])
    noted.append((identity, tensor))


@tf.RegisterGradient(_BACK_TYPE)
def _of_seen(op: tf.Operation, gradient: Any) -> Any:
    """Called by tf.gradients."""
    return _back(gradient)


def _back(gradient: Any) -> Any:
    replica = context.require("the gradient of a gradient")
    if gradient is None or replica.synchronizes is None:
        return gradient
    return replica.synchronizes(gradient, True)
