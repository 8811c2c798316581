# SPDX-License-Identifier: Apache-2.0
"""Checks operands and places placeholders: the part that all primitives share.

A primitive is one file with three parts: the function a user calls (its meaning), a
`gradient` (its dual) and a `lower` (its real ops). `permute.py` is the best to read
first. WORKSPACE.md says what else a new primitive needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import arguments, context, errors
from replicator._tf import choice, tapes
from replicator.graph.ir import differing as constants
from replicator.graph.ir import placeholder
from replicator.graph.ir.placeholder import Call, OperandPolicy, Value
from replicator.graph.matching import control_flow
from replicator.primitives import flows, weighing

HALF = (tf.float16, tf.bfloat16)
# What TensorFlow, NumPy and Python raise for a value that is not a tensor or a nest.
_PYTHON = (AttributeError, OverflowError, RuntimeError, TypeError, ValueError)
UNCONVERTED = (*_PYTHON, tf.errors.OpError)
_MANY = 8  # results of one call from which adding their identities in bulk pays


def flatten(value: Any, what: str) -> list[tf.Tensor | tf.IndexedSlices]:
    """Flattens a nest into tensors; IndexedSlices are passed through.

    Args:
        value: A nest of values that convert to tensors.
        what: The primitive, for the message.

    Raises:
        ArgumentError: A leaf is not a tensor, or is of a composite type that has no
            meaning here.
    """
    leaves = []
    for leaf in flat(value, what):
        if isinstance(leaf, tf.IndexedSlices):
            leaves.append(_checked_slices(leaf, what))
            continue
        if isinstance(leaf, tf.SparseTensor | tf.RaggedTensor):
            raise bad_argument(
                what,
                f"cannot communicate a {type(leaf).__name__}",
                "communicate its component tensors.",
            )
        try:
            leaves.append(usable(leaf))
        except errors.ReplicatorError:
            raise  # from a variable that cannot be read here
        except UNCONVERTED as error:
            text = f"{type(leaf).__name__} {errors.repr_of(leaf)}"
            raise bad_argument(
                what,
                f"was given {text}, which is not a tensor",
                "pass tensors, numbers, arrays or variables, or a nest of them.",
            ) from error
    return leaves


def flat(value: Any, what: str) -> list[Any]:
    """Returns the leaves of a nest as they are.

    Args:
        value: A nest of anything.
        what: The primitive, for the message.

    Raises:
        ArgumentError: It is not a nest.
    """
    try:
        return leaves_of(value)
    except UNCONVERTED as error:
        raise bad_argument(
            what,
            f"was given a value that is not a nest of tensors "
            f"({errors.summary(error)})",
            "pass a tensor, or lists, tuples and dicts of them; the keys of a dict "
            "must be of one type that can be sorted.",
        ) from error


def leaves_of(value: Any) -> list[Any]:
    """Returns the leaves of a nest; raises one of UNCONVERTED if it is not a nest.

    Some sequences can be flattened but not rebuilt from tensors, e.g. a bytearray.
    """
    leaves: list[Any] = tf.nest.flatten(value)
    tf.nest.pack_sequence_as(value, [object()] * len(leaves))
    return leaves


def usable(leaf: Any) -> tf.Tensor:
    """Converts a leaf to a tensor; raises one of UNCONVERTED if it is unusable here."""
    tensor = tf.convert_to_tensor(arguments.native(leaf))
    if tf.is_symbolic_tensor(tensor):
        graph = tf.compat.v1.get_default_graph()
        while graph is not None and graph is not tensor.graph:
            graph = getattr(graph, "outer_graph", None)
        if graph is None:
            raise ValueError("it is a tensor of another graph")
    return tensor


def _checked_slices(slices: tf.IndexedSlices, what: str) -> tf.IndexedSlices:
    """Returns the IndexedSlices; raises ArgumentError if their parts are no tensors."""
    try:
        values, indices = usable(slices.values), usable(slices.indices)
    except UNCONVERTED as error:
        raise bad_argument(
            what,
            f"was given IndexedSlices of values that are not tensors "
            f"({errors.summary(error)})",
            "create them from tensors: tf.IndexedSlices(values, indices, dense_shape).",
        ) from error
    if values is slices.values and indices is slices.indices:
        return slices
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def bad_argument(what: str, problem: str, fix: str) -> errors.ArgumentError:
    """Returns the error for a call with an invalid argument."""
    replica = context.current()
    where = "" if replica is None else f" on replica {replica.replica_id}"
    return errors.ArgumentError(f"{what}{where} {problem}.", fix=fix)


def check_replica(what: str, name: str, replica_id: Any, num_replicas: int) -> int:
    """Returns `replica_id` if it is a valid root, source or destination."""
    if not arguments.is_whole(replica_id, -arguments.LARGEST):
        raise bad_argument(
            what,
            f"was given {name}={errors.repr_of(replica_id)}",
            f"{name} is a Python int, the id of a replica, the same on all replicas.",
        )
    if not 0 <= replica_id < num_replicas:
        raise bad_argument(
            what,
            f"was given {name}={replica_id}, but there are {num_replicas} replicas",
            f"0 <= {name} < {num_replicas}.",
        )
    return replica_id


def check_root(what: str, root: Any, group: Sequence[int]) -> None:
    """Raises ArgumentError unless `root` is a member of the group."""
    replica = context.require(what)
    check_replica(what, "root", root, replica.num_replicas)
    if root not in group:
        raise bad_argument(
            what,
            f"was given root={root}, which is not in the group {list(group)}",
            "pass the id of a replica in the group as root.",
        )


def check_place(what: str, line: str) -> None:
    """Raises ReplicatorError unless the other replicas can join a call made here.

    Args:
        what: The call.
        line: The user's line.
    """
    replica = context.require(what)
    control_flow.refuse_outside(
        tf.compat.v1.get_default_graph(),
        replica.build.graph,
        f"{what} on replica {replica.replica_id}",
        line,
    )


def differing(value_of: Callable[[int], bool | int]) -> tf.Tensor:
    """Returns a constant of the replica being built that may differ between copies.

    If there are copies, its value is unknown until it runs. Python, static shapes and
    the gradients of conditionals and loops, where TensorFlow makes constants of the
    same value, would depend on it, and they are the same for copies.

    Args:
        value_of: Maps the id of any replica to its value: a bool or an int32 scalar.
    """
    replica = context.require("a constant")
    values = [value_of(replica_id) for replica_id in replica.build.world.replica_ids]
    made = constants.constant(values, replica.replica_id)
    if replica.build.all_traced:
        return made
    return tf.raw_ops.PlaceholderWithDefault(input=made, shape=[])


def communicate(
    primitive: str,
    options: dict[str, Any],
    operands: Sequence[tf.Tensor],
    results: Sequence[Value],
    agreed: Sequence[Value] | None = None,
    of: Call | None = None,
    group: Sequence[int] | None = None,
    channel: str | None = None,
    receipt: bool = False,
    differentiable: bool = True,
    policies: Sequence[OperandPolicy] | None = None,
    joinable: bool = False,
    conditional: bool = False,
) -> list[tf.Tensor]:
    """Puts one communication call into the sub-graph of the replica being built.

    Args:
        primitive: Its name in table.py.
        options: JSON values on which the replicas must agree.
        operands: The tensors that this replica passes.
        results: Dtype and static shape of the tensors that it receives.
        agreed: What must match on all replicas; the operands by default.
        of: Inside a gradient: the call being differentiated. Gradients are paired by
            it, since replicas may reach them in different orders.
        group: The participating replicas, in order. By default all of them, or inside
            a gradient the group of the call being differentiated.
        channel: The sequence in which this call is counted; its group's by default.
        receipt: Whether the operands affect only the losses of other replicas. The
            call then makes a scalar zero, the receipt, through which `linked` makes
            this replica's loss depend on the call, so that gradients come back.
        differentiable: Whether gradients flow through it, by its dual in table.py.
        policies: One per operand, if any operand belongs to a variable.
        joinable: As in `Call`.
        conditional: As in `Call`.

    Returns:
        One tensor per entry of `results`, on this replica's device.

    Raises:
        ContextError: No step is being built.
        ReplicatorError: The other replicas cannot join a call made here.
    """
    replica = context.require(primitive)
    line = errors.user_line()
    check_place(primitive, line)
    if not replica.is_outermost:
        # A function that is called twice communicates twice; with a single trace, the
        # gradients of the two calls would be indistinguishable.
        replica.trace_anew()
        replica.build.in_functions = True
    values = tuple(Value.of(t) for t in operands)
    key = _next_key(replica, of, group, channel)
    weights: list[tf.Tensor | None] = []
    if of is None:
        operands, weights = weighing.weighed_operands(replica, primitive, key, operands)
    facts = replica.build.facts[primitive]
    call = Call(
        primitive=primitive,
        options=options,
        replica_id=replica.replica_id,
        device=replica.device,
        group=_members(replica, group, of),
        key=key,
        operands=values,
        agreed=values if agreed is None else tuple(agreed),
        line=line,
        receipt=receipt,
        facts=facts,
        policies=tuple(policies or ()),
        assignment=replica.mode.writing,
        joinable=joinable,
        conditional=conditional,
    )
    op_results = [*results, Value("float32", ())] if receipt else results
    operands = _captured(operands)
    with tapes.stop_recording():
        op = placeholder.put(call, operands, op_results)
    if differentiable:
        _record(replica.build, placeholder.Placeholder(op, call))
    # The identities outlive the placeholder: what the user does with a result (return,
    # keep, fetch it, wait for it) is done to an op that remains.
    outputs = _identities(op)
    if receipt:
        replica.states.of(flows.Receipts).append(outputs.pop())
    return weighing.unweighed(outputs, weights)


def _record(build: context.Build, placed: placeholder.Placeholder) -> None:
    """Registers the gradient of a call with the tapes."""
    primitive, op = placed.call.primitive, placed.op
    gradient = build.gradients[primitive]
    tapes.record_gradient(
        primitive,
        op.outputs,
        op.inputs,
        lambda *d: differentiate(gradient, placed, d),
    )


def _captured(operands: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """Captures tensors before recording stops: a tape in a function has to see that."""
    graph = tf.compat.v1.get_default_graph()
    if not graph.building_function:
        return operands
    return [graph.capture(tensor) for tensor in operands]


def _identities(op: tf.Operation) -> list[tf.Tensor]:
    """Returns an identity of each output of an op, on the op's device."""
    if len(op.outputs) < _MANY or choice.place_of_reads() is None:
        return [tf.identity(output) for output in op.outputs]
    nodes = choice.Nodes()
    for output in op.outputs:
        nodes.add("Identity", [output], op.device, T=output.dtype)
    return [identity.outputs[0] for identity in nodes.finish("identities")]


