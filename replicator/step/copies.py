# SPDX-License-Identifier: Apache-2.0
"""Creates handles and copies for several replicas at once, and hides what differs.

graph/cloning/ imports copies of the first replica into the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replicator import context, errors
from replicator._tf import choice
from replicator.graph.cloning import clone, facts
from replicator.graph.ir import walk
from replicator.graph.ir.captures import Captures
from replicator.graph.ir.kinds import kind_of
from replicator.graph.order import ordering
from replicator.primitives import arithmetic
from replicator.step.tracing import Placed
from replicator.variables.creation import VariableFactory


def hide_values(inputs: Sequence[Any]) -> list[Any]:
    """Gives the first replica inputs of its own, which reveal nothing about it.

    TensorFlow folds constants into static shapes, as in tf.reshape(x, [constant]), and
    copies take over those of the first replica. Also, one tensor may be two of its
    inputs, or be used elsewhere, where another replica has two tensors.

    Args:
        inputs: `inputs[r]` are replica r's, nests of the same structure.

    Returns:
        The inputs. Those that differ are behind an op that TensorFlow does not fold, if
        it could fold them; else the first replica's are behind an identity.
    """
    flat = [tf.nest.flatten(nest, expand_composites=True) for nest in inputs]
    columns = []
    for column in zip(*flat, strict=True):
        if any(leaf is not column[0] for leaf in column) and _is_value(column[0]):
            constants = [tf.get_static_value(leaf) for leaf in column]
            is_equal = all(
                value is not None and np.array_equal(value, constants[0])
                for value in constants
            )
            if not is_equal and any(map(_is_folded, column)):
                column = tuple(_changed(leaf, arithmetic.shield) for leaf in column)
            else:
                column = (_changed(column[0], tf.identity), *column[1:])
        columns.append(column)
    return [
        tf.nest.pack_sequence_as(nest, leaves, expand_composites=True)
        for nest, leaves in zip(inputs, zip(*columns, strict=True), strict=True)
    ]


def _is_folded(tensor: tf.Tensor) -> bool:
    """Whether a tensor is computed from constants alone."""
    if not tf.is_symbolic_tensor(tensor):
        return True
    return not any(
        kind_of(op).stateful or op.type.startswith("Placeholder")
        for op in walk.upstream([tensor.op], walk.computed_from)
    )


_RESOURCES = (tf.resource, tf.variant)


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and leaf.dtype not in _RESOURCES


def _changed(leaf: tf.Tensor, change: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    with tf.device(leaf.device):
        return change(leaf)


def bring_handles(factory: VariableFactory, build: context.Build) -> None:
    """Gives all replicas the handles of all variables that any of them uses so far.

    Otherwise each would get them one by one, on first use, which takes a substantial
    part of the build of a step with many variables.
    """
    shared = {id(variable): variable for variable in build.aliases.variables().values()}
    build.aliases.make(list(shared.values()), build.world.local)
    if build.graph.building_function:
        owners = factory.owners()
        used = [
            (owners.get(id(outside)), bool(inside.device))
            for outside, inside in build.graph.captures
        ]
        choice.capture_all(
            build.graph,
            [
                (component.handle, component.handle.device if is_placed else "")
                for variable, is_placed in used  # as on the replica that used it first
                if variable is not None and _has_components(variable)
                for component in variable.components
            ],
        )


def make(
    factory: VariableFactory,
    build: context.Build,
    elements: Sequence[Any],
    ops: Sequence[tf.Operation],
    returned: Any,
    scope: str,
) -> Iterator[tuple[list[tf.Operation], Any]]:
    """Adds copies of the first replica for those for which step_fn is not called.

    Args:
        factory: Creates the variables.
        build: The build.
        elements: Each replica's inputs: all tensors that differ between replicas.
        ops: The ops of the first replica.
        returned: What step_fn returned for it.
        scope: Its name scope.

    Yields:
        The ops of each copy, and what step_fn would have returned for it.
    """
    world = build.world
    first, *others = world.local
    devices = [world.device(r) for r in world.local]
    initializers = ordering.with_sources(factory.initializers, [ops])
    columns = _columns(elements, world.local)
    bring_handles(factory, build)
    used = [*build.aliases.variables().values()]
    used += [v for v in factory.owners().values() if _has_components(v)]
    variables = {id(variable): variable for variable in used}
    for variable in variables.values():
        place = functools.partial(variable.placement.handles_on, variable)
        handles = [place(r, build.aliases) for r in world.local]
        columns += [list(column) for column in zip(*handles, strict=True)]
    original = facts.Original(
        facts.Replica(first, devices[0], scope), devices, _keeper(build, columns)
    )
    leaves = tf.nest.flatten(returned, expand_composites=True)
    copier = clone.Copier(
        original,
        [op for op in ops if op not in initializers],
        [leaf for leaf in leaves if leaf is not None],
        columns,
        build.ledger,
    )
    for n, replica_id in enumerate(others, 1):
        with tf.name_scope(f"replica_{replica_id}") as scope:
            copy = copier.copy(n, facts.Replica(replica_id, devices[n], scope))
        yield (
            copy.ops,
            tf.nest.map_structure(copy.leaf, returned, expand_composites=True),
        )


def _keeper(
    build: context.Build, columns: Sequence[Sequence[tf.Tensor]]
) -> Callable[[tf.Operation], bool]:
    """Returns a predicate: whether a resource determines the device of an op.

    The resource is a variable that one replica owns, or one that all replicas share and
    the user has placed. All other ops on the first replica's device are its own.
    """
    first_inputs, outermost = (
        {id(column[0]) for column in columns},
        Captures().outermost,
    )
    placed = build.states.of(Placed)

    def is_kept(op: tf.Operation) -> bool:
        if build.aliases.device_for(op) is not None:
            return True
        if op not in placed:
            return False
        resources = [t for t in (*op.inputs, *op.outputs) if t.dtype in _RESOURCES]
        is_own = any(id(outermost(tensor)) in first_inputs for tensor in resources)
        return bool(resources) and not is_own

    return is_kept


def _has_components(variable: Any) -> bool:
    """Whether each replica has its own component."""
    placement = variable.placement
    return placement.owner is None or placement.has_copies


def _columns(
    elements: Sequence[Any], replica_ids: Sequence[int]
) -> list[list[tf.Tensor]]:
    """Returns the tensors of the replicas' elements, [k][n], where they differ.

    Raises:
        CloneError: Dtypes or static shapes differ, and the ops that a step builds may
            depend on them.
    """
    flat = [tf.nest.flatten(element, expand_composites=True) for element in elements]
    tensors = zip(*flat, strict=True)
    columns = [
        list(column)
        for column in tensors
        if column[0] is not None and any(tensor is not column[0] for tensor in column)
    ]
    for column in columns:
        for r, tensor in zip(replica_ids, column, strict=True):
            if _kind(tensor) != _kind(column[0]):
                raise errors.CloneError(
                    'with build="clone", all replicas must be fed tensors of one '
                    "dtype and static shape.",
                    [
                        f"replica {replica_ids[0]}: {_kind(column[0])}",
                        f"replica {r}: {_kind(tensor)}",
                    ],
                    "let input_fn return equal shapes (for a Dataset, "
                    "drop_remainder=True). Arrays and tensors of a global batch "
                    "must divide evenly among the replicas; or pass them as a "
                    "Dataset, whose batches may have any number of rows: "
                    "Dataset.from_tensor_slices(arrays).batch(size). Or build "
                    'each replica separately with build="trace".',
                )
    return columns


def _kind(tensor: tf.Tensor) -> str:
    """Returns dtype and static shape, as text: unknown shapes are never equal."""
    return f"{tensor.dtype.name} {tensor.shape}"
