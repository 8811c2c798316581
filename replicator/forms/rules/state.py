# SPDX-License-Identifier: Apache-2.0
"""Rules of variables, and of what pulls elements from iterators and queues.

An op that has state and no rule runs once, on replica 0, which sends its results to
all: prints, summaries, tables, functions of Python. Random numbers are in random.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator._tf import frames
from replicator.forms.forms import REPLICATED, Fact, Form, Layout, Partial, Sharded
from replicator.forms.rule import (
    AS_IS,
    Need,
    OpPlan,
    about,
    is_partial,
    plan,
    refused,
    replicated,
    rule,
)
from replicator.graph.ir import shapes

# All ops that optimizers and sparse updates are.
_APPLYING = ("ResourceApply", "ResourceSparseApply", "ResourceScatter")
_UPDATES = " ".join(name for name in dir(tf.raw_ops) if name.startswith(_APPLYING))
_ASSIGNING = """
    AssignVariableOp AssignAddVariableOp AssignSubVariableOp DestroyResourceOp
    ResourceCountUpTo ResourceStridedSliceAssign
    """
# What becomes of a sum follows from what becomes of each summand.
_ADDING = re.compile(
    "Assign(Add|Sub)?VariableOp|DestroyResourceOp|ResourceStridedSliceAssign|"
    "ResourceScatter(Nd)?(Add|Sub|Update)"
)
_GENERATORS = """
    RngReadAndSkip RngSkip StatefulRandomBinomial StatefulStandardNormal
    StatefulStandardNormalV2 StatefulTruncatedNormal StatefulUniform
    StatefulUniformFullInt StatefulUniformInt
    """
_DATASETS = """
    FilterDataset FlatMapDataset GeneratorDataset GroupByReducerDataset
    GroupByWindowDataset InterleaveDataset MapAndBatchDataset MapDataset
    ParallelFilterDataset ParallelInterleaveDatasetV4 ParallelMapDatasetV2
    ReduceDataset ScanDataset TakeWhileDataset
    """


@rule("ReadVariableOp")
def read(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan:
    """Reads a variable, whose form is that of its value."""
    return plan(op, [AS_IS], facts[0].form)


@rule(_UPDATES + _ASSIGNING)
def update(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan:
    """Gives each replica's variable what one device's gets: sums are added up here.

    A variable that is itself a sum, like a metric's, gets a part of what is added.

    Raises:
        UnsupportedError: It is a sum, and the op does not add to it.
    """
    if is_partial(facts[0]) and not _ADDING.fullmatch(op.type):
        raise refused(
            op,
            f"{op.name} ({op.type}) updates a variable of which each replica holds a "
            "summand (ON_READ, SUM), by other than a sum.",
            "update it by assign(), or create it without `synchronization`.",
        )
    needs: list[Need] = []
    for arg, tensor in zip(op.op_def.input_arg, op.inputs, strict=True):
        is_place = arg.name in ("indices", "begin", "end", "strides")
        like: Form = REPLICATED if is_place else facts[0].form
        needs.append(AS_IS if tensor.dtype == tf.resource else like)
    return plan(op, needs, REPLICATED)


@rule(_GENERATORS)
def of_generator(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan:
    """Advances the state of each replica's generator; replica 0's is that of all.

    The library gives each replica a generator of another seed, so that steps that are
    written for a replica draw other numbers on each.
    """

    def build(replica: Any, op: tf.Operation, inputs: Sequence[Any]) -> list[tf.Tensor]:
        made = replica.stamp(op, inputs)
        own = [replica.convert(x, REPLICATED, Partial()) for x in made]
        return replica.sums(own) if own else []

    return plan(op, [AS_IS], REPLICATED, build=build)


@rule("IteratorGetNext IteratorGetNextSync QueueDequeueManyV2 QueueDequeueUpToV2")
def pulled(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan:
    """Pulls one element for all, as on one device; each replica takes its rows.

    Which axis is a batch changes no number, only who computes what.
    """
    of_rows = [one and not scope.in_branch for one in _are_batches(op.outputs)]
    rows = shapes.size(op.outputs[of_rows.index(True)], 0) if any(of_rows) else None
    layout = Layout(f"rows of {op.name}", scope.depth, rows)

    def build(replica: Any, op: tf.Operation, inputs: Sequence[Any]) -> list[tf.Tensor]:
        results = list(replica.once(op, inputs))
        batches = [x for x, is_batch in zip(results, of_rows, strict=True) if is_batch]
        if batches:
            replica.deal(layout, tf.shape(batches[0])[0])
            results = _of_as_many_rows(op, results, batches)
        return [
            replica.convert(x, REPLICATED, Sharded(0, layout)) if is_batch else x
            for x, is_batch in zip(results, of_rows, strict=True)
        ]

    forms = [Sharded(0, layout) if is_batch else REPLICATED for is_batch in of_rows]
    return OpPlan([AS_IS] * len(facts), [Fact(form) for form in forms], build=build)


@rule("IteratorFromStringHandle IteratorFromStringHandleV2")
def by_handle(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan:
    """Finds the iterator of a handle, which is where all iterators are."""

    def build(replica: Any, op: tf.Operation, inputs: Sequence[Any]) -> list[tf.Tensor]:
        with tf.device("CPU:0"):
            made: list[tf.Tensor] = replica.stamp(op, inputs)
            return made

    return replicated(op, build=build)


@rule("IteratorGetNextAsOptional")
def optional_elements(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan:
    """Refuses to loop over an iterator: an optional element is not communicated.

    Raises:
        UnsupportedError: Always.
    """
    raise refused(
        op,
        f"{op.name} pulls an element that may be missing, as a loop over an iterator "
        "does: replicas cannot share it.",
        "loop outside of the function, or call next(iterator) in it.",
    )


@rule(_DATASETS)
def dataset(op: tf.Operation, facts: list[Fact], scope: Any) -> None:
    """Refuses a function of a dataset that uses variables.

    Raises:
        UnsupportedError: It does.
    """
    if any(t.dtype == tf.resource for t in op.inputs):
        raise refused(
            op,
            f"{op.name} ({op.type}) calls a function that uses a variable or a table: "
            "datasets run apart from the replicas.",
            "loop over the dataset outside of the function.",
        )


def _are_batches(outputs: Sequence[tf.Tensor]) -> list[bool]:
    """Returns which components of an element are divided among the replicas.

    Those with an unknown number of rows, or else those with as many as the first one.
    """
    lengths = [shapes.size(out, 0) if out.shape.rank else 1 for out in outputs]
    known = next((n for n in lengths if n != 1), 1)
    wanted = None if None in lengths else known
    return [
        n == wanted != 1 and out.dtype not in (tf.variant, tf.resource)
        for n, out in zip(lengths, outputs, strict=True)
    ]


def _of_as_many_rows(
    op: tf.Operation, results: Sequence[tf.Tensor], batches: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns the components of an element; fails if batches differ in their rows."""
    if len(batches) < 2 or shapes.size(batches[0], 0) is not None:
        return list(results)
    text = errors.compose(
        f"the tensors of an element of {op.name} have different numbers of rows.",
        [f"at {errors.innermost(frames.user_frames(op))}"],
        "give those that are no batches a first axis of known size: dataset.map with "
        "x[None], say, and x[0] in the program.",
    )
    first = tf.shape(batches[0])[0]
    checks = [
        tf.debugging.assert_equal(tf.shape(one)[0], first, text) for one in batches[1:]
    ]
    with tf.control_dependencies(checks):
        return [tf.identity(x) for x in results]


rule("VarIsInitializedOp VariableShape")(about)
