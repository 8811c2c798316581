# SPDX-License-Identifier: Apache-2.0
"""Exchange of small Python objects between replicas while a step is built.

Replicas are built one after another, so the first cannot know what the last will send.
A replica that needs an object that is still missing records its own and stops being
built; the others follow, and then the step is built again, with one more call known. If
an attempt learns nothing, some replica waits for a call that never comes: a
MismatchError.

None of this is part of the graph, so objects can be exchanged wherever Python runs.

What other processes send is not unpickled: unpickling runs whatever the sender chose.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from replicator import context, errors
from replicator.cluster.peers import Peers
from replicator.primitives import base, groups
from replicator.step import encoding

_OBJECTS = "objects"  # the key of object calls in a build's knowledge

_FIX = (
    "let every replica of a group exchange the same objects in the same order, with "
    "one root; move a call out of the Python code that depends on the replica."
)


_NO_TENSORS = (
    "objects are Python values that are known when the step is built; tensors are sent "
    "by broadcast and all_gather."
)
_Object = TypeVar("_Object")
_Key = tuple[tuple[int, ...], int, int]  # group, number of the call in it, replica


@dataclasses.dataclass(frozen=True)
class _ObjectCall:
    """One object call by one replica."""

    primitive: str
    root: int | None
    group: tuple[int, ...]
    number: int
    replica_id: int
    line: str
    data: bytes

    @property
    def key(self) -> _Key:
        """Identifies the call and the replica that made it."""
        return self.group, self.number, self.replica_id

    @property
    def place(self) -> str:
        """Names the call in messages."""
        return f"Object call {self.number} of group {list(self.group)}"

    def to_json(self) -> dict[str, Any]:
        """Returns the call as a JSON value."""
        data = base64.b64encode(self.data).decode()
        return {**dataclasses.asdict(self), "data": data}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> _ObjectCall:
        """Restores a call from what `to_json` returned."""
        data, group = base64.b64decode(facts["data"]), tuple(facts["group"])
        return cls(**{**facts, "data": data, "group": group})

    def __str__(self) -> str:
        root = "" if self.root is None else f" root={self.root}"
        return f"{self.primitive}{root} group={list(self.group)} at {self.line}"


@dataclasses.dataclass
class _Attempt:
    """The object calls of one attempt at a build.

    Attributes:
        calls: The calls that were made.
        waiting: Those in which a replica stopped being built.
        learned: Whether any of them was made for the first time.
    """

    calls: dict[_Key, _ObjectCall] = dataclasses.field(default_factory=dict)
    waiting: list[_ObjectCall] = dataclasses.field(default_factory=list)
    learned: bool = False

    @classmethod
    def of(cls, build: context.Build) -> _Attempt:
        """Returns the calls of the current attempt."""
        return build.states.of(cls)


def broadcast_object(obj: Any, root: int = 0, group: Any = None) -> Any:
    """Gives every replica a copy of the root's Python object while the step is built.

    Example:
        >>> def step_fn():
        ...     config = {"size": 3} if repl.replica_id == 0 else None
        ...     return tf.zeros([repl.broadcast_object(config)["size"]])
        >>> for x in repl.run(step_fn): print(x)
        tf.Tensor([0. 0. 0.], shape=(3,), dtype=float32)
        tf.Tensor([0. 0. 0.], shape=(3,), dtype=float32)

    Args:
        obj: On the root, a small value that can be pickled and holds no tensors;
            ignored on the others. Between hosts that each build their own graph: None,
            booleans, numbers, strings, bytes, NumPy arrays, and lists, tuples, sets and
            dicts of them.
        root: The replica whose object is sent, a member of the group.
        group: The participating replicas, from `Replicator.group` or `groups`; all by
            default. The calling replica must be one of them.

    Returns:
        A copy of the root's object, as it was when the root was first built.

    Raises:
        ArgumentError: `root` is not a replica of the group, or the object is a tensor,
            holds one, or cannot be pickled, or sent to other hosts.
        MismatchError: The replicas of the group make different object calls.
        ContextError: Called outside a step.
    """
    members = groups.members("broadcast_object", group)
    base.check_root("broadcast_object", root, members)
    return _exchange("broadcast_object", obj, root, members, [root])[0]


def all_gather_object(obj: _Object, group: Any = None) -> list[_Object]:
    """Gives every replica copies of all replicas' objects while the step is built.

    Each such call builds the step once more.

    Example:
        >>> def step_fn():
        ...     names = repl.all_gather_object(f"replica {repl.replica_id}")
        ...     return tf.constant(", ".join(names))
        >>> repl.run(step_fn).numpy()
        b'replica 0, replica 1'

    Args:
        obj: A small value as for `broadcast_object`; may differ in type and size
            between replicas.
        group: The participating replicas, from `Replicator.group` or `groups`; all by
            default. The calling replica must be one of them.

    Returns:
        One object per replica of the group, by ascending id, each as it was when its
        replica was first built.

    Raises:
        ArgumentError: The object is a tensor, holds one, or cannot be pickled, or sent
            to other hosts.
        MismatchError: The replicas of the group make different object calls.
        ContextError: Called outside a step.
    """
    members = groups.members("all_gather_object", group)
    return _exchange("all_gather_object", obj, None, members, members)


def check(build: context.Build, peers: Peers | None = None) -> None:
    """Checks an attempt's object calls once all replicas are built as far as possible.

    Args:
        build: The state shared by the replicas.
        peers: The processes that build the other replicas, if any.

    Raises:
        BuildAgain: A replica waits, and will know more in the next attempt.
        MismatchError: A replica waits for an object that no other will send, or some
            replicas of a group did not make a call that the others made.
    """
    attempt = _Attempt.of(build)
    retries = bool(attempt.waiting) and attempt.learned
    if peers is not None:
        retries = _exchange_calls(peers, build, attempt)
    if retries:
        raise context.BuildAgain
    for call in attempt.waiting or attempt.calls.values():
        if len(_partners(attempt.calls, call)) < len(call.group):
            _raise_missing(build, call)
    assert not attempt.waiting, "a replica waits for an object that was sent"


def _exchange_calls(peers: Peers, build: context.Build, attempt: _Attempt) -> bool:
    """Exchanges the object calls made here with those of the other processes.

    Returns:
        Whether all processes make another attempt, since one of them needs it.
    """
    report = {
        "waits": bool(attempt.waiting),
        "learned": attempt.learned,
        "calls": [call.to_json() for call in attempt.calls.values()],
    }
    reports = peers.exchange("ends an attempt at a step", report)
    for process in peers.processes:
        for facts in reports[process]["calls"] if process != peers.process else ():
            call = _ObjectCall.from_json(facts)
            attempt.calls[call.key] = call
            known_calls = build.knowledge.get(_OBJECTS, {})
            if call.key not in known_calls:
                build.knowledge[_OBJECTS] = {**known_calls, call.key: call}
    waits = any(process_report["waits"] for process_report in reports)
    return waits and any(process_report["learned"] for process_report in reports)


def _exchange(
    primitive: str,
    obj: Any,
    root: int | None,
    group: tuple[int, ...],
    speakers: Sequence[int],
) -> list[Any]:
    """Records this replica's object; returns the objects of the speakers."""
    replica = context.require(primitive)
    build, own_id = replica.build, replica.replica_id
    build.refuse_copies(f"what {primitive} is given on all replicas")
    number = replica.count(("objects", group))
    crosses_processes = (
        len(build.world.local) < build.world.num_replicas
    )  # in several processes
    encode = _encoded if crosses_processes else _pickled
    data = encode(primitive, obj) if own_id in speakers else b""
    own_call = _ObjectCall(
        primitive, root, group, number, own_id, errors.user_line(), data
    )
    attempt, known_calls = _Attempt.of(build), build.knowledge.get(_OBJECTS, {})
    attempt.calls[own_call.key] = own_call
    if own_call.key not in known_calls:
        attempt.learned = True
        known_calls = build.knowledge[_OBJECTS] = {
            **known_calls,
            own_call.key: own_call,
        }
    partners = _partners(known_calls, own_call)
    for partner in partners.values():
        if (partner.primitive, partner.root) != (primitive, root):
            raise errors.MismatchError(
                f"{own_call.place} differs between replicas.",
                [
                    _site(build, call.replica_id, str(call))
                    for call in (partner, own_call)
                ],
                _FIX,
            )
    if not partners.keys() >= set(speakers):
        attempt.waiting.append(own_call)
        raise context.Waiting
    decode = encoding.decode if crosses_processes else pickle.loads  # of our own
    return [decode(partners[speaker].data) for speaker in speakers]


