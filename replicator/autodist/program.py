# SPDX-License-Identifier: Apache-2.0
"""What a single-device graph holds: what is copied for each replica, and what is not.

Looks at the user's graph and changes nothing. Its ops are of three kinds:

- *of replicas*: what computes and writes variables; each replica gets a copy;
- *shared*: there once, for all replicas. What holds the elements of an iterator, a
  table, a queue; what saves and restores; and all that these are made of, as initial
  values are, which must be the same on all replicas;
- *handles* of variables, which each replica has in its own way.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf, errors
from replicator.autodist import flows, marked, slots
from replicator.graph.ir import switching
from replicator.graph.ir.kinds import kind_of, resource_inputs

# Made once, and what changes them for all replicas.
_SHARED = re.compile(
    r"\w*Iterator(V2)?|MakeIterator|IteratorToStringHandle|IteratorFromStringHandle\w*"
    r"|\w*Dataset(V\d)?|\w*HashTable(V2)?|InitializeTable\w*|LookupTableImport(V2)?"
    r"|LookupTableExport(V2)?|\w*Queue(V2)?|QueueEnqueue\w*|QueueClose(V2)?"
    r"|QueueSize(V2)?|QueueIsClosed(V2)?|Save(V2|Slices)?|Restore(V2|Slice)?"
    r"|MergeV2Checkpoints|ShardedFilename|WriteFile|\w*Summary(Writer|FileWriter)\w*"
)
# Each replica's gives other elements, and holds the next until it is asked.
ELEMENTS = re.compile(r"IteratorGetNext(Sync)?|QueueDequeue\w*|ReaderRead\w*")
# What makes a resource that a step uses up by itself.
_OF_A_STEP = re.compile(r"TensorArray\w*|Stack\w*|Empty\w*|TensorList\w*|Optional\w*")
_REFUSED = re.compile(
    r"Variable(V2)?|TemporaryVariable|Barrier\w*|Stage|Unstage|Stage\w+|MapStage"
    r"|Collective\w+|Nccl\w+|_?Send|_?Recv|_?HostSend|_?HostRecv|\w*Conditional"
    r"Accumulator|AccumulatorApplyGradient|\w*Reader(V2)?|Mutex\w*|ConsumeMutexLock"
)
_PLACEHOLDERS = ("Placeholder", "PlaceholderWithDefault", "PlaceholderV2")


class Program:
    """The ops of a single-device graph up to now.

    Args:
        graph: The graph.
        variables: Those made in the scope: MarkedVariables, or what describes them.
        known: What was known of it when it had fewer ops, if that was looked at.
        is_split: Whether replicas have parts of what is fed; else each has all of it.

    Attributes:
        is_split: Whether they have.
        ops: All that were added since, in order.
        shared: Those that are there once.
        markers: The gradients of variables, in order.

    Raises:
        UnsupportedError: There is an op that cannot be copied.
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
        every = graph.get_operations()
        start: int = 0 if known is None else known.count
        self.count: int = len(every)
        self.ops = [op for op in every[start:] if not _tf.is_abandoned(op)]
        self.variables = {one.op.name: one for one in variables}
        before: Collection[tf.Operation] = () if known is None else known.shared
        self.shared: set[tf.Operation] = _shared(
            self.ops, self.variables, before, self.splits
        )
        self.markers = [
            op for op in self.ops if marked.text(op, marked.GRADIENT) is not None
        ]
        self._flows: dict[tuple[frozenset[str], bool], set[tf.Operation]] = {}
        # From where differentiation starts, and what that is once it is weighed.
        self._begun: dict[tf.Operation, Any] = {} if known is None else known._begun
        self._refuse()

    def unsplit(self) -> Program | None:
        """Returns the program, computed of whole batches by each replica.

        None if iterators deal the elements: none of them has the whole.
        """
        if any(ELEMENTS.fullmatch(op.type) for op in self.copied):
            return None
        own = list(self.variables.values())
        return Program(self.graph, own, is_split=False)

    def splits(self, tensor: tf.Tensor) -> bool:
        """Whether what is fed for a tensor may be split."""
        return self.is_split and _splits(tensor)

    def variable_behind(self, tensor: tf.Tensor) -> Any:
        """Returns the variable of which a tensor is a handle, if it is one."""
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
        """The shared ops, but for handles of variables, in order."""
        own = self.variables
        return [op for op in self.ops if op in self.shared and not is_handle(op, own)]

    @functools.cached_property
    def slots(self) -> dict[str, str]:
        """The variables that optimizers update with another, by their names."""
        return slots.find(self.ops, self.variable_behind)

    def differing(
        self, fed: Iterable[str] = (), by_shape: bool = True
    ) -> set[tf.Operation]:
        """Returns the ops whose results differ between replicas.

        They depend on what is split, drawn or dealt, and not through the gradient of a
        variable, which is the same on all.

        Args:
            fed: The names of ops without which nothing is split, and that are fed.
            by_shape: Whether what depends on the shape alone differs, too.
        """
        key = frozenset(fed), by_shape
        if key not in self._flows:
            every = self.graph.get_operations()[: self.count]
            names = key[0]
            sources = [op for op in every if op.name in names or self.gives_own(op)]
            sources += self._begun
            self._flows[key] = self._downstream(sources, by_shape)
        return self._flows[key]

    def begin(self, start: tf.Operation, value: Any) -> None:
        """Notes what something is on replicas from where differentiation starts.

        Args:
            start: From where it does.
            value: What is known of that, a `kinds.Value`.
        """
        self._begun[start] = value
        self._flows.clear()

    @property
    def flow(self) -> flows.Flow:
        """What differs between replicas."""
        given = {id(op.outputs[0]): value for op, value in self._begun.items()}
        differing, by_value = self.differing(), self.differing(by_shape=False)
        return flows.Flow(differing, by_value, given, self.control)

    @functools.cached_property
    def control(self) -> switching.Flow:
        """The conditionals and loops of TensorFlow 1."""
        return switching.Flow(self.graph.get_operations()[: self.count])

    @functools.cached_property
    def _decided(self) -> dict[tf.Operation, list[tf.Operation]]:
        """What is returned from either side of conditionals, by what says from which.

        On both sides there may be constants: nothing that differs leads to them.
        """
        found: dict[tf.Operation, list[tf.Operation]] = {}
        for op in self.graph.get_operations()[: self.count] if self.control else ():
            for tensor in self.control.deciders(op) or ():
                found.setdefault(tensor.op, []).append(op)
        return found

    def downstream(self, op: tf.Operation) -> set[tf.Operation]:
        """Returns an op and those that depend on it, but not through gradients."""
        return self._downstream([op], by_shape=True)

    def _downstream(
        self, sources: Sequence[tf.Operation], by_shape: bool
    ) -> set[tf.Operation]:
        """Returns ops and those that are given their results, but not by gradients."""
        found = set(sources)
        stack = list(sources)
        while stack:
            op = stack.pop()
            given = [one for tensor in op.outputs for one in tensor.consumers()]
            for consumer in (*given, *self._decided.get(op, ())):
                if consumer in found or consumer.type == "Const":
                    continue
                if marked.text(consumer, marked.GRADIENT) is not None:
                    continue
                if not by_shape and consumer.type in flows.SHAPES:
                    continue
                found.add(consumer)
                stack.append(consumer)
        return found

    def gives_own(self, op: tf.Operation) -> bool:
        """Whether an op gives each replica something else."""
        if op in self.shared or not self.is_split:
            return False
        if op.type in _PLACEHOLDERS and marked.text(op, marked.GRADIENT) is None:
            return self.splits(op.outputs[0])
        if ELEMENTS.fullmatch(op.type):
            return True
        return flows.draws(op)

    def _refuse(self) -> None:
        own = self.variables
        for op in self.ops:
            what = None
            if op.type == "VarHandleOp" and op.name not in own:
                what = (
                    f"variable {op.name} was made outside of AutoDist's scope",
                    "enter autodist.scope() before the first variable is made.",
                )
            elif _REFUSED.fullmatch(op.type):
                what = (
                    f"{op.type} {op.name} cannot be copied for each replica: it holds "
                    "a state, or communicates by itself",
                    "use variables made in the scope, datasets and tables.",
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
                what = (
                    f"{op.type} {op.name} cannot be copied for each replica: it makes "
                    "something that holds a state",
                    "let it be a variable, a dataset's iterator or a table.",
                )
            if what is not None:
                problem, fix = what
                raise errors.UnsupportedError(
                    errors.compose(f"{problem}.", [f"at {errors.line_of(op)}"], fix)
                )


def _splits(tensor: tf.Tensor) -> bool:
    """Whether the first size of a tensor is not known."""
    shape = tensor.shape
    if tensor.dtype in (tf.resource, tf.variant):
        return False
    return shape.rank is None or (shape.rank > 0 and shape[0] is None)


def is_handle(op: tf.Operation, variables: Any) -> bool:
    """Whether an op stands for a variable."""
    if op.type == "VarHandleOp":
        return True
    return op.type == "Identity" and marked.text(op, marked.READ) in variables


def _shared(
    ops: Sequence[tf.Operation],
    variables: Any,
    before: Collection[tf.Operation],
    splits: Callable[[tf.Tensor], bool],
) -> set[tf.Operation]:
    """Returns the ops that are there once: some by their types, and their sources."""
    new = set(ops)
    shared = set(before)
    stack = [op for op in ops if _SHARED.fullmatch(op.type) or _is_whole(op, splits)]
    stack += _settings(ops)
    for variable in variables.values():
        if variable.initializer in new:
            stack.append(variable.initializer.inputs[1].op)
    while stack:
        op = stack.pop()
        if op in shared or op not in new or is_handle(op, variables):
            continue
        shared.add(op)
        stack += [tensor.op for tensor in op.inputs]
        stack += op.control_inputs
    return shared


def _is_whole(op: tf.Operation, splits: Callable[[tf.Tensor], bool]) -> bool:
    """Whether an op is fed a value that goes to all replicas as it is."""
    if op.type not in _PLACEHOLDERS or splits(op.outputs[0]):
        return False
    return not op.inputs or op.inputs[0].op.type == "Const"


def _settings(ops: Sequence[tf.Operation]) -> list[tf.Operation]:
    """Returns placeholders of unknown rank that optimizers use: a learning rate."""
    stack = [op for op in ops if slots.UPDATES.fullmatch(op.type)]
    seen, found = set(stack), []
    while stack:
        op = stack.pop()
        if op.type == "Placeholder" and op.outputs[0].shape.rank is None:
            found.append(op)
        if marked.text(op, marked.GRADIENT) is None:
            sources = {tensor.op for tensor in op.inputs} - seen
            seen |= sources
            stack += sources
    return found
