"""Placeholder ops: how a replica's sub-graph says "here we communicate".

While a step is built, each communication call leaves one op behind that carries the
operands, has outputs of the result's dtypes and shapes, and describes itself completely
in its own node attributes. A pass over the graph needs nothing but the graph.

The op is a PyFuncStateless: it takes any number of operands, is stateless (so nothing
makes it run) and, should a bug of ours leave one in place, it fails by name when it
runs, where an identity would silently hand on the local value. The post-pass takes away
all of its consumers, so that it is pruned before anything runs.

Source: placeholders and a rewriting pass are the mechanism of TF-Replicator
(Buchlovsky et al. 2019, arXiv:1902.00465, section 4).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

GRADIENT_TYPE = "ReplicatorCommunication"
_OP_TYPE = "PyFuncStateless"
_MARK = "replicator:"

Shape = tuple[int | None, ...] | None  # None: unknown rank; None inside: unknown size


@dataclasses.dataclass(frozen=True)
class Value:
    """The dtype and static shape of one operand or result."""

    dtype: str
    shape: Shape

    @classmethod
    def of(cls, tensor: tf.Tensor) -> Value:
        """Returns what is known of a tensor while the graph is built."""
        shape = tensor.shape
        return cls(
            tf.as_dtype(tensor.dtype).name,
            None if shape.rank is None else tuple(shape.as_list()),
        )

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.dtype}[...]"
        sizes = ("?" if size is None else str(size) for size in self.shape)
        return f"{self.dtype}[{', '.join(sizes)}]"


@dataclasses.dataclass(frozen=True)
class Call:
    """One place where one replica communicates.

    Attributes:
        primitive: "all_reduce", "broadcast", ...
        options: What else the replicas must agree on, e.g. {"op": "sum"}.
        replica_id: The replica that calls.
        device: Where that replica is built.
        key: Which communication of the step this is: "3" for the replica's fourth call,
            "3/0" for the first call that the gradient of that one makes.
        operands: What it hands in.
        agreed: What must be the same on all replicas: `operands`, with the sizes that
            may differ set to None.
        line: The user's line, "train.py:42 in step_fn".
    """

    primitive: str
    options: dict[str, Any]
    replica_id: int
    device: str
    key: str
    operands: tuple[Value, ...]
    agreed: tuple[Value, ...]
    line: str

    @property
    def backward(self) -> bool:
        """Whether the call belongs to a gradient."""
        return "/" in self.key

    def __str__(self) -> str:
        options = "".join(
            f" {name}={value}"
            for name, value in self.options.items()
            if value is not None
        )
        shown = ", ".join(map(str, self.operands[:3]))
        more = f", ... ({len(self.operands)} tensors)" if len(self.operands) > 3 else ""
        origin = "in the gradient, " if self.backward else ""
        return f"{self.primitive}{options} {shown}{more} {origin}at {self.line}"

    def site(self) -> str:
        """Returns the line of an error message that says where the call stands."""
        return f"replica {self.replica_id} ({self.device}): {self}"


@dataclasses.dataclass(frozen=True, eq=False)
class Placeholder:
    """A placeholder op of a graph and what it says of itself."""

    op: tf.Operation
    call: Call

    @property
    def operands(self) -> tuple[tf.Tensor, ...]:
        """What the replica hands in."""
        return tuple(self.op.inputs)

    @property
    def results(self) -> tuple[tf.Tensor, ...]:
        """What stands for the results until they are rewired."""
        return tuple(self.op.outputs)


def put(
    call: Call, operands: Sequence[tf.Tensor], results: Sequence[Value]
) -> tf.Operation:
    """Adds a placeholder op to the graph being built.

    Args:
        call: The description that the op will carry.
        operands: The tensors that the replica hands in.
        results: The dtype and static shape of each output.

    Returns:
        The op; `op.outputs[k]` stands for the k-th result until it is rewired.
    """
    graph = operands[0].graph
    override = graph.gradient_override_map({_OP_TYPE: GRADIENT_TYPE})
    # No device: the op never runs, and there is no kernel for it on accelerators.
    with tf.device(None), override:
        outputs = tf.raw_ops.PyFuncStateless(
            input=list(operands),
            token=_MARK + json.dumps(dataclasses.asdict(call)),
            Tout=[tf.as_dtype(value.dtype) for value in results],
            name=call.primitive,
        )
    for output, value in zip(outputs, results, strict=True):
        output.set_shape(value.shape)
    return outputs[0].op


def read(op: tf.Operation) -> Call | None:
    """Returns what a placeholder op says of itself, or None if it is another op."""
    if op.type != _OP_TYPE:
        return None
    token = op.get_attr("token").decode()
    if not token.startswith(_MARK):
        return None
    facts = json.loads(token.removeprefix(_MARK))
    for name in ("operands", "agreed"):
        facts[name] = tuple(
            Value(v["dtype"], None if v["shape"] is None else tuple(v["shape"]))
            for v in facts[name]
        )
    return Call(**facts)


def find(ops: Iterable[tf.Operation]) -> list[Placeholder]:
    """Returns the placeholders among `ops`, in order."""
    return [Placeholder(op, call) for op in ops if (call := read(op)) is not None]
