# SPDX-License-Identifier: Apache-2.0
"""Errors of eager steps take few lines, the user's among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from replicator.step import error_messages
from tests import helpers

_PLACES = "Graph execution error:\n\nDetected at node Assert defined at ...\n"


def _error(text: str) -> tf.errors.OpError:
    return tf.errors.InvalidArgumentError(None, None, _PLACES + text)


def test_the_pieces_of_an_assertion_become_a_message() -> None:
    error = error_messages.shorten(
        _error(
            "assertion failed: [all_reduce: it is wrong.] [replica 0: at train.py:4] "
            "[shapes on replicas 0, 1, 2:] [2 3] [] [-1] [Fix: don\\'t.]\n\t [[{{node "
            "communicate/Assert}}]] [Op:__inference_traced_1]"
        )
    )
    assert type(error) is tf.errors.InvalidArgumentError
    assert str(error) == (
        "all_reduce: it is wrong.\n  replica 0: at train.py:4\n"
        "  shapes on replicas 0, 1, 2: [2, 3] [] [-1]\nFix: don't."
    )


@pytest.mark.parametrize(
    "text", ["assertion failed: [of the user] [3]", "ConcatOp : Dimensions differ"]
)
def test_other_errors_stay_what_they_are(text: str) -> None:
    error = _error(text)
    assert error_messages.shorten(error) is error


# --- TensorFlow's errors about the user's ops -----------------------------------------


def _check(x: tf.Tensor) -> tf.Tensor:
    return tf.debugging.check_numerics(tf.math.log(x - 2.0), "it is bad")  # line


def _asserts(x: tf.Tensor) -> tf.Tensor:
    tf.debugging.assert_greater(x, 2.0, message="x is small")  # line
    return x


def _ensures(x: tf.Tensor) -> tf.Tensor:
    size = 2 + tf.cast(tf.equal(x, 2.0), tf.int32)
    return tf.ensure_shape(helpers.opaque(tf.zeros([2]), None)[:size], [3])  # line


def _inside(x: tf.Tensor) -> tf.Tensor:
    return tf.cond(x > 0, lambda: _check(x), lambda: x)


PROGRAMS = {
    "check_numerics": (_check, "it is bad : Tensor had", "CheckNumerics"),
    "assert": (_asserts, "[x is small] [Condition x > y did not hold", "Assert"),
    "ensure_shape": (_ensures, "[2] is not compatible with expected", "EnsureShape"),
    "conditional": (_inside, "it is bad : Tensor had", "CheckNumerics"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_the_user_checks_is_told_with_replica_and_line(name: str) -> None:
    program, message, op = PROGRAMS[name]
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque(2.0 if repl.replica_id else 3.0)
        return program(x)

    if name == "ensure_shape":  # which fails on replica 0
        repl = helpers.make(1)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        repl.run(step)
    assert type(caught.value) is tf.errors.InvalidArgumentError
    first, *sites = str(caught.value).splitlines()
    assert message in first
    assert sites and all(op in site for site in sites)
    assert all("tests/step/test_error_messages.py:" in site for site in sites)
    whose = 0 if name == "ensure_shape" else 1
    if name != "conditional":
        assert all(site.startswith(f"  replica {whose}: ") for site in sites)
    for site in sites:
        number = int(site.partition("test_error_messages.py:")[2].partition(" ")[0])
        with open(__file__) as file:
            assert file.read().splitlines()[number - 1].endswith("# line")


def test_each_root_is_told_once_and_cancelled_ones_are_not() -> None:
    place = (
        "Detected at node replica_1/Check defined at (most recent call last):\n"
        '  File "/a/train.py", line 4, in step\n\n'
    )
    bad = (
        "INVALID_ARGUMENT:  it is bad\nin two lines\n\t [[{{node replica_1/Check}}]]\n"
    )
    text = (
        f"Graph execution error:\n\n{place}{place}3 root error(s) found.\n  (0) {bad}"
        f"  (1) CANCELLED:  by another\n  (2) {bad}\t [[x/_4]]\n"
        "0 successful operations.\n0 derived errors ignored. [Op:__inference_step_58]"
    )
    error = error_messages.shorten(tf.errors.InvalidArgumentError(None, None, text))
    assert str(error) == (
        "it is bad\nin two lines\n  replica 1: Check at /a/train.py:4 in step"
    )


def test_ops_that_fail_at_once_are_told_though_tensorflow_has_lines_of_one() -> None:
    where = "defined at (most recent call last):\n"
    roots = "".join(
        f"  ({n}) INVALID_ARGUMENT:  bad {r}\n\t [[{{{{node replica_{r}/Check}}}}]]\n"
        for n, r in enumerate((1, 0))
    )
    text = (
        f"Graph execution error:\n\nDetected at node replica_1/Check {where}"
        f"<stack traces unavailable>\nDetected at node replica_0/Check {where}"
        f'  File "/a/train.py", line 4, in step\n\n2 root error(s) found.\n{roots}'
        "0 successful operations.\n0 derived errors ignored. [Op:__inference_step_426]"
    )
    error = error_messages.shorten(tf.errors.InvalidArgumentError(None, None, text))
    assert str(error) == (
        "bad 1\nbad 0\n  replica 1: Check\n  replica 0: Check at /a/train.py:4 in step"
    )


@pytest.mark.parametrize(
    "make",
    [tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.InternalError],
)
def test_what_hosts_and_runtimes_say_is_left_alone(make: Callable[..., Any]) -> None:
    error = make(
        *(None, None),
        "Graph execution error:\n\nDetected at node x defined at (most recent call "
        'last):\n  File "/a/train.py", line 4, in step\n\nit is gone',
    )
    assert error_messages.shorten(error) is error
