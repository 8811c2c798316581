# SPDX-License-Identifier: Apache-2.0
"""What is known of the values of a step before it is rewired: the keys of each graph.

A value may be read from a variable, whose key says how often it was written before, and
be a result of a conditional, a loop or a function, in whose graphs it is looked up.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Container, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from replicator._tf import effects as tf_effects
from replicator._tf import functions
from replicator.graph.ir.captures import Captures
from replicator.graph.ir.kinds import acting, chooses, kind_of, resource_inputs
from replicator.graph.matching import control_flow
from replicator.graph.order import effects
from replicator.graph.same.keys import (
    LOOPS,
    OWN,
    Key,
    Keys,
    Loop,
    Origin,
    description,
    device_type,
    is_pure,
)

_SMALL = 1024  # elements; larger eager tensors are only compared between processes


class Outside:
    """What is known of the values that enter a step from outside it.

    Args:
        variable_of: Returns the replicated variable behind a handle, or None.
        num_replicas: The number of all replicas.
        own: If other processes build all other replicas, the ids of the tensors that
            the only local replica has to itself.
        between: Whether other processes build some replicas.
    """

    def __init__(
        self,
        variable_of: Callable[[tf.Tensor], Any],
        num_replicas: int,
        own: Container[int] | None = None,
        between: bool = False,
    ) -> None:
        self.num_replicas, self.between = num_replicas, between
        self._variable_of, self._own = variable_of, own or ()
        self._captures = Captures()
        self._numbers: dict[int, tuple[int, Any]] = {}

    def resource(self, tensor: tf.Tensor) -> Any:
        """Returns the replicated variable behind a handle, or any other resource."""
        outermost = self._captures.outermost(tensor)
        variable = self._variable_of(outermost)
        return outermost if variable is None else variable

    def number(self, tensor: tf.Tensor) -> int:
        """Returns the number of a tensor of unknown value, which is its identity."""
        return self._numbers.setdefault(id(tensor), (len(self._numbers), tensor))[0]

    def facts(self, tensor: tf.Tensor) -> Any:
        """Returns what a tensor is known by that was there before; None if nothing."""
        source = self._captures.outermost(tensor)
        if id(tensor) in self._own:
            return None
        if not tf.is_symbolic_tensor(source):
            name = source.dtype.name
            if source.dtype in (tf.resource, tf.variant):
                return "outside", name, self.number(source)
            if not self.between and source.shape.num_elements() > _SMALL:
                return "outside", name, self.number(source)
            value = np.asarray(source.numpy())
            text = value.tolist() if value.dtype == object else value.tobytes()
            return "constant", name, value.shape, text
        if tensor.op.type == "Placeholder":
            return "argument", tensor.op.name, tensor.dtype.name
        return None


class Scope(Keys):
    """The keys of the values in one graph of a step, in one place that calls it.

    Args:
        outside: What is known of values from outside the step.
        outer: The scope in which it is called; None for the graph of the step itself.
        path: The ops that call it, from the outermost on.
        n: Which of the functions of the last of these it is.
        graph: The function.
        key_of: For a loop, returns the key of the k-th variable.
        loops: As for `Keys`.

    Attributes:
        resources: The resources that ops of the graph take, by their ids.
    """

    def __init__(
        self,
        outside: Outside,
        outer: Scope | None = None,
        path: tuple[tf.Operation, ...] = (),
        n: int = 0,
        graph: Any = None,
        key_of: Callable[[int], Key] | None = None,
        loops: tuple[int, ...] = (),
    ) -> None:
        super().__init__(graph.inputs if outer else (), key_of, path, loops)
        self._outside, self._graph, self._outer, self._n = outside, graph, outer, n
        self._inside: dict[tuple[tf.Operation, int], Scope] = {}
        self._versions: dict[tuple[tf.Operation, int], Any] = {}
        self._written: set[tuple[tf.Operation, int]] = set()
        self._numbers: dict[tuple[tf.Operation, str], int] = {}
        self.resources: dict[int, Any] = {}

    # --- Resources --------------------------------------------------------------------

    def scan(
        self, ops: Iterable[tf.Operation], start: Any = None
    ) -> dict[int, list[tf.Operation]]:
        """Notes which version of a resource each op sees: every write changes it.

        Args:
            ops: Ops that run in their order.
            start: Distinguishes the versions that they begin with.

        Returns:
            The ops that write each resource, by its id, in order.
        """
        writes: dict[int, list[tf.Operation]] = {}
        for op in ops:
            written = []
            for index, tensor in resource_inputs(op):
                resource = self._resource(tensor)
                key = id(resource)
                self.resources[key] = resource
                before = (start, self._entry(tensor), len(writes.get(key, ())))
                self._versions[op, id(tensor)] = before
                if effects.writes(op, index):
                    written.append(key)
            for key in dict.fromkeys(written):
                writes.setdefault(key, []).append(op)
                self._written.add((op, key))
        return writes

    @functools.cached_property
    def writes(self) -> dict[int, list[tf.Operation]]:
        """The ops of a function that write each resource, by its id, in order."""
        return self.scan(acting([self._graph.get_operations()])[0])

    def _operand(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns what the calling op passes as an argument; None for other tensors."""
        k = self._positions.get(id(tensor))
        if k is None:
            return None
        k += 1 if chooses(self.path[-1]) else 0
        inputs = self.path[-1].inputs
        return inputs[k] if k < len(inputs) else None

    def _resource(self, tensor: tf.Tensor) -> Any:
        """Returns the replicated variable behind a handle, or any other resource."""
        if self._outer is None:
            return self._outside.resource(tensor)
        operand = self._operand(tensor)
        return tensor if operand is None else self._outer._resource(operand)

    def _entry(self, tensor: tf.Tensor) -> Any:
        """Returns the version of a resource at the start of a function."""
        operand = self._operand(tensor)
        if self._outer is None or operand is None:
            return None
        op = self.path[-1]
        before = self._outer._version(op, operand)
        is_written = (op, id(self._outer._resource(operand))) in self._outer._written
        return (before, self._n) if is_written else before

    def _version(self, op: tf.Operation, tensor: tf.Tensor) -> Any:
        """Returns the version of a resource that an op sees."""
        if (op, id(tensor)) not in self._versions:
            if self._outer is not None:
                assert self.writes is not None  # now they are known
            else:  # ops before the step, or of its initializers
                known = {op for op, _ in self._versions}
                ops = acting([op.graph.get_operations()])[0]
                self.scan([op for op in ops if op not in known], "before")
        return self._versions.get((op, id(tensor)), id(op))

    # --- Origins ----------------------------------------------------------------------

    def origin(self, tensor: tf.Tensor) -> Origin:
        """Returns what a tensor is computed from."""
        op, index = tensor.op, tensor.value_index
        if self._outer is None:
            facts = self._outside.facts(tensor)
            if facts is not None:
                return Origin(op, facts)
        elif self._key_of is None and (operand := self._operand(tensor)) is not None:
            return Origin(op, None, [(self._outer, operand)])
        elif id(tensor) in self._positions:
            return super().origin(tensor)
        if kind_of(op).calls:
            return self._of_call(tensor)
        if tf_effects.only_reads(op) or is_pure(op):
            return self.of_op(op, index, self._version)
        return super().origin(tensor)

    def of_op(
        self,
        op: tf.Operation,
        index: int = -1,
        version: Callable[[tf.Operation, tf.Tensor], Any] | None = None,
    ) -> Origin:
        """Returns the origin of what an op computes, or writes, from its inputs.

        Args:
            op: The op.
            index: The number of its result.
            version: Returns the version of a resource that it reads; it reads none by
                default.
        """
        facts: Any = description(op, index)
        resources = {id(tensor): tensor for _, tensor in resource_inputs(op)}
        inputs = [t for t in op.inputs if id(t) not in resources]
        for tensor in resources.values():
            resource = self._resource(tensor)
            placement = getattr(resource, "placement", None)
            if version and placement is not None and placement.differs:
                return self.own(op.outputs[index])
            key = getattr(resource, "key", None)
            named = self._outside.number(resource) if key is None else key
            facts = facts, named, version and version(op, tensor)
        return Origin(op, facts, [(self, tensor) for tensor in inputs], inputs)

    def _of_call(self, tensor: tf.Tensor) -> Origin:
        """Returns the origin of a result of control flow or a function."""
        op, k = tensor.op, tensor.value_index
        is_loop = op.type in LOOPS
        bodies = list(enumerate(self.functions(op)))
        if op.type not in control_flow.CONSTRUCTS or not bodies:
            return self.own(tensor)
        bodies = bodies[1:] if is_loop else bodies
        if any(len(graph.outputs) <= k for _, graph in bodies):
            return self.own(tensor)
        choice = self.choice(op)
        parts = [
            *choice.parts,
            *((self.inside(op, n), g.outputs[k]) for n, g in bodies),
        ]
        if is_loop:  # it may make no turn
            parts.append((self, op.inputs[k]))
        construct = control_flow.CONSTRUCTS[op.type]
        facts = (construct, device_type(op.device), choice.facts)
        return Origin(op, facts, parts, choice.first)

    def choice(self, op: tf.Operation) -> Origin:
        """Returns the origin of which branch is taken, or of how many turns are made.

        Choices also count as equal if all ops communicate with one another inside, as
        they are then compared at run time. Ops that communicate with others, in another
        group or at another place of the program, may choose otherwise.
        """
        first = [t for t in op.inputs if t.dtype != tf.resource]
        is_loop = op.type in LOOPS
        if not (is_loop or chooses(op)):
            return Origin(op, (), (), first)
        count = self._outside.num_replicas
        calls = control_flow.calls_inside(op)
        keys = [call.key for call in calls if len(call.group) == count]
        if keys:
            key = min(keys)
            return Origin(op, ("agreed", key, self._place(op, key)), (), first)
        if not is_loop:
            return Origin(op, (), [(self, op.inputs[0])], first)
        if not (graphs := self.functions(op)):
            return Origin(op, ("own", id(op)), (), first, OWN)
        return Origin(op, (), [(self.inside(op, 0), graphs[0].outputs[0])], first)

    def _place(self, op: tf.Operation, key: str) -> tuple[int, ...]:
        """Returns which of the ops that hold a call an op is, on each level.

        Several do if a function is called several times.
        """
        if (op, key) not in self._numbers:
            self._count(op.graph)
        return (*self._places(key), self._numbers[op, key])

    def _places(self, key: str) -> tuple[int, ...]:
        return () if self._outer is None else self._outer._place(self.path[-1], key)

    def _count(self, graph: tf.Graph) -> None:
        counts: collections.Counter[tuple[int, str]] = collections.Counter()
        for op in graph.get_operations():
            for call in control_flow.calls_inside(op):
                self._numbers[op, call.key] = counts[call.replica_id, call.key]
                counts[call.replica_id, call.key] += 1

    # --- Functions --------------------------------------------------------------------

    def functions(self, op: tf.Operation) -> list[Any]:
        """Returns the functions that an op calls; [] if one of them is only in C++."""
        graphs = [graph for _, graph in functions.called_graphs(op)]
        return graphs if len(graphs) == len(functions.names_called(op)) else []

    def inside(self, op: tf.Operation, n: int) -> Scope:
        """Returns the scope of the n-th function that an op calls."""
        if (op, n) not in self._inside:
            key_of = Loop(self, op).key if op.type in LOOPS else None
            for k, graph in enumerate(self.functions(op)):
                self._inside[op, k] = self._open(op, k, graph, key_of, self.loops)
        return self._inside[op, n]

    def turn(
        self, op: tf.Operation, key_of: Callable[[int], Key], loops: tuple[int, ...]
    ) -> Keys:
        """Returns the keys in the body of a loop; see `Keys.turn`."""
        return self._open(op, 1, self.functions(op)[1], key_of, loops)

    def _open(self, op: tf.Operation, n: int, *about: Any) -> Scope:
        return Scope(self._outside, self, (*self.path, op), n, *about)
