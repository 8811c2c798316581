# SPDX-License-Identifier: Apache-2.0
"""Proves that two replicas built the same sub-graph, so that others can be copies.

Compares the ops of replicas 0 and 1 one by one, including those in functions they call,
and reports the first difference in type, attributes or inputs. Necessary differences do
not count: devices, names, the components of variables, the elements of the inputs,
seeds that were separated, and the caller of a communication. Ops on which nothing
depends are ignored. Reads graphs and changes none; `clone.py` makes the copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from replicator import _tf, errors
from replicator.graph.cloning import pythons
from replicator.graph.equal import counterparts
from replicator.graph.ir import differing, placeholder
from replicator.graph.passes import random

_WAY_OUT = (
    "let step_fn build the same ops on every replica, and pass values that differ "
    "through the inputs, as tensors; or build each replica separately with "
    'build="trace".'
)
# Placement, what follows from the inputs, and how ops would be differentiated.
_UNCOMPARED = ("_class", "_output_shapes", "_gradient_op_type")

Node = Any  # a NodeDef
Key = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Level:
    """The ops of two replicas in one graph: the step's, or a function's.

    Attributes:
        ops: `ops[s]` are the ops of replica s on which something depends, in order.
        own: `own[s]` maps the id of each tensor from outside that replica s has to
            itself (input, handle of a variable, argument) to its position.
        functions: The functions that the ops call, by replica 1's name; those that both
            replicas call are left out.
        tokens: The tokens of replica 0's Python functions on all levels, by replica
            1's.
    """

    ops: tuple[list[tf.Operation], list[tf.Operation]]
    own: tuple[Mapping[int, int], Mapping[int, int]]
    functions: dict[str, Function] = dataclasses.field(default_factory=dict)
    tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of replica 1 with a counterpart on replica 0.

    Attributes:
        graph: Its graph.
        outputs: What it returns.
        level: The ops of both.
    """

    graph: Any
    outputs: list[tf.Tensor]
    level: Level


@dataclasses.dataclass(frozen=True)
class Replicas:
    """What is known of the two replicas.

    Attributes:
        devices: The devices of all replicas.
        scopes: The name scopes of the two, with the final "/".
        counted: TensorFlow's count of seeds in the graph before replica 0 was built,
            before replica 1 was built, and after.
    """

    devices: tuple[str, ...]
    scopes: tuple[str, str]
    counted: tuple[int, int, int]


def prove(
    ops: Sequence[Sequence[tf.Operation]],
    returned: Sequence[Sequence[Any]],
    own: Sequence[Sequence[tf.Tensor]],
    replicas: Replicas,
) -> Level:
    """Raises unless replicas 0 and 1 are alike; returns their ops.

    Args:
        ops: `ops[s]` are the ops of replica s, in build order.
        returned: `returned[s]` are the leaves of what step_fn returned.
        own: `own[k][r]` is replica r's counterpart of the k-th tensor from outside.
        replicas: What is known of the two.

    Raises:
        CloneError: They differ; the message names the first difference.
    """
    captured = counterparts.captures(tf.compat.v1.get_default_graph())
    places: tuple[dict[int, int], dict[int, int]] = ({}, {})
    for k, column in enumerate(own):
        for s in (0, 1):
            places[s][id(column[s])] = k
    for tensor_id, external in captured.items():
        for s in (0, 1):
            if id(external) in places[s]:
                places[s][tensor_id] = places[s][id(external)]
    live = [
        counterparts.live(own_ops, roots, captured)
        for own_ops, roots in zip(ops, returned, strict=True)
    ]
    shared, leak = counterparts.shared(live[1], set(ops[0]), captured, places[0])
    if leak is not None:
        _refuse_leak(*leak)
    level = Level(([op for op in live[0] if op not in shared], live[1]), places)
    proof = _Proof(replicas, captured)
    proof.compare(level, [(column[0], column[1]) for column in own])
    for first_leaf, second_leaf in zip(*returned, strict=True):
        proof.compare_sources("what step_fn returns", first_leaf, second_leaf)
    return dataclasses.replace(level, tokens=proof.pythons.tokens)


def _refuse_leak(source: tf.Operation, op: tf.Operation) -> NoReturn:
    """Raises because replica 1 uses an op that replica 0 built."""
    raise errors.CloneError(
        errors.compose(
            "replica 1 uses an op that replica 0 built.",
            [_site(0, source), _site(1, op)],
            "do not keep tensors from one call of step_fn for the next, or build the "
            "layer that keeps them before the step; or build each replica separately "
            'with build="trace".',
        )
    )