def _members(
    replica: context.ReplicaContext, group: Sequence[int] | None, of: Call | None
) -> tuple[int, ...]:
    """Returns the replicas that participate in a call."""
    if group is not None:
        return tuple(group)
    return replica.build.world.replica_ids if of is None else of.group


def _next_key(
    replica: context.ReplicaContext,
    of: Call | None,
    group: Sequence[int] | None,
    channel: str | None,
) -> str:
    """Returns the key of the replica's next call, or of the next call in a gradient."""
    assert replica.mode.backward == (of is not None), (
        "a dual says what it is the gradient of"
    )
    if of is not None:
        return f"{of.key}/{replica.count(('gradient of', of.key))}"
    if channel is None and group is not None and len(group) < replica.num_replicas:
        channel = ",".join(map(str, group))
    number = replica.count(("calls", channel))
    return f"{channel}:{number}" if channel else str(number)


def differentiate(
    gradient: placeholder.Gradient,
    placed: placeholder.Placeholder,
    upstream: Sequence[Any],
) -> list[tf.Tensor | None]:
    """Builds the backward communication of a placeholder.

    Args:
        gradient: The dual.
        placed: The placeholder of the forward communication.
        upstream: The gradients of its results: tensors, IndexedSlices or None.

    Returns:
        The gradients of its operands.
    """
    replica = context.require(f"the gradient of {placed.call.primitive}")
    results = placed.results
    dense = [
        tf.zeros_like(result) if d is None else _in_dtype_of(result, d)
        for result, d in zip(results, upstream[: len(results)], strict=True)
    ]
    with replica.backward_pass():
        return weighing.weighed_gradient(
            replica, placed, dense, lambda dense: gradient(placed, dense)
        )


def _in_dtype_of(result: tf.Tensor, upstream: Any) -> tf.Tensor:
    """Casts a gradient to the result's dtype; custom gradients may have another."""
    upstream = tf.convert_to_tensor(upstream)
    inexact = result.dtype.is_floating and upstream.dtype.is_floating
    if inexact or result.dtype.is_complex and upstream.dtype.is_complex:
        return tf.cast(upstream, result.dtype)
    return upstream


def all_reduce_options(
    op: str, algorithm: str | None = None, of: Call | None = None
) -> dict[str, Any]:
    """Returns the options of an all_reduce call.

    Args:
        op: The reduction.
        algorithm: As for `all_reduce`, whose gradient uses the algorithm of `of`.
        of: Inside a gradient: the call being differentiated.
    """
    if of is not None and of.primitive == "all_reduce":
        algorithm = of.options.get("algorithm")
    return {"op": op} | ({} if algorithm is None else {"algorithm": algorithm})
