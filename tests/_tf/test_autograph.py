# SPDX-License-Identifier: Apache-2.0
"""AutoGraph: each private name is called."""

from __future__ import annotations

import pytest
import tensorflow as tf

from replicator._tf import autograph
from tests._tf import shared


class _OddError(Exception):
    def __init__(self, code, *, where):
        super().__init__(code, where)


def test_call_converted_converts():
    def function(x):
        if x > 0:
            return x
        return -x

    with tf.Graph().as_default() as graph:
        result = autograph.call_converted(function, [tf.constant(-2.0)])
        assert shared.evaluate(result, graph) == 2.0


def test_call_converted_passes_exceptions_unchanged():
    error = _OddError(1, where="here")

    def function():
        raise error

    with tf.Graph().as_default(), pytest.raises(_OddError) as caught:
        autograph.call_converted(function, [])
    assert caught.value is error
    assert vars(error).keys() <= {"__notes__"}  # the user's lines


def test_exceptions_left_as_they_are_pass_a_tf_function() -> None:
    class Known(autograph.LeftAsItIs, _OddError):
        pass

    error = Known(1, where="here")

    @tf.function
    def function() -> None:
        raise error

    with pytest.raises(Known) as caught:
        function()
    assert caught.value is error


def test_what_is_not_converted_lets_others_exceptions_pass() -> None:
    error = _OddError(1, where="here")

    @autograph.not_converted
    def ours() -> None:
        """Stands for a function of ours."""
        raise error

    for function in (ours, tf.function(ours), tf.function(lambda: ours())):
        with pytest.raises(_OddError) as caught:
            function()
        assert caught.value is error
    assert ours.__name__ == "ours" and ours.__doc__ == "Stands for a function of ours."


@pytest.mark.parametrize("method", [False, True])
def test_function_of_opens_a_tf_function(method):
    def plain(x):
        return x

    assert autograph.function_of(plain) is plain
    if not method:
        assert autograph.function_of(tf.function(plain)) is plain
        return

    class Holder:
        @tf.function(autograph=False)
        def call(self, x):
            return x + 1

    holder = Holder()
    opened = autograph.function_of(holder.call)
    assert not isinstance(opened, tf.types.experimental.PolymorphicFunction)
    assert int(opened(1)) == 2


def _fails(x):
    return x @ tf.ones([3, 1])


def _calls_what_fails(x):
    return _fails(2.0 * x)


def test_an_error_of_converted_code_notes_the_users_lines_once():
    @tf.function(autograph=False)
    def function(x):
        return autograph.call_converted(
            lambda x: autograph.call_converted(_calls_what_fails, [x]), [x]
        )

    with pytest.raises(ValueError, match="must be equal") as caught:
        function(tf.ones([2, 4]))
    (note,) = caught.value.__notes__
    first, *lines = note.splitlines()
    assert first == "in user code:"
    assert [line.split(", in ")[1] for line in lines[::2]] == [
        "_calls_what_fails",
        "_fails",
    ]
    assert all(line.startswith("    return ") for line in lines[1::2])
    assert all(f'File "{__file__}", line ' in line for line in lines[::2])
