# SPDX-License-Identifier: Apache-2.0
"""Decides whether values are equal on all replicas by construction, and if not, why.

Traces back from one tensor per replica, side by side. Values are equal if they are one
tensor, results that a collective returns to all replicas, reads of one variable after
the same writes, or computed by the same stateless op from equal values; likewise inside
conditionals, loops and functions. Reads graphs and changes none; runs before anything
is rewired.

`value_numbering.Labels` numbers the values of a graph while it is rewired; this module
also tracks the order in which variables are written, and names the op that makes values
differ.

Source: value numbering (Cocke and Schwartz 1970, Programming languages and their
compilers); loops are assumed equal until that is refuted, as in Alpern, Wegman and
Zadeck 1988, Detecting equality of variables in programs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import tensorflow as tf

from replicator._tf import effects as tf_effects
from replicator._tf import functions as tf_functions
from replicator.graph.equal.outside import Arguments, Column, Inputs, Ops
from replicator.graph.equal.value_numbering import is_pure
from replicator.graph.ir import placeholder
from replicator.graph.ir.kinds import acting, chooses, kind_of, resource_inputs
from replicator.graph.matching import control_flow
from replicator.graph.order import effects

_LOOPS = ("While", "StatelessWhile")


class Level:
    """The ops of all replicas on one level of the graph, side by side.

    Attributes:
        writes: `writes[r]` maps the id of a resource (a replicated variable or any
            other) to replica r's ops that write it, in order.
        resources: The resources by these ids.
        num_replicas: If other processes build some replicas, the number of all.
    """

    def __init__(
        self,
        replicas: Sequence[Iterable[tf.Operation]],
        inputs: Inputs,
    ) -> None:
        self._inputs = inputs
        self.num_replicas = inputs.num_replicas
        self._known: dict[tuple[int, ...], Ops | None] = {}
        self._inside: dict[tuple[Ops, int], Level | None] = {}
        self._versions: list[dict[tuple[tf.Operation, int], Any]] = []
        self.writes: list[dict[int, list[tf.Operation]]] = []
        self.resources: dict[int, Any] = {}
        for r, ops in enumerate(replicas):
            self._scan(r, ops)

    def _scan(self, r: int, ops: Iterable[tf.Operation]) -> None:
        """Records what a replica's ops write, and which versions of resources."""
        versions: dict[tuple[tf.Operation, int], Any] = {}
        writes: dict[int, list[tf.Operation]] = {}
        for op in ops:
            written = []
            for index, tensor in resource_inputs(op):
                resource = self.resource(r, tensor)
                key = id(resource)
                self.resources[key] = resource
                entry = self._inputs.version(r, tensor)
                versions[op, id(tensor)] = (entry, len(writes.get(key, ())))
                if effects.writes(op, index):
                    written.append(key)
            for key in dict.fromkeys(written):
                writes.setdefault(key, []).append(op)
        self._versions.append(versions)
        self.writes.append(writes)

    def resource(self, r: int, tensor: tf.Tensor) -> Any:
        """Returns the replicated variable behind a handle, or any other resource."""
        return self._inputs.resource(r, tensor)

    def version(self, r: int, op: tf.Operation, tensor: tf.Tensor) -> Any:
        """Returns the version of a resource that an op sees; every write changes it."""
        return self._versions[r].get((op, id(tensor)))

    def difference(self, column: Column) -> Ops | None:
        """Returns the ops that make the replicas' values differ.

        Args:
            column: One tensor per replica, on this level.

        Returns:
            One op per replica, or None if the values are equal by construction.
        """
        stack = [column]
        opened = set()
        while stack:
            top = stack[-1]
            key = _key(top)
            if key in self._known:
                stack.pop()
                continue
            first = key not in opened
            opened.add(key)
            if first:  # graphs are too deep for recursion
                missing = [c for c in self._below(top) if _key(c) not in self._known]
                if missing:
                    stack += missing
                    continue
            self._known[key] = self._find(top)
        return self._known[_key(column)]

    def difference_of_inputs(self, ops: Ops) -> Ops | None:
        """Returns the ops by which the replicas' ops or inputs differ, else None.

        Resources count as equal if they are the same variables.
        """
        if not are_alike(ops):
            return ops
        for column in zip(*(op.inputs for op in ops), strict=True):
            if column[0].dtype == tf.resource:
                if not self._same_resource(column):
                    return ops
            elif (differing_ops := self.difference(column)) is not None:
                return differing_ops
        return None

    def _below(self, column: Column) -> list[Column]:
        """Returns the columns that must be compared before this one can be."""
        ops = [tensor.op for tensor in column]
        dependencies = [x for op in ops if (x := self._given(op)) is not None]
        if len(dependencies) < len(ops) or any(op.type != ops[0].type for op in ops):
            return []
        if self._inputs.difference(column)[0]:
            return []
        inputs = zip(*dependencies, strict=False)
        return [below for below in inputs if below[0].dtype != tf.resource]

    def _find(self, column: Column) -> Ops | None:
        """Compares one column, once those below it have been compared."""
        decided, differing_ops = self._inputs.difference(column)
        if decided:
            return differing_ops
        ops = tuple(tensor.op for tensor in column)
        if len({tensor.value_index for tensor in column}) > 1:
            return ops
        calls = [placeholder.read(op) for op in ops]
        if calls[0] is not None:
            keys = {None if call is None else call.key for call in calls}
            same = calls[0].same_for_all(len(ops[0].outputs))
            is_same = self._is_of_all(calls[0]) and column[0].value_index < same
            return None if len(keys) == 1 and is_same else ops
        if kind_of(ops[0]).calls:
            return self._of_call(ops, column[0].value_index)
        dependencies = [x for op in ops if (x := self._given(op)) is not None]
        if len(dependencies) < len(ops) or not are_alike(ops):
            return ops
        if len(set(map(len, dependencies))) > 1:
            return ops
        for inputs in zip(*dependencies, strict=True):
            if inputs[0].dtype == tf.resource:
                if not self._same_value(ops, inputs):
                    return ops
            elif (differing_ops := self._known.get(_key(inputs), ops)) is not None:
                return differing_ops
        return None

    def _given(self, op: tf.Operation) -> Sequence[tf.Tensor] | None:
        """Returns the tensors that alone determine an op's results, or None."""
        determined = is_pure(op) or kind_of(op).calls or tf_effects.only_reads(op)
        return op.inputs if determined else None

    def _same_resource(self, column: Column) -> bool:
        return len({id(self.resource(r, t)) for r, t in enumerate(column)}) == 1

    def _same_value(self, ops: Ops, handles: Column) -> bool:
        """Whether ops read one variable, or table, after equally many writes."""
        if not self._same_resource(handles):
            return False
        placement = getattr(self.resource(0, handles[0]), "placement", None)
        if placement is not None and placement.differs:
            return False
        versions = [
            self.version(r, op, handle)
            for r, (op, handle) in enumerate(zip(ops, handles, strict=True))
        ]
        return all(version == versions[0] for version in versions)

    # --- Inside conditionals, loops and functions -------------------------------------

    def bodies(self, ops: Ops) -> list[Level]:
        """Returns the functions that the replicas' ops call, side by side.

        Returns:
            An empty list if the ops differ in type or in number of functions, or if a
            function only exists in C++.
        """
        counts = {len(tf_functions.called_graphs(op)) for op in ops}
        if len({op.type for op in ops}) > 1 or counts != {
            tf_functions.count_functions(ops[0])
        }:
            return []
        levels = [self._body(ops, n) for n in range(counts.pop())]
        return [] if None in levels else [x for x in levels if x is not None]

    def difference_of_choice(self, ops: Ops) -> Ops | None:
        """Returns the ops by which branches or numbers of turns may differ, else None.

        Choices also count as equal if all ops communicate with one another inside, as
        they are then compared at run time. Ops that communicate with others, in another
        group or at another place of the program, may choose otherwise.
        """
        calls = [
            {
                call.key
                for call in control_flow.calls_inside(op)
                if self._is_of_all(call)
            }
            for op in ops
        ]
        if set.intersection(*calls):
            return None
        if control_flow.CONSTRUCTS.get(ops[0].type) == "function":
            return None
        if ops[0].type in _LOOPS:
            cond = self._body(ops, 0)
            if cond is None:
                return ops
            outputs = (tf_functions.called_graphs(op)[0][1].outputs[0] for op in ops)
            return cond.difference(tuple(outputs))
        return self.difference(tuple(op.inputs[0] for op in ops))

    def _is_of_all(self, call: placeholder.Call) -> bool:
        """Whether replicas of other processes take part in a call, too, if there are.

        Those of this process have calls of the same key if they take part.
        """
        return self.num_replicas in (None, len(call.group))

    def _of_call(self, ops: Ops, output: int) -> Ops | None:
        """Returns the ops that make a result of control flow or a function differ."""
        if any(op.type not in control_flow.CONSTRUCTS for op in ops):
            return ops
        bodies = self.bodies(ops)
        if not bodies:
            return ops
        choice = self.difference_of_choice(ops)
        if choice is not None:
            return choice
        for n, level in enumerate(bodies):
            if ops[0].type in _LOOPS and n == 0:
                continue
            graphs = [tf_functions.called_graphs(op)[n][1] for op in ops]
            if any(len(graph.outputs) <= output for graph in graphs):
                return ops
            column = tuple(graph.outputs[output] for graph in graphs)
            differing_ops = level.difference(column)
            if differing_ops is None and ops[0].type in _LOOPS:
                # The initial values must be equal too: the loop may make no turn.
                differing_ops = self.difference(tuple(op.inputs[output] for op in ops))
            if differing_ops is not None:
                return differing_ops
        return None

    def _body(self, ops: Ops, n: int) -> Level | None:
        """Returns the n-th functions that the replicas' ops call, side by side."""
        if (ops, n) not in self._inside:
            loop = ops[0].type in _LOOPS
            levels = self._loop(ops) if loop else [self._open(ops, n, None)]
            for k, level in enumerate(levels):
                self._inside[ops, k if loop else n] = level
        return self._inside[ops, n]

    def _loop(self, ops: Ops) -> list[Level | None]:
        """Returns the condition and the body of loops, with their invariants decided.

        Loop variables that start out equal are assumed to stay equal, until refuted.
        """
        # The loop of one replica may have more captures than another's.
        columns = list(zip(*(op.inputs for op in ops), strict=False))
        begin = [c[0].dtype == tf.resource or not self.difference(c) for c in columns]
        stays = begin
        while True:
            body = self._open(ops, 1, stays)
            if body is None:
                return [None, None]
            graphs = [tf_functions.called_graphs(op)[1][1] for op in ops]
            still_equal = [
                stay
                and (
                    columns[k][0].dtype == tf.resource
                    or not body.difference(tuple(g.outputs[k] for g in graphs))
                )
                for k, stay in enumerate(stays)
            ]
            if still_equal == stays:
                return [self._open(ops, 0, stays), body]
            stays = still_equal

    def _open(self, ops: Ops, n: int, stays: Sequence[bool] | None) -> Level | None:
        called = [tf_functions.called_graphs(op) for op in ops]
        if any(len(functions) <= n for functions in called):
            return None
        graphs = [functions[n][1] for functions in called]
        offset = 1 if chooses(ops[0]) else 0
        inputs = Arguments(self, ops, graphs, offset, (n, stays is not None), stays)
        replicas = acting([graph.get_operations() for graph in graphs])
        return Level(replicas, inputs)


