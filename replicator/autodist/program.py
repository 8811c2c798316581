# SPDX-License-Identifier: Apache-2.0
"""Sorts the ops of a single-device graph into those copied per replica and the rest.

Reads the user's graph and changes nothing. Its ops are of three kinds:

- *of replicas*: ops that compute and write variables; each replica gets a copy;
- *shared*: a single copy for all replicas: iterators, tables, queues, ops that save and
  restore, and everything these depend on. Initial values are among them, since they
  must be equal on all replicas;
- *handles* of variables, which each replica replaces with its own.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf, errors
from replicator.autodist import flows, marked, pulled, slots
from replicator.graph.ir import shapes, switching
from replicator.graph.ir.kinds import kind_of, resource_inputs

# Resources created once, and the ops that change them for all replicas.
_SHARED = re.compile(
    r"\w*Iterator(V2)?|MakeIterator|IteratorToStringHandle|IteratorFromStringHandle\w*"
    r"|\w*Dataset(V\d)?|\w*HashTable(V2)?|InitializeTable\w*|LookupTableImport(V2)?"
    r"|LookupTableExport(V2)?|\w*Queue(V2)?|QueueEnqueue\w*|QueueClose(V2)?"
    r"|QueueSize(V2)?|QueueIsClosed(V2)?|Save(V2|Slices)?|Restore(V2|Slice)?"
    r"|MergeV2Checkpoints|ShardedFilename|WriteFile|\w*Summary(Writer|FileWriter)\w*"
)
# Ops that create a resource which a step uses up within itself.
_OF_A_STEP = re.compile(r"TensorArray\w*|Stack\w*|Empty\w*|TensorList\w*|Optional\w*")
_REFUSED = re.compile(
    r"Variable(V2)?|TemporaryVariable|Barrier\w*|Stage|Unstage|Stage\w+|MapStage"
    r"|Collective\w+|Nccl\w+|_?Send|_?Recv|_?HostSend|_?HostRecv|\w*Conditional"
    r"Accumulator|AccumulatorApplyGradient|\w*Reader(V2)?|Mutex\w*|ConsumeMutexLock"
)
_PLACEHOLDERS = ("Placeholder", "PlaceholderWithDefault", "PlaceholderV2")


class Program:
    """The ops of a single-device graph at one point in time.

    Args:
        graph: The graph.
        variables: Those created in the scope: MarkedVariables, or descriptions of them.
        known: The Program of an earlier state of the graph, if there was one.
        is_split: Whether replicas get parts of what is fed; else each gets all of it.

    Attributes:
        is_split: Whether replicas get parts of what is fed.
        ops: All ops added since `known`, in order.
        shared: The ops with a single copy for all replicas.
        markers: The markers of variables' gradients, in order.

    Raises:
        UnsupportedError: An op cannot be copied.
    """

    def __init__(
        self,
        graph: tf.Graph,
        variables: Sequence[Any],
        known: Program | None = None,
        is_split: bool = True,
    ) -> None:
        self.graph = graph
        self.is_split: bool = is_split if known is None else known.is_split
        graph_ops = graph.get_operations()
        start: int = 0 if known is None else known.count
        self.count: int = len(graph_ops)
        self.ops = [op for op in graph_ops[start:] if not _tf.is_abandoned(op)]
        self.variables = {variable.op.name: variable for variable in variables}
        shared_before: Collection[tf.Operation] = () if known is None else known.shared
        self.shared: set[tf.Operation] = _shared(
            self.ops, self.variables, shared_before, self.splits
        )
        self.markers = [
            op for op in self.ops if marked.text(op, marked.GRADIENT) is not None
        ]
        self._flows: dict[tuple[frozenset[str], bool], set[tf.Operation]] = {}
        # The starts of differentiation, with their Value once weighted.
        self._begun: dict[tf.Operation, Any] = {} if known is None else known._begun
        self._refuse()

    def unsplit(self) -> Program | None:
        """Returns the program in which each replica computes the whole batch.

        None if iterators deal the elements, since no replica has the whole batch then.
        """
        if any(map(pulled.pulls, self.copied)):
            return None
        variables = list(self.variables.values())
        return Program(self.graph, variables, is_split=False)

    def splits(self, tensor: tf.Tensor) -> bool:
        """Whether a value fed for a tensor may be split."""
        return self.is_split and _splits(tensor)

    def variable_behind(self, tensor: tf.Tensor) -> Any:
        """Returns the variable that a tensor is a handle of, or None."""
        op = tensor.op
        name = marked.text(op, marked.READ) if op.type == "Identity" else op.name
        if op.type not in ("Identity", "VarHandleOp"):
            return None
        return self.variables.get(name or "")

    @functools.cached_property
    def copied(self) -> list[tf.Operation]:
        """The ops of which each replica gets a copy, in order."""
        return [
            op
            for op in self.ops
            if op not in self.shared and not is_handle(op, self.variables)
        ]

    @functools.cached_property
    def imported(self) -> list[tf.Operation]:
        """The shared ops, except handles of variables, in order."""
        variables = self.variables
        return [
            op for op in self.ops if op in self.shared and not is_handle(op, variables)
        ]

    @functools.cached_property
    def slots(self) -> dict[str, str]:
        """Maps the names of optimizer slots to those of their variables."""
        return slots.find(self.ops, self.variable_behind)

    def differing(
        self, fed: Iterable[str] = (), by_shape: bool = True
    ) -> set[tf.Operation]:
        """Returns the ops whose results differ between replicas.

        These depend on split, drawn or dealt values other than through the gradient of
        a variable, which is equal on all replicas.

        Args:
            fed: The names of further ops that are fed parts.
            by_shape: Whether to include ops that depend on shapes alone.
        """
        key = frozenset(fed), by_shape
        if key not in self._flows:
            graph_ops = self.graph.get_operations()[: self.count]
            fed_names = key[0]
            sources = [
                op for op in graph_ops if op.name in fed_names or self.gives_own(op)
            ]
            sources += self._begun
            self._flows[key] = self._downstream(sources, by_shape)
        return self._flows[key]

    def begin(self, start: tf.Operation, value: Any) -> None:
        """Records the Value of a start of differentiation on the replicas.

        Args:
            start: The op that differentiation starts from.
            value: Its `kinds.Value`.
        """
        self._begun[start] = value
        self._flows.clear()

    @property
    def flow(self) -> flows.Flow:
        """Which ops differ between replicas, and how."""
        start_values = {id(op.outputs[0]): value for op, value in self._begun.items()}
        differing, by_value = self.differing(), self.differing(by_shape=False)
        return flows.Flow(differing, by_value, start_values, self.control)

    @functools.cached_property
    def control(self) -> switching.Flow:
        """The conditionals and loops of TensorFlow 1."""
        return switching.Flow(self.graph.get_operations()[: self.count])

    @functools.cached_property
    def _decided(self) -> dict[tf.Operation, list[tf.Operation]]:
        """Maps each op that makes a predicate to the Merges of its conditional.

        Both branches may return constants, to which no data path from the predicate
        leads.
        """
        merges: dict[tf.Operation, list[tf.Operation]] = {}
        for op in self.graph.get_operations()[: self.count] if self.control else ():
            for tensor in self.control.deciders(op) or ():
                merges.setdefault(tensor.op, []).append(op)
        return merges

    def downstream(self, op: tf.Operation) -> set[tf.Operation]:
        """Returns an op and those that depend on it other than through gradients."""
        return self._downstream([op], by_shape=True)

    def _downstream(
        self, sources: Sequence[tf.Operation], by_shape: bool
    ) -> set[tf.Operation]:
        """Returns ops and those that depend on them other than through gradients."""
        dependents = set(sources)
        stack = list(sources)
        while stack:
            op = stack.pop()
            data_consumers = [c for tensor in op.outputs for c in tensor.consumers()]
            for consumer in (*data_consumers, *self._decided.get(op, ())):
                if consumer in dependents or consumer.type == "Const":
                    continue
                if marked.text(consumer, marked.GRADIENT) is not None:
                    continue
                if not by_shape and consumer.type in flows.SHAPES:
                    continue
                dependents.add(consumer)
                stack.append(consumer)
        return dependents

    def gives_own(self, op: tf.Operation) -> bool:
        """Whether an op gives each replica a different result."""
        if op in self.shared or not self.is_split:
            return False
        if op.type in _PLACEHOLDERS and marked.text(op, marked.GRADIENT) is None:
            return self.splits(op.outputs[0])
        return pulled.pulls(op) or flows.draws(op)

    def _refuse(self) -> None:
        variables = self.variables
        for op in self.ops:
            refusal = None
            if op.type == "VarHandleOp" and op.name not in variables:
                refusal = (
                    f"variable {op.name} was created outside AutoDist's scope, or "
                    "imported",
                    "enter autodist.scope() before the first variable is created; "
                    "build an imported graph by its program instead, and restore its "
                    "checkpoint with a Saver.",
                )
            elif _REFUSED.fullmatch(op.type):
                refusal = (
                    f"{op.type} {op.name} cannot be copied for each replica: it holds "
                    "state, or communicates by itself",
                    "use variables created in the scope, datasets and tables.",
                )
            elif op.type == "IteratorGetNextAsOptional":
                refusal = (
                    f"{op.type} {op.name} may have no element, so that the examples "
                    "of each replica cannot be counted",
                    "call get_next() of the iterator.",
                )
            elif op.type == "VarHandleOp" or op in self.shared:
                continue
            elif (
                kind_of(op).stateful
                and any(t.dtype == tf.resource for t in op.outputs)
                and not _OF_A_STEP.fullmatch(op.type)
                and not kind_of(op).calls
                and not resource_inputs(op)
            ):
                refusal = (
                    f"{op.type} {op.name} cannot be copied for each replica: it "
                    "creates an object that holds state",
                    "use a variable, a dataset's iterator or a table.",
                )
            if refusal is not None:
                problem, fix = refusal
                raise errors.UnsupportedError(
                    errors.compose(f"{problem}.", [f"at {errors.line_of(op)}"], fix)
                )


def _splits(tensor: tf.Tensor) -> bool:
    """Whether the first dimension of a tensor is unknown."""
    if tensor.dtype in (tf.resource, tf.variant):
        return False
    shape = shapes.static(tensor)
    return shape is None or shape[:1] == (None,)


def is_handle(op: tf.Operation, variables: Any) -> bool:
    """Whether an op makes a handle of a variable."""
    if op.type == "VarHandleOp":
        return True
    return op.type == "Identity" and marked.text(op, marked.READ) in variables


def _shared(
    ops: Sequence[tf.Operation],
    variables: Any,
    before: Collection[tf.Operation],
    splits: Callable[[tf.Tensor], bool],
) -> set[tf.Operation]:
    """Returns the ops with a single copy: certain types, and all they depend on."""
    new_ops = set(ops)
    shared = set(before)
    stack = [op for op in ops if _SHARED.fullmatch(op.type) or _is_whole(op, splits)]
    stack += _settings(ops)
    for variable in variables.values():
        if variable.initializer in new_ops:
            stack.append(variable.initializer.inputs[1].op)
    while stack:
        op = stack.pop()
        if op in shared or op not in new_ops or is_handle(op, variables):
            continue
        shared.add(op)
        stack += [tensor.op for tensor in op.inputs]
        stack += op.control_inputs
    return shared


def _is_whole(op: tf.Operation, splits: Callable[[tf.Tensor], bool]) -> bool:
    """Whether an op is fed a value that goes to all replicas unsplit."""
    if op.type not in _PLACEHOLDERS or splits(op.outputs[0]):
        return False
    return not op.inputs or op.inputs[0].op.type == "Const"


def _settings(ops: Sequence[tf.Operation]) -> list[tf.Operation]:
    """Returns placeholders of unknown rank that optimizers use: a learning rate."""
    stack = [op for op in ops if slots.UPDATES.fullmatch(op.type)]
    seen, placeholders = set(stack), []
    while stack:
        op = stack.pop()
        if op.type == "Placeholder" and op.outputs[0].shape.rank is None:
            placeholders.append(op)
        if marked.text(op, marked.GRADIENT) is None:
            sources = {tensor.op for tensor in op.inputs} - seen
            seen |= sources
            stack += sources
    return placeholders
