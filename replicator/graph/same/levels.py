# SPDX-License-Identifier: Apache-2.0
"""Decides whether the values of a step are equal on all replicas, and if not, why.

Values are equal if their keys are: if they are one tensor, results that a collective
returns to all replicas, reads of one variable after as many writes, or computed by the
same stateless op from equal values; likewise inside conditionals, loops and functions.
Where keys differ, what they were made of is walked, side by side, to the first op that
differs. Reads graphs and changes none; runs before anything is rewired.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from replicator.graph.same.keys import OWN, Key, Keys, Origin, hashed
from replicator.graph.same.scopes import Outside, Scope

Column: TypeAlias = tuple[tf.Tensor, ...]  # one per replica
Ops: TypeAlias = tuple[tf.Operation, ...]  # one per replica


class Level:
    """The ops of all replicas on one level of the graph, side by side.

    Args:
        scopes: The scope of each replica.
        writes: As below.
        between: Whether other processes build further replicas.

    Attributes:
        writes: `writes[r]` maps the id of a resource (a replicated variable or any
            other) to replica r's ops that write it, in order.
        resources: The resources by these ids.
    """

    def __init__(
        self,
        scopes: Sequence[Scope],
        writes: Sequence[dict[int, list[tf.Operation]]],
        between: bool,
    ) -> None:
        self._scopes, self.writes, self._between = scopes, writes, between
        self.resources: dict[int, Any] = {}
        for scope in scopes:
            self.resources.update(scope.resources)

    def difference(self, column: Column) -> Ops | None:
        """Returns the ops that make the replicas' values differ.

        Args:
            column: One tensor per replica, on this level.

        Returns:
            One op per replica, or None if the values are equal by construction.
        """
        values = list(zip(self._scopes, column, strict=True))
        if not self._differ(values):
            return None
        return self._walk([scope.origin(tensor) for scope, tensor in values])

    def difference_of_inputs(self, ops: Ops) -> Ops | None:
        """Returns the ops by which the replicas' ops or inputs differ, else None.

        Resources count as equal if they are the same variables.
        """
        return self._difference([s.of_op(op) for s, op in self._side_by_side(ops)])

    def difference_of_choice(self, ops: Ops) -> Ops | None:
        """Returns the ops by which branches or numbers of turns may differ, else None.

        See `Scope.choice`.
        """
        return self._difference([s.choice(op) for s, op in self._side_by_side(ops)])

    def digest(self, op: tf.Operation) -> str:
        """Returns what is the same in all processes of a write of the first replica.

        It is "" for a value that is not equal on all replicas by construction.
        """
        origin = self._scopes[0].of_op(op)
        keys = [scope.of(tensor) for scope, tensor in origin.parts]
        key = hashed(origin.facts, keys)
        return "" if key.open & OWN else key.digest.hex()

    def bodies(self, ops: Ops) -> list[Level]:
        """Returns the functions that the replicas' ops call, side by side.

        Returns:
            An empty list if the ops differ in type or in number of functions, or if a
            function only exists in C++.
        """
        pairs = self._side_by_side(ops)
        counts = {(op.type, len(scope.functions(op))) for scope, op in pairs}
        if len(counts) > 1:
            return []
        ((_, count),) = counts
        scopes = [[scope.inside(op, n) for scope, op in pairs] for n in range(count)]
        return [Level(s, [x.writes for x in s], self._between) for s in scopes]

    def _side_by_side(self, ops: Ops) -> list[tuple[Scope, tf.Operation]]:
        return list(zip(self._scopes, ops, strict=True))

    def _difference(self, origins: Sequence[Origin]) -> Ops | None:
        """Returns the ops by which what has these origins differs, else None."""
        keys = [hashed(x.facts, [s.of(t) for s, t in x.parts]) for x in origins]
        return self._walk(origins) if self._are_other(keys) else None

    def _differ(self, values: Sequence[tuple[Keys, tf.Tensor]]) -> bool:
        return self._are_other([keys.of(tensor) for keys, tensor in values])

    def _are_other(self, keys: Sequence[Key]) -> bool:
        """Whether keys are not those of one value, also in other processes."""
        own = self._between and any(key.open & OWN for key in keys)
        return own or len({key.digest for key in keys}) > 1

    def _walk(self, origins: Sequence[Origin]) -> Ops:
        """Returns the first ops that differ, of those from which values come."""
        while True:
            if all(origin.facts == origins[0].facts for origin in origins):
                parts = zip(*(origin.parts for origin in origins), strict=False)
                column = next((c for c in parts if self._differ(c)), None)
                if column is not None:
                    origins = [keys.origin(tensor) for keys, tensor in column]
                    continue
            return tuple(origin.op for origin in origins)


def of_step(
    replicas: Sequence[Iterable[tf.Operation]],
    variable_of: Callable[[tf.Tensor], Any],
    num_replicas: int,
    own: Container[int] | None = None,
    between: bool = False,
) -> Level:
    """Returns the outermost level of a step.

    Args:
        replicas: `replicas[r]` are replica r's ops that may use resources or have
            effects, in build order.
        variable_of: Returns the replicated variable behind a handle, or None.
        num_replicas: As in `Outside`.
        own: As in `Outside`.
        between: As in `Outside`.
    """
    scope = Scope(Outside(variable_of, num_replicas, own, between))
    writes = [scope.scan(ops) for ops in replicas]
    return Level([scope] * len(replicas), writes, between)
