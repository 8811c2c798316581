# SPDX-License-Identifier: Apache-2.0
"""Creates the sub-graphs of further replicas as copies of replica 1's.

Runs with build="clone", after replicas 0 and 1 are built in Python and before the
passes over all replicas. What `proof.py` has proven the same on both is imported again
for each further replica, in C++: with the replica's own inputs and variables, on its
device, with its seeds, and with its id in its communication calls. Functions are copied
if each replica has one of its own: once for all copies, if only devices differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf
from replicator.graph.cloning import proof, pythons
from replicator.graph.equal import counterparts
from replicator.graph.ir import differing, placeholder
from replicator.graph.ir.kinds import has_effect
from replicator.graph.order import effects
from replicator.graph.passes import random

_LIKE = 1  # the replica that is copied
_IN = "outside"  # prefix of the names of a copy's inputs from outside


@dataclasses.dataclass(frozen=True)
class _Names:
    """The names that differ in one replica's copies.

    Attributes:
        replica_id: The replica.
        device: Where it runs.
        renaming: Rewrites text about replica 1 for this replica.
        pythons: Copies replica 1's Python functions for this replica.
    """

    replica_id: int
    device: str
    renaming: counterparts.Renaming
    pythons: pythons.Copies


@dataclasses.dataclass(frozen=True)
class Copy:
    """A replica that is a copy.

    Attributes:
        ops: Its ops, in the order in which replica 1 was built.
        leaf: Maps a tensor or op that replica 1 returned to this replica's.
    """

    ops: list[tf.Operation]
    leaf: Callable[[Any], Any]


class Copier:
    """Copies replica 1, once it is proven to be like replica 0.

    Args:
        ops: `ops[s]` are the ops of replica s, in build order; there are two replicas.
        returned: `returned[s]` are the leaves of what step_fn returned.
        own: `own[k][r]` is replica r's counterpart of the k-th tensor from outside.
        replicas: What is known of the replicas.
        ledger: Records the writes that keep the replicas equal.

    Raises:
        CloneError: The two replicas differ.
    """

    def __init__(
        self,
        ops: Sequence[Sequence[tf.Operation]],
        returned: Sequence[Sequence[Any]],
        own: Sequence[Sequence[tf.Tensor]],
        replicas: proof.Replicas,
        ledger: effects.Ledger,
    ) -> None:
        self._level = proof.prove(ops, returned, own, replicas)
        self._own = own
        self._replicas = replicas
        graph = tf.compat.v1.get_default_graph()
        self._template = Template(graph, self._level, replicas, ledger)

    def copy(self, replica_id: int, scope: str) -> Copy:
        """Adds a copy to the default graph.

        Args:
            replica_id: The replica.
            scope: An unused name scope, with the final "/".
        """
        template, places = self._template, self._level.own[_LIKE]
        names = self._names(replica_id, scope)
        graph = tf.compat.v1.get_default_graph()

        def in_place_of(tensor: tf.Tensor) -> tf.Tensor:
            k = places.get(id(tensor))
            if k is None:
                return tensor
            replica_tensor = self._own[k][replica_id]
            return (
                graph.capture(replica_tensor)
                if graph.building_function
                else replica_tensor
            )

        inputs = [in_place_of(tensor) for tensor in template.outside]
        copies = template.stamp(names, inputs, scope)

        def leaf(what: Any) -> Any:
            if isinstance(what, tf.Operation):
                return template.operation(what, copies)
            if not tf.is_symbolic_tensor(what):
                return what
            return template.result(what, copies, in_place_of)

        return Copy(copies, leaf)

    def _names(self, replica_id: int, scope: str) -> _Names:
        devices, old = self._replicas.devices, self._replicas.scopes[_LIKE]
        elsewhere = [op for op in self._template.ops if not op.name.startswith(old)]
        renamed = {op.name: scope + _name(op, old) for op in elsewhere}
        for k, name in counterparts.names(column[_LIKE] for column in self._own):
            renamed[name] = self._own[k][replica_id].name
        return _Names(
            replica_id,
            devices[replica_id],
            counterparts.Renaming(
                (old, scope),
                (devices[_LIKE], devices[replica_id]),
                renamed,
            ),
            pythons.Copies(self._level.tokens),
        )


class Template:
    """The ops of replica 1 on one level, ready to be copied.

    Args:
        graph: The graph that contains them.
        level: The ops of replicas 0 and 1 in it.
        replicas: What is known of the two.
        ledger: Records the writes that keep the replicas equal.

    Attributes:
        is_common: Whether, devices aside, the ops are those of all replicas, and have
            no effects: a function of them may be shared.
    """

    def __init__(
        self,
        graph: Any,
        level: proof.Level,
        replicas: proof.Replicas,
        ledger: effects.Ledger,
    ) -> None:
        self._graph, self._level, self._replicas = graph, level, replicas
        self._ledger = ledger
        first, self.ops = level.ops
        index = {op: n for n, op in enumerate(self.ops)}
        agreed = ledger.agreed_ops(graph)
        self._agreed = {n for n, op in enumerate(self.ops) if op in agreed}
        self._index = index
        self.outside: list[tf.Tensor] = []  # their inputs from other ops
        self._waits: list[tuple[int, tf.Operation]] = []  # (op, control input outside)
        self._nodes = self._take(index)
        different = list(map(_different, first, self.ops))
        self._patches = [n for n, names in enumerate(different) if names]
        self._first = {n: first[n].node_def for n in self._patches}
        self._own_place = [
            (first_op.device, second_op.device) == replicas.devices[:2]
            for first_op, second_op in zip(first, self.ops, strict=True)
        ]
        self._handles = [
            (n, k)
            for n, op in enumerate(self.ops)
            for k, tensor in enumerate(op.outputs)
            if tensor.dtype in (tf.resource, tf.variant)
        ]
        self._functions = {
            name: (
                function,
                Template(function.graph, function.level, replicas, ledger),
            )
            for name, function in level.functions.items()
        }
        called = list(map(_called, self._nodes.node))
        self._common = {n for n, (_, one) in self._functions.items() if one.is_common}
        for functions, is_own in zip(called, self._own_place, strict=True):
            self._common.difference_update(*(() if is_own else functions.values()))
        self._copies: dict[Any, str] = {}  # of these, by graph and name
        self.is_common: bool = not (self._agreed or self._waits) and all(
            names <= functions.keys()
            and all(map(self._common.issuperset, functions.values()))
            if functions
            else not names and not has_effect(op)
            for op, names, functions in zip(self.ops, different, called, strict=True)
        )

    def _take(self, index: Mapping[tf.Operation, int]) -> Any:
        """Returns the ops' nodes, with inputs named by the copies' names."""
        by_name = {op.name: n for op, n in index.items()}
        nodes: list[Any] = [None] * len(index)
        for node in self._graph.as_graph_def(add_shapes=True).node:
            n = by_name.get(node.name)
            if n is not None:
                nodes[n] = node
        positions: dict[int, int] = {}
        definition = tf.compat.v1.GraphDef()
        for op, node in zip(self.ops, nodes, strict=True):
            node.attr.pop("_class", None)  # every op has a device
            inputs = []
            for tensor in op.inputs:
                if tensor.op in index:
                    inputs.append(
                        f"{_name(tensor.op, self._scope)}:{tensor.value_index}"
                    )
                else:
                    k = positions.setdefault(id(tensor), len(positions))
                    if k == len(self.outside):
                        self.outside.append(tensor)
                    inputs.append(f"{_IN}{k}:0")
            for source in op.control_inputs:
                if source in index:
                    inputs.append(f"^{_name(source, self._scope)}")
                else:
                    self._waits.append((index[op], source))
            node.name = _name(op, self._scope)
            node.input[:] = inputs
            definition.node.append(node)
        return definition

    @property
    def _scope(self) -> str:
        return self._replicas.scopes[_LIKE]

    def stamp(
        self, names: _Names, inputs: Sequence[tf.Tensor], scope: str
    ) -> list[tf.Operation]:
        """Adds a replica's copy to the default graph; returns its ops, in order.

        Args:
            names: The replica, and the names that differ in it.
            inputs: Its inputs, in place of `outside`.
            scope: An unused name scope, with the final "/".
        """
        graph = tf.compat.v1.get_default_graph()
        functions = {name: self._copy(name, names) for name in self._functions}
        start = _tf.operation_count(graph)
        definition = self._patched(names, functions)
        input_map = {f"{_IN}{k}:0": tensor for k, tensor in enumerate(inputs)}
        new = _tf.import_nodes(graph, definition, input_map, scope)
        by_name = {op.name: n for n, op in enumerate(new)}
        places = [by_name[scope + node.name] for node in definition.node]
        copies = [new[n] for n in places]
        for n, source in self._waits:
            _tf.add_control_inputs(copies[n], [source])
        for n in self._agreed:
            self._ledger.enter(graph, start + places[n], start + places[n] + 1)
        for n, k in self._handles:
            _tf.copy_handle_data(self.ops[n].outputs[k], copies[n].outputs[k])
        return copies

    def _copy(self, name: str, names: _Names) -> str:
        """Returns the name of a replica's function in place of one of replica 1's."""
        function, template = self._functions[name]
        if name not in self._common:
            scope = f"replica_{names.replica_id}"
            return _copy_function(function, template, names, scope)
        key = tf.compat.v1.get_default_graph(), name
        if key not in self._copies:  # without devices: it runs where it is called
            anywhere = dataclasses.replace(names, device="")
            self._copies[key] = _copy_function(function, template, anywhere, "replicas")
        return self._copies[key]

    def _patched(self, names: _Names, functions: Mapping[str, str]) -> Any:
        """Returns the nodes with the replica's own devices and attributes."""
        definition = tf.compat.v1.GraphDef()
        definition.CopyFrom(self._nodes)
        nodes = definition.node
        for node, is_replica_device in zip(nodes, self._own_place, strict=True):
            if is_replica_device:
                node.device = names.device
        for n in self._patches:
            _patch(nodes[n], self._first[n], names, functions)
        return definition

    def result(
        self,
        tensor: tf.Tensor,
        copies: Sequence[tf.Operation],
        outside: Callable[[tf.Tensor], tf.Tensor],
    ) -> tf.Tensor:
        """Returns a copy's counterpart of a tensor.

        Args:
            tensor: A tensor of replica 1.
            copies: What `stamp` returned.
            outside: Maps a tensor from outside to the copy's counterpart.
        """
        n = self._index.get(tensor.op)
        if n is not None:
            return copies[n].outputs[tensor.value_index]
        return outside(tensor)

    def operation(
        self, op: tf.Operation, copies: Sequence[tf.Operation]
    ) -> tf.Operation:
        """Returns a copy's counterpart of an op."""
        n = self._index.get(op)
        return op if n is None else copies[n]


