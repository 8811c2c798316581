# SPDX-License-Identifier: Apache-2.0
"""The Python stack: each private name is called."""

from __future__ import annotations

import inspect
import linecache
import os
import pathlib
import subprocess
import sys
import threading
from typing import Any
from unittest import mock

import pytest
import sonnet as snt
import tensorflow as tf

from replicator import errors
from replicator._tf import autograph
from replicator._tf import frames as tf_frames


def test_written_by_library_is_true_of_what_layers_of_libraries_assign():
    seen = []
    # Like a method of a variable, it has no line of the user's.
    names = {"told": tf_frames.written_by_library, "seen": seen}
    note = eval("lambda *args: seen.append(told()) or args[0]", names)
    average = mock.MagicMock()
    average._counter.assign_add = note
    snt.ExponentialMovingAverage.update(average, 1.0)
    note(1)
    tf.keras.layers.Lambda(lambda x: note(x))(tf.ones([1]))
    tf.nest.map_structure(note, [1])
    assert seen == [True, False, False, False]


def test_user_frames_are_of_the_user():
    def inner():
        return tf_frames.user_frames()  # the innermost line

    frames = inner()
    assert frames == [f for f in frames if "site-packages/tensorflow" not in f[0]]
    filename, line, name = frames[-1]
    assert filename == __file__
    assert name == "inner"
    assert linecache.getline(filename, line).strip().endswith("# the innermost line")


def test_user_frames_of_or_on_behalf_of_an_op_are_those_that_made_it():
    def make():
        return tf.reduce_mean([1.0, 2.0])  # the op is made here

    with tf.Graph().as_default():
        op = make().op
        other = tf.constant(1.0).op
    filename, line, name = tf_frames.user_frames(op)[-1]
    assert (filename, name) == (__file__, "make")
    assert linecache.getline(filename, line).strip().endswith("# the op is made here")
    elsewhere: list[Any] = []
    with tf_frames.on_behalf_of(op):
        assert tf_frames.user_frames() == tf_frames.user_frames(op)
        assert errors.user_line().endswith("in make")
        assert tf_frames.user_frames(other)[-1][2] != "make"
        thread = threading.Thread(
            target=lambda: elsewhere.extend(tf_frames.user_frames())
        )
        thread.start()
        thread.join(30)
        with pytest.raises(KeyError), tf_frames.on_behalf_of(other):
            raise KeyError
        assert tf_frames.user_frames() == tf_frames.user_frames(op)
    assert "make" not in [name for _, _, name in [*elsewhere, *tf_frames.user_frames()]]


def test_user_frames_of_an_exception_are_those_that_it_left():
    @tf.autograph.experimental.do_not_convert
    def plain():
        raise KeyError("here")  # raised here

    def converted():
        if tf.constant(1) > 0:  # in a generated file
            plain()

    with pytest.raises(KeyError) as caught:
        autograph.call_converted(converted, [])
    frames = tf_frames.user_frames(caught.value)
    assert {filename for filename, _, _ in frames} == {__file__}
    assert linecache.getline(__file__, frames[-1][1]).strip().endswith("# raised here")


def test_user_frames_of_an_exception_of_converted_code_are_as_written():
    def converted():
        if tf.constant(1) > 0:  # the outer line
            for _ in range(2):
                raise KeyError("here")  # raised here

    with pytest.raises(KeyError) as caught:
        autograph.call_converted(converted, [])
    frames = [f for f in tf_frames.user_frames(caught.value) if f[2] == "converted"]
    lines = [linecache.getline(file, line).strip() for file, line, _ in frames]
    assert lines[0].endswith("# the outer line")
    assert lines[-1].endswith("# raised here")


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_packages_are_installed_in_folders_of_two_names(folder: str) -> None:
    keras, own = (f"/usr/lib/{folder}/{name}/a.py" for name in ("keras", "mine"))
    others = [(tf.__file__, 1, "f"), (tf_frames.__file__, 2, "g"), ("<string>", 1, "h")]
    frames = [(keras, 1, "f"), (own, 2, "step"), *others]
    assert tf_frames.users_of(frames) == [(own, 2, "step")]
    assert tf_frames.is_installed(keras) and tf_frames.is_installed(own)
    assert not tf_frames.is_installed("/home/me/train.py")
    assert tf_frames.is_users("/home/me/train.py") and tf_frames.is_users(
        "<ipython-input-1>"
    )
    libraries = (keras, own, tf_frames.__file__, "<frozen runpy>", linecache.__file__)
    assert not any(map(tf_frames.is_users, libraries))


