# SPDX-License-Identifier: Apache-2.0
"""Where in the control flow communication is.

While a step is built, `refuse_outside` refuses the places from which no communication
can be reached by the post-pass. Once it is built, `find_sites` finds the ops of one
level of a replica's graph that communicate: placeholders, and the conditionals, loops
and function calls that hold some, to any depth. It reads graphs and changes none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import tensorflow as tf

from replicator import _tf, errors
from replicator.graph.ir import placeholder, switching
from replicator.graph.ir.kinds import kind_of
from replicator.graph.ir.placeholder import Call, Placeholder
from replicator.graph.matching import factors
from replicator.graph.passes.owners import NOTHING_SHARED, Handles

# What each op that can be merged is called in messages. All others that call functions
# (tf.data, tf.py_function, ...) run them where no other replica can join.
CONSTRUCTS = {
    "If": "conditional",
    "StatelessIf": "conditional",
    "Case": "conditional",
    "StatelessCase": "conditional",
    "While": "loop",
    "StatelessWhile": "loop",
    "PartitionedCall": "function",
    "StatefulPartitionedCall": "function",
}


_V1 = (
    "in a conditional or a loop of TensorFlow 1",
    "call tf.compat.v1.enable_control_flow_v2() at the start of the program; "
    "communication works in the control flow of TensorFlow 2, in sessions too.",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """A conditional, a loop or a function call in which a replica communicates.

    Attributes:
        op: The op of this level.
        replica_id: The replica whose op it is.
        calls: What is called inside, in order, to any depth.
    """

    op: tf.Operation
    replica_id: int
    calls: tuple[Call, ...]

    @property
    def construct(self) -> str:
        """What the op is called in messages."""
        name = CONSTRUCTS[self.op.type]
        if "Case" in self.op.type:
            return f"{len(self.op.get_attr('branches'))}-way {name}"
        return name

    def site(self) -> str:
        """Returns the line of an error message that says where the op is."""
        return f"replica {self.replica_id} ({self.calls[0].device}): {self}"

    def __str__(self) -> str:
        shown = "; ".join(map(str, self.calls[:3]))
        more = f"; ... ({len(self.calls)} calls)" if len(self.calls) > 3 else ""
        return f"a {self.construct} ({self.op.name}) with {shown}{more}"


def refuse_outside(graph: tf.Graph, built: tf.Graph, what: str, line: str) -> None:
    """Raises unless a call is where the post-pass can find it.

    Args:
        graph: The graph that ops are being added to.
        built: The graph that the step is built into.
        what: The call, e.g. "all_reduce on replica 0".
        line: The user's line.

    Raises:
        ReplicatorError: The call is in a tf.init_scope, in control flow of
            TensorFlow 1, in a function that XLA compiles, or in a function that is no
            part of the step.
    """
    problem, fix = _obstacle(graph, built)
    if problem:
        raise errors.ReplicatorError(
            errors.compose(f"{what} is {problem}.", [f"at {line}"], fix)
        )


def _obstacle(graph: tf.Graph, built: tf.Graph) -> tuple[str, str]:
    """Returns (what is wrong with the place, the way out), or empty strings."""
    if tf.executing_eagerly():
        return "in a tf.init_scope", "communicate outside of it, in the step itself."
    while True:
        context = _tf.control_flow_context(graph)
        if context == "xla":
            return (
                "in a function with jit_compile=True, which XLA compiles for one "
                "device",
                "communicate before or after it, or leave jit_compile=True away.",
            )
        if context == "v1":
            return _V1
        if graph is built:
            return "", ""
        outer = getattr(graph, "outer_graph", None)
        if outer is None:
            return (
                f"in a graph that is no part of the step "
                f"({getattr(graph, 'name', '') or 'a tf.Graph'})",
                "communicate in the graph in which the step is built.",
            )
        graph = outer


def check_switches(ops: Iterable[tf.Operation], flow: switching.Flow) -> None:
    """Raises if communication is in control flow of TensorFlow 1.

    What `refuse_outside` does not see: a function that was traced outside of it, and is
    called inside.

    Args:
        ops: The ops of a step, at its top level.
        flow: What of them is there.

    Raises:
        ReplicatorError: It does.
    """
    for op in ops if flow else ():
        if op not in flow:
            continue
        call = placeholder.read(op)
        calls = calls_inside(op) if call is None else (call,)
        if calls:
            place, fix = _V1
            what = f"{calls[0].pairs_as} on replica {calls[0].replica_id}"
            sites = [call.site() for call in calls[:3]]
            raise errors.ReplicatorError(
                errors.compose(f"{what} is {place}.", sites, fix)
            )


def find_sites(
    ops: Iterable[tf.Operation], replica_id: int, handles: Handles = NOTHING_SHARED
) -> list[Placeholder | Region]:
    """Returns the ops that communicate, in order.

    Args:
        ops: The ops of one replica on one level.
        replica_id: That replica.
        handles: Tells the variables whose writes, in control flow, communicate.

    Raises:
        ReplicatorError: A call is in a function that is run by something other
            than a conditional, a loop or a call.
    """
    sites: list[Placeholder | Region] = []
    for op in ops:
        call = placeholder.read(op)
        if call is not None:
            sites.append(Placeholder(op, call))
            continue
        if not kind_of(op).calls:
            continue
        calls = (*calls_inside(op), *handles.calls_inside(op, replica_id))
        if not calls:
            continue
        if op.type not in CONSTRUCTS:
            raise errors.ReplicatorError(
                errors.compose(
                    f"replica {replica_id} communicates in a function that {op.type} "
                    "runs, where the other replicas cannot join.",
                    [call.site() for call in calls[:3]],
                    "communicate in the step itself, before or after it"
                    + (
                        "; to loop over a dataset, write `for x in iter(dataset)`."
                        if op.type.endswith("Dataset")
                        else "."
                    ),
                )
            )
        sites.append(Region(op, replica_id, calls))
    return sites


def calls_inside(op: tf.Operation) -> tuple[Call, ...]:
    """Returns the calls in the functions that `op` calls, each once, in order."""
    if not kind_of(op).calls:
        return ()
    return tuple({call.key: call for call in _calls_in(op)}.values())


def _calls_in(op: tf.Operation) -> Iterable[Call]:
    for _, body in _tf.called_graphs(op):
        for inner in body.get_operations():
            call = placeholder.read(inner)
            if call is not None:
                yield call
            elif kind_of(inner).calls:
                yield from _calls_in(inner)


def held(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a value that stays in place when the op that makes it is replaced.

    Where communication could replace a product by its factors, or rows be read in place
    of a variable, it also shows, as a consumer, that the whole is needed itself.
    """
    op = tensor.op
    replaced = op.type in factors.TAKEN_APART or op.type in (
        "ReadVariableOp",
        "GatherV2",
    )
    if not (replaced or placeholder.read(op) or kind_of(op).calls):
        return tensor
    with tf.device(tensor.device):
        return tf.identity(tensor)
