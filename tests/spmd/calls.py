# SPDX-License-Identifier: Apache-2.0
"""Draws the calls of a random program: one function for each primitive.

Each takes the source of random choices, the available registers, and the participants
of a collective or the pending messages. It returns a call, or None if none fits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from hypothesis import strategies as st

from tests.spmd import program as p
from tests.spmd import simulator

T = TypeVar("T")
Groups = tuple[tuple[int, ...], ...] | None

_NEWEST = 4  # an operand is one of the last registers
_LARGE = 48  # elements of an operand, so that values do not grow endlessly


class Drawing(Protocol):
    """The source of random choices: `strategies.Maker`."""

    world: simulator.World
    smooth: bool
    draw: Callable[[Any], Any]

    def integer(self, least: int, most: int) -> int: ...

    def choice(self, among: Sequence[T]) -> T: ...

    def maybe(self) -> bool: ...

    def fresh(self) -> str: ...


def collective(by: Drawing, scope: simulator.Scope) -> p.Statement | None:
    """Draws a call of any collective."""
    name = by.choice(list(CALLS))
    return CALLS[name](by, scope, name, groups(by))


def groups(by: Drawing) -> Groups:
    """Draws the participants: all, some, or all in separate groups."""
    replicas = list(by.world.replica_ids)
    kind = by.integer(0, 5)
    if kind < 4 or len(replicas) == 1:
        return None
    if kind == 4:
        some = by.draw(st.sets(st.sampled_from(replicas), min_size=1))
        return (tuple(sorted(some)),)
    order = by.draw(st.permutations(replicas))
    cut = by.integer(1, len(replicas) - 1)
    return tuple(sorted(map(tuple, map(sorted, (order[:cut], order[cut:])))))


def _members(by: Drawing, among: Groups) -> tuple[tuple[int, ...], ...]:
    return among or (tuple(by.world.replica_ids),)


def _suiting(
    by: Drawing,
    scope: simulator.Scope,
    among: Groups,
    test: Callable[[list[np.ndarray]], bool],
) -> str | None:
    """Draws a register for which each group's values pass the test."""

    def suits(values: simulator.Values) -> bool:
        by_group = [[values[r] for r in group] for group in _members(by, among)]
        return all(
            all(v is not None and v.size <= _LARGE for v in part) and test(part)
            for part in by_group
        )

    names = [name for name in reversed(scope) if suits(scope[name])]
    return by.choice(names[:_NEWEST]) if names else None


def _alike(values: list[np.ndarray]) -> bool:
    return len({v.shape for v in values}) == 1


def _joining(axis: int | None) -> Callable[[list[np.ndarray]], bool]:
    """Tests whether values are alike except along an axis, which exists."""
    if axis is None:
        return _alike

    def test(values: list[np.ndarray]) -> bool:
        rank = values[0].ndim
        if not -rank <= axis < rank or any(v.ndim != rank for v in values):
            return False
        return len({tuple(np.delete(v.shape, axis)) for v in values}) == 1

    return test


def _root(by: Drawing, among: Groups) -> tuple[Groups, int]:
    """Draws a root; of several groups, only the first takes part."""
    among = among and among[:1]
    return among, by.choice(_members(by, among)[0])


def _op(by: Drawing, values: simulator.Values) -> str:
    integers = any(v is not None and v.dtype == np.int32 for v in values)
    ops = ["bitwise_and", "bitwise_or", "bitwise_xor"] if integers else ["mean", "mean"]
    ops = ["sum", *ops, "max", "min", "prod", "argmin", "argmax"]
    return by.choice(ops)


def _owner(by: Drawing, op: str) -> str | None:
    return by.fresh() if op.startswith("arg") else None


# --- Messages ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Message:
    """A message that was sent in a block and is still to be received there."""

    sent: p.Send
    value: np.ndarray

    @property
    def channel(self) -> tuple[int, int, int]:
        """The channel: its messages are received in the order they were sent."""
        return self.sent.sender, self.sent.receiver, self.sent.tag