@pytest.mark.slow
def test_tensorflow_may_be_beside_the_users_program(tmp_path: pathlib.Path) -> None:
    """As after pip install --target: its lines are not the user's."""
    packages = pathlib.Path(tf.__file__).parents[1]
    (tmp_path / "tensorflow").symlink_to(packages / "tensorflow")
    program = tmp_path / "train.py"
    program.write_text(
        "import tensorflow as tf\n"
        "from replicator._tf import frames\n"
        "@tf.function\n"
        "def step():\n"
        f"    assert tf.__file__.startswith({str(tmp_path)!r}), tf.__file__\n"
        "    print([(f, line) for f, line, _ in frames.user_frames()])\n"
        "step()\n"
    )
    root = pathlib.Path(tf_frames.__file__).parents[2]
    path = os.pathsep.join([str(tmp_path), str(root), str(packages)])
    printed = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed.strip() == str([(str(program), 7), (str(program), 6)])


def test_user_frames_see_through_autograph():
    seen = []

    @tf.autograph.experimental.do_not_convert
    def note():
        seen.append(tf_frames.user_frames()[-2:])

    @tf.function
    def function(x):
        if x > 0:  # converted, so that this line is in a generated file
            note()
        return x

    function(tf.constant(1))
    assert all(frame[0] == __file__ for frame in seen[0])


def test_stack_since_shows_what_is_deeper():
    depth = tf_frames.stack_depth()

    def call(function):
        return function()

    def one():
        return tf_frames.stack_since(depth)

    def two():
        return tf_frames.stack_since(depth)

    first = call(one)
    lines = [inspect.getsourcelines(function)[1] + 1 for function in (call, one)]
    assert first == tuple((__file__, line) for line in lines)
    assert first == call(one)  # however often, and from wherever above `depth`
    assert first != call(two)


@pytest.mark.parametrize(
    ("how", "converted"),
    [("file", False), ("file", True), ("text", False), ("library", False)],
)
def test_errors_that_passed_user_code_are_known(how: str, converted: bool) -> None:
    def one() -> Any:
        return 1 + "a"  # type: ignore[operator]

    names: dict[str, Any] = {}
    exec("def two():\n    return 1 + 'a'\n", names)  # as in a notebook
    library = tf.keras.layers.Dense(3)
    called = {"file": one, "text": names["two"], "library": library}[how]
    caught = None
    try:
        autograph.call_converted(called, []) if converted else called()
    except TypeError as error:
        caught = error
    assert caught is not None
    caught.__traceback__ = caught.__traceback__.tb_next  # without this test's own line
    assert tf_frames.passed_user_code(caught) is (how != "library")


def test_copy_line_gives_an_op_the_frames_of_another():
    def original() -> tf.Operation:
        return tf.no_op()

    with tf.Graph().as_default():
        one, copy, again = original(), tf.no_op(), tf.no_op()
    tf_frames.copy_line(one, copy)
    tf_frames.copy_line(copy, again)
    assert tf_frames.user_frames(again) == tf_frames.user_frames(copy)
    assert tf_frames.user_frames(copy) == tf_frames.user_frames(one)
    assert tf_frames.user_frames(copy)[-1][2] == "original"
    assert [tf_frames.copied_from(op) for op in (again, copy, one)] == [copy, one, one]
