# SPDX-License-Identifier: Apache-2.0
"""The ways to break a random program, and the expected errors.

Calls are inserted into a program on which the replicas agree, and different ones on one
replica. Their registers begin with "w": they do not exist on all replicas.
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
from tests.spmd import program as p

_TAG = 99  # unique to these messages
_SHAPE = (12, 2)  # of the operands; divisible by all numbers of replicas
Statements = tuple[p.Statement, ...]


@dataclasses.dataclass(frozen=True)
class Change:
    """A change that breaks a program.

    Attributes:
        valid: The statements inserted into the program.
        broken: Their replacements on some replicas.
        error: The class of the error.
        says: A part of its message.
        top: Whether it has to be inserted where it runs unconditionally.
    """

    valid: Statements
    broken: dict[int, Statements]
    error: type[Exception] = errors.MismatchError
    says: str = ""
    top: bool = False


class Draw:
    """Draws a change for a program."""

    def __init__(self, draw: Any, program: p.Program) -> None:
        self.draw = draw
        self.program = program
        self.count = program.num_replicas
        self.one = self.integer(0, self.count - 1)  # the deviating replica

    def integer(self, least: int, most: int) -> int:
        return self.draw(st.integers(least, most))

    def choice(self, among: Any) -> Any:
        return repeatable.choice(self.draw, among)

    def data(
        self, name: str = "w0", dtype: str = "float32", shape: Any = _SHAPE
    ) -> p.Data:
        return p.Data(name, dtype, (shape,) * self.count, seed=1)

    def call(self) -> p.Collective:
        """Draws a call of all replicas, or of a group with the deviating one."""
        name, options = self.choice(_CALLS.items())
        others = [r for r in range(self.count) if r != self.one]
        groups = None
        if self.integer(0, 2) == 2 and all(key not in dict(options) for key in _IDS):
            some = self.draw(st.sets(st.sampled_from(others), min_size=1))
            groups = (tuple(sorted({self.one, *some})),)
        return p.Collective("w1", name, "w0", options, groups)

    def peer(self) -> int:
        return self.choice([r for r in range(self.count) if r != self.one])


# The arguments of the inserted calls; the operand is float32[12, 2].
_CALLS: dict[str, tuple[tuple[str, Any], ...]] = {
    "all_reduce": (("op", "sum"),),
    "broadcast": (("root", 0),),
    "all_gather": (("axis", 0),),
    "reduce": (("root", 0), ("op", "sum")),
    "gather": (("root", 0), ("axis", 0)),
    "scatter": (("root", 0), ("axis", 0)),
    "reduce_scatter": (("op", "sum"), ("axis", 0)),
    "permute": (("pairs", ((0, 1),)),),
    "shift": (("offset", 1),),
    "all_to_all": (("split_axis", 0), ("concat_axis", 0)),
}
_IDS = ("root", "pairs")
_OTHER = {
    "op": "max",
    "root": 1,
    "axis": 1,
    "offset": 2,
    "pairs": ((1, 0),),
    "concat_axis": 1,
}


# --- Calls without a partner ---------------------------------------------------------


def more(by: Draw) -> Change:
    call = by.choice([by.call(), p.Barrier()])
    return Change((by.data(), call), {by.one: (by.data(), call, call)})


def fewer(by: Draw) -> Change:
    call = by.choice([by.call(), p.Barrier()])
    return Change((by.data(), call), {by.one: (by.data(),)})


def order(by: Draw) -> Change:
    first = by.call()
    second = p.Collective("w2", "all_reduce", "w0", (("op", "min"),), first.groups)
    return Change(
        (by.data(), first, second), {by.one: (by.data(), second, first)}, says="differs"
    )


def shape(by: Draw) -> Change:
    call = by.call()
    cut = any("axis" in name for name, _ in call.options)
    others = [(12, 2, 1), (12, 3)] if cut else [(12, 2, 1), (12, 3), (12,), ()]
    other = by.data(shape=by.choice(others))
    return Change((by.data(), call), {by.one: (other, call)}, says="not the same shape")


def dtype(by: Draw) -> Change:
    call = by.call()
    other = by.data(dtype=by.choice(["float64", "int32"]))
    return Change((by.data(), call), {by.one: (other, call)}, says="not the same dtype")


def option(by: Draw) -> Change:
    call = by.call()
    name = by.choice([name for name, _ in call.options if name in _OTHER])
    changed = {**dict(call.options), name: _OTHER[name]}
    other = dataclasses.replace(call, options=tuple(changed.items()))
    says = f"not the same {'pairs' if name == 'offset' else name}"
    return Change((by.data(), call), {by.one: (by.data(), other)}, says=says)


def primitive(by: Draw) -> Change:
    call = by.call()
    name, options = by.choice((k, v) for k, v in _CALLS.items() if k != call.primitive)
    groups = None if any(key in dict(options) for key in _IDS) else call.groups
    other = p.Collective("w1", name, "w0", options, groups)
    return Change((by.data(), call), {by.one: (by.data(), other)})


def group(by: Draw) -> Change:
    """All replicas call, but one of them among a subgroup only, or by itself."""
    call = p.Collective("w1", "all_reduce", "w0", (("op", "sum"),))
    subgroup = (by.one,) if by.count == 2 else tuple(sorted((by.one, by.peer())))
    other = dataclasses.replace(call, groups=(subgroup,))
    return Change((by.data(), call), {by.one: (by.data(), other)})


def branch(by: Draw) -> Change:
    """One replica calls inside a conditional, a function or a loop."""
    call = by.call()
    within = dataclasses.replace(call, target="w3", source="w0")
    inside = p.Block((within,), ("w0",))
    argument = dataclasses.replace(call, target="w3", source="w4")
    zero, two = p.Number(0, 2), p.Number(2, 4)
    places: list[p.Statement] = [
        p.Choose(("w2",), zero, (inside, p.Block((), ("w0",)))),
        p.Loop(("w2",), two, ("w0",), ("w4",), p.Block((within,), ("w4",))),
        p.Call(("w2",), ("w0",), ("w4",), p.Block((argument,), ("w4",))),
    ]
    here = by.choice([call, *places])
    there = by.choice([place for place in places if place is not here])
    return Change(
        (by.data(), here),
        {by.one: (by.data(), there)},
        says="different places in the control flow",
    )


def other_branch(by: Draw) -> Change:
    """One replica calls in the other branch of a conditional."""
    call, zero = by.call(), p.Number(0, 2)
    inside, outside = p.Block((call,), ("w0",)), p.Block((), ("w0",))
    return Change(
        (by.data(), p.Choose(("w2",), zero, (inside, outside))),
        {by.one: (by.data(), p.Choose(("w2",), zero, (outside, inside)))},
    )


def gradient(by: Draw) -> Change:
    """One replica takes no gradient of its call."""
    watched = [x for x in by.program.inputs if x.target in by.program.watched]
    suiting = [x.target for x in watched if len(set(x.shapes)) == 1]
    assume(suiting)
    source = by.choice(suiting)
    call = p.Collective("result", "all_reduce", source, (("op", "sum"),))
    stopped = p.Local("w1", "stopped", (source,))
    return Change(
        (call,),
        {by.one: (stopped, dataclasses.replace(call, source="w1"))},
        says="A gradient of",
        top=True,
    )


# --- Messages ------------------------------------------------------------------------


def _message(by: Draw, tag: int = _TAG) -> tuple[p.Send, p.Recv]:
    """A message from the deviating replica to another."""
    peer = by.peer()
    return (
        p.Send("w0", by.one, peer, tag),
        p.Recv("w1", by.one, peer, tag, ("float32", _SHAPE)),
    )


def lost(by: Draw) -> Change:
    """A send without recv, or a recv without send."""
    send, recv = _message(by)
    wrong = by.choice([send, recv])
    return Change((by.data(), send, recv), _for_all(by, (by.data(), wrong)))


def _for_all(by: Draw, statements: Statements) -> dict[int, Statements]:
    return dict.fromkeys(range(by.count), statements)


def tag(by: Draw) -> Change:
    send, recv = _message(by)
    other = dataclasses.replace(recv, tag=_TAG + 1)
    return Change((by.data(), send, recv), {recv.receiver: (by.data(), send, other)})


def spec(by: Draw) -> Change:
    send, recv = _message(by)
    spec, says = by.choice(
        [
            (("float32", (12, 3)), "not the same shape"),
            (("float32", (12,)), "not the same shape"),
            (("float32", (None, 3)), "not the same shape"),
            (("int32", _SHAPE), "not the same dtype"),
        ]
    )
    other = dataclasses.replace(recv, spec=spec)
    return Change(
        (by.data(), send, recv), {recv.receiver: (by.data(), send, other)}, says=says
    )


def circle(by: Draw) -> Change:
    """Some replicas wait in a ring, each for what its predecessor sends later."""
    ring = by.draw(st.permutations(range(by.count)))[: by.integer(2, by.count)]
    links = list(zip(ring, [*ring[1:], ring[0]], strict=True))
    sends = tuple(p.Send("w0", a, b, _TAG) for a, b in links)
    recvs = tuple(
        p.Recv(f"w{n}", a, b, _TAG, ("float32", _SHAPE))
        for n, (a, b) in enumerate(links, 1)
    )
    return Change(
        (by.data(), *sends, *recvs),
        _for_all(by, (by.data(), *recvs, *sends)),
        errors.DeadlockError,
        "in a cycle",
    )


def crossed(by: Draw) -> Change:
    """One waits before a collective for a message that the other sends after it."""
    send, recv = _message(by)
    call = p.Collective("w2", "all_reduce", "w0", (("op", "sum"),))
    return Change(
        (by.data(), call, send, recv),
        {recv.receiver: (by.data(), send, recv, call)},
        errors.DeadlockError,
        "in a cycle",
    )


def crossed_groups(by: Draw) -> Change:
    """Two replicas call the collectives of two groups in different orders."""
    assume(by.count > 2)
    both = tuple(sorted((by.one, by.peer())))
    one = p.Collective("w1", "all_reduce", "w0", (("op", "sum"),))
    two = dataclasses.replace(one, target="w2", groups=(both,))
    return Change(
        (by.data(), one, two),
        {by.one: (by.data(), two, one)},
        errors.DeadlockError,
        "in a cycle",
    )


# --- Arguments -----------------------------------------------------------------------


def argument(by: Draw) -> Change:
    """One replica passes an invalid argument."""
    call = by.call()
    rest = tuple(r for r in range(by.count) if r != by.one)
    wrong: list[p.Statement] = [
        p.Collective("w1", "all_reduce", "w0", (("op", "median"),)),
        p.Collective("w1", "broadcast", "w0", (("root", by.count),)),
        p.Collective("w1", "broadcast", "w0", (("root", rest[0]),), ((by.one,),)),
        p.Collective("w1", "all_gather", "w0", (("axis", 2),)),
        p.Collective("w1", "reduce", "w0", (("root", -1),)),
        p.Collective("w1", "scatter", "w0", (("root", by.one), ("axis", -3))),
        p.Collective("w1", "scatter", "w0", (("root", by.one), ("axis", 0.5))),
        p.Collective("w1", "permute", "w0", (("pairs", ((0, 1), (1, 1))),)),
        p.Collective("w1", "shift", "w0", (("offset", 1.5),)),
        p.Collective("w1", "all_to_all", "w0", _cut_up((1,) * by.count)),
        p.Collective("w1", "all_to_all", "w0", _cut_up((13,) * (by.count - 1) + (-1,))),
        p.Collective("w1", "all_reduce", "w0", (("group", rest),)),
        p.Collective("w1", "all_reduce", "w0", (("weight", (1,) * by.count),)),
        p.Send("w0", by.one, by.one, _TAG),
        p.Recv("w1", by.one, by.one, _TAG, ("float32", _SHAPE)),
    ]
    return Change(
        (by.data(), call),
        {by.one: (by.data(), by.choice(wrong))},
        errors.ArgumentError,
        f"on replica {by.one}",
    )


def _cut_up(sizes: tuple[int, ...]) -> tuple[tuple[str, Any], ...]:
    """Returns the options of an all_to_all in slices of these sizes."""
    splits = (sizes,) * len(sizes)
    return (("split_axis", 0), ("concat_axis", 0), ("splits", splits))


# --- Errors at run time --------------------------------------------------------------


def disagreement(by: Draw) -> Change:
    """One replica takes another branch, or another number of turns."""
    call = p.Collective("w1", "all_reduce", "w0", (("op", "sum"),))
    inside, outside = p.Block((call,), ("w1",)), p.Block((), ("w0",))
    turn = p.Block((dataclasses.replace(call, source="w3"),), ("w1",))

    def place(number: int) -> p.Statement:
        # The result is returned: unused communication would not run.
        if loop:
            return p.Loop(("result",), p.Number(number, 4), ("w0",), ("w3",), turn)
        return p.Choose(("result",), p.Number(number, 2), (inside, outside))

    loop = by.draw(st.booleans())
    numbers = by.draw(st.permutations(range(4 if loop else 2)))[:2]
    return Change(
        (by.data(), place(numbers[0])),
        {by.one: (by.data(), place(numbers[1]))},
        tf.errors.InvalidArgumentError,
        "replicas disagree",
        top=True,
    )


KINDS: dict[str, Callable[[Draw], Change]] = {
    change.__name__: change
    for change in (
        more,
        fewer,
        order,
        shape,
        dtype,
        option,
        primitive,
        group,
        branch,
        other_branch,
        gradient,
        lost,
        tag,
        spec,
        circle,
        crossed,
        argument,
        disagreement,
        crossed_groups,
    )
}
