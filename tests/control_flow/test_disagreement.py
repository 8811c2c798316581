# SPDX-License-Identifier: Apache-2.0
"""Replicas that choose different branches or turn counts get an error that says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import replicator
from tests import forks, helpers


def _own(repl: replicator.Replicator) -> tf.Tensor:
    return helpers.opaque(float(repl.replica_id))


def _cond(repl: replicator.Replicator) -> Any:
    x = _own(repl)
    return tf.cond(x < 2.0, lambda: repl.all_reduce(x), lambda: x)


def _switch_case(repl: replicator.Replicator) -> Any:
    x = _own(repl)
    branches = [lambda: x, lambda: repl.all_reduce(x), lambda: -x]
    return tf.switch_case(tf.cast(x, tf.int32), branches)


def _while_loop(repl: replicator.Replicator) -> Any:
    x = _own(repl)
    return tf.while_loop(
        lambda n, y: n < x + 2.0,
        lambda n, y: (n + 1.0, repl.all_reduce(y)),
        [tf.constant(0.0), x],
    )[1]


def _in_functions_in_a_loop(repl: replicator.Replicator) -> Any:
    inner = tf.function(lambda x: tf.cond(x < 2.0, lambda: repl.broadcast(x), _zero))
    outer = tf.function(lambda x: tf.cond(x < 9.0, lambda: inner(x), _zero))
    return tf.while_loop(
        lambda n, x: n < 2, lambda n, x: (n + 1, outer(x)), [0, _own(repl)]
    )[1]


def _zero() -> tf.Tensor:
    return tf.constant(0.0)


SAYS: dict[Callable[..., Any], str] = {
    _cond: r"in a conditional in which they communicate:\] "
    r"\[replica 0 takes the true branch\] \[replica 1 takes the true branch\] "
    r"\[replica 2 takes the false branch\] "
    r"\[the conditional holds all_reduce op=sum float32\[\] at .*:\d+ in .*\] \[Fix: ",
    _switch_case: r"in a 3-way conditional in which they communicate:\] "
    r"\[replica 0 takes branch 0\] \[replica 1 takes branch 1\] "
    r"\[replica 2 takes branch 2\] \[the 3-way conditional holds all_reduce",
    _while_loop: r"in a loop in which they communicate:\] \[replica 0 stops\] "
    r"\[replica 1 runs another iteration\] \[replica 2 runs another iteration\] "
    r"\[the loop holds all_reduce",
    _in_functions_in_a_loop: r"in a conditional .* \[replica 2 takes the false branch"
    r"\] \[the conditional holds broadcast",
}


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("place", SAYS, ids=lambda place: place.__name__)
def test_says_which_replica_did_what(place: Callable[..., Any], mode: str) -> None:
    repl = helpers.make(3)

    def step() -> Any:
        return place(repl)

    def next_step() -> Any:
        return repl.all_reduce(_own(repl))

    message = "replicas disagree " + SAYS[place]
    if mode == "eager":  # only there, the error is nothing but these lines
        message = message.replace(r"\] \[Fix", r"\nFix").replace(r"\] \[", r"\n  ")
        message = message.replace(r".* \[", r"(?s:.*)\n  ")
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        helpers.run(mode, repl, lambda: step)
    after = helpers.run(mode, repl, lambda: next_step)
    assert list(after) == [3.0] * 3


def test_nothing_is_written_by_a_replica_that_would_have_gone_on() -> None:
    repl = helpers.make(2)
    with repl.context():
        turns = tf.Variable(0, synchronization=tf.VariableSynchronization.ON_READ)

    def step() -> tf.Tensor:
        def turn(n: tf.Tensor) -> tuple[tf.Tensor]:
            turns.assign_add(1)
            return (n + 0 * repl.all_reduce(n) + 1,)

        stop = helpers.opaque(2 + repl.replica_id)
        return tf.while_loop(lambda n: n < stop, turn, [tf.constant(0)])[0]

    with pytest.raises(tf.errors.InvalidArgumentError, match="replica 0 stops"):
        repl.run(step)
    assert helpers.components(turns) == [2, 2]


_PROGRAM = """
import tests.conftest
import tensorflow as tf
from tests import helpers
from tests.control_flow import test_disagreement

repl = helpers.make(3)
try:
    repl.run(lambda: test_disagreement._while_loop(repl))
except tf.errors.InvalidArgumentError as error:
    assert "replica 0 stops" in str(error)
    print("refused")
