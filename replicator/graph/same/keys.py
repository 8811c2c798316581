# SPDX-License-Identifier: Apache-2.0
"""A key for each value: values with equal keys are equal when a step runs.

A key is a hash of an op, its attributes, and the keys of its inputs: so are the values
of two replicas compared, or, as a key is the same in all processes, those of two
processes. Constants and the results that a collective returns to all replicas have keys
of their own; an op of which nothing is known gives a value that equals no other.

The variables of a loop depend on one another. The key of one is a hash of all on which
it depends: what each begins with, and how a turn computes it from those before. So it
is equal on two replicas if and only if the values are in each turn, by induction.

`Keys` serves while a graph is rewired. What is known before that, of variables and
inside functions, is in levels.py.

Source: value numbering is due to Cocke and Schwartz 1970, Programming languages and
their compilers; loops are assumed equal until that is refuted, as in Alpern, Wegman and
Zadeck 1988, Detecting equality of variables in programs.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from replicator._tf import functions
from replicator.graph.ir import placeholder
from replicator.graph.ir.kinds import kind_of

OWN = 1  # the bit of `Key.open` of what not all replicas have
LOOPS = ("While", "StatelessWhile")

# The inputs of a Merge, which functions that were imported may hold, do not determine
# which of them it returns.
_NOT_PURE = ("Placeholder", "PlaceholderWithDefault", "PyFuncStateless", "Merge")


class Key(NamedTuple):
    """Identifies a value by what it is computed from.

    Attributes:
        digest: The same for all values that are equal.
        open: OWN if the value depends on what not all replicas have, and a bit for each
            variable of a loop on which it depends while that loop is looked at.
    """

    digest: bytes
    open: int = 0


class Origin(NamedTuple):
    """What a value is computed from.

    Attributes:
        op: The op that makes the value what it is.
        facts: What the op does; None if the value is that of the only part.
        parts: The values that it takes, each with the keys of its graph.
        first: The values of the same graph that are looked at before.
        open: As of `Key`, of the op itself.
    """

    op: tf.Operation
    facts: Any
    parts: Sequence[tuple[Keys, tf.Tensor]] = ()
    first: Sequence[tf.Tensor] = ()
    open: int = 0


class Keys:
    """The keys of the values in one graph, in the place from which it is called.

    Args:
        arguments: The graph's arguments, whose keys are known.
        key_of: Returns the key of the k-th of these.
        path: The ops that call the graph, from the outermost on.
        loops: The number of variables of each loop around it that is looked at.
    """

    def __init__(
        self,
        arguments: Sequence[tf.Tensor] = (),
        key_of: Callable[[int], Key] | None = None,
        path: tuple[tf.Operation, ...] = (),
        loops: tuple[int, ...] = (),
    ) -> None:
        self._known: dict[int, Key] = {}  # by the id of a tensor
        self._positions = {id(tensor): k for k, tensor in enumerate(arguments)}
        self._key_of = key_of
        self._made = itertools.count()
        self.path, self.loops = path, loops

    def set(self, tensor: tf.Tensor, key: Key) -> None:
        """Sets the key of a tensor, such as an argument of a function."""
        self._known[id(tensor)] = key

    def new(self) -> Key:
        """Returns a key that no tensor has yet."""
        return hashed(("new", next(self._made)))

    def join(self, results: Sequence[Sequence[tf.Tensor]]) -> None:
        """Gives the replicas' copies of each result the same key.

        Args:
            results: `results[n]` are the results of the n-th replica, equal to the
                others'.
        """
        for column in zip(*results, strict=True):
            if len(set(map(id, column))) > 1:
                key = self.new()
                for tensor in column:
                    self.set(tensor, key)

    def same(self, tensors: Sequence[tf.Tensor]) -> bool:
        """Whether the tensors are equal by construction."""
        return len(set(map(self.of, tensors))) == 1

    def of(self, tensor: tf.Tensor) -> Key:
        """Returns the key of a tensor, without recursion: graphs are deep."""
        stack, origins = [tensor], dict[int, Origin]()
        while stack:
            top = stack[-1]
            if id(top) in self._known:
                stack.pop()
                continue
            origin = origins.get(id(top))
            if origin is None:
                origin = origins[id(top)] = self.origin(top)
                missing = [t for t in origin.first if id(t) not in self._known]
                if missing:
                    stack += missing
                    continue
            keys = [keys.of(part) for keys, part in origin.parts]
            plain = origin.facts is None
            self._known[id(top)] = (
                keys[0] if plain else hashed(origin.facts, keys, origin.open)
            )
        return self._known[id(tensor)]

    def origin(self, tensor: tf.Tensor) -> Origin:
        """Returns what a tensor is computed from."""
        op, index = tensor.op, tensor.value_index
        if id(tensor) in self._positions and self._key_of is not None:
            key = self._key_of(self._positions[id(tensor)])
            return Origin(self.path[-1], ("argument", key.digest), open=key.open)
        call = placeholder.read(op)
        if call is not None and call.facts.same_for_all:
            facts = ("call", call.key, call.group, index, *self._places(call.key))
            return Origin(op, facts, open=OWN if call.channel else 0)
        if not is_pure(op):
            return self.own(tensor)
        inputs = op.inputs
        return Origin(op, description(op, index), [(self, t) for t in inputs], inputs)

    def _places(self, key: str) -> tuple[int, ...]:
        """Returns which of the functions that hold a call this is, on each level."""
        return ()

    def own(self, tensor: tf.Tensor) -> Origin:
        """Returns the origin of a tensor of which nothing is known."""
        ids = tuple(map(id, (*self.path, tensor.op)))
        return Origin(tensor.op, ("own", ids, tensor.value_index), open=OWN)

    def turn(
        self, op: tf.Operation, key_of: Callable[[int], Key], loops: tuple[int, ...]
    ) -> Keys:
        """Returns the keys in the body of a loop.

        Args:
            op: The loop.
            key_of: Returns the key of the k-th variable before a turn.
            loops: As above.
        """
        graph, _ = functions.function_body(op, "body")
        return Keys(graph.inputs, key_of, (*self.path, op), loops)


class Loop:
    """The keys of a loop's variables.

    Args:
        keys: Those of the graph that the loop is in.
        op: The loop.
    """

    def __init__(self, keys: Keys, op: tf.Operation) -> None:
        graph, self._results = functions.function_body(op, "body")
        self._keys, self._inputs = keys, op.inputs
        self._stays = [
            result is argument
            for result, argument in zip(self._results, graph.inputs, strict=True)
        ]
        self._first_bit = 1 + sum(keys.loops)
        loops = (*keys.loops, len(self._results))
        self._turn = keys.turn(op, self._symbol, loops)
        self._known: dict[int, Key] = {}

    def key(self, k: int) -> Key:
        """Returns the key of the k-th variable before any turn."""
        if self._stays[k]:
            return self._keys.of(self._inputs[k])
        if k not in self._known:
            self._known[k] = self._find(k)
        return self._known[k]

    def keys(self) -> list[Key]:
        """Returns the keys of all variables before any turn."""
        return [self.key(k) for k, _ in enumerate(self._inputs)]

    def _symbol(self, k: int) -> Key:
        """Returns a key that stands for the k-th variable before a turn."""
        if self._stays[k]:
            return self._keys.of(self._inputs[k])
        depth = len(self._keys.loops)
        return hashed(("variable", depth, k), (), 1 << (self._first_bit + k))

    def _find(self, k: int) -> Key:
        """Hashes a variable with all on which it depends in any number of turns."""
        todo, reached = [k], dict[int, list[Key]]()
        while todo:
            n = todo.pop()
            if n in reached:
                continue
            after = self._turn.of(self._results[n])
            reached[n] = [self._keys.of(self._inputs[n]), after]
            bits = after.open >> self._first_bit
            todo += [m for m in range(len(self._results)) if bits >> m & 1]
        numbers = sorted(reached)
        key = hashed(("loop", k, numbers), [key for n in numbers for key in reached[n]])
        return Key(key.digest, key.open & ((1 << self._first_bit) - 1))


def hashed(facts: Any, keys: Sequence[Key] = (), is_open: int = 0) -> Key:
    """Returns the key of a value.

    Args:
        facts: What distinguishes it from others that are computed from the same.
        keys: Those of what it is computed from.
        is_open: As `Key.open`, of itself.
    """
    text = facts if isinstance(facts, bytes) else repr(facts).encode()
    digest = hashlib.blake2b(b"%d " % len(text), digest_size=16)
    digest.update(text)
    for key in keys:
        digest.update(key.digest)
        is_open |= key.open
    return Key(digest.digest(), is_open)


def is_pure(op: tf.Operation) -> bool:
    """Whether an op's results depend on nothing but its inputs."""
    if op.type in _NOT_PURE:
        return False
    kind = kind_of(op)
    return not (kind.stateful or kind.calls)


def description(op: tf.Operation, index: int = -1) -> bytes:
    """Describes what an op does, and on what type of device, but not on which.

    Attributes with underscores, such as names and compiler annotations, do not count.

    Args:
        op: The op, which calls no function.
        index: The number of a result, if it is about one.
    """
    node = op.node_def  # a copy
    for field in ("name", "input", "experimental_debug_info"):
        node.ClearField(field)
    node.device = device_type(op.device)
    for name in [name for name in node.attr if name.startswith("_")]:
        del node.attr[name]
    return b"%d " % index + node.SerializeToString(deterministic=True)


@functools.cache
def device_type(device: str) -> str:
    """Returns the type of a device; "" if it is none in particular."""
    return tf.DeviceSpec.from_string(device).device_type or ""