def of_step(
    replicas: Sequence[Iterable[tf.Operation]],
    variable_of: Callable[[tf.Tensor], Any],
    own: Container[int] | None = None,
    num_replicas: int | None = None,
) -> Level:
    """Returns the outermost level of a step.

    Args:
        replicas: `replicas[r]` are replica r's ops that may use resources or have
            effects, in build order.
        variable_of: Returns the replicated variable behind a handle, or None.
        own: As in `Inputs`.
        num_replicas: As in `Inputs`.
    """
    return Level(replicas, Inputs(variable_of, own, num_replicas))


def _key(column: Column) -> tuple[int, ...]:
    return tuple(map(id, column))


def are_alike(ops: Sequence[tf.Operation]) -> bool:
    """Whether ops do the same, on the same type of device, with equally many inputs."""
    first = ops[0]
    attributes: Any = None
    for op in ops[1:]:
        if op is first:
            continue
        if op.type != first.type or len(op.inputs) != len(first.inputs):
            return False
        if _device_type(op.device) != _device_type(first.device):
            return False
        if attributes is None:
            attributes = _attributes(first)
        if _attributes(op) != attributes:
            return False
    return True


def _attributes(op: tf.Operation) -> dict[str, Any]:
    """Returns the attributes that determine what an op does.

    Those with underscores, such as names and compiler annotations, do not.
    """
    return {k: v for k, v in op.node_def.attr.items() if not k.startswith("_")}


@functools.cache
def _device_type(device: str) -> str | None:
    return tf.DeviceSpec.from_string(device).device_type
