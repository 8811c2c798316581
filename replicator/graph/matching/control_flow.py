# SPDX-License-Identifier: Apache-2.0
"""Locates communication within control flow.

While a step is built, `refuse_outside` rejects calls in places the post-pass cannot
reach. Afterwards, `find_sites` finds the communicating ops on one level of a replica's
graph: placeholders, and the conditionals, loops and function calls that contain some,
to any depth. Reads graphs and changes none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import tensorflow as tf

from replicator import errors
from replicator._tf import control_flow
from replicator.graph.ir import placeholder, walk
from replicator.graph.ir.kinds import kind_of
from replicator.graph.ir.placeholder import Call, Placeholder
from replicator.graph.matching import factors
from replicator.graph.passes.owners import NOTHING_SHARED, Handles

# The op types that can be merged, with their names in messages. Any other op that calls
# functions (tf.data, tf.py_function, ...) runs them where no other replica can join.
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


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """A conditional, loop or function call inside which a replica communicates.

    Attributes:
        op: The op on this level.
        replica_id: The replica that built it.
        calls: The communication calls inside it, in order, to any depth.
    """

    op: tf.Operation
    replica_id: int
    calls: tuple[Call, ...]

    @property
    def construct(self) -> str:
        """The op's name in messages."""
        name = CONSTRUCTS[self.op.type]
        if "Case" in self.op.type:
            return f"{len(self.op.get_attr('branches'))}-way {name}"
        return name

    def site(self) -> str:
        """Returns the error message line that locates the op."""
        return f"replica {self.replica_id} ({self.calls[0].device}): {self}"

    def __str__(self) -> str:
        text = "; ".join(map(str, self.calls[:3]))
        more = f"; ... ({len(self.calls)} calls)" if len(self.calls) > 3 else ""
        return f"a {self.construct} ({self.op.name}) with {text}{more}"


def refuse_outside(graph: tf.Graph, step_graph: tf.Graph, what: str, line: str) -> None:
    """Refuses a call in a place that the post-pass does not reach.

    Args:
        graph: The graph to which ops are being added.
        step_graph: The graph into which the step is built.
        what: The call, e.g. "all_reduce on replica 0".
        line: The user's line.

    Raises:
        ReplicatorError: The call is in a tf.init_scope, in a function compiled by XLA,
            or in a function outside the step.
    """
    problem, fix = _obstacle(graph, step_graph)
    if problem:
        raise errors.ReplicatorError(f"{what} is {problem}.", [f"at {line}"], fix)


def _obstacle(graph: tf.Graph, step_graph: tf.Graph) -> tuple[str, str]:
    """Returns (problem with the place, fix), or empty strings if there is none."""
    if tf.executing_eagerly():
        return "in a tf.init_scope", "communicate outside of it, in the step itself."
    while True:
        if control_flow.is_compiled(graph):
            return (
                "in a function with jit_compile=True, which XLA compiles for one "
                "device",
                "communicate before or after it, or leave out jit_compile=True.",
            )
        if graph is step_graph:
            return "", ""
        outer = getattr(graph, "outer_graph", None)
        if outer is None:
            return (
                f"in a graph that is not part of the step "
                f"({getattr(graph, 'name', '') or 'a tf.Graph'})",
                "communicate in the graph in which the step is built.",
            )
        graph = outer


def find_sites(
    ops: Iterable[tf.Operation], replica_id: int, handles: Handles = NOTHING_SHARED
) -> list[Placeholder | Region]:
    """Returns the ops that communicate, in order.

    Args:
        ops: One replica's ops on one level.
        replica_id: The replica.
        handles: Identifies the variables that communicate when written in control flow.

    Raises:
        ReplicatorError: A call is in a function run by something other than a
            conditional, a loop or a function call.
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
                f"replica {replica_id} communicates in a function that {op.type} runs, "
                "where the other replicas cannot join.",
                [call.site() for call in calls[:3]],
                "communicate in the step itself, before or after it"
                + (
                    "; to loop over a dataset, write `for x in iter(dataset)`."
                    if op.type.endswith("Dataset")
                    else "."
                ),
            )
        sites.append(Region(op, replica_id, calls))
    return sites


def calls_inside(op: tf.Operation) -> tuple[Call, ...]:
    """Returns the distinct calls in the functions that `op` calls, in order."""
    if not kind_of(op).calls:
        return ()
    calls = map(placeholder.read, walk.at_any_depth([op]))
    return tuple({call.key: call for call in calls if call is not None}.values())


def identity_if_rewired(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor, or an identity of it if rewiring may replace its op.

    The identity also counts as a consumer of the whole value; otherwise communication
    could replace a product by its factors, or a read of a variable by a read of some
    rows.
    """
    op = tensor.op
    replaced = op.type in factors.TRACED_OPS or op.type in (
        "ReadVariableOp",
        "GatherV2",
        "VariableShape",
    )
    if not (replaced or placeholder.read(op) or kind_of(op).calls):
        return tensor
    with tf.device(tensor.device):
        return tf.identity(tensor)