def _name(op: tf.Operation, scope: str) -> str:
    """Returns an op's name relative to the scope of its replica."""
    if op.name.startswith(scope):
        return op.name.removeprefix(scope)
    return f"{_IN}/{op.name}"


def _different(one: tf.Operation, two: tf.Operation) -> set[str]:
    """Returns the attributes of an op that differ between replicas."""
    first, second = one.node_def.attr, two.node_def.attr
    return {
        name
        for name in second
        if name == differing.ATTRIBUTE
        or (name != "_class" and (name not in first or first[name] != second[name]))
    }


def _called(node: Any) -> dict[str, list[str]]:
    """Returns the names of the functions that a node calls, by attribute."""
    found = {
        name: [value.func.name]
        if value.HasField("func")
        else [function.name for function in value.list.func]
        for name, value in node.attr.items()
    }
    return {name: names for name, names in found.items() if names}


def _patch(node: Any, first: Any, names: _Names, functions: Mapping[str, str]) -> None:
    """Gives a copy of replica 1's node another replica's attributes."""
    is_given = differing.give(node, names.replica_id)
    steps = names.replica_id - _LIKE
    for name in list(node.attr):
        value = node.attr[name]
        if name == "_output_shapes" or (is_given and name == "value"):
            continue
        if name == random.SEPARATED:
            value.i = names.replica_id
        elif name in first.attr and first.attr[name] == value:
            continue
        elif name == "seed2":
            start = random.counted(node.attr["seed"].i, first.attr[name].i, value.i)
            value.i += steps * (value.i - start)
        elif name == "token":
            call = placeholder.call_of(value.s)
            if call is not None:
                copied_call = dataclasses.replace(
                    call, replica_id=names.replica_id, device=names.device
                )
                value.s = placeholder.token_of(copied_call).encode()
            else:
                value.s = names.pythons.token(value.s.decode()).encode()
        elif value.HasField("func"):
            value.func.name = functions[value.func.name]
        elif value.list.func:
            for function in value.list.func:
                function.name = functions.get(function.name, function.name)
        else:
            value.CopyFrom(counterparts.rename(value, names.renaming))


def _copy_function(
    function: proof.Function, template: Template, names: _Names, scope: str
) -> str:
    """Adds a copy of a function to the default graph; returns its name."""
    inside = _tf.new_function_graph(scope)
    graph = function.graph
    arguments = _tf.add_inputs(inside, graph.inputs, [t.shape for t in graph.inputs])
    argument_of = {id(t): new for t, new in zip(graph.inputs, arguments, strict=True)}

    def argument(tensor: tf.Tensor) -> tf.Tensor:
        return argument_of[id(tensor)]

    with inside.as_default():
        inputs = [argument(t) for t in template.outside]
        copies = template.stamp(names, inputs, f"{scope}/")
        results = [template.result(t, copies, argument) for t in function.outputs]
    must_run = [template.operation(op, copies) for op in graph.control_outputs]
    return _tf.finish_function(inside, results, must_run)
