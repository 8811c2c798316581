# SPDX-License-Identifier: Apache-2.0
"""Groups: some of the replicas, which communicate among themselves.

Every collective takes `group=`: a Group, or a Partition of all replicas from which each
replica takes its own group. Calls are counted per group, so that groups may make
different numbers of calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from replicator import arguments, context, errors
from replicator.primitives import base


@dataclasses.dataclass(frozen=True, repr=False)
class Group:
    """Some of the replicas; made by `Replicator.group`.

    Example:
        >>> group = repl.group([1, 0])
        >>> group, len(group), 1 in group
        (Group([0, 1]), 2, True)

    Attributes:
        members: Their ids, in ascending order, which is the order of reductions.
    """

    members: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[int]:
        return iter(self.members)

    def __contains__(self, replica_id: object) -> bool:
        return replica_id in self.members

    def __repr__(self) -> str:
        return f"Group({list(self.members)})"

    def index(self, replica_id: int) -> int:
        """Returns the place of a replica in the group, counted from 0.

        Example:
            >>> repl.group([1]).index(1)
            0

        Raises:
            ArgumentError: The group has no such replica.
        """
        if not arguments.is_whole(replica_id) or replica_id not in self.members:
            raise base.bad_argument(
                "Group.index",
                f"was given {errors.shown(replica_id)}, which is not in {self!r}",
                "ask for a member, by its id.",
            )
        return self.members.index(replica_id)


@dataclasses.dataclass(frozen=True, repr=False)
class Partition:
    """Groups that hold each replica exactly once; made by `Replicator.groups`.

    Example:
        >>> repl.groups([[0], [1]])
        Partition([[0], [1]])

    Attributes:
        groups: The groups.
    """

    groups: tuple[Group, ...]

    def __repr__(self) -> str:
        return f"Partition({[list(group) for group in self.groups]})"

    @property
    def own(self) -> Group:
        """Inside a step: the group of the replica being built.

        Example:
            >>> alone = repl.groups([[0], [1]])
            >>> for x in repl.run(lambda: tf.constant(alone.own.members)): print(x)
            tf.Tensor([0], shape=(1,), dtype=int32)
            tf.Tensor([1], shape=(1,), dtype=int32)

        Raises:
            ArgumentError: The partition is of another number of replicas.
            ContextError: Read outside a step.
        """
        return self._own("Partition.own")

    def _own(self, what: str) -> Group:
        """Returns `own`; errors name `what` was called."""
        replica = context.require(what)
        replica.build.refuse_copies("the replica's own group")
        count = sum(map(len, self.groups))
        if count != replica.num_replicas:
            raise base.bad_argument(
                what,
                f"was given {self!r}, but there are {replica.num_replicas} replicas",
                "make the partition by the `groups` of the Replicator that runs the "
                "step.",
            )
        return next(group for group in self.groups if replica.replica_id in group)


def make_group(members: Any, num_replicas: int, what: str = "group") -> Group:
    """Returns the group of these replicas.

    Args:
        members: Their ids, in any order.
        num_replicas: How many replicas there are.
        what: Who asks, for messages.

    Raises:
        ArgumentError: A replica does not exist, or is listed twice; or there is none.
    """
    ids: list[int] = []
    for replica_id in _entries(what, members, "a group", "[0, 2]"):
        base.check_replica(what, "member", replica_id, num_replicas)
        if replica_id in ids:
            ids.clear()
            break
        ids.append(replica_id)
    if not ids:
        raise base.bad_argument(
            what,
            f"was given {errors.shown(members)} as a group",
            "a group has at least one replica, and each once.",
        )
    return Group(tuple(sorted(ids)))


def make_partition(groups: Any, num_replicas: int) -> Partition:
    """Returns the partition of all replicas into these groups.

    Args:
        groups: The ids of each group's replicas.
        num_replicas: How many replicas there are.

    Raises:
        ArgumentError: A replica is in no group, or in two.
    """
    entries = _entries("groups", groups, "groups", "[[0, 1], [2, 3]]")
    made = tuple(make_group(members, num_replicas, "groups") for members in entries)
    everyone = sorted(replica_id for group in made for replica_id in group)
    if everyone != list(range(num_replicas)):
        raise base.bad_argument(
            "groups",
            f"was given {[list(group) for group in made]}",
            f"each of the {num_replicas} replicas is in exactly one group.",
        )
    return Partition(made)


def _entries(what: str, listed: Any, role: str, example: str) -> Iterator[Any]:
    """Yields the entries of a list, or of whatever else has entries to go through."""
    try:
        if isinstance(listed, str) or tf.is_tensor(listed):
            raise TypeError("no list")
        yield from listed
    except errors.ReplicatorError:
        raise
    except base.UNCONVERTED as error:
        raise base.bad_argument(
            what,
            f"was given {errors.shown(listed)} as {role}",
            f"pass a list of the ids of replicas, e.g. {example}.",
        ) from error


def members(what: str, group: Any) -> tuple[int, ...]:
    """Returns the replicas that take part in a call of the replica being built.

    Args:
        what: The primitive, for messages.
        group: As the user gave it: a Group, a Partition, the ids of replicas, or None
            for all.

    Raises:
        ArgumentError: The replica is not in the group, or it is no group.
        ContextError: Called outside a step.
    """
    replica = context.require(what)
    if group is None:
        return replica.build.world.everyone
    if isinstance(group, Partition):
        return group._own(what).members
    # A Group may be that of a Replicator with more replicas.
    own = make_group(group, replica.num_replicas, what)
    if len(own) < replica.num_replicas:
        replica.build.refuse_copies("whether a replica is in the group")
    if replica.replica_id not in own:
        raise base.bad_argument(
            what,
            f"was given the group {list(own)}, in which it is not",
            "let only members of a group call its collectives: "
            "`if repl.replica_id in group: ...`.",
        )
    return own.members
