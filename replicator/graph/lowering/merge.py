# SPDX-License-Identifier: Apache-2.0
"""Merges the replicas' conditionals, loops or function calls into one op.

The merged op takes the concatenated inputs of all replicas, and calls functions that
hold the bodies of all replicas side by side. Inside, communication is matched, lowered
and rewired as on any other level. The merged op takes one branch or makes one number of
iterations; a replica that would have chosen otherwise causes an error at run time,
where other systems would hang.

Ops without communication inside stay as they are: there, replicas are independent.

Source: TF-Replicator (Buchlovsky et al. 2019, arXiv:1902.00465) rewrites the top level
of the graph; merging applies the same idea one level down.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator._tf import bodies, effects
from replicator._tf import functions as tf_functions
from replicator._tf import ops as tf_ops
from replicator.graph.lowering import crossing, inline, iterations
from replicator.graph.lowering.crossing import Ways
from replicator.graph.lowering.disagreement import agreed
from replicator.graph.lowering.record import Nesting, function_name
from replicator.graph.matching.control_flow import CONSTRUCTS, Region
from replicator.graph.order import phases
from replicator.graph.same.keys import Key, Keys, Loop, hashed

# Rewrites a level, from each replica's ops, the replicas' ids and the level's nesting;
# returns the ops, with merged ops in place of those they replace.
Rewrite = Callable[
    [Sequence[Sequence[tf.Operation]], Sequence[int], Nesting], list[list[tf.Operation]]
]

# What a replica does that answers False, and True; for messages.
_ITERATION = ("stops", "runs another iteration")
_BRANCH = ("takes the false branch", "takes the true branch")


@dataclasses.dataclass(frozen=True)
class Merge:
    """The arguments of `merge`.

    Attributes:
        regions: The ops, in replica order, of one construct.
        rewrite: Rewrites what is inside.
        labels: Identifies values that are the same on all replicas.
        nesting: Where the ops are.
        ways: The channels to replicas built by other processes, if any.
    """

    regions: Sequence[Region]
    rewrite: Rewrite
    labels: Keys
    nesting: Nesting
    ways: Ways | None

    @property
    def is_stateful(self) -> bool:
        """Whether the merged op runs even if nothing needs its results.

        Between processes, others may wait for what it sends.
        """
        return self.ways is not None or any(
            not region.op.type.startswith(("Stateless", "Partitioned"))
            for region in self.regions
        )


def merge(
    regions: Sequence[Region],
    rewrite: Rewrite,
    labels: Keys,
    nesting: Nesting,
    ways: Ways | None = None,
) -> tf.Operation:
    """Replaces one op per replica by one op for all of them.

    Args:
        regions: The ops, in replica order, of one construct.
        rewrite: Rewrites what is inside.
        labels: Identifies values that are the same on all replicas.
        nesting: Where the ops are.
        ways: The channels to replicas built by other processes, if any.

    Returns:
        The merged op. It has all consumers and all control inputs of the ops it
        replaces.

    Raises:
        MismatchError: What is inside differs between the replicas.
    """
    old = [region.op for region in regions]
    before = list(dict.fromkeys(op for o in old for op in o.control_inputs))
    construct = CONSTRUCTS[old[0].type]
    build = {"conditional": _conditional, "loop": _loop, "function": _call}[construct]
    with tf.control_dependencies(None), tf.device(None):
        with tf.name_scope(f"merged_{construct}"):
            new = build(Merge(regions, rewrite, labels, nesting, ways))
    tf_ops.add_control_inputs(new, before)
    tf_ops.set_read_only_inputs(new, _read_only(old, new))
    outputs = iter(new.outputs)
    for op in old:
        for tensor in op.outputs:
            result = next(outputs)
            tf_ops.copy_handle_data(tensor, result)
            tf_ops.replace(tensor, result)
        tf_ops.move_control_outputs(op, new)
    tf_ops.abandon(old)
    return new


def _read_only(old: Sequence[tf.Operation], new: tf.Operation) -> list[int]:
    """Returns the indices of the merged op's inputs that are read-only resources."""
    reads = set[int]()
    writes = set[int]()
    for op in old:
        read_ids, written_ids = effects.resources_touched(op)
        reads, writes = reads | read_ids, writes | written_ids
    return [n for n, t in enumerate(new.inputs) if id(t) in reads - writes]


