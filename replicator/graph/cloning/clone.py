# SPDX-License-Identifier: Apache-2.0
"""Creates the sub-graphs of further replicas as copies of the first one's.

Runs with build="clone", after step_fn was called for the first replica and before the
passes over all replicas. The ops are imported again for each further replica, in C++.
A copy has the replica's own inputs and variables, in place of the first one's, and is
on its device; what else differs is in facts.py. All the rest is equal, since Python
has run once. Functions are copied if each replica needs one of its own: once for all
copies, if only devices differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator._tf import choice, frames, graphs
from replicator._tf import functions as tf_functions
from replicator._tf import ops as tf_ops
from replicator.graph.cloning import facts
from replicator.graph.cloning.facts import Original, Replica
from replicator.graph.ir import placeholder, walk
from replicator.graph.ir.captures import Captures
from replicator.graph.ir.kinds import has_effect, kind_of
from replicator.graph.order import effects

_IN = "outside"  # prefix of the names of a copy's inputs from outside


@dataclasses.dataclass(frozen=True)
class Copy:
    """A replica that is a copy.

    Attributes:
        ops: Its ops, in the order in which the first replica was built.
        leaf: Maps a tensor or op that the first replica returned to this replica's.
    """

    ops: list[tf.Operation]
    leaf: Callable[[Any], Any]


class Copier:
    """Copies the first replica.

    Args:
        original: What is known of it.
        ops: Its ops, in build order.
        returned: The leaves of what step_fn returned for it.
        own: `own[k][n]` is the n-th replica's counterpart of the k-th tensor from
            outside.
        ledger: Records the writes that keep the replicas equal.

    Raises:
        CloneError: An op cannot be copied.
    """

    def __init__(
        self,
        original: Original,
        ops: Sequence[tf.Operation],
        returned: Sequence[Any],
        own: Sequence[Sequence[tf.Tensor]],
        ledger: effects.Ledger,
    ) -> None:
        graph = tf.compat.v1.get_default_graph()
        outermost = Captures().outermost
        captures = getattr(graph, "captures", ())  # of a function
        captured = {id(inner): outermost(inner) for _, inner in captures}
        self._own, self._original = own, original
        self._places = {id(column[0]): k for k, column in enumerate(own)}
        for inner, outer in captured.items():
            if id(outer) in self._places:
                self._places[inner] = self._places[id(outer)]
        self._template = Template(
            graph, _live(ops, returned, captured), original, ledger, {}
        )

    def copy(self, n: int, replica: Replica) -> Copy:
        """Adds a copy to the default graph.

        Args:
            n: The position of the replica among those of this process.
            replica: The replica; its scope is unused so far.
        """
        template = self._template
        graph = tf.compat.v1.get_default_graph()

        def in_place_of(tensor: tf.Tensor) -> tf.Tensor:
            k = self._places.get(id(tensor))
            if k is None:
                return tensor
            own = self._own[k][n]
            return graph.capture(own) if graph.building_function else own

        names = {
            column[0].name: column[n].name
            for column in self._own
            if tf.is_symbolic_tensor(column[0])
        }
        new = facts.New(self._original, replica, {**template.names(replica), **names})
        copies = template.stamp(new, list(map(in_place_of, template.outside)))

        def leaf(what: Any) -> Any:
            if isinstance(what, tf.Operation):
                return template.operation(what, copies)
            if not tf.is_symbolic_tensor(what):
                return what
            return template.result(what, copies, in_place_of)

        return Copy(copies, leaf)


class Template:
    """The ops of the first replica on one level, ready to be copied.

    Args:
        graph: The graph that contains them.
        ops: The ops on which something depends, in build order.
        original: What is known of the replica.
        ledger: Records the writes that keep the replicas equal.
        known: The functions that are ready already, by name.

    Attributes:
        outside: Their inputs from other ops.
        is_fixed: Whether a function of them can be called by all replicas as it is.
        is_common: Whether, devices aside, the ops are those of all replicas, and have
            no effects: the copies may share a function of them.
    """

    def __init__(
        self,
        graph: Any,
        ops: list[tf.Operation],
        original: Original,
        ledger: effects.Ledger,
        known: dict[str, Function | None],
    ) -> None:
        self._graph, self._ops, self._scope = graph, ops, original.replica.scope
        self._ledger = ledger
        self._index = {op: n for n, op in enumerate(ops)}
        claims = ledger.claims(graph)
        self._claims = [(n, claims[op]) for n, op in enumerate(ops) if op in claims]
        self.outside: list[tf.Tensor] = []
        self._waits: list[tuple[int, tf.Operation]] = []  # (op, control input outside)
        self._nodes = self._take()
        self._moved = [n for n, op in enumerate(ops) if original.moves(op)]
        self._facts = [
            (n, fact)
            for n, (op, node) in enumerate(zip(ops, self._nodes.node, strict=True))
            if (fact := facts.of(op, node, original)) is not None
        ]
        self._handles = [
            (n, k)
            for n, op in enumerate(ops)
            for k, tensor in enumerate(op.outputs)
            if tensor.dtype in (tf.resource, tf.variant)
        ]
        self._calls = {
            n: tf_functions.names_called(op)
            for n, op in enumerate(ops)
            if kind_of(op).calls
        }
        self._functions: dict[str, Function] = {}
        for n, names in self._calls.items():
            for name in names:
                function = _function(ops[n], name, original, ledger, known)
                if function is not None and not function.template.is_fixed:
                    self._functions[name] = function
        at_home = {n for n in self._moved if ops[n].device == original.replica.device}
        self._common = {n for n, f in self._functions.items() if f.template.is_common}
        for n, names in self._calls.items():
            own = self._functions.keys() & names
            # A condition without devices would not be like that of the first replica,
            # with which it is merged if the body communicates.
            if n not in at_home or not own <= self._common:
                self._common -= own
        self._copies: dict[Any, str] = {}  # of these, by graph and name
        differs = bool(self._claims or self._waits or self._facts)
        self.is_fixed: bool = not (differs or self._moved or self._functions)
        self.is_common: bool = (
            not differs
            and len(at_home) == len(self._moved)
            and self._common == self._functions.keys()
            and not any(has_effect(op) for op in ops if not kind_of(op).calls)
        )

    def _take(self) -> Any:
        """Returns the ops' nodes, with inputs named by the copies' names."""
        by_name = {op.name: n for op, n in self._index.items()}
        nodes: list[Any] = [None] * len(self._ops)
        for node in self._graph.as_graph_def(add_shapes=True).node:
            n = by_name.get(node.name)
            if n is not None:
                nodes[n] = node
        positions: dict[int, int] = {}
        definition = tf.compat.v1.GraphDef()
        for op, node in zip(self._ops, nodes, strict=True):
            node.attr.pop("_class", None)  # every op has a device
            inputs = []
            for tensor in op.inputs:
                if tensor.op in self._index:
                    inputs.append(f"{self._name(tensor.op)}:{tensor.value_index}")
                else:
                    k = positions.setdefault(id(tensor), len(positions))
                    if k == len(self.outside):
                        self.outside.append(tensor)
                    inputs.append(f"{_IN}{k}:0")
            for source in op.control_inputs:
                if source in self._index:
                    inputs.append(f"^{self._name(source)}")
                else:
                    self._waits.append((self._index[op], source))
            node.name = self._name(op)
            node.input[:] = inputs
            definition.node.append(node)
        return definition

    def _name(self, op: tf.Operation) -> str:
        """Returns an op's name relative to the scope of its replica."""
        own = op.name.removeprefix(self._scope)
        is_inside = len(own) < len(op.name) and not own.startswith("_")  # a bad start
        return own if is_inside else f"{_IN}/{op.name}"

    def names(self, replica: Replica) -> dict[str, str]:
        """Returns the names in a copy of ops that have not those of their replica."""
        own = ((op.name, self._name(op)) for op in self._ops)
        return {
            name: replica.scope + new for name, new in own if name != self._scope + new
        }

    def stamp(self, new: facts.New, inputs: Sequence[tf.Tensor]) -> list[tf.Operation]:
        """Adds a replica's copy to the default graph; returns its ops, in order.

        Args:
            new: The replica, and what differs in it.
            inputs: Its inputs, in place of `outside`.
        """
        graph, scope = tf.compat.v1.get_default_graph(), new.replica.scope
        functions = {name: self._copy(name, new) for name in self._functions}
        start = graphs.operation_count(graph)
        definition = self._patched(new, functions)
        input_map = {f"{_IN}{k}:0": tensor for k, tensor in enumerate(inputs)}
        try:
            ops = choice.import_nodes(graph, definition, input_map, scope)
        except (tf.errors.InvalidArgumentError, ValueError) as error:
            by_name = {scope + self._name(op): op for op in self._ops}
            raise facts.unlike(by_name, str(error)) from None
        by_name = {op.name: n for n, op in enumerate(ops)}
        places = [by_name[scope + node.name] for node in definition.node]
        copies = [ops[n] for n in places]
        for op, copy in zip(self._ops, copies, strict=True):
            frames.copy_line(op, copy)
        for n, source in self._waits:
            tf_ops.add_control_inputs(copies[n], [source])
        for n, claim in self._claims:
            place = start + places[n]
            self._ledger.enter(graph, place, place + 1, claim)
        for n, k in self._handles:
            tf_ops.copy_handle_data(self._ops[n].outputs[k], copies[n].outputs[k])
        return copies

    def _patched(self, new: facts.New, functions: Mapping[str, str]) -> Any:
        """Returns the nodes with the replica's own devices and attributes."""
        definition = tf.compat.v1.GraphDef()
        definition.CopyFrom(self._nodes)
        nodes = definition.node
        for n in self._moved:
            nodes[n].device = new.places[nodes[n].device]
        for n, fact in self._facts:
            fact(nodes[n], new)
        for n in self._calls if functions else ():
            for value in nodes[n].attr.values():
                for function in tf_functions.named(value):
                    function.name = functions.get(function.name, function.name)
        return definition

    def _copy(self, name: str, new: facts.New) -> str:
        """Returns the name of a replica's function in place of one of the first's."""
        function = self._functions[name]
        if name not in self._common:
            return function.copied(new.inside(f"replica_{new.replica.replica_id}/"))
        key = tf.compat.v1.get_default_graph(), name
        if key not in self._copies:  # without devices: it runs where it is called
            anywhere = new.inside("replicas/", anywhere=True)
            self._copies[key] = function.copied(anywhere)
        return self._copies[key]

    def result(
        self,
        tensor: tf.Tensor,
        copies: Sequence[tf.Operation],
        outside: Callable[[tf.Tensor], tf.Tensor],
    ) -> tf.Tensor:
        """Returns a copy's counterpart of a tensor.

        Args:
            tensor: A tensor of the first replica.
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


@dataclasses.dataclass(frozen=True)
class Function:
    """A function that the first replica calls.

    Attributes:
        graph: Its graph.
        outputs: What it returns.
        template: Its ops.
    """

    graph: Any
    outputs: list[tf.Tensor]
    template: Template

    def copied(self, new: facts.New) -> str:
        """Adds a copy to the default graph; returns its name."""
        graph, template = self.graph, self.template
        inside = tf_functions.new_function_graph(new.replica.scope.removesuffix("/"))
        arguments = tf_functions.add_inputs(
            inside, graph.inputs, [t.shape for t in graph.inputs]
        )
        argument_of = {
            id(t): argument for t, argument in zip(graph.inputs, arguments, strict=True)
        }

        def argument(tensor: tf.Tensor) -> tf.Tensor:
            return argument_of[id(tensor)]

        with inside.as_default():
            copies = template.stamp(new, list(map(argument, template.outside)))
            results = [template.result(t, copies, argument) for t in self.outputs]
        must_run = [template.operation(op, copies) for op in graph.control_outputs]
        return tf_functions.finish_function(inside, results, must_run)


def _function(
    op: tf.Operation,
    name: str,
    original: Original,
    ledger: effects.Ledger,
    known: dict[str, Function | None],
) -> Function | None:
    """Returns the function that an op calls; None if it exists only in C++."""
    if name not in known:
        body = tf_functions.function_called(op, name)
        if body is None:
            known[name] = None
        else:
            graph, outputs = body
            inputs = {id(tensor): tensor for tensor in graph.inputs}
            roots = [*outputs, *graph.control_outputs]
            ops = _live(graph.get_operations(), roots, inputs)
            template = Template(graph, ops, original, ledger, known)
            known[name] = Function(graph, outputs, template)
    return known[name]


def _live(
    ops: Sequence[tf.Operation], roots: Iterable[Any], captured: Mapping[int, Any]
) -> list[tf.Operation]:
    """Returns, in order, the ops with an effect or result, and all they depend on.

    Ops that represent a tensor from outside are left out: a placeholder, or a constant
    if the tensor was small and eager. The first op to use such a tensor creates them.
    """
    replica_ops = {
        op for op in ops if not any(id(t) in captured for t in op.outputs[:1])
    }
    live = [root if isinstance(root, tf.Operation) else root.op for root in roots]
    for op in ops:
        kind = kind_of(op)
        if kind.stateful or kind.calls or placeholder.read(op) is not None:
            if not tf_ops.is_abandoned(op):
                live.append(op)
    live_ops = walk.upstream(live, among=replica_ops)
    return [op for op in ops if op in live_ops]
