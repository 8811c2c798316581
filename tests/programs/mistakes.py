# SPDX-License-Identifier: Apache-2.0
"""Random programs on which the replicas disagree, and the errors that say so.

Lines are put somewhere into a random program, and other ones for one replica. They use
w, a float32[12, 2] tensor; the shape is divisible by all numbers of replicas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from hypothesis import assume
from hypothesis import strategies as st

from replicator import errors
from tests import repeatable
from tests.programs import drawn

Lines = tuple[str, ...]
# Calls with their options, and other values of these.
_CALLS: dict[str, dict[str, tuple[str, str]]] = {
    "all_reduce": {"op": ("'sum'", "'max'")},
    "broadcast": {"root": ("0", "1")},
    "all_gather": {"axis": ("0", "1")},
    "reduce": {"root": ("0", "1"), "op": ("'sum'", "'max'")},
    "gather": {"root": ("0", "1"), "axis": ("0", "1")},
    "scatter": {"root": ("0", "1"), "axis": ("0", "1")},
    "reduce_scatter": {"op": ("'sum'", "'max'"), "axis": ("0", "1")},
    "permute": {"pairs": ("[(0, 1)]", "[(1, 0)]")},
    "shift": {"offset": ("1", "2")},
    "all_to_all": {"split_axis": ("0", "0"), "concat_axis": ("0", "1")},
}
_DATA = "w = known(tf.ones([12, 2]))"
_SUM = "repl.all_reduce(w)"


@dataclasses.dataclass(frozen=True)
class Change:
    """A change that breaks a program.

    Attributes:
        valid: The lines that are put into the program.
        broken: Those of some replicas.
        error: The class of the error.
        says: A part of its message.
        used: Whether w is part of the program's result, as far as it runs.
    """

    valid: Lines
    broken: dict[int, Lines]
    error: type[Exception] = errors.MismatchError
    says: str = ""
    used: bool = False


class Draw:
    """Draws a change for a number of replicas."""

    def __init__(self, draw: Any, count: int) -> None:
        self.draw, self.count = draw, count
        self.one = self.integer(0, count - 1)  # the deviating replica
        self.peer = self.choice([r for r in range(count) if r != self.one])
        self.name = self.choice(_CALLS)

    def integer(self, least: int, most: int) -> int:
        return self.draw(st.integers(least, most))

    def choice(self, among: Any) -> Any:
        return repeatable.choice(self.draw, among)

    def call(self, name: str = "", other: str = "") -> str:
        """Returns a call of a primitive, with another value of an option."""
        options = _CALLS[name or self.name]
        given = (f"{key}={values[key == other]}" for key, values in options.items())
        return f"repl.{name or self.name}(w, {', '.join(given)})"

    def one_differs(
        self, valid: Any, broken: Any, says: str = "", **facts: Any
    ) -> Change:
        """Returns a change of the lines of one replica."""
        return Change((_DATA, *valid), {self.one: (_DATA, *broken)}, says=says, **facts)


# --- Calls without a partner ----------------------------------------------------------


def more(by: Draw) -> Change:
    call = by.choice([by.call(), "repl.barrier()"])
    return by.one_differs([call], [call, call])


def fewer(by: Draw) -> Change:
    return by.one_differs([by.choice([by.call(), "repl.barrier()"])], [])


def order(by: Draw) -> Change:
    calls = [by.call(), "repl.all_reduce(w, 'min')"]
    return by.one_differs(calls, calls[::-1], "differs")


def shape(by: Draw) -> Change:
    cut = any("axis" in name for name in _CALLS[by.name])
    others = ["[12, 2, 1]", "[12, 3]"] + ([] if cut else ["[12]", "[]"])
    other = f"w = known(tf.ones({by.choice(others)}))"
    return by.one_differs([by.call()], [other, by.call()], "not the same shape")


def dtype(by: Draw) -> Change:
    other = f"w = tf.cast(w, '{by.choice(['float64', 'int32'])}')"
    return by.one_differs([by.call()], [other, by.call()], "not the same dtype")


def option(by: Draw) -> Change:
    name = by.choice([k for k, (one, two) in _CALLS[by.name].items() if one != two])
    says = f"not the same {'pairs' if name == 'offset' else name}"
    return by.one_differs([by.call()], [by.call(other=name)], says)


def primitive(by: Draw) -> Change:
    other = by.choice([name for name in _CALLS if name != by.name])
    return by.one_differs([by.call()], [by.call(other)])


def group(by: Draw) -> Change:
    """All replicas call, but one of them among a subgroup only, or by itself."""
    members = [by.one] if by.count == 2 else sorted([by.one, by.peer])
    return by.one_differs([_SUM], [f"repl.all_reduce(w, group={members})"])


_PLACES = (
    "{call}",
    "tf.cond(known(True), lambda: [{call}, 0][1], lambda: 1)",
    "tf.while_loop(lambda k: k < 2, lambda k: [[{call}, k + 1][1]], [0])",
    "tf.function(lambda w: [{call}, w][1], autograph=False)(w)",
)


def place(by: Draw) -> Change:
    """One replica calls inside a conditional, a function or a loop."""
    here, there = by.draw(st.permutations(_PLACES))[:2]
    lines = ([place.format(call=by.call())] for place in (here, there))
    return by.one_differs(*lines, "different places in the control flow")


def branch(by: Draw) -> Change:
    """One replica calls in the other branch of a conditional."""
    inside, outside = f"lambda: [{by.call()}, 0][1]", "lambda: 1"
    lines = ([f"tf.cond(known(True), {a}, {b})"] for a, b in _both(inside, outside))
    return by.one_differs(*lines)


def _both(one: str, other: str) -> list[tuple[str, str]]:
    return [(one, other), (other, one)]


# --- Messages -------------------------------------------------------------------------


def _message(by: Draw, spec: str = "[12, 2]", tag: int = 99) -> tuple[str, str]:
    """A message from the deviating replica to another."""
    send = f"if repl.replica_id == {by.one}: repl.send(w, {by.peer}, tag=99)"
    recv = f"repl.recv(tf.TensorSpec({spec}), {by.one}, tag={tag})"
    return send, f"if repl.replica_id == {by.peer}: {recv}"


def lost(by: Draw) -> Change:
    """A send without recv, or a recv without send."""
    lines = _DATA, by.choice(_message(by))
    return Change((), dict.fromkeys(range(by.count), lines))


def tag(by: Draw) -> Change:
    send, recv = _message(by, tag=100)
    return Change((_DATA, send), {by.peer: (_DATA, recv)})


def spec(by: Draw) -> Change:
    specs = ["[12, 3]", "[12]", "[None, 3]", "[12, 2], tf.int32"]
    other = by.choice(specs)
    send, recv = _message(by, other)
    says = f"not the same {'dtype' if 'int' in other else 'shape'}"
    return Change((_DATA, send), {by.peer: (_DATA, recv)}, says=says)


def circle(by: Draw) -> Change:
    """Some replicas wait in a ring, each for what its predecessor sends later."""
    ring = by.draw(st.permutations(range(by.count)))[: by.integer(2, by.count)]
    broken = {
        r: (
            _DATA,
            f"repl.recv(w, {ring[n - 1]}, tag=99)",
            f"repl.send(w, {ring[(n + 1) % len(ring)]}, tag=99)",
        )
        for n, r in enumerate(ring)
    }
    return Change((), broken, errors.DeadlockError, "in a cycle")


def crossed(by: Draw) -> Change:
    """One waits before a collective for a message that the other sends after it."""
    send, recv = _message(by)
    broken = {by.peer: (_DATA, recv, _SUM)}
    return Change((_DATA, _SUM, send), broken, errors.DeadlockError, "in a cycle")


def crossed_groups(by: Draw) -> Change:
    """Two replicas call the collectives of two groups in different orders."""
    both = sorted([by.one, by.peer])
    calls = [_SUM, f"if repl.replica_id in {both}: repl.all_reduce(w, group={both})"]
    return by.one_differs(calls, calls[::-1], "in a cycle", error=errors.DeadlockError)


# --- Arguments, and errors at run time ------------------------------------------------


def argument(by: Draw) -> Change:
    """One replica passes an invalid argument."""
    rest = [r for r in range(by.count) if r != by.one]
    sizes = [13] * (by.count - 1) + [-1]
    wrong = [
        "repl.all_reduce(w, 'median')",
        f"repl.all_reduce(w, group={rest})",
        f"repl.all_reduce(w, weight={(1,) * by.count})",
        f"repl.broadcast(w, root={by.count})",
        f"repl.broadcast(w, root={rest[0]}, group=[{by.one}])",
        "repl.all_gather(w, axis=2)",
        "repl.reduce(w, root=-1)",
        f"repl.scatter(w, root={by.one}, axis=-3)",
        f"repl.scatter(w, root={by.one}, axis=0.5)",
        "repl.permute(w, [(0, 1), (1, 1)])",
        "repl.shift(w, 1.5)",
        f"repl.all_to_all(w, 0, 0, splits={[1] * by.count})",
        f"repl.all_to_all(w, 0, 0, splits={sizes})",
        f"repl.send(w, {by.one})",
        f"repl.recv(w, {by.one})",
    ]
    return by.one_differs(
        [by.call()],
        [by.choice(wrong)],
        f"on replica {by.one}",
        error=errors.ArgumentError,
    )


def gradient(by: Draw) -> Change:
    """One replica takes no gradient of its call."""
    valid = "w += tf.reduce_sum(repl.all_reduce(x))"
    broken = "w += tf.reduce_sum(repl.all_reduce(tf.stop_gradient(x)))"
    data = "w = tf.zeros([], x.dtype)"
    return Change(
        (data, valid), {by.one: (data, broken)}, says="A gradient of", used=True
    )


def disagreement(by: Draw) -> Change:
    """One replica takes another branch, or another number of iterations."""
    one, other = by.draw(st.permutations(range(3)))[:2]
    line = by.choice(
        [
            "w = tf.while_loop(lambda k, w: k < {n}, "
            "lambda k, w: (k + 1, repl.all_reduce(w)), [0, w])[1]",
            "w = tf.cond(known({n} < 1), lambda: repl.all_reduce(w), lambda: w)",
        ]
    )
    assume("while" in line or (one < 1) != (other < 1))
    return by.one_differs(
        [line.format(n=f"known({one})" if "while" in line else one)],
        [line.format(n=f"known({other})" if "while" in line else other)],
        "replicas disagree",
        error=tf.errors.InvalidArgumentError,
        used=True,
    )


_KINDS = (
    *(more, fewer, order, shape, dtype, option, primitive, group, place, branch),
    *(lost, tag, spec, circle, crossed, crossed_groups, argument, gradient),
    disagreement,
)
KINDS: dict[str, Callable[[Draw], Change]] = {kind.__name__: kind for kind in _KINDS}


@dataclasses.dataclass(frozen=True, repr=False)
class Wrong:
    """A program that must be refused.

    Attributes:
        text: The program.
        count: The number of replicas.
        change: What is wrong with it.
    """

    text: drawn.Text
    count: int
    change: Change

    def __repr__(self) -> str:
        error = self.change.error.__name__
        return f"{error} expected on {self.count} replicas from{self.text}"


@st.composite
def wrong_programs(draw: Any, kind: str) -> Wrong:
    """Draws a program that must be refused; `kind` is an entry of KINDS."""
    count = draw(st.integers(3 if kind == "crossed_groups" else 2, 4))
    change = KINDS[kind](Draw(draw, count))
    head, *lines, last = draw(drawn.texts()).lines
    places = [n for n, line in enumerate(lines) if line.lstrip().startswith("v")]
    at = len(lines) if change.used else draw(st.sampled_from(places))
    margin = " " * (4 if change.used else len(lines[at]) - len(lines[at].lstrip()))
    put: list[str] = []
    for r in range(count):
        put.append(f"{margin}if repl.replica_id == {r}:")
        own = change.broken.get(r, change.valid)
        put += [f"{margin}    {line}" for line in own] or [f"{margin}    pass"]
    if change.used:
        last = f"{last} + tf.cast(0.5 * tf.reduce_sum(w), x.dtype)"
    names = ["    repl, known = world.repl, world.known"]
    text = drawn.Text((head, *names, *lines[:at], *put, *lines[at:], last))
    return Wrong(text, count, change)