def _partners(
    calls: Mapping[_Key, _ObjectCall], call: _ObjectCall
) -> dict[int, _ObjectCall]:
    """Returns the calls that match `call`, itself included, by replica."""
    keys = {r: (call.group, call.number, r) for r in call.group}
    return {r: calls[key] for r, key in keys.items() if key in calls}


def _raise_missing(build: context.Build, extra: _ObjectCall) -> None:
    """Raises MismatchError for a call without partners, saying what the others do."""
    attempt = _Attempt.of(build)
    waiting = {call.replica_id: f"waits in {call}" for call in attempt.waiting}
    does = {
        r: f"makes no such call{_in_another_group(attempt, extra, r)}"
        for r in extra.group
    }
    does |= waiting
    for replica_id, call in _partners(attempt.calls, extra).items():
        if call not in attempt.waiting:
            does[replica_id] = str(call)
    raise errors.MismatchError(
        f"{extra.place} of replica {extra.replica_id} has no partner.",
        [_site(build, r, does[r]) for r in extra.group],
        _FIX,
    )


def _in_another_group(attempt: _Attempt, extra: _ObjectCall, replica_id: int) -> str:
    """Names a call in another group that has no partner either, if there is one."""
    for call in attempt.calls.values():
        is_candidate = call.replica_id == replica_id and call.group != extra.group
        if is_candidate and len(_partners(attempt.calls, call)) < len(call.group):
            return f", but one in another group: {call}"
    return ""