"""


def test_none_hangs() -> None:
    """In a process of its own, which can be killed."""
    ended = forks.run(["-c", _PROGRAM], timeout=120)
    assert ended.stdout.strip() == "refused", ended.stderr


# --- Python that differs by replica ---------------------------------------------------


def _a_conditional(repl: replicator.Replicator, x: tf.Tensor) -> tf.Tensor:
    return tf.cond(x > 0.0, lambda: repl.all_reduce(x), lambda: x)


def _a_loop(repl: replicator.Replicator, x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(lambda x: x < 2.0, lambda x: [repl.all_reduce(x)], [x])[0]


def _a_condition(repl: replicator.Replicator, x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(lambda x: repl.all_reduce(x) < 2.0, lambda x: [x + 1.0], [x])[
        0
    ]


def _another_branch(repl: replicator.Replicator, x: tf.Tensor) -> tf.Tensor:
    return tf.cond(x > 0.0, lambda: x, lambda: repl.all_reduce(x))


def _a_function(repl: replicator.Replicator, x: tf.Tensor) -> tf.Tensor:
    return tf.function(repl.all_reduce)(x)


def _a_switch(repl: replicator.Replicator, x: tf.Tensor) -> tf.Tensor:
    return tf.switch_case(tf.constant(0), [lambda: repl.all_reduce(x), lambda: x])


def _the_step(repl: replicator.Replicator, x: tf.Tensor) -> tf.Tensor:
    return repl.all_reduce(x)


def _nothing(repl: replicator.Replicator, x: tf.Tensor) -> tf.Tensor:
    return x


def _conditionals(*counts: int) -> Callable[..., tf.Tensor]:
    """As many conditionals as there are counts, each with so many calls."""

    def several(repl: replicator.Replicator, x: tf.Tensor) -> tf.Tensor:
        for count in counts:

            def branch(x: tf.Tensor = x, count: int = count) -> tf.Tensor:
                for _ in range(count):
                    x = repl.all_reduce(x)
                return x

            x = tf.cond(helpers.opaque(True), branch, lambda x=x: x)
        return x

    return several


LINE = r"all_reduce op=sum float32\[\] at .*test_disagreement.py:\d+ in \w+"
PAIRS: list[tuple[Callable[..., Any], Callable[..., Any], str]] = [
    (
        _a_conditional,
        _nothing,
        rf"(?s)call 0 of replica 0 has no partner: {LINE}.*replica 1: 0 calls",
    ),
    (
        _the_step,
        _a_conditional,
        rf"(?s)at the top level on replica 0, inside a conditional on replica 1.*"
        rf"{LINE}.*a conditional \(.*\) with {LINE}.*Fix: ",
    ),
    (
        _a_loop,
        _a_conditional,
        rf"(?s)inside a loop on replica 0, inside a conditional on replica 1.*"
        rf"a loop \(.*\) with {LINE}.*a conditional \(.*\) with {LINE}",
    ),
    (
        _a_function,
        _a_loop,
        "inside a function on replica 0, inside a loop on replica 1",
    ),
    (
        _a_conditional,
        _a_switch,
        "inside a conditional on replica 0, inside a 2-way conditional on replica 1",
    ),
    (
        _a_conditional,
        _another_branch,
        rf"(?s)replica \d makes a call at a place .* in another branch.*{LINE}\n"
        rf".*{LINE}",
    ),
    (
        _a_loop,
        _a_condition,
        rf"(?s)replica \d makes a call at a place .* in another branch.*{LINE}\n"
        rf".*{LINE}",
    ),
    (
        _conditionals(2),
        _conditionals(1, 1),
        rf"(?s)replica 1 makes in two conditionals the calls that another .* in one\."
        rf".*a conditional \(.*\) with {LINE}.*a conditional \(.*\) with {LINE}"
        rf".*replica 0 .*a conditional \(.*\) with {LINE}",
    ),
    (_conditionals(2), _conditionals(1), "call 1 of replica 0 has no partner"),
]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("one", "other", "said"), PAIRS, ids=lambda x: getattr(x, "__name__", "")
)
def test_python_that_differs_by_replica_is_an_error_with_lines(
    one: Callable[..., Any], other: Callable[..., Any], said: str, first: int
) -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        place = one if repl.replica_id == first else other
        return place(repl, helpers.opaque(1.0))

    if first:  # the same with the numbers exchanged
        said = said.translate(str.maketrans({"0": "1", "1": "0"})).replace(
            "call 1", "c"
        )
    with pytest.raises(replicator.MismatchError) as caught:
        repl.run(step)
    if not first:
        assert caught.match(said)


def test_a_group_may_communicate_where_the_others_do_not() -> None:
    repl = helpers.make(3)
    group = [0, 2]

    def step() -> tf.Tensor:
        x = helpers.opaque(repl.replica_id + 1.0)
        if repl.replica_id in group:
            x = tf.cond(x > 0.0, lambda: repl.all_reduce(x, group=group), lambda: x)
        return repl.all_reduce(x)

    assert [float(y) for y in repl.run(step)] == [4.0 + 2.0 + 4.0] * 3


def test_groups_make_their_own_turns() -> None:
    repl = helpers.make(4)
    groups = repl.groups([[0, 1], [2, 3]])

    def step() -> tf.Tensor:
        turns = helpers.opaque(1 + repl.replica_id // 2)
        return tf.while_loop(
            lambda n, x: n < turns,
            lambda n, x: (n + 1, repl.all_reduce(x, group=groups)),
            [tf.constant(0), helpers.opaque(1.0)],
        )[1]

    assert [float(y) for y in repl.run(step)] == [2.0, 2.0, 4.0, 4.0]


def test_branches_that_do_not_exist_are_all_the_last_one() -> None:
    """TensorFlow takes the last branch for any index that is out of range."""
    repl = helpers.make(4)

    def step() -> tf.Tensor:
        index = helpers.opaque([1, 2, 9, -1][repl.replica_id])
        branches = [lambda: tf.constant(0.0), lambda: repl.all_reduce(1.0)]
        return tf.switch_case(index, branches)

    assert [float(x) for x in repl.run(step)] == [4.0] * 4
