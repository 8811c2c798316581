# SPDX-License-Identifier: Apache-2.0
"""Sums gradients of variables over all replicas, in programs written for one device.

On replicas that ask for it, a variable is read through an identity of its handle whose
gradient is the sum over all replicas. Any optimizer is passed that sum, even one that
is written by hand.
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
_VARIABLE = (
    "_replicator_synchronized"  # the identity's attribute with the variable's key
)
# Keys of a build's findings, per replica.
_STAND_INS = "stand-ins"  # identities, with the tensors that they stand for
_SHARED_READS = "shared reads"  # identities that no tape has to record


@contextlib.contextmanager
def read(variable: Any) -> Iterator[None]:
    """Makes reads of a variable in this block sum its gradient over all replicas.

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

    Each tape needs an identity that is created after the tape watches the variable.
    """
    if tf.compat.v1.get_default_graph() is not replica.build.graph:
        replica.trace_anew()  # a reused trace would have another tape's identity
    elif _tf.place_of_reads() is not None:
        shared = replica.build.findings.setdefault(
            (_SHARED_READS, replica.replica_id), {}
        )
        if variable.key not in shared:
            shared[variable.key] = _new_identity(variable, replica)
        identity: tf.Tensor = shared[variable.key]
        return identity
    _tf.note_read(variable)
    return _new_identity(variable, replica)


def _new_identity(variable: Any, replica: context.ReplicaContext) -> tf.Tensor:
    graph = replica.build.graph

    def combine(gradient: Any) -> Any:
        return _sum_gradient(variable, gradient)

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
        _tf.record_gradient("Identity", [identity], [handle], lambda d: [combine(d)])
    variables = replica.build.findings.setdefault(_VARIABLE, {})
    variables[variable.key] = variable
    _note_stand_in(replica, identity, handle)
    return identity


def resolve(replica: context.ReplicaContext) -> None:
    """Replaces the identities by what they stand for, once all gradients are taken.

    Passes that order effects or compare values identify variables by their handles.
    Besides, every op less is one less to copy for each replica.
    """
    stand_ins = replica.build.findings.get((_STAND_INS, replica.replica_id), ())
    for identity, tensor in stand_ins:
        _tf.replace(identity, tensor)
    # Functions would take an identity of a handle for a write of the variable.
    handle_ops = [t.op for t, tensor in stand_ins if tensor.dtype == tf.resource]
    _tf.abandon(handle_ops)


@tf.RegisterGradient(_TYPE)
def _read_gradient(op: tf.Operation, gradient: Any) -> Any:
    """The gradient of a read, for tf.gradients."""
    replica = context.require("the gradient of a variable")
    variables = replica.build.findings[_VARIABLE]
    return _sum_gradient(variables[op.get_attr(_VARIABLE).decode()], gradient)


def _sum_gradient(variable: Any, gradient: Any) -> Any:
    """Sums a gradient over all replicas, after each has weighted its own."""
    if gradient is None:
        return None
    replica = context.require("the gradient of a variable")
    assert replica.synchronizes is not None, "it was so when the variable was read"
    gradient = replica.synchronizes(gradient, False)
    if isinstance(gradient, tf.IndexedSlices):
        (total,) = all_reduce.combine([gradient], "sum", None, [variable.policy])
    else:
        # Each variable has its own call; those for small gradients are merged.
        (total,) = all_reduce.reduce_dense(
            *([tf.convert_to_tensor(gradient)], "sum"),
            policies=[variable.policy],
            together=True,
        )
    if isinstance(total, tf.IndexedSlices):
        values = _with_weighted_gradient(total.values)
        return tf.IndexedSlices(values, total.indices, total.dense_shape)
    return _with_weighted_gradient(total)


def _with_weighted_gradient(total: tf.Tensor) -> tf.Tensor:
    """Returns a summed gradient such that differentiating it weights the result.

    That result is the gradient of one replica's loss, and counts by the loss's weight.
    """
    replica = context.require("the gradient of a variable")
    graph = tf.compat.v1.get_default_graph()
    with _tf.stop_recording(), graph.gradient_override_map({"Identity": _BACK_TYPE}):
        identity = tf.identity(total)
    _tf.record_gradient(
        "Identity", [identity], [total], lambda d: [_weight_gradient(d)]
    )
    if replica.is_outermost:
        _note_stand_in(replica, identity, total)
    return identity


def _note_stand_in(
    replica: context.ReplicaContext, identity: tf.Tensor, tensor: tf.Tensor
) -> None:
    """Notes an identity that only gradients need; `resolve` removes it."""
    stand_ins = replica.build.findings.setdefault((_STAND_INS, replica.replica_id), [])
    stand_ins.append((identity, tensor))


@tf.RegisterGradient(_BACK_TYPE)
def _total_gradient(op: tf.Operation, gradient: Any) -> Any:
    """The gradient of a summed gradient, for tf.gradients."""
    return _weight_gradient(gradient)


def _weight_gradient(gradient: Any) -> Any:
    replica = context.require("the gradient of a gradient")
    if gradient is None or replica.synchronizes is None:
        return gradient
    return replica.synchronizes(gradient, True)
