# SPDX-License-Identifier: Apache-2.0
"""Placeholder ops: mark the communication calls in a replica's sub-graph.

While a step is built, each communication call adds one op that takes the operands, has
outputs with the results' dtypes and shapes, and describes itself completely in its own
node attributes. A pass over the graph needs nothing but the graph.

The op is a PyFuncStateless: it takes any number of operands, it is stateless (so
nothing makes it run), and if a bug of ours leaves one in place, it fails by name at run
time, where an identity would silently pass on the local value. The post-pass removes
all of its consumers, so that it is pruned before anything runs.

Source: placeholders and a rewriting pass are the mechanism of TF-Replicator (Buchlovsky
et al. 2019, arXiv:1902.00465, section 4).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from replicator._tf import ops
from replicator.graph.ir import shapes
from replicator.graph.ir.shapes import Shape

GRADIENT_TYPE = "ReplicatorCommunication"
TYPE = "PyFuncStateless"
_MARK = "replicator:"
_NO_NAME = re.compile(r"[^0-9]+")  # everything in a key but its numbers
_CACHED = 1024  # the number of calls whose parsed attributes are cached


@dataclasses.dataclass(frozen=True)
class Value:
    """The dtype and static shape of one operand or result.

    Example:
        >>> plan = repl.build(lambda: repl.all_reduce(tf.zeros([10, 2]))).plan
        >>> (value,) = plan[0].operands[0]  # what replica 0 passes
        >>> value.dtype, value.shape, str(value)
        ('float32', (10, 2), 'float32[10, 2]')

    Attributes:
        dtype: The name of the dtype, e.g. "float32".
        shape: The sizes, None for each one that is only known when the step runs; None
            in place of all sizes if the rank is unknown.
    """

    dtype: str
    shape: Shape

    @classmethod
    def of(cls, tensor: tf.Tensor) -> Value:
        """Returns a tensor's dtype and static shape."""
        return cls(tf.as_dtype(tensor.dtype).name, shapes.static(tensor))

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.dtype}[...]"
        sizes = ("?" if size is None else str(size) for size in self.shape)
        return f"{self.dtype}[{', '.join(sizes)}]"


class OperandPolicy(NamedTuple):
    """The variable that an operand belongs to, and how that affects its communication.

    Attributes:
        variable: The variable's key; "" for an operand that belongs to none.
        owner: The replica that needs the result, if only one does.
        algorithm: How it is reduced, one of ALGORITHM_NAMES; None: as the call says.
        bucket: Only operands of the same bucket may share a message.
    """

    variable: str = ""
    owner: int | None = None
    algorithm: str | None = None
    bucket: str = ""


NO_POLICY = OperandPolicy()


@dataclasses.dataclass(frozen=True)
class PrimitiveFacts:
    """What passes need to know of a primitive, defined in the primitive's own file.

    Attributes:
        algorithm: How its data travels, for plans. "hub": one device does the work and
            sends out the result; "direct": each tensor goes from the replica that has
            it to those that need it; "order": nothing is sent.
        same_for_all: Whether all participants receive the same.
        end: For a message, "sends" or "receives".
        orders_effects: Whether effects after a call wait for those before it.
        reduces_for_all: Whether its option "op" says how each operand is reduced, and
            all participants receive the result.
        joins: Whether its option "axis" names an axis along which sizes may differ.
    """

    algorithm: str = "direct"
    same_for_all: bool = False
    end: str | None = None
    orders_effects: bool = False
    reduces_for_all: bool = False
    joins: bool = False