class _Proof:
    """Compares levels, and records which ops and tensors correspond."""

    def __init__(self, replicas: Replicas, captured: Container[int]) -> None:
        self._replicas = replicas
        self._captured = captured  # ids of captures of tensors from outside
        self._places: tuple[dict[tf.Operation, Any], dict[tf.Operation, Any]] = ({}, {})
        self._own: list[tuple[Mapping[int, int], Mapping[int, int]]] = []
        self._functions: dict[tuple[str, str], Function] = {}
        self._graph = tf.compat.v1.get_default_graph()
        # (number, level, tensors from outside) not in _names yet.
        self._unnamed: list[tuple[int, Level, Sequence[Sequence[tf.Tensor]]]] = []
        self._names: tuple[dict[str, str], dict[str, str]] = ({}, {})
        self.pythons = pythons.Pairs()

    def compare(self, level: Level, outside: Sequence[Sequence[tf.Tensor]]) -> None:
        """Raises unless the ops of a level are alike, one by one.

        Args:
            level: The ops of both replicas.
            outside: `outside[k][s]` is replica s's k-th tensor from outside.
        """
        number = len(self._own)
        self._own.append(level.own)
        self._unnamed.append((number, level, outside))
        for s in (0, 1):
            for n, op in enumerate(level.ops[s]):
                self._places[s][op] = (number, n)
        for first_op, second_op in zip(*level.ops, strict=False):
            self._compare_ops(first_op, second_op, level, number)
        counts = [len(ops) for ops in level.ops]
        if counts[0] != counts[1]:
            s = 0 if counts[0] > counts[1] else 1
            extra = level.ops[s][min(counts)]
            raise errors.CloneError(
                errors.compose(
                    f"replica {s} builds ops that replica {1 - s} does not.",
                    [_site(s, extra)],
                    _WAY_OUT,
                )
            )

    def _compare_ops(
        self, one: tf.Operation, two: tf.Operation, level: Level, number: int
    ) -> None:
        if one.type != two.type:
            self._refuse("not the same op", one, two)
        if one.type == "Placeholder":
            self._refuse("a placeholder, which cannot be fed on copies", one, two)
        own = level.own
        ins = [list(op.inputs) for op in (one, two)]
        keys = [
            [self._key(s, tensor, own) for tensor in inputs]
            for s, inputs in enumerate(ins)
        ]
        if keys[0] != keys[1]:
            self._refuse("not the same inputs", one, two)
        waits = [
            {self._op_key(s, source, own) for source in op.control_inputs}
            for s, op in enumerate((one, two))
        ]
        if waits[0] != waits[1]:
            self._refuse("not the same control dependencies", one, two)
        if [t.dtype for t in one.outputs] != [t.dtype for t in two.outputs]:
            self._refuse("not the same dtypes", one, two)
        devices = self._replicas.devices
        if counterparts.place(one.device, two.device, devices, 1) is None:
            self._refuse("not on corresponding devices", one, two)
        self._compare_attributes(one, two, level)

    def compare_sources(self, what: str, one: Any, two: Any) -> None:
        """Raises unless two tensors or ops correspond."""
        keys = []
        for s, leaf in enumerate((one, two)):
            is_op = isinstance(leaf, tf.Operation)
            find = self._op_key if is_op else self._key
            keys.append(find(s, leaf, self._own[0]))
        if keys[0] != keys[1]:
            ops = [x if isinstance(x, tf.Operation) else x.op for x in (one, two)]
            self._refuse(f"not the same in {what}", *ops)

    def _key(
        self, s: int, tensor: tf.Tensor, own: tuple[Mapping[int, int], ...]
    ) -> Key:
        """Returns a key that is equal for corresponding tensors of the two replicas."""
        if not tf.is_symbolic_tensor(tensor):
            return ("shared", id(tensor))
        k = own[s].get(id(tensor))
        if k is not None:
            return ("own", k)
        if id(tensor) in self._captured:
            return ("shared", id(tensor))
        return (*self._op_key(s, tensor.op, own), tensor.value_index)

    def _op_key(
        self, s: int, op: tf.Operation, own: tuple[Mapping[int, int], ...]
    ) -> Key:
        place = self._places[s].get(op)
        if place is not None:
            return ("made", place)
        for tensor in op.outputs[:1]:  # the op that makes an input
            if id(tensor) in own[s]:
                return ("own", own[s][id(tensor)])
        return ("shared", id(op))

    def _compare_attributes(
        self, one: tf.Operation, two: tf.Operation, level: Level
    ) -> None:
        calls = placeholder.read(one), placeholder.read(two)
        if calls[0] is not None and calls[1] is not None:
            count = len(self._replicas.devices)
            difference = counterparts.call_difference(calls[0], calls[1], count)
            if difference:
                self._refuse(difference, one, two)
        nodes = one.node_def.attr, two.node_def.attr
        for name in sorted({*nodes[0], *nodes[1]}):
            if name in _UNCOMPARED or (name == "token" and calls[0] is not None):
                continue
            if (name in nodes[0]) != (name in nodes[1]):
                if name != random.SEPARATED:
                    self._refuse(f"not the same attribute {name}", one, two)
                continue
            values = nodes[0][name], nodes[1][name]
            if values[0] == values[1]:
                continue
            if name == "seed2" and random.SEPARATED in nodes[1]:
                self._compare_seeds(values[0].i, values[1].i, one, two)
            elif names := counterparts.function_names(values):
                for first, second in zip(*names, strict=True):
                    self._compare_functions(first, second, one, two, level)
            elif name == "token" and one.type in pythons.OPS:
                difference = self.pythons.difference(
                    *(value.s.decode() for value in values)
                )
                if difference:
                    self._refuse(difference, one, two)
            elif name == "value" and differing.ATTRIBUTE in nodes[1]:
                continue  # the attribute is compared too: the values of all replicas
            elif not self._same_text(values):
                what = "constant" if one.type == "Const" else f"attribute {name}"
                self._refuse(f"not the same {what}", one, two)

    def _same_text(self, values: Sequence[Any]) -> bool:
        """Whether two values differ only in the replicas' names of the same things."""
        while self._unnamed:
            number, level, outside = self._unnamed.pop()
            for s in (0, 1):
                for k, name in counterparts.names(column[s] for column in outside):
                    self._names[s][name] = f"\0{number}:{k}"
                for n, op in enumerate(level.ops[s]):
                    self._names[s][op.name] = f"\0{number}.{n}"
        renamed = [
            counterparts.rename(
                value,
                counterparts.Renaming(
                    (self._replicas.scopes[s], "\0/"),
                    (self._replicas.devices[s], "\0device"),
                    self._names[s],
                ),
            )
            for s, value in enumerate(values)
        ]
        return renamed[0] == renamed[1]

    def _compare_seeds(
        self, first: int, second: int, one: tf.Operation, two: tf.Operation
    ) -> None:
        """Raises unless the seeds are equal, or differ only by TensorFlow's counting.

        In the step's graph, counted seeds differ by how many one replica draws; each
        function counts its own from 0.
        """
        first = random.counted(one.get_attr("seed"), first, second)
        second -= random.OFFSET
        if first == second:
            return
        start, middle, end = self._replicas.counted
        counted = start <= first < middle <= second < end
        if not (
            counted and second - first == end - middle and one.graph is self._graph
        ):
            self._refuse("not the same seed", one, two)

    def _compare_functions(
        self,
        first: str,
        second: str,
        one: tf.Operation,
        two: tf.Operation,
        level: Level,
    ) -> None:
        if first == second:
            return
        function = self._functions.get((first, second))
        if function is None:
            bodies = [
                _tf.function_called(op, name)
                for op, name in ((one, first), (two, second))
            ]
            if bodies[0] is None or bodies[1] is None:
                self._refuse("functions that cannot be compared", one, two)
            function = self._function(bodies[0], bodies[1], one, two)
            self._functions[first, second] = function
        level.functions[second] = function

    def _function(
        self, first: Any, second: Any, one: tf.Operation, two: tf.Operation
    ) -> Function:
        graphs = first[0], second[0]
        if len(graphs[0].inputs) != len(graphs[1].inputs) or len(first[1]) != len(
            second[1]
        ):
            self._refuse("functions with different arguments or results", one, two)
        own = tuple(
            {id(tensor): k for k, tensor in enumerate(graph.inputs)} for graph in graphs
        )
        live = [
            counterparts.live(
                graph.get_operations(), [*outputs, *graph.control_outputs], places
            )
            for (graph, outputs), places in zip((first, second), own, strict=True)
        ]
        level = Level((live[0], live[1]), own)  # type: ignore[arg-type]
        self.compare(level, list(zip(*(graph.inputs for graph in graphs), strict=True)))
        for tensors in zip(first[1], second[1], strict=True):
            keys = [self._key(s, tensor, own) for s, tensor in enumerate(tensors)]
            if keys[0] != keys[1]:
                self._refuse("functions that return different tensors", one, two)
        return Function(second[0], second[1], level)

    def _refuse(self, difference: str, one: tf.Operation, two: tf.Operation) -> None:
        raise errors.CloneError(
            errors.compose(
                f"replicas 0 and 1 differ, so the others cannot be copies: "
                f"{difference}.",
                [_site(0, one), _site(1, two)],
                _WAY_OUT,
            )
        )


def _site(s: int, op: tf.Operation) -> str:
    return f"replica {s}: {op.type} {op.name} at {errors.line_of(op)}"
