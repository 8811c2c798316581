# SPDX-License-Identifier: Apache-2.0
"""Creates handles and copies for several replicas at once, and hides what differs.

graph/cloning/proof.py proves that replicas 0 and 1 are alike; graph/cloning/clone.py
imports copies of replica 1 into the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replicator import _tf, context, errors
from replicator.graph.cloning import clone, proof
from replicator.graph.ir.kinds import kind_of
from replicator.graph.order import ordering
from replicator.primitives import arithmetic
from replicator.variables.creation import VariableFactory
from replicator.variables.initial_values import Captured


def hide_values(inputs: Sequence[Any]) -> list[Any]:
    """Keeps static shapes from depending on inputs that are constants in the graph.

    TensorFlow folds constants into static shapes, tf.reshape(x, [constant]) for one,
    and copies have those of replica 1.

    Args:
        inputs: `inputs[r]` are replica r's, nests of the same structure.

    Returns:
        The same, behind an op that TensorFlow does not evaluate where they may differ.
    """
    flat = [tf.nest.flatten(nest, expand_composites=True) for nest in inputs]
    columns = []
    for column in zip(*flat, strict=True):
        tensors = [leaf for leaf in column if tf.is_symbolic_tensor(leaf)]
        constants = [tf.get_static_value(leaf) for leaf in tensors]
        same = all(
            value is not None and np.array_equal(value, constants[0])
            for value in constants
        )
        if not same and any(map(_is_folded, tensors)):
            column = tuple(_hidden(leaf) for leaf in column)
        columns.append(column)
    return [
        tf.nest.pack_sequence_as(nest, leaves, expand_composites=True)
        for nest, leaves in zip(inputs, zip(*columns, strict=True), strict=True)
    ]


def _is_folded(tensor: tf.Tensor) -> bool:
    """Whether a tensor is computed from constants alone."""
    todo, seen = [tensor.op], {tensor.op}
    while todo:
        op = todo.pop()
        if kind_of(op).stateful or op.type.startswith("Placeholder"):
            return False
        todo += {source.op for source in op.inputs} - seen
        seen.update(todo)
    return True


def _hidden(leaf: Any) -> Any:
    if not tf.is_symbolic_tensor(leaf) or leaf.dtype in (tf.resource, tf.variant):
        return leaf
    with tf.device(leaf.device):
        return arithmetic.shield(leaf)


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
        _tf.capture_all(
            build.graph,
            [
                (component.handle, component.handle.device if is_placed else "")
                for variable, is_placed in used  # as on the replica that used it first
                if variable is not None and _has_components(variable)
                for component in variable.components
            ],
        )


def check_captures(build: context.Build) -> None:
    """Requests another build if creating variables made a function capture tensors.

    Raises:
        BuildAgain: There will be copies, and the functions of replica 1, which found
            the variables created, may lack what those of replica 0 captured.
    """
    copied = not build.all_traced
    captured = copied and build.states.of(Captured).any
    if captured and Captured not in build.knowledge:
        build.knowledge[Captured] = True
        raise context.BuildAgain


def make(
    factory: VariableFactory,
    build: context.Build,
    elements: Sequence[Any] | None,
    replicas: Sequence[Sequence[tf.Operation]],
    returned: Sequence[Any],
    scopes: Sequence[str],
    counted: Sequence[int],
) -> Iterator[tuple[list[tf.Operation], Any]]:
    """Adds copies of replica 1 for the replicas for which step_fn is not called.

    Args:
        factory: Creates the variables.
        build: The build.
        elements: Each replica's inputs: all tensors that differ between replicas.
        replicas: The ops of replicas 0 and 1.
        returned: What step_fn returned for them.
        scopes: Their name scopes.
        counted: TensorFlow's count of seeds at the start of each.

    Yields:
        The ops of each copy, and what step_fn would have returned for it.
    """
    world = build.world
    assert world.num_local == world.num_replicas, "the proof is of replicas 0 and 1"
    seeds = counted[0], counted[1], _tf.seeds_counted(build.graph)
    initializers = ordering.with_sources(factory.initializers, replicas)
    columns = _columns(elements) if elements else []
    bring_handles(factory, build)
    used = [*build.aliases.variables().values()]
    used += [v for v in factory.owners().values() if _has_components(v)]
    variables = {id(variable): variable for variable in used}
    for variable in variables.values():
        place = functools.partial(variable.placement.handles_on, variable)
        handles = [place(r, build.aliases) for r in world.local]
        columns += [list(column) for column in zip(*handles, strict=True)]
    flat = [tf.nest.flatten(leaves, expand_composites=True) for leaves in returned]
    copier = clone.Copier(
        [[op for op in ops if op not in initializers] for ops in replicas],
        [[leaf for leaf in leaves if leaf is not None] for leaves in flat],
        columns,
        proof.Replicas(world.devices, (scopes[0], scopes[1]), seeds),
        build.ledger,
    )
    for replica_id in world.local[len(build.traced) :]:
        with tf.name_scope(f"replica_{replica_id}") as scope:
            copy = copier.copy(replica_id, scope)
        yield (
            copy.ops,
            tf.nest.map_structure(copy.leaf, returned[1], expand_composites=True),
        )


def _has_components(variable: Any) -> bool:
    """Whether each replica has its own component."""
    placement = variable.placement
    return placement.owner is None or placement.has_copies


def _columns(elements: Sequence[Any]) -> list[list[tf.Tensor]]:
    """Returns the tensors of all replicas' elements, [k][r], if their shapes agree.

    Raises:
        CloneError: Static shapes differ, and the ops that a step builds may depend on
            them.
    """
    flat = [tf.nest.flatten(element, expand_composites=True) for element in elements]
    tensors = zip(*flat, strict=True)
    columns = [list(column) for column in tensors if column[0] is not None]
    for column in columns:
        for r, tensor in enumerate(column):
            # As text: unknown shapes are never equal.
            if str(tensor.shape) != str(column[0].shape):
                raise errors.CloneError(
                    errors.compose(
                        'with build="clone", all replicas must be fed tensors of one '
                        "static shape.",
                        [
                            f"replica 0: {column[0].shape}",
                            f"replica {r}: {tensor.shape}",
                        ],
                        "let input_fn return equal shapes (for a Dataset, "
                        "drop_remainder=True). Arrays and tensors of a global batch "
                        "must divide evenly among the replicas; or pass them as a "
                        "Dataset, whose batches may have any number of rows: "
                        "Dataset.from_tensor_slices(arrays).batch(size). Or build "
                        'each replica separately with build="trace".',
                    )
                )
    return columns