def send(
    by: Drawing, scope: simulator.Scope, waiting: list[Message], depth: int
) -> p.Send | None:
    """Draws a send, and adds it to the pending messages."""
    sender, receiver = by.draw(st.permutations(list(by.world.replica_ids)))[:2]
    names = [x for x in reversed(scope) if scope[x][sender] is not None]
    if by.smooth:  # the gradient is sent back for a tensor like the message
        names = [x for x in names if _like(scope, receiver, scope[x][sender])]
    if not names:
        return None
    source = by.choice(names)
    tag = 10 * depth + by.integer(0, 1)  # distinct from pending messages outside
    sent = p.Send(source, sender, receiver, tag)
    waiting.append(Message(sent, scope[source][sender]))
    return sent


def receive(by: Drawing, scope: simulator.Scope, waiting: list[Message]) -> p.Recv:
    """Draws the recv of a pending message."""
    channel = by.choice(waiting).channel
    message = next(m for m in waiting if m.channel == channel)
    waiting.remove(message)
    value = message.value
    shape = tuple(None if by.integer(0, 3) == 3 else size for size in value.shape)
    like = _like(scope, message.sent.receiver, value)
    use = like and (by.smooth or by.integer(0, 3) == 3)
    return p.Recv(
        by.fresh(),
        *channel,
        spec=(str(value.dtype), shape),
        like=by.choice(like) if use else None,
    )


def _like(scope: simulator.Scope, replica_id: int, value: np.ndarray) -> list[str]:
    """Returns the registers in which a replica has a value like this."""
    types = simulator.types([value])
    return [
        name
        for name, values in scope.items()
        if simulator.types(values)[replica_id : replica_id + 1] == types
    ]


# --- Individual collectives ----------------------------------------------------------


def _all_reduce(by: Drawing, scope: simulator.Scope, name: str, among: Groups) -> Any:
    source = _suiting(by, scope, among, _alike)
    if source is None:
        return None
    op = _op(by, scope[source])
    options: list[tuple[str, Any]] = [("op", op)]
    if op == "mean" and by.integer(0, 3) < 3:
        weight = tuple(by.integer(0, 3) for _ in by.world.replica_ids)
        options.append(("weight", weight))
    target, owner = by.fresh(), _owner(by, op)
    return p.Collective(target, name, source, tuple(options), among, owner=owner)


def _reduce(by: Drawing, scope: simulator.Scope, name: str, among: Groups) -> Any:
    among, root = _root(by, among)
    source = _suiting(by, scope, among, _alike)
    if source is None:
        return None
    op = _op(by, scope[source])
    options = (("root", root), ("op", op))
    target, owner = by.fresh(), _owner(by, op)
    return p.Collective(target, name, source, options, among, owner=owner)


def _reduce_scatter(
    by: Drawing, scope: simulator.Scope, name: str, among: Groups
) -> Any:
    axis = by.choice([0, 1, -1])

    def test(values: list[np.ndarray]) -> bool:
        return _alike(values) and _joining(axis)(values)

    source = _suiting(by, scope, among, test)
    if source is None:
        return None
    op = _op(by, scope[source])
    options = (("op", op), ("axis", axis))
    target, owner = by.fresh(), _owner(by, op)
    return p.Collective(target, name, source, options, among, owner=owner)


def _from_root(
    by: Drawing,
    scope: simulator.Scope,
    among: Groups,
    root: int,
    test: Callable[[list[np.ndarray]], bool],
) -> str | None:
    """Draws a register that the root has; the others have similar values, or none."""
    [group] = _members(by, among)

    def suits(values: simulator.Values) -> bool:
        by_group = [values[r] for r in group if values[r] is not None]
        if values[root] is None or by.smooth and len(by_group) < len(group):
            return False
        return values[root].size <= _LARGE and _alike(by_group) and test([values[root]])

    names = [name for name in reversed(scope) if suits(scope[name])]
    return by.choice(names[:_NEWEST]) if names else None


def _spec(by: Drawing, values: simulator.Values, among: Groups, root: int) -> Any:
    """Draws the operand of non-root replicas: None means their own value, if any."""
    [group] = _members(by, among)
    everywhere = all(values[r] is not None for r in group)
    if everywhere and (by.smooth or by.maybe()):
        return None
    value = values[root]
    return str(value.dtype), value.shape


