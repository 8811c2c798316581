# SPDX-License-Identifier: Apache-2.0
"""What differs between the ops of a replica and those of its copies.

The device, seeds, the caller of a communication, the library's constants that differ,
the tokens of Python functions that are differentiated, and the names in assertions.
Where a copy's fact does not follow from the first replica's, the op is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from replicator import errors
from replicator._tf import python
from replicator.costs import hosts
from replicator.graph.ir import differing, placeholder
from replicator.graph.ir.kinds import kind_of
from replicator.graph.ir.placeholder import Call
from replicator.graph.passes import random

# The name of an op or a tensor.
_NAME = re.compile(r"([A-Za-z0-9.][A-Za-z0-9_.\\/>-]*)(:\d+)?")


@dataclasses.dataclass(frozen=True)
class Replica:
    """A replica, in the step or in a function.

    Attributes:
        replica_id: Its id.
        device: Where it runs; "" in a function that runs where it is called.
        scope: The name scope of its ops, with the final "/".
    """

    replica_id: int
    device: str
    scope: str


@dataclasses.dataclass(frozen=True)
class Original:
    """The replica that is copied.

    Attributes:
        replica: The replica.
        devices: The devices of all replicas that are built here.
        is_kept: Whether an op on its device is there in all copies.
    """

    replica: Replica
    devices: Sequence[str]
    is_kept: Callable[[tf.Operation], bool]

    def places(self, device: str) -> dict[str, str]:
        """Returns where a copy on a device has what the original has elsewhere.

        Args:
            device: The device of the copy; "" where the copy runs where it is called.
        """
        own = self.replica.device
        if not device:
            return {own: ""}
        return {hosts.cpu_of(own): hosts.cpu_of(device), own: device}

    def moves(self, op: tf.Operation) -> bool:
        """Whether an op is on another device in some of the copies."""
        if op.device != self.replica.device:
            own = hosts.cpu_of(self.replica.device)
            return op.device == own and any(
                hosts.cpu_of(d) != own for d in self.devices
            )
        return not self.is_kept(op)


class New:
    """A copy that is being made.

    Args:
        original: The replica that is copied.
        replica: The new one.
        names: The names in the copy of ops and tensors outside the replica's scope.

    Attributes:
        replica: The new replica.
        places: Its devices in place of the original's.
    """

    def __init__(
        self, original: Original, replica: Replica, names: Mapping[str, str]
    ) -> None:
        self._original, self._names = original, names
        self._tokens: dict[str, str] = {}
        self.replica = replica
        self.places = original.places(replica.device)

    def inside(self, scope: str, anywhere: bool = False) -> New:
        """Returns the same copy, in a function.

        Args:
            scope: The name scope of its ops there.
            anywhere: Whether the function runs where it is called.
        """
        device = "" if anywhere else self.replica.device
        replica = dataclasses.replace(self.replica, scope=scope, device=device)
        new = New(self._original, replica, self._names)
        new._tokens = self._tokens
        return new

    def text(self, text: bytes) -> bytes:
        """Returns text on the original with the names and devices of this replica."""
        words = text.decode("latin-1")  # any bytes survive the round trip
        words = _NAME.sub(self._renamed, words)
        words = words.replace(self._original.replica.scope, self.replica.scope)
        place = re.escape(self._original.replica.device) + r"(?!\d)"
        words = re.sub(place, lambda _: self.replica.device, words)
        return words.encode("latin-1")

    def _renamed(self, found: re.Match[str]) -> str:
        op, output = found[1], found[2] or ""
        return self._names.get(found[0]) or self._names.get(op, op) + output

    def token(self, token: bytes) -> bytes:
        """Returns the token of this replica's own registration of a Python function."""
        return python.copy_python_function(token.decode(), self._tokens).encode()


Fact = Callable[[Any, New], object]  # gives a copy's NodeDef what is its own


def of(op: tf.Operation, node: Any, original: Original) -> Fact | None:
    """Returns what gives a copy of an op its own attributes; None if it has none.

    Args:
        op: An op of the replica that is copied.
        node: Its NodeDef.
        original: What is known of the replica.

    Raises:
        CloneError: The op cannot be copied.
    """
    if op.type == "Placeholder":
        _refuse(
            op,
            "a placeholder, which could not be fed on copies",
            "pass its value to the step",
        )
    if "shared_name" in node.attr and node.attr["shared_name"].s and _makes_handle(op):
        _refuse(op, "a resource with a name of its own", "create it before the step")
    if differing.ATTRIBUTE in node.attr:
        return lambda node, new: differing.give(node, new.replica.replica_id)
    call = placeholder.read(op)
    if call is not None:
        return functools.partial(_give_call, call)
    if op.type == "EagerPyFunc":
        return _give_token
    if kind_of(op).seeded and (node.attr["seed"].i or node.attr["seed2"].i):  # or none
        return functools.partial(_give_seed, original.replica.replica_id)
    if op.type == "Const" and node.attr["value"].tensor.string_val:
        if all(user.type == "Assert" for user in op.outputs[0].consumers()):
            return _give_text
    return None


def _makes_handle(op: tf.Operation) -> bool:
    """Whether an op makes a resource, and does not only find one by its name."""
    return any(
        t.dtype == tf.resource or t.dtype.name[-4:] == "_ref" for t in op.outputs
    )


def _give_call(call: Call, node: Any, new: New) -> None:
    replica_id, device = new.replica.replica_id, new.replica.device
    own = dataclasses.replace(call, replica_id=replica_id, device=device)
    node.attr["token"].s = placeholder.token_of(own).encode()


def _give_token(node: Any, new: New) -> None:
    # TensorFlow keeps what a function computed, for its gradient, under its token.
    node.attr["token"].s = new.token(node.attr["token"].s)


def _give_seed(original: int, node: Any, new: New) -> None:
    steps = new.replica.replica_id - original
    node.attr["seed2"].i += steps * random.OFFSET
    node.attr[random.SEPARATED].i = new.replica.replica_id


def _give_text(node: Any, new: New) -> None:
    texts = node.attr["value"].tensor.string_val
    texts[:] = map(new.text, list(texts))


def _refuse(op: tf.Operation, what: str, instead: str) -> NoReturn:
    raise errors.CloneError(
        f'with build="clone", step_fn cannot create {what} ({op.type} {op.name}).',
        [f"at {errors.line_of(op)}"],
        f'{instead}; or build each replica separately with build="trace".',
    )


def unlike(ops: Mapping[str, tf.Operation], found: str) -> errors.CloneError:
    """Returns the error for a copy that TensorFlow does not accept.

    It infers the shapes of a copy anew, from constants that are the copy's own, for
    example. They have to be those for which the first replica's ops were built.

    Args:
        ops: The ops of the first replica, by the names of their copies.
        found: What TensorFlow says.
    """
    op = next((op for name, op in ops.items() if f"{name}'" in found), None)
    return errors.CloneError(
        'with build="clone", a copy has not the static shapes of the first replica: '
        f"{found}",
        None if op is None else [f"at {errors.line_of(op)}"],
        'build each replica separately with build="trace".',
    )
