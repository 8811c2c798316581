"""What all primitives share: checking operands and placing the placeholder.

A primitive is one file with three parts: the function a user calls (its meaning), a
`gradient` (its dual) and a `lower` (its real ops). `broadcast.py` is the shortest one
to read first. A new primitive is such a file, one line in `table.py`, and a method of
Replicator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf, context, errors
from replicator.graph import control_flow, placeholder
from replicator.graph.placeholder import Call, Shape, Value

HALF = (tf.float16, tf.bfloat16)
_MANY = 8  # results of one call: from here on they are worth adding at once

# Takes the placeholder and the gradients of its results, in order; returns those of its
# operands, None where there is none.
Gradient = Callable[
    [placeholder.Placeholder, Sequence[tf.Tensor]], Sequence[tf.Tensor | None]
]


def flatten(value: Any, what: str) -> list[tf.Tensor | tf.IndexedSlices]:
    """Returns the leaves of a nest as tensors; IndexedSlices stay what they are.

    Args:
        value: A nest of whatever converts to tensors.
        what: The primitive, for the message.

    Raises:
        ArgumentError: A leaf is no tensor, or of a composite type without a meaning
            here.
    """
    leaves = []
    for leaf in tf.nest.flatten(value):
        if isinstance(leaf, tf.IndexedSlices):
            leaves.append(leaf)
            continue
        if isinstance(leaf, tf.SparseTensor | tf.RaggedTensor):
            raise bad_argument(
                what,
                f"cannot communicate a {type(leaf).__name__}",
                "communicate its component tensors.",
            )
        try:
            leaves.append(tf.convert_to_tensor(leaf))
        except (TypeError, ValueError) as error:
            raise bad_argument(
                what,
                f"was given {type(leaf).__name__} {leaf!r}, which is no tensor",
                "hand in tensors, numbers, arrays or variables, or a nest of them.",
            ) from error
    return leaves


def bad_argument(what: str, problem: str, fix: str) -> errors.ArgumentError:
    """Returns the error for a call with an argument that makes no sense."""
    replica = context.current()
    where = "" if replica is None else f" on replica {replica.replica_id}"
    return errors.ArgumentError(
        errors.compose(f"{what}{where} {problem}.", [f"at {errors.user_line()}"], fix)
    )


def check_replica(what: str, name: str, replica_id: Any, num_replicas: int) -> int:
    """Returns `replica_id` if it names a replica, as root, source or destination."""
    if isinstance(replica_id, bool) or not isinstance(replica_id, int):
        raise bad_argument(
            what,
            f"was given {name}={replica_id!r}",
            f"{name} is a Python int, the id of a replica; it must be the same on all.",
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
            "the root is a replica of the group, by its id.",
        )


def check_place(what: str, line: str) -> None:
    """Raises ReplicatorError unless the other replicas can join a call made here.

    Args:
        what: What was called.
        line: The user's line.
    """
    replica = context.require(what)
    control_flow.refuse_outside(
        tf.compat.v1.get_default_graph(),
        replica.build.graph,
        f"{what} on replica {replica.replica_id}",
        line,
    )


def communicate(
    primitive: str,
    options: dict[str, Any],
    operands: Sequence[tf.Tensor],
    results: Sequence[Value],
    gradient: Gradient | None,
    agreed: Sequence[Value] | None = None,
    of: Call | None = None,
    group: Sequence[int] | None = None,
    channel: str | None = None,
    receipt: bool = False,
) -> list[tf.Tensor]:
    """Puts one communication call of the replica being built into its sub-graph.

    Args:
        primitive: The name under which table.py knows it.
        options: JSON values on which the replicas must agree.
        operands: What this replica hands in.
        results: Dtype and static shape of what it receives.
        gradient: The dual, or None if nothing can be differentiated.
        agreed: What must be alike on all replicas; the operands, unless given.
        of: Inside a gradient: the call that is differentiated. Replicas may reach the
            gradients of their calls in different orders, so these pair by their calls.
        group: The replicas that take part, in order; all, unless given, and inside a
            gradient those of the call that is differentiated.
        channel: Among which calls this one is counted, if not among its group's.
        receipt: Whether what is handed in changes the losses of other replicas only.
            The call then makes a scalar zero, the receipt, by which `linked` lets this
            replica's loss depend on it, so that gradients come back.

    Returns:
        One tensor per entry of `results`, on this replica's device.

    Raises:
        ContextError: No step is being built.
        ReplicatorError: The call stands where the other replicas cannot join.
    """
    replica = context.require(primitive)
    line = errors.user_line()
    check_place(primitive, line)
    graph = tf.compat.v1.get_default_graph()
    if graph is not replica.build.graph:
        # A function that is called twice communicates twice; from one trace, nobody
        # could tell the gradients of the two calls apart.
        replica.trace_anew()
    values = tuple(Value.of(t) for t in operands)
    call = Call(
        primitive=primitive,
        options=options,
        replica_id=replica.replica_id,
        device=replica.device,
        group=_members(replica, group, of),
        key=_next_key(replica, of, group, channel),
        operands=values,
        agreed=values if agreed is None else tuple(agreed),
        line=line,
        receipt=receipt,
    )
    made = [*results, Value("float32", ())] if receipt else results
    if graph.building_function:
        # Before recording stops: a tape inside a nested function has to see that what
        # it watches outside comes in.
        operands = [graph.capture(tensor) for tensor in operands]
    with _tf.stop_recording():
        op = placeholder.put(call, operands, made)
    if gradient is not None:
        placed = placeholder.Placeholder(op, call)
        _tf.record_gradient(
            primitive,
            op.outputs,
            op.inputs,
            lambda *d: differentiate(gradient, placed, d),
        )
    # The identities stay when the placeholder goes: whatever the user does with a
    # result (return it, keep it, fetch it, wait for it) is done to an op that remains.
    outputs = _identities(op)
    if receipt:
        replica.receipts.append(outputs.pop())
    return outputs


def _identities(op: tf.Operation) -> list[tf.Tensor]:
    """Returns an identity of each result of an op, where the op stands."""
    if len(op.outputs) < _MANY or _tf.place_of_reads() is None:
        return [tf.identity(output) for output in op.outputs]
    nodes = _tf.Nodes()
    for output in op.outputs:
        nodes.add("Identity", [output], op.device, T=output.dtype)
    return [identity.outputs[0] for identity in nodes.finish("identities")]


def linked(loss: Any) -> tf.Tensor:
    """Returns the loss, made to depend on all that this replica has sent so far.

    What is differentiated is the sum of all replicas' losses, but a tape only visits
    what the replica's own loss depends on. Where that leaves out a `send`, or a
    `reduce`, `gather` or the like of which another replica is the root, no gradient
    would come back from there; through the linked loss, it does.

    Args:
        loss: A floating tensor of any shape; 0.0 on a replica without a loss.

    Returns:
        The same value.

    Raises:
        ArgumentError: The loss is no floating tensor.
    """
    replica = context.require("linked")
    loss, *more = flatten(loss, "linked") or [None]
    if more or not isinstance(loss, tf.Tensor) or not is_differentiable(loss):
        raise bad_argument(
            "linked", f"was given {loss!r}", "hand in one tensor of floating numbers."
        )
    graphs = {tf.compat.v1.get_default_graph()}
    while outer := {getattr(graph, "outer_graph", None) for graph in graphs} - graphs:
        graphs |= outer
    for receipt in replica.receipts:
        if receipt.graph in graphs:
            loss += tf.cast(receipt, loss.dtype)
    return loss


def _members(
    replica: context.ReplicaContext, group: Sequence[int] | None, of: Call | None
) -> tuple[int, ...]:
    """Returns the replicas that take part in a call."""
    if group is not None:
        return tuple(group)
    return tuple(range(replica.num_replicas)) if of is None else of.group


def _next_key(
    replica: context.ReplicaContext,
    of: Call | None,
    group: Sequence[int] | None,
    channel: str | None,
) -> str:
    """Returns the key of the replica's next call, or of the next in a gradient."""
    assert replica.backward == (of is not None), (
        "a dual says what it is the gradient of"
    )
    if of is not None:
        return f"{of.key}/{replica.count(('gradient of', of.key))}"
    if channel is None and group is not None and len(group) < replica.num_replicas:
        channel = ",".join(map(str, group))
    number = replica.count(("calls", channel))
    return f"{channel}:{number}" if channel else str(number)


