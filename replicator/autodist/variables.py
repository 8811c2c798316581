# SPDX-License-Identifier: Apache-2.0
"""Variables of a graph for one device, and the library's in place of them.

The user's graph has plain resource variables. The graph of all replicas has the
library's, which the strategy places. Their initial values are copies of the user's; if
those depend on other variables, say, a step runs the user's own initializers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator._tf import choice
from replicator._tf import variables as tf_variables
from replicator.autodist import slots
from replicator.graph.ir import shapes, walk
from replicator.graph.ir.kinds import kind_of
from replicator.step.known import Settings
from replicator.variables.chooser import Description, VariableFacts

# The arguments of a variable creator that a resource variable takes.
_FACTS = (
    *("initial_value", "trainable", "collections", "validate_shape", "name", "dtype"),
    *("constraint", "synchronization", "aggregation", "shape"),
)
_OF_ROWS = ("ResourceSparseApply", "ResourceScatter")


class PlainVariable(tf_variables.ResourceVariable):
    """A variable of the user's graph.

    Attributes:
        is_by_reference: Whether it stands for a reference variable of TensorFlow 1.
    """

    is_by_reference = False


def creator(made: list[PlainVariable]) -> Callable[..., PlainVariable]:
    """Returns a variable creator that makes plain variables.

    Args:
        made: The list that it appends them to.
    """

    def create(_: Any, **kwargs: Any) -> PlainVariable:
        facts = {k: v for k, v in kwargs.items() if k in _FACTS and v is not None}
        variable = PlainVariable(**facts)
        variable.is_by_reference = _is_by_reference(kwargs)
        made.append(variable)
        return variable

    return create


def _is_by_reference(arguments: Mapping[str, Any]) -> bool:
    """Whether a variable creator's arguments ask for a reference variable."""
    if "use_resource" not in arguments:  # tf.Variable of TensorFlow 2
        return False
    asked = arguments["use_resource"]
    return not (tf.compat.v1.resource_variables_enabled() if asked is None else asked)


class Variables:
    """The library's variables in the graph of all replicas, which is the default graph.

    Args:
        settings: What creates them, and the strategy.

    Attributes:
        made: The library's variables, by the handles' ops of the user's.
        trained: Those that the strategy decides on, by the user's names.
        initial: Their initial values, by the same ops, of those that have a copy.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.initial: dict[tf.Operation, tf.Tensor] = {}
        self.made: dict[tf.Operation, Any] = {}
        self.trained: dict[str, Any] = {}

    def behind(self, handle: tf.Tensor) -> Any:
        """Returns the library's variable in place of one of the user's.

        Raises:
            UnsupportedError: The handle's variable was not created in the scope.
        """
        if handle.op in self.made:
            return self.made[handle.op]
        raise errors.UnsupportedError(
            f"variable {handle.op.name} was created outside AutoDist's scope, or "
            "imported.",
            [f"at {errors.line_of(handle.op)}"],
            "enter autodist.scope() before the first variable is created; build an "
            "imported graph by its program instead, and restore its checkpoint with a "
            "Saver.",
        )

    def make(self, graph: tf.Graph, variables: Sequence[PlainVariable]) -> None:
        """Makes those that are not made yet.

        Args:
            graph: The user's graph, which says how they are updated.
            variables: Its variables.
        """
        new = {v.op: v for v in variables if v.op not in self.made}
        if not new:
            return
        by_op = {v.op: v for v in variables}
        ops = graph.get_operations()
        primaries = slots.find(ops, lambda tensor: by_op.get(tensor.op))
        chosen = self._chosen(ops, [v for v in new.values() if _is_trained(v)])
        by_name = {v.op.name: v for v in variables}
        self.initial.update(
            _copied(graph, [*new.values()], self._settings.world.devices[0])
        )
        for op in sorted(new, key=lambda op: op.name in primaries):  # slots last
            variable = new[op]
            primary = by_name.get(primaries.get(op.name, ""))
            self.made[op] = self._settings.factory.creator(
                None,
                initial_value=self.initial.get(op, lambda v=variable: _empty(v)),
                name=op.name,
                shape=variable.shape,
                trainable=False,  # the strategy has decided already
                slot_of=None if primary is None else self.made.get(primary.op),
                description=chosen.get(op.name),
            )
            if _is_trained(variable):
                self.trained[op.name] = self.made[op]

    def _chosen(
        self, ops: Sequence[tf.Operation], variables: Sequence[PlainVariable]
    ) -> Mapping[str, Description]:
        chooser = self._settings.chooser
        if chooser is None:
            return {}
        updates = _updates(ops)
        facts = []
        for order, variable in enumerate(variables):
            types = updates.get(variable.op, ())
            by_rows = [one for one in types if one.startswith(_OF_ROWS)]
            nbytes = variable.shape.num_elements() * variable.dtype.size
            facts.append(
                VariableFacts(
                    variable.op.name,
                    shapes.defined(variable),
                    variable.dtype.name,
                    sparse=bool(by_rows),
                    order=order,
                    nbytes=nbytes,
                )
            )
        return chooser.begin().choose_all(facts)


def _is_trained(variable: PlainVariable) -> bool:
    is_known = variable.dtype.is_floating and variable.shape.is_fully_defined()
    return bool(variable.trainable and is_known)


def _updates(ops: Sequence[tf.Operation]) -> dict[tf.Operation, list[str]]:
    """Returns the types of the ops that update each variable, by its handle's op."""
    found: dict[tf.Operation, list[str]] = {}
    for op in ops:
        if op.type.startswith("Resource") and op.inputs:
            found.setdefault(op.inputs[0].op, []).append(op.type)
    return found


def _copied(
    graph: tf.Graph, variables: Sequence[PlainVariable], device: str
) -> dict[tf.Operation, tf.Tensor]:
    """Copies initial values to the default graph; returns them by handles' ops.

    Values that depend on more than constants and random numbers are left out.
    """
    all_ops, ops = set(graph.get_operations()), dict[tf.Operation, None]()
    values = {}
    for variable in variables:
        value = variable.initializer.inputs[1]
        sources = walk.in_order([value.op], walk.computed_from, all_ops)
        if all(map(_can_be_copied, sources)):
            values[variable.op] = value
            ops.update(dict.fromkeys(sources))
    if not ops:
        return {}
    definition = tf.compat.v1.GraphDef()
    for op in ops:
        node = definition.node.add()
        node.CopyFrom(op.node_def)
        node.attr.pop("_class", None)
        node.device = device
    target = tf.compat.v1.get_default_graph()
    scope = target.unique_name("initial_values") + "/"
    choice.import_nodes(target, definition, {}, scope)
    return {
        op: target.get_tensor_by_name(scope + value.name)
        for op, value in values.items()
    }


def _can_be_copied(op: tf.Operation) -> bool:
    """Whether an op depends on its inputs and random numbers only."""
    kind = kind_of(op)
    has_state = kind.stateful and not kind.seeded  # like all that makes a resource
    is_large = op.type == "Const" and (op.outputs[0].shape.num_elements() or 0) > _LARGE
    waits = op.control_inputs or op.type.startswith("Placeholder")
    return not (has_state or kind.calls or waits or is_large)


_LARGE = 1 << 20  # elements of constants, which a GraphDef could not hold


def _empty(variable: tf.Variable) -> tf.Tensor:
    """Returns a value with a variable's dtype and, as far as known, shape."""
    shape = [size or 0 for size in shapes.static(variable) or ()]
    if variable.dtype == tf.string:
        return tf.fill(shape, "")
    return tf.zeros(shape, variable.dtype)