def _loop(request: Merge) -> tf.Operation:
    old, labels = [region.op for region in request.regions], request.labels
    outputs = [tensor for op in old for tensor in op.outputs]

    same_iterations = []

    def agree(conditions: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        same_iterations.append(labels.same(conditions))
        return [_agreed(request, conditions, _ITERATION)]

    input_labels = [Loop(labels, op).keys() for op in old]
    inside = request.nesting.inside("loop condition", None)
    condition = _function(request, "cond", inside, input_labels, agree)
    total = iterations.count(old[0]) if same_iterations[0] else None
    inside = request.nesting.inside("loop body", total)
    body = _function(request, "body", inside, input_labels)
    new = bodies.add_lowered(
        tf.raw_ops.While if request.is_stateful else tf.raw_ops.StatelessWhile,
        input=[tensor for op in old for tensor in op.inputs],
        cond=condition,
        body=body,
        output_shapes=[tensor.shape for tensor in outputs],
        parallel_iterations=max(op.get_attr("parallel_iterations") for op in old),
    )
    count = labels.new()  # of iterations, which is the same for all of them
    for tensor, label in zip(new.outputs, itertools.chain(*input_labels), strict=True):
        labels.set(tensor, hashed("after", [count, label]))
    return new


def _conditional(request: Merge) -> tf.Operation:
    old = [region.op for region in request.regions]
    is_case = "Case" in old[0].type
    chosen = _agreed(
        request, [op.inputs[0] for op in old], None if is_case else _BRANCH
    )
    input_labels = [
        [request.labels.of(tensor) for tensor in op.inputs[1:]] for op in old
    ]
    names = [("then_branch", "true", 0), ("else_branch", "false", 0)]
    if is_case:
        count = len(old[0].get_attr("branches"))
        names = [("branches", f"branch {n}", n) for n in range(count)]
    branches = []
    for attribute, name, position in names:
        inside = request.nesting.inside(f"conditional ({name})", None)
        branches.append(
            _function(request, attribute, inside, input_labels, position=position)
        )
    outputs = [tensor for op in old for tensor in op.outputs]
    return bodies.add_conditional(
        chosen,
        is_case,
        branches,
        [tensor for op in old for tensor in op.inputs[1:]],
        [tensor.dtype for tensor in outputs],
        [tensor.shape for tensor in outputs],
        request.is_stateful,
    )


def _call(request: Merge) -> tf.Operation:
    old = [region.op for region in request.regions]
    input_labels = [[request.labels.of(tensor) for tensor in op.inputs] for op in old]
    inside = request.nesting.inside(function_name(old[0]))
    body = _function(request, "f", inside, input_labels)
    arguments = [tensor for op in old for tensor in op.inputs]
    outputs = [tensor for op in old for tensor in op.outputs]
    dtypes = [tensor.dtype for tensor in outputs]
    if _in_session():
        # A session does not inline function calls, and hides which op failed inside
        # one; it does inline a conditional with a single branch.
        output_shapes = [tensor.shape for tensor in outputs]
        return bodies.add_conditional(
            0, True, [body], arguments, dtypes, output_shapes, request.is_stateful
        )
    raw = tf.raw_ops
    kind = raw.StatefulPartitionedCall if request.is_stateful else raw.PartitionedCall
    kind(args=arguments, Tout=dtypes, f=body)  # returns results, if there are any
    return tf.compat.v1.get_default_graph().get_operations()[-1]


def _agreed(
    request: Merge, answers: Sequence[tf.Tensor], outcomes: tuple[str, str] | None
) -> tf.Tensor:
    depth = len(request.nesting.path)
    return agreed(
        request.regions, answers, outcomes, request.labels, request.ways, depth
    )


def _in_session() -> bool:
    """Whether the outermost graph is run by a session rather than as a function."""
    with tf.init_scope():
        return not tf.executing_eagerly()


def _function(
    request: Merge,
    attribute: str,
    nesting: Nesting,
    labels_by_replica: Sequence[Sequence[Key]],
    finish: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]] | None = None,
    position: int = 0,
) -> Any:
    """Adds a function that holds one function of each replica.

    Args:
        request: The ops that call the functions.
        attribute: The attribute that names these, e.g. "body".
        nesting: Where the functions are.
        labels_by_replica: `labels_by_replica[n][k]` is the label of the n-th replica's
            k-th argument.
        finish: Maps the results of all replicas to the results of the merged function.
        position: The index of the function in an attribute that lists several.

    Returns:
        The merged function's name, as an op attribute.
    """
    regions = request.regions
    joint = tf_functions.new_function_graph(f"merged_{attribute}")
    functions = [tf_functions.function_body(r.op, attribute, position) for r in regions]
    arguments = [
        _arguments(joint, graph.inputs, own_labels, request.labels)
        for (graph, _), own_labels in zip(functions, labels_by_replica, strict=True)
    ]
    with joint.as_default():
        copies = [
            inline.copy(*function, tensors, f"replica_{region.replica_id}")
            for region, function, tensors in zip(
                regions, functions, arguments, strict=True
            )
        ]
        ids = [region.replica_id for region in regions]
        rewritten = request.rewrite([copy.ops for copy in copies], ids, nesting)
        must_run = _renamed(copies, rewritten)
        returned = [tensor for copy in copies for tensor in copy.results]
        if finish is not None:
            returned = list(finish(returned))
        results = [tensor.op for tensor in returned]
        if request.ways is not None:
            must_run += crossing.ops_of(joint)
        failing = phases.separate([*must_run, *results], frozenset())
        must_run += phases.joint(failing)  # what waits for a call waits for all of them
        if attribute == "cond" and must_run:  # the loop uses nothing but its result
            with tf.device(returned[0].device), tf.control_dependencies(must_run):
                returned = [tf.identity(returned[0])]
    return tf_functions.finish_function(joint, returned, list(dict.fromkeys(must_run)))


def _arguments(
    joint: Any,
    like: Sequence[tf.Tensor],
    own_labels: Sequence[Key],
    labels: Keys,
) -> list[tf.Tensor]:
    """Adds the arguments of one replica's function to a function graph."""
    arguments = tf_functions.add_inputs(joint, like, [tensor.shape for tensor in like])
    for argument, label in zip(arguments, own_labels, strict=True):
        labels.set(argument, label)
    return arguments


def _renamed(
    copies: Sequence[inline.InlinedFunction],
    rewritten: Sequence[Sequence[tf.Operation]],
) -> list[tf.Operation]:
    """Returns the ops that must run, with merged ops in place of those they replace."""
    renamed = {
        old: new
        for copy, after in zip(copies, rewritten, strict=True)
        for old, new in zip(copy.ops, after, strict=True)
    }
    return [renamed.get(op, op) for copy in copies for op in copy.must_run]