def differentiate(
    gradient: Gradient, placed: placeholder.Placeholder, upstream: Sequence[Any]
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
        tf.zeros_like(result) if d is None else tf.convert_to_tensor(d)
        for result, d in zip(results, upstream[: len(results)], strict=True)
    ]
    with replica.backward_pass():
        return list(gradient(placed, dense))


# How many tensors one AddN adds from left to right: TensorFlow 2.21 takes up to nine.
_ADDED_AT_ONCE = 8


def add_in_order(column: Sequence[tf.Tensor]) -> tf.Tensor:
    """Adds up one tensor per replica, in replica order.

    In one pass over memory: for eight tensors of 16 MiB, AddN takes 0.6 of the time of
    seven additions. Grappler sorts the operands of an AddN by their names, and adds up
    constants beforehand; so each gets a name that sorts, of an op that is not folded.

    Shapes that differ when it runs are an InvalidArgumentError.
    """
    if len(column) == 1:
        return tf.identity(column[0])
    column = _told_apart(column)
    if len(column) == 2:
        return tf.add_n(column)
    nodes = _tf.Nodes()
    dtype = column[0].dtype
    total: tf.Tensor | int = column[0]
    for start in range(1, len(column), _ADDED_AT_ONCE - 1):
        named = [
            nodes.add("PlaceholderWithDefault", [x], dtype=dtype, shape=shape)
            for x, shape in [
                (total, column[0].shape),
                *((x, x.shape) for x in column[start : start + _ADDED_AT_ONCE - 1]),
            ]
        ]
        total = nodes.add("AddN", named, N=len(named), T=dtype)
    ops = nodes.finish("add_in_order")
    made, result = set(ops), ops[-1].outputs[0]
    added = [op.inputs[0] for op in ops if op.inputs[0].op not in made]
    _tf.record_gradient("AddInOrder", [result], added, lambda d: [d] * len(added))
    return result