@dataclasses.dataclass(frozen=True)
class Call:
    """One place where one replica communicates.

    Attributes:
        primitive: "all_reduce", "broadcast", ...
        options: What else the replicas must agree on, e.g. {"op": "sum"}.
        replica_id: The replica that calls.
        device: The device on which that replica is built.
        group: The replicas that take part, in order.
        key: Which communication of the step this is: "3" for the fourth call of all
            replicas, "0,2:3" for that of replicas 0 and 2, "0>2#7:3" for the fourth
            message from 0 to 2 under tag 7; and "3/0" for the first call in the
            gradient of call "3".
        operands: The dtypes and shapes of what it passes.
        agreed: What must be the same on all replicas: `operands`, with the sizes that
            may differ set to None.
        line: The user's line, "train.py:42 in step_fn".
        receipt: Whether the last result is a zero that represents the call's effect on
            other replicas' losses; see `base.communicate`.
        facts: What is true of all calls of the primitive.
        policies: One per operand, or none at all; the replicas must agree on them.
        merged: The lines of further calls that were merged into this one.
        assignment: The assignment whose value the replicas agree on by this call, if
            any: the variable's name, the method, and the variable's key.
        joinable: Whether it may be joined with calls that come soon after it.
        conditional: Whether its last operand, a bool equal on all replicas, says at run
            time whether anything is communicated.
    """

    primitive: str
    options: dict[str, Any]
    replica_id: int
    device: str
    group: tuple[int, ...]
    key: str
    operands: tuple[Value, ...]
    agreed: tuple[Value, ...]
    line: str
    receipt: bool = False
    facts: PrimitiveFacts = PrimitiveFacts()
    policies: tuple[OperandPolicy, ...] = ()
    merged: tuple[str, ...] = ()
    assignment: tuple[str, str, str] | None = None
    joinable: bool = False
    conditional: bool = False

    def policy(self, k: int) -> OperandPolicy:
        """Returns the policy of the k-th operand."""
        return self.policies[k] if k < len(self.policies) else NO_POLICY

    @property
    def backward(self) -> bool:
        """Whether the call belongs to a gradient."""
        return "/" in self.key

    @property
    def depth(self) -> int:
        """The order of the gradient that the call is in, or 0 for a forward call."""
        return self.key.count("/")

    @property
    def channel(self) -> str:
        """The calls among which this one is numbered; "" for those of all replicas."""
        return self.key.partition("/")[0].rpartition(":")[0]

    @property
    def number(self) -> str:
        """The number within its channel, from 0 on, of this or the forward call."""
        return self.key.partition("/")[0].rpartition(":")[2]

    @property
    def writes(self) -> str:
        """The assignment whose value the replicas agree on, for messages, or ""."""
        return ".".join(self.assignment[:2]) if self.assignment else ""

    @property
    def pairs_as(self) -> str:
        """What calls share to pair: the primitive, or "message" for sends and recvs."""
        return "message" if self.facts.end else self.primitive

    @property
    def scope(self) -> str:
        """The name scope of its real ops, which identifies them in traces of a step."""
        number = _NO_NAME.sub(".", self.key)
        return f"communicate/{self.pairs_as}/{number}"

    def __str__(self) -> str:
        options = "".join(
            f" {name}={value}"
            for name, value in self.options.items()
            if value is not None
        )
        if self.assignment:
            options += f" for {self.writes}"
        if self.channel and self.pairs_as != "message":
            options += f" group={list(self.group)}"
        values = self.agreed if self.pairs_as == "message" else self.operands
        text = "".join(f" {value}," for value in values[:3]).rstrip(",")
        more = f", ... ({len(values)} tensors)" if len(values) > 3 else ""
        origin = "in the gradient, " if self.backward else ""
        return f"{self.primitive}{options}{text}{more} {origin}at {self.line}"

    def site(self) -> str:
        """Returns the error message line that locates the call."""
        return f"replica {self.replica_id} ({self.device}): {self}"