def _site(build: context.Build, replica_id: int, does: str) -> str:
    is_local = replica_id in build.world.local
    where = build.world.device(replica_id) if is_local else "of another host"
    return f"replica {replica_id} ({where}): {does}"


def _encoded(primitive: str, obj: Any) -> bytes:
    """Encodes an object for other processes."""
    try:
        return encoding.encode(obj)
    except encoding.CannotEncode as error:
        content = str(error)
        if content != type(obj).__name__:
            content = f"{type(obj).__name__} that holds a {content}"
        raise base.bad_argument(
            primitive,
            f"was given a {content}, which cannot be sent to other hosts",
            f"pass {encoding.TYPES}: other objects would run code there. "
            "dataclasses.asdict makes a dict of a dataclass; tensors are sent by "
            "broadcast and all_gather.",
        ) from None


class _Pickler(pickle.Pickler):
    """Pickles an object, and refuses tensors anywhere in it."""

    def persistent_id(self, obj: Any) -> None:
        if tf.is_tensor(obj):
            raise _HoldsTensorError(type(obj).__name__)


class _HoldsTensorError(Exception):
    """Names the type of a tensor that an object holds."""


def _pickled(primitive: str, obj: Any) -> bytes:
    """Pickles an object, so that each replica gets its own copy."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(obj)
    except _HoldsTensorError as error:
        container = "" if tf.is_tensor(obj) else f"{type(obj).__name__} that holds a "
        raise base.bad_argument(
            primitive, f"was given a {container}{error}", _NO_TENSORS
        ) from None
    except Exception as error:  # pickle and the hooks it calls may raise anything
        raise base.bad_argument(
            primitive,
            f"was given {errors.repr_of(obj)}, which cannot be pickled ({error})",
            "pass numbers, strings, NumPy arrays, or lists and dicts of them.",
        ) from error
    return buffer.getvalue()