def _broadcast(by: Drawing, scope: simulator.Scope, name: str, among: Groups) -> Any:
    among, root = _root(by, among)
    source = _from_root(by, scope, among, root, lambda values: True)
    if source is None:
        return None
    spec = _spec(by, scope[source], among, root)
    return p.Collective(by.fresh(), name, source, (("root", root),), among, spec)


def _scatter(by: Drawing, scope: simulator.Scope, name: str, among: Groups) -> Any:
    among, root = _root(by, among)
    [group] = _members(by, among)
    axis = by.choice([None, 0, 1, -1])

    def test(values: list[np.ndarray]) -> bool:
        if axis is None:
            return values[0].ndim > 0 and values[0].shape[0] == len(group)
        return _joining(axis)(values)

    source = _from_root(by, scope, among, root, test)
    if source is None:
        return None
    options = (("root", root), ("axis", axis))
    spec = _spec(by, scope[source], among, root)
    return p.Collective(by.fresh(), name, source, options, among, spec)


def _all_gather(by: Drawing, scope: simulator.Scope, name: str, among: Groups) -> Any:
    axis = by.choice([None, 0, 1, -1])
    source = _suiting(by, scope, among, _joining(axis))
    if source is None:
        return None
    return p.Collective(by.fresh(), name, source, (("axis", axis),), among)


def _gather(by: Drawing, scope: simulator.Scope, name: str, among: Groups) -> Any:
    among, root = _root(by, among)
    axis = by.choice([None, 0, 1, -1])
    source = _suiting(by, scope, among, _joining(axis))
    if source is None:
        return None
    options = (("root", root), ("axis", axis))
    return p.Collective(by.fresh(), name, source, options, among)


def _all_to_all(by: Drawing, scope: simulator.Scope, name: str, among: Groups) -> Any:
    split, concat = by.choice([0, 1, -1]), by.choice([0, 1, -1])
    among = among and among[:1]
    [group] = _members(by, among)
    uneven = by.maybe()
    # Slices of different sizes can only be concatenated along the axis of the split.
    same_axis = uneven and split == concat

    def test(values: list[np.ndarray]) -> bool:
        if not all(_joining(axis)(values) for axis in (split, concat)):
            return False
        if same_axis:
            return True
        return _alike(values) and (uneven or values[0].shape[split] % len(group) == 0)

    source = _suiting(by, scope, among, test)
    if source is None:
        return None
    options: list[tuple[str, Any]] = [("split_axis", split), ("concat_axis", concat)]
    if uneven:
        lengths = [scope[source][r].shape[split] for r in group]
        first = _cut(by, lengths[0], len(group))
        cuts = [_cut(by, n, len(group)) if same_axis else first for n in lengths]
        by_replica = dict(zip(group, cuts, strict=True))
        options.append(
            ("splits", tuple(by_replica.get(r, ()) for r in by.world.replica_ids))
        )
    return p.Collective(by.fresh(), name, source, tuple(options), among)


def _cut(by: Drawing, size: int, count: int) -> tuple[int, ...]:
    """Draws sizes, zeros included, with a given sum."""
    cuts = sorted(by.integer(0, size) for _ in range(count - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True))


def _permute(by: Drawing, scope: simulator.Scope, name: str, among: Groups) -> Any:
    among = among and among[:1]
    source = _suiting(by, scope, among, _alike)
    if source is None:
        return None
    [group] = _members(by, among)
    destinations = by.draw(st.permutations(group))
    pairs = list(zip(group, destinations, strict=True))
    subset = tuple(pair for pair in pairs if by.integer(0, 3) < 3)
    return p.Collective(by.fresh(), name, source, (("pairs", subset),), among)


def _shift(by: Drawing, scope: simulator.Scope, name: str, among: Groups) -> Any:
    source = _suiting(by, scope, among, _alike)
    if source is None:
        return None
    options = (("offset", by.integer(-3, 3)),)
    return p.Collective(by.fresh(), name, source, options, among)


CALLS = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "permute": _permute,
    "shift": _shift,
    "all_to_all": _all_to_all,
}