@dataclasses.dataclass(frozen=True, eq=False)
class Placeholder:
    """A placeholder op and the call that it describes."""

    op: tf.Operation
    call: Call

    @property
    def construct(self) -> str:
        """The op's name in messages."""
        return "call"

    @property
    def calls(self) -> tuple[Call, ...]:
        """The one call, as a tuple; a `control_flow.Region` can have several."""
        return (self.call,)

    @property
    def replica_id(self) -> int:
        """The replica that calls."""
        return self.call.replica_id

    def site(self) -> str:
        """Returns the error message line that locates the op."""
        return self.call.site()

    def __str__(self) -> str:
        return str(self.call)

    @property
    def operands(self) -> tuple[tf.Tensor, ...]:
        """The tensors that the replica passes."""
        return tuple(self.op.inputs)

    @property
    def results(self) -> tuple[tf.Tensor, ...]:
        """The results but for the receipt, until they are rewired."""
        return tuple(self.op.outputs[: -1 if self.call.receipt else None])

    @property
    def receipt(self) -> tf.Tensor | None:
        """The receipt, if there is one, until it is rewired."""
        return self.op.outputs[-1] if self.call.receipt else None


# Takes a placeholder and the gradients of its results, in order; returns those of its
# operands, or None for an operand without one.
Gradient = Callable[[Placeholder, Sequence[tf.Tensor]], Sequence[tf.Tensor | None]]


def put(
    call: Call, operands: Sequence[tf.Tensor], results: Sequence[Value]
) -> tf.Operation:
    """Adds a placeholder op to the graph being built.

    Args:
        call: The description that the op will carry.
        operands: The tensors that the replica passes.
        results: The dtype and static shape of each output.

    Returns:
        The op; `op.outputs[k]` is the k-th result until it is rewired.
    """
    graph = tf.compat.v1.get_default_graph()
    override = graph.gradient_override_map({TYPE: GRADIENT_TYPE})
    # No device: the op never runs, and there is no kernel for it on accelerators.
    with tf.device(None), override:
        outputs = tf.raw_ops.PyFuncStateless(
            input=list(operands),
            token=token_of(call),
            Tout=[tf.as_dtype(value.dtype) for value in results],
            name=call.primitive,
        )
    op = outputs[0].op if results else graph.get_operations()[-1]
    for output, value in zip(op.outputs, results, strict=True):
        output.set_shape(value.shape)
    return op


def token_of(call: Call) -> str:
    """Encodes a call as the attribute by which a placeholder describes itself."""
    # Like dataclasses.asdict, but without its deep copy, which takes most of the time.
    fields = {
        **vars(call),
        "operands": list(map(vars, call.operands)),
        "agreed": list(map(vars, call.agreed)),
        "facts": vars(call.facts),
    }
    return _MARK + json.dumps(fields)


def set_key(op: tf.Operation, call: Call, key: str) -> None:
    """Changes the key of a placeholder op, which describes `call`."""
    ops.set_text_attr(op, "token", token_of(dataclasses.replace(call, key=key)))


def read(op: tf.Operation) -> Call | None:
    """Returns the call that a placeholder op describes; None for any other op."""
    if op.type != TYPE:
        return None
    return call_of(op.get_attr("token"))


@functools.lru_cache(maxsize=_CACHED)
def call_of(token: bytes) -> Call | None:
    """Returns the call that a placeholder's attribute describes; None for any other.

    Cached, since passes read each call many times, and the text of a call with hundreds
    of tensors is long.
    """
    text = token.decode()
    if not text.startswith(_MARK):
        return None
    fields = json.loads(text.removeprefix(_MARK))
    fields["group"] = tuple(fields["group"])
    fields["merged"] = tuple(fields["merged"])
    fields["assignment"] = fields["assignment"] and tuple(fields["assignment"])
    fields["facts"] = PrimitiveFacts(**fields["facts"])
    fields["policies"] = tuple(OperandPolicy(*policy) for policy in fields["policies"])
    for name in ("operands", "agreed"):
        fields[name] = tuple(
            Value(v["dtype"], None if v["shape"] is None else tuple(v["shape"]))
            for v in fields[name]
        )
    return Call(**fields)