def fold(
    combine: Callable[[tf.Tensor, tf.Tensor], tf.Tensor], column: Sequence[tf.Tensor]
) -> tf.Tensor:
    """Combines one tensor per replica from left to right, so that the order holds.

    Grappler turns a chain of additions into one AddN, and reorders the operands of an
    AddN: by name, and constants together. Of a sum of two it can only exchange the two,
    and it does not look through an EnsureShape.
    """
    if len(column) == 1:
        return tf.identity(column[0])
    column = _told_apart(column)
    result = column[0]
    for k, operand in enumerate(column[1:]):
        if k:
            result = ensure_shape(result, result.shape)
        result = combine(result, operand)
    return result


def _told_apart(column: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Keeps Grappler from seeing that two operands are one tensor.

    It would make x + x a product with a constant, and its control edge from another
    device makes a loop hang (TensorFlow 2.21; seen with a broadcast that is reduced).
    """
    seen = set()
    apart = []
    for tensor in column:
        origin = tensor
        while origin.op.type == "Identity":
            origin = origin.op.inputs[0]
        call = placeholder.read(origin.op)
        name = id(origin) if call is None else (call.key, origin.value_index)
        apart.append(ensure_shape(tensor, tensor.shape) if name in seen else tensor)
        seen.add(name)
    return apart


def ensure_shape(tensor: tf.Tensor, shape: Any) -> tf.Tensor:
    """Compares a shape when it runs.

    tf.ensure_shape of an unknown rank fails if TensorFlow finds the rank, as it does
    where a function is called with tensors of which more is known. Of an unknown rank,
    this only keeps Grappler from looking through, as an EnsureShape does.
    """
    if tf.TensorShape(shape).rank is None:
        return tf.raw_ops.PlaceholderWithDefault(
            input=tensor, shape=tf.TensorShape(None)
        )
    return tf.ensure_shape(tensor, shape)


def without(shape: Sequence[int | None], axis: int) -> Shape:
    """Returns a static shape whose size along `axis` is unknown."""
    return tuple(None if k == axis else size for k, size in enumerate(shape))


def is_differentiable(tensor: tf.Tensor) -> bool:
    """Whether gradients flow through tensors of this dtype."""
    return tensor.dtype.is_floating or tensor.dtype.is_complex
