# SPDX-License-Identifier: Apache-2.0
"""The traceback of an error in step_fn: the user's lines, as with tf.function."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from replicator._tf import frames as tf_frames
from replicator.step import tracing
from tests import helpers


def _step(x: Any) -> Any:
    return _helper(x)


def _helper(x: Any) -> Any:
    return tf.reduce_mean(undefined_name(x))  # type: ignore[name-defined]  # noqa: F821


@tf.autograph.experimental.do_not_convert
def _unconverted(x: Any) -> Any:
    return _helper(x)


def _of_python(x: Any) -> Any:
    return json.loads("no JSON")


def _caused(x: Any) -> Any:
    try:
        return _helper(x)
    except NameError as error:
        raise KeyError("mine") from error


def _text(call: Callable[[], Any]) -> str:
    with pytest.raises(Exception) as caught:
        call()
    return "".join(traceback.format_exception(caught.value))


def _run(step_fn: Any) -> str:
    repl = helpers.make(2)
    return _text(lambda: repl.run(step_fn, tf.ones([4]), input_mode="global_batch"))


def test_an_error_in_a_step_is_as_short_as_in_a_function() -> None:
    expected = _text(lambda: tf.function(_step)(tf.ones([4])))
    actual = _run(_step)
    assert len(actual.splitlines()) <= len(expected.splitlines())
    assert "replicator/" not in actual and "autograph_generated" not in actual
    for name in ("_step", "_helper"):
        assert f", in {name}\n" in actual, actual
    assert "    return tf.reduce_mean(undefined_name(x))" in actual
    assert actual.count("NameError: name 'undefined_name' is not defined") == 1


def test_a_mismatch_is_its_message_and_a_few_frames() -> None:
    repl = helpers.make(2, build="trace")

    def step(x: tf.Tensor) -> tf.Tensor:
        return repl.all_reduce(x) if repl.replica_id == 0 else repl.all_gather(x)

    text = _text(lambda: repl.run(step, args=(tf.ones([3]),)))
    frames, _, message = text.partition("replicator.errors.MismatchError: ")
    assert len(frames.splitlines()) <= 10 and "replicator/step" not in frames
    assert "all_gather float32[3] at " in message and "Fix: " in message


@pytest.mark.parametrize("mode", ["built", "function", "again"])
def test_so_it_is_however_the_step_is_called(mode: str) -> None:
    repl = helpers.make(2)
    calls: dict[str, Callable[[], Any]] = {
        "built": repl.build(_step, args=(1.0,)),
        "function": tf.function(lambda: repl.run(_step, args=(1.0,))),
        "again": lambda: repl.run(_step, args=(1.0,)),
    }
    if mode == "again":
        _text(calls[mode])
    text = _text(calls[mode])
    assert ", in _helper\n" in text and "replicator/step" not in text, text


@pytest.mark.parametrize(
    ("step_fn", "said"),
    [
        (_unconverted, ["in _unconverted", "in _helper"]),
        (_of_python, ["in _of_python", "json/decoder.py", "JSONDecodeError"]),
        (_caused, ["in _caused", "NameError", "direct cause", "KeyError: 'mine'"]),
        (lambda x: tf.reduce_mean("a"), ["in <lambda>", "DataType string"]),
    ],
    ids=["unconverted", "Python's", "caused", "TensorFlow's"],
)
def test_lines_of_other_code_are_kept(step_fn: Any, said: list[str]) -> None:
    text = _run(step_fn)
    assert all(words in text for words in said), text
    assert "replicator/step" not in text, text


def test_an_error_of_a_running_step_has_the_users_frames_only() -> None:
    text = _run(lambda x: tf.debugging.assert_equal(x, 2.0))
    assert "InvalidArgumentError" in text and "replicator/step" not in text


def test_the_users_line_is_found_in_a_shortened_traceback() -> None:
    repl = helpers.make(2)
    with pytest.raises(NameError) as caught:
        repl.run(_step, tf.ones([4]), input_mode="global_batch")
    assert [name for _, _, name in tf_frames.user_frames(caught.value)][-2:] == [
        "_step",
        "_helper",
    ]


def test_all_frames_are_shown_on_demand() -> None:
    tf.debugging.disable_traceback_filtering()
    try:
        text = _run(_step)
    finally:
        tf.debugging.enable_traceback_filtering()
    assert "replicator/step/tracing.py" in text and "autograph_generated" in text


def test_a_fault_of_our_own_has_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        return {}["a fault"]

    broken.__code__ = broken.__code__.replace(co_filename=tracing.__file__)
    monkeypatch.setattr(tracing.scopes, "restored_caching_device", broken)
    text = _run(lambda x: x)
    assert "replicator/step/steps.py" in text and "KeyError: 'a fault'" in text
