"""What is refused once all replicas are built, before anything is rewired.

Each check takes what was built and returns nothing, or raises an error that says where
the replicas differ, or could come to differ, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator.creation import VariableFactory
from replicator.graph import effects, placeholder
from replicator.graph.captures import Captures
from replicator.graph.kinds import resource_inputs
from replicator.graph.owners import Aliases


def check_outputs(outputs: Sequence[Any], devices: Sequence[str]) -> None:
    """Raises MismatchError unless all replicas returned one structure."""
    first = outputs[0]
    for replica_id, other in enumerate(outputs[1:], 1):
        try:
            tf.nest.assert_same_structure(first, other, expand_composites=True)
            alike = all(
                type(one) is type(two) or tf.is_tensor(one) and tf.is_tensor(two)
                for one, two in zip(
                    tf.nest.flatten(first), tf.nest.flatten(other), strict=True
                )
            )
        except (TypeError, ValueError):
            alike = False
        if not alike:
            raise errors.MismatchError(
                errors.compose(
                    "step_fn returns different structures on different replicas.",
                    [
                        f"replica 0 ({devices[0]}): {_outline(first)}",
                        f"replica {replica_id} ({devices[replica_id]}): "
                        f"{_outline(other)}",
                    ],
                    "return the same structure on every replica; to return nothing on "
                    "one, return None on all.",
                )
            )


def _outline(structure: Any) -> str:
    """Describes a structure by the dtypes and shapes of its leaves."""

    def leaf(value: Any) -> str:
        if value is None or isinstance(value, tf.Operation):
            return type(value).__name__
        return str(placeholder.Value.of(value))

    return str(tf.nest.map_structure(leaf, structure)).replace("'", "")


def check_writes(
    factory: VariableFactory,
    ledger: effects.Ledger,
    replicas: Sequence[Sequence[tf.Operation]],
    aliases: Aliases,
) -> None:
    """Raises ContextError if a step could make the replicas' variables drift apart."""
    owners = {**factory.owners(), **aliases.variables()}
    initializers = factory.initializers
    outermost = Captures().outermost
    known = ledger.agreed_ops(tf.compat.v1.get_default_graph())
    for replica_id, ops in enumerate(replicas):
        for op, resource, agreed in effects.find_writes(ops, ledger, known):
            if op in initializers:
                continue
            variable = owners.get(id(outermost(resource)))
            if variable is not None and (agreed or variable.differs):
                continue
            if variable is None:
                problem = (
                    f"replica {replica_id} writes a variable that was made outside of "
                    f"the context ({op.type}); it would be written once per replica."
                )
                fix = (
                    "create it (or the model, optimizer, metric or generator that "
                    "holds it) under `with repl.context():`, and then load its values."
                )
            else:
                problem = (
                    f"replica {replica_id} writes variable {variable.name} by "
                    f"{op.type}, by which the replicas would drift apart."
                )
                fix = (
                    "wrap the optimizer, repl.wrap_optimizer(optimizer); or write it "
                    "by one of the variable's own methods, assign, assign_add, ..."
                )
            where = [f"at {errors.line_of(op)}"]
            raise errors.ContextError(errors.compose(problem, where, fix))


def check_components(
    factory: VariableFactory,
    replicas: Sequence[Sequence[tf.Operation]],
    aliases: Aliases,
) -> None:
    """Raises ContextError if a replica uses another one's component of a variable.

    That happens in functions that are called by the step but were traced elsewhere; no
    gradient would reach the replica's own component.
    """
    owners = {**factory.owners(), **aliases.variables()}
    initializers = factory.initializers
    outermost = Captures().outermost
    for replica_id, ops in enumerate(replicas):
        for op in ops:
            if op in initializers:
                continue
            for _, resource in resource_inputs(op):
                handle = outermost(resource)
                variable = owners.get(id(handle))
                if variable is None or handle is variable.handle_on(
                    replica_id, aliases
                ):
                    continue
                raise errors.ContextError(
                    errors.compose(
                        f"replica {replica_id} uses another replica's component of "
                        f"variable {variable.name}, by {op.type}.",
                        [f"at {errors.line_of(op)}"],
                        "call the tf.function itself, which is traced per replica, "
                        "and not its concrete function (a loaded SavedModel has no "
                        "others). One with jit_compile=True is traced once: make "
                        "another one for what is called outside of steps, and take "
                        "gradients of tf.recompute_grad inside of it.",
                    )
                )


def check_circles(replicas: Sequence[Sequence[tf.Operation]]) -> None:
    """Raises DeadlockError if replicas would wait for one another in a circle."""
    link = effects.find_leak(replicas)
    if link is not None:
        taker, giver = link
        raise errors.DeadlockError(
            errors.compose(
                "a replica uses a tensor of another replica directly, and communicates "
                "with it: they could wait for one another.",
                [
                    f"the tensor is made at {errors.line_of(giver)} ({giver.name})",
                    f"and used at {errors.line_of(taker)} ({taker.name})",
                ],
                "do not keep tensors of one call of step_fn for the next; hand them "
                "over by broadcast or all_gather.",
            )
        )
