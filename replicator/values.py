"""PerReplica: one value for each replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


class PerReplica(tuple):
    """A tuple of one value per replica, in replica order.

    It is a tuple, so `tf.reduce_mean(per_replica_loss)`, `np.mean(...)`, unpacking and
    indexing work as in the TF-Replicator paper (Buchlovsky et al. 2019, section 3).
    It survives `tf.nest` (which rebuilds tuple types from one list) and `session.run`
    (which rebuilds them from items).
    """

    __slots__ = ()

    def __new__(cls, *values: Any) -> PerReplica:
        """Takes the values one by one, or all of them as one list or plain tuple.

        A namedtuple is a value: that is what `session.run` makes of a SparseTensor.
        """
        if len(values) == 1 and type(values[0]) in (list, tuple):
            values = tuple(values[0])
        return super().__new__(cls, values)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (tuple(self),)

    def __repr__(self) -> str:
        return f"PerReplica({', '.join(map(repr, self))})"


def transpose(structures: Sequence[Any]) -> Any:
    """Turns one structure per replica into one structure of PerReplica leaves.

    Args:
        structures: `structures[r]` is what replica r returned; all of one structure.

    Returns:
        The same structure with a PerReplica of `len(structures)` values at each leaf.
    """
    leaves = [tf.nest.flatten(structure) for structure in structures]
    columns = [PerReplica(column) for column in zip(*leaves, strict=True)]
    return pack(structures[0], columns)


def pack(structure: Any, leaves: Sequence[Any]) -> Any:
    """Packs leaves that may be tuples themselves; tf.nest would see structure in them.

    Args:
        structure: A nest with `len(leaves)` leaves.
        leaves: What to put at each leaf, in tf.nest's order.

    Returns:
        `structure` with its leaves replaced.
    """
    remaining: Callable[[], Any] = iter(leaves).__next__
    return tf.nest.map_structure(lambda _: remaining(), structure)


def packer(structure: Any) -> Callable[[Sequence[Any]], Any]:
    """Returns what does `pack(structure, leaves)` again and again.

    For tuples, lists and dicts without asking tf.nest, which takes as long as a step.
    """
    places = pack(structure, range(len(tf.nest.flatten(structure))))
    if _of_builtins(places):
        return lambda leaves: _fill(places, leaves)
    return lambda leaves: pack(structure, leaves)


def _of_builtins(places: Any) -> bool:
    if type(places) is dict:
        return all(map(_of_builtins, places.values()))
    if type(places) in (list, tuple):
        return all(map(_of_builtins, places))
    return type(places) is int


def _fill(places: Any, leaves: Sequence[Any]) -> Any:
    """Puts each leaf where its index is."""
    kind = type(places)
    if kind is int:
        return leaves[places]
    if kind is dict:
        return {key: _fill(place, leaves) for key, place in places.items()}
    return kind([_fill(place, leaves) for place in places])
