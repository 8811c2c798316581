# SPDX-License-Identifier: Apache-2.0
"""Groups of replicas that communicate among themselves.

Every collective takes `group=`: a Group, or a Partition of all replicas, of which each
replica uses the group that contains it. Calls are counted per group, so that groups may
make different numbers of calls.
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
    """A subset of the replicas; created by `Replicator.group`.

    Example:
        >>> group = repl.group([1, 0])
        >>> group, len(group), 1 in group
        (Group([0, 1]), 2, True)

    Attributes:
        members: The replicas' ids in ascending order, the order of reductions.
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
        """Returns the index of a replica in the group.

        Example:
            >>> repl.group([1]).index(1)
            0

        Args:
            replica_id: The id of a member.

        Raises:
            ArgumentError: The replica is not in the group.
        """
        if not arguments.is_whole(replica_id) or replica_id not in self.members:
            raise base.bad_argument(
                "Group.index",
                f"was given {errors.repr_of(replica_id)}, which is not in {self!r}",
                "pass the id of a member.",
            )
        return self.members.index(replica_id)


@dataclasses.dataclass(frozen=True, repr=False)
class Partition:
    """Groups that contain each replica exactly once; created by `Replicator.groups`.

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
            ArgumentError: The partition is for another number of replicas.
            ContextError: Read outside a step.
        """
        return self._group_of_replica("Partition.own")

    def _group_of_replica(self, what: str) -> Group:
        """Returns `own`; errors name `what` was called."""
        replica = context.require(what)
        replica.build.refuse_copies("the replica's own group")
        count = sum(map(len, self.groups))
        if count != replica.num_replicas:
            raise base.bad_argument(
                what,
                f"was given {self!r}, but there are {replica.num_replicas} replicas",
                "create the partition with `groups` of the Replicator that runs the "
                "step.",
            )
        return next(group for group in self.groups if replica.replica_id in group)


def make_group(members: Any, num_replicas: int, what: str = "group") -> Group:
    """Returns the group of the given replicas.

    Args:
        members: Their ids, in any order.
        num_replicas: The number of replicas.
        what: The caller, for messages.

    Raises:
        ArgumentError: A replica does not exist or is listed twice, or `members` is
            empty.
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
            f"was given {errors.repr_of(members)} as a group",
            "list at least one replica, and each once.",
        )
    return Group(tuple(sorted(ids)))


def make_partition(groups: Any, num_replicas: int) -> Partition:
    """Returns the partition of all replicas into the given groups.

    Args:
        groups: The ids of each group's replicas.
        num_replicas: The number of replicas.

    Raises:
        ArgumentError: A replica is in no group, or in two.
    """
    entries = _entries("groups", groups, "groups", "[[0, 1], [2, 3]]")
    partition = tuple(
        make_group(members, num_replicas, "groups") for members in entries
    )
    everyone = sorted(replica_id for group in partition for replica_id in group)
    if everyone != list(range(num_replicas)):
        raise base.bad_argument(
            "groups",
            f"was given {[list(group) for group in partition]}",
            f"each of the {num_replicas} replicas is in exactly one group.",
        )
    return Partition(partition)


def _entries(what: str, listed: Any, role: str, example: str) -> Iterator[Any]:
    """Yields the entries of an iterable; raises ArgumentError if it is not one."""
    try:
        if isinstance(listed, str) or tf.is_tensor(listed):
            raise TypeError("no list")
        yield from listed
    except errors.ReplicatorError:
        raise
    except base.UNCONVERTED as error:
        raise base.bad_argument(
            what,
            f"was given {errors.repr_of(listed)} as {role}",
            f"pass a list of the ids of replicas, e.g. {example}.",
        ) from error


def members(what: str, group: Any) -> tuple[int, ...]:
    """Returns the replicas that participate in a call of the replica being built.

    Args:
        what: The primitive, for messages.
        group: The user's argument: a Group, a Partition, the ids of replicas, or None
            for all.

    Raises:
        ArgumentError: The replica is not in the group, or `group` is invalid.
        ContextError: Called outside a step.
    """
    replica = context.require(what)
    if group is None:
        return replica.build.world.replica_ids
    if isinstance(group, Partition):
        return group._group_of_replica(what).members
    # A Group may come from a Replicator with more replicas.
    checked = make_group(group, replica.num_replicas, what)
    if len(checked) < replica.num_replicas:
        replica.build.refuse_copies("whether a replica is in the group")
    if replica.replica_id not in checked:
        raise base.bad_argument(
            what,
            f"was given the group {list(checked)}, in which it is not",
            "let only members of a group call its collectives: "
            "`if repl.replica_id in group: ...`.",
        )
    return checked.members
