# SPDX-License-Identifier: Apache-2.0
"""Our messages name the user's lines, and users' exceptions pass unchanged."""

from __future__ import annotations

import ast
import contextlib
import linecache
import pathlib
import pickle
import re
from typing import Any

import pytest
import tensorflow as tf

import replicator
from replicator import errors
from tests import helpers, sampling

CLASSES = {
    "MismatchError": ValueError,
    "DeadlockError": ValueError,
    "ContextError": RuntimeError,
    "DeviceError": ValueError,
    "InputError": ValueError,
}


def _line(fragment: str) -> int:
    """Returns the number of the only line of this file that ends with a marker."""
    lines = linecache.getlines(__file__)
    (number,) = [
        n for n, line in enumerate(lines, 1) if line.rstrip().endswith(fragment)
    ]
    return number


# --- The classes ---------------------------------------------------------------------


@pytest.mark.parametrize(("name", "base"), CLASSES.items(), ids=CLASSES)
def test_every_error_is_a_replicator_error_and_a_builtin_one(name, base):
    error = getattr(replicator, name)
    assert issubclass(error, replicator.ReplicatorError)
    assert issubclass(error, base)
    assert error.__doc__


def test_every_error_is_a_public_name() -> None:
    actual = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.ReplicatorError)
    }
    assert len(actual) >= 12
    assert actual <= set(replicator.__all__)
    for name in actual:
        assert getattr(replicator, name) is getattr(errors, name)


@pytest.mark.parametrize("name", [*CLASSES, "ReplicatorError"])
def test_errors_stay_what_they_are_under_autograph(name):
    """AutoGraph recreates exceptions, or changes their class."""
    error = getattr(replicator, name)

    @tf.function
    def fail():
        raise error("as it was")

    with pytest.raises(error, match="as it was") as caught:
        fail()
    assert type(caught.value) is error


def test_a_message_is_a_problem_sites_and_a_fix():
    text = errors.compose("It is wrong.", ["here", "there"], "do this.")
    assert text == "It is wrong.\n  here\n  there\nFix: do this."
    assert errors.compose("It is wrong.", []) == "It is wrong."
    assert "test_errors.py:" in errors.compose("It is wrong.")  # the running line


@pytest.mark.parametrize("name", CLASSES)
def test_an_error_composes_its_message(name: str) -> None:
    error = getattr(errors, name)
    expected = errors.compose("It is wrong.", ["here"], "do this.")
    made = error("It is wrong.", ["here"], "do this.")
    assert str(made) == str(pickle.loads(pickle.dumps(made))) == expected
    here = str(error("It is wrong.", fix="do this."))
    assert re.fullmatch(
        r"It is wrong\.\n  at .*test_errors.py:.*\nFix: do this\.", here
    )
    assert str(error(expected)) == expected


def test_lines_outside_of_the_working_directory_are_absolute(monkeypatch):
    frames = [("/elsewhere/train.py", 3, "main"), ("/elsewhere/model.py", 7, "call")]
    monkeypatch.setattr(errors.tf_frames, "user_frames", lambda op=None: frames)
    assert errors.user_line() == "/elsewhere/model.py:7 in call"
    monkeypatch.setattr(errors.tf_frames, "user_frames", lambda op=None: [])
    assert errors.line_of(tf.constant(1)) == "an unknown line"


# --- The user's line -----------------------------------------------------------------


def _helper(repl: replicator.Replicator, x: tf.Tensor) -> tf.Tensor:
    if repl.replica_id == 0:
        return repl.all_reduce(x, "sum")  # MARK helper 0
    return repl.all_reduce(x, "max")  # MARK helper 1


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("through", ["step", "helper", "lambda"])
def test_messages_name_the_users_line(mode, through):
    """In eager and function modes AutoGraph generates the code that runs."""
    repl = helpers.make(2)

    def step_fn():
        x = tf.constant(1.0)
        if tf.executing_eagerly():  # something for autograph to convert
            x = x + 1
        if through == "helper":
            return _helper(repl, x)
        if through == "lambda":
            one = lambda y: repl.all_reduce(y, "sum")  # noqa: E731  MARK lambda 0
            two = lambda y: repl.all_reduce(y, "max")  # noqa: E731  MARK lambda 1
            return (two if repl.replica_id else one)(x)
        if repl.replica_id == 0:
            return repl.all_reduce(x, "sum")  # MARK step 0
        return repl.all_reduce(x, "max")  # MARK step 1

    with pytest.raises(replicator.MismatchError) as caught:
        helpers.run(mode, repl, lambda: step_fn)
    for r in range(2):
        number = _line(f"MARK {through} {r}")
        assert f"tests/test_errors.py:{number} in " in str(caught.value)
    if through == "helper":
        assert "in _helper" in str(caught.value)


@pytest.mark.parametrize("mode", helpers.MODES)
def test_the_line_of_a_gradient_is_that_of_the_call(mode):
    """The error names the line whose gradient is the unmatched communication."""
    repl = helpers.make(2)

    def step_fn():
        x = tf.constant(1.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = repl.all_reduce(x, "sum")
        return tape.gradient(y, x) if repl.replica_id == 0 else y  # MARK gradient

    with pytest.raises(replicator.MismatchError, match="in the gradient, at") as caught:
        helpers.run(mode, repl, lambda: step_fn)
    number = _line("# MARK gradient")
    assert f"tests/test_errors.py:{number} in step_fn" in str(caught.value)


# --- Errors under AutoGraph ----------------------------------------------------------


def _traced(kind: str, repl: replicator.Replicator) -> Any:
    """Calls a primitive with a bad argument, in code that AutoGraph converts."""
    x = tf.constant(1.0)
    if kind == "function":
        return tf.function(lambda y: repl.all_reduce(y, "bad"))(x)
    if kind == "functions":
        inner = tf.function(lambda y: repl.all_reduce(y, "bad"))
        return tf.function(lambda y: inner(y) + 1.0)(x)
    if kind == "method":
        return _Layer(repl)(x)
    if kind == "branch":
        if x > 0:
            x = repl.all_reduce(x, "bad")
        return x
    if kind == "loop":
        for _ in tf.range(3):
            x += repl.all_reduce(x, "bad")
        return x
    if kind == "mapped":
        return tf.map_fn(lambda y: repl.all_reduce(y, "bad"), tf.ones([2]))
    return tf.custom_gradient(
        lambda y: (repl.all_reduce(y, "bad"), lambda d: d),
    )(x)


class _Layer(tf.Module):
    def __init__(self, repl: replicator.Replicator) -> None:
        self._repl = repl

    @tf.function
    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        return self._repl.all_reduce(x, "bad")


@pytest.mark.parametrize("around", ["nothing", "a function", "two functions"])
@pytest.mark.parametrize(
    "kind", ["function", "functions", "method", "branch", "loop", "mapped", "gradient"]
)
def test_our_messages_pass_converted_code_as_they_are(kind: str, around: str) -> None:
    repl = helpers.make(2)

    def step_fn() -> Any:
        return _traced(kind, repl)

    def run() -> Any:
        return repl.run(step_fn)

    call = run if around == "nothing" else tf.function(run)
    if around == "two functions":
        call = tf.function(lambda: tf.function(run)())
    with pytest.raises(replicator.ArgumentError) as caught:
        call()
    text = str(caught.value)
    assert text.startswith("all_reduce on replica 0 was given op='bad'.\n  at ")
    assert "in user code" not in text and "/replicator/" not in text
    assert "tests/test_errors.py:" in text and "\nFix: " in text


@pytest.mark.parametrize("where", ["step_fn", "function", "input_fn", "map_reduce"])
def test_none_of_our_lines_are_in_the_text_of_others_errors(where: str) -> None:
    """An error of TensorFlow or the user in a step that a tf.function builds."""
    repl = helpers.make(2)

    def fail(x: Any = 1.0) -> Any:
        return tf.matmul(tf.constant(1.0), x)  # of no matrices

    def step_fn(x: Any = None) -> Any:
        if where == "map_reduce":
            return repl.map_reduce(fail, [1.0, 2.0])
        return tf.function(fail)() if where == "function" else fail()

    @tf.function
    def train() -> Any:
        input_fn = (lambda: fail()) if where == "input_fn" else None
        return repl.run(step_fn, input_fn)

    @tf.function
    def twice() -> Any:
        return train(), train()

    for call in (train, twice):
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError)) as caught:
            call()
        text = str(caught.value)
        assert "MatMul" in text or "rank 2" in text
        assert "/replicator/" not in text


# --- The user's own exceptions -------------------------------------------------------


class OddError(Exception):
    """An exception that cannot be recreated from its message."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(code, where)
        self.code = code


class Interrupt(BaseException):
    """Not even an Exception."""


def _raised() -> dict[str, BaseException]:
    return {
        "odd": OddError(3, where="here"),
        "value": ValueError("one", 2),
        "key": KeyError("name"),
        "stop": StopIteration(4),
        "base": Interrupt("now"),
        "keyboard": KeyboardInterrupt(),
        "assertion": AssertionError(),
        "tensorflow": tf.errors.InvalidArgumentError(None, None, "bad"),
        "unicode": UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad byte"),
        "group": ExceptionGroup("several", [ValueError(1), KeyError(2)]),
    }


@pytest.mark.battery(5)
@pytest.mark.parametrize(
    ("kind", "mode", "failing_replica"),
    sampling.in_turn(list(_raised()), ["eager", "session"], [0, 1]),
)
def test_exceptions_of_step_fn_pass_unchanged(mode, failing_replica, kind):
    repl = helpers.make(2)
    error, cause = _raised()[kind], LookupError("the cause")
    args, before = error.args, dict(vars(error))
    with repl.context():
        count = tf.Variable(0.0) if mode == "eager" else None
    broken = [True]

    def step_fn():
        if count is not None:
            count.assign_add(repl.all_reduce(1.0, "mean"))
        total = repl.all_reduce(1.0, "sum")
        if broken[0] and repl.replica_id == failing_replica:
            raise error from cause
        return total

    graph = tf.Graph().as_default() if mode == "session" else contextlib.nullcontext()
    with graph:
        for _ in range(2):
            with pytest.raises(type(error)) as caught:
                repl.run(step_fn)
            assert caught.value is error
            assert caught.value.args == args
            assert caught.value.__cause__ is cause
            facts = dict(vars(error))
            notes = facts.pop("__notes__", [])  # the user's lines, once
            assert facts == before and len(notes) <= 1
        with pytest.raises(replicator.ContextError):
            _ = repl.replica_id  # no replica is left behind
        broken[0] = False
        values: Any = repl.run(step_fn)
        if mode == "session":
            with tf.compat.v1.Session() as session:
                values = session.run(values)
    assert [float(v) for v in values] == [2.0, 2.0]
    if count is not None:
        assert count.numpy() == 1.0


@pytest.mark.parametrize("failing_replica", [0, 1])
def test_a_function_that_catches_runs_nothing_of_the_broken_step(failing_replica):
    repl = helpers.make(2)
    with repl.context():
        count = tf.Variable(0)
    calls: list[int] = []
    error = OddError(1, where="step")

    def input_fn():
        return tf.data.Dataset.range(100)

    def broken(x):
        count.assign_add(1)
        tf.py_function(lambda: calls.append(1), [], [])
        repl.all_reduce(x, "sum")
        tf.debugging.Assert(x < 0, ["must not run"])
        if repl.replica_id == failing_replica:
            raise error

    def whole(x):
        count.assign_add(10)
        tf.py_function(lambda: calls.append(10), [], [])
        return repl.all_reduce(x, "sum")

    @tf.function(autograph=False)
    def both():
        with pytest.raises(OddError) as caught:
            repl.run(broken, input_fn)
        assert caught.value is error
        return repl.run(whole, input_fn)

    assert [int(v) for v in both()] == [1, 1]
    assert count.numpy() == 10
    assert calls == [10, 10]
    assert [int(v) for v in repl.run(whole, input_fn)] == [5, 5]


@pytest.mark.parametrize("replicas", [1, 2])
def test_nothing_runs_of_a_broken_step_in_a_function_that_returns_nothing(replicas):
    """The function returns nothing that TensorFlow could prune against."""
    repl = helpers.make(replicas)
    with repl.context():
        count = tf.Variable(0.0)

    def broken():
        count.assign_add(1.0)
        raise KeyError

    @tf.function(autograph=False)
    def function():
        with contextlib.suppress(KeyError):
            repl.run(broken)

    function()
    assert helpers.components(count) == [0.0] * replicas


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
def test_a_build_that_we_refuse_leaves_nothing_behind(mode):
    repl = helpers.make(2)

    def step_fn():
        repl.all_reduce(1.0, "sum")
        return (tf.constant(1),) * (repl.replica_id + 1)

    def whole():
        return repl.all_reduce(2.0, "sum")

    def run():
        with pytest.raises(replicator.MismatchError):
            repl.run(step_fn)
        return repl.run(whole)

    if mode == "session":
        with tf.Graph().as_default():
            values = run()
            with tf.compat.v1.Session() as session:
                values = session.run(values)
    else:
        values = (tf.function(run, autograph=False) if mode == "function" else run)()
    assert [float(v) for v in values] == [4.0, 4.0]


def test_variables_that_a_broken_step_made_are_its_own_in_the_next_try():
    repl = helpers.make(2)
    broken = [True]

    def step_fn():
        state = tf.Variable(1.0)
        if broken[0] and repl.replica_id == 1:
            raise KeyError
        return state.assign_add(repl.all_reduce(1.0, "mean"))

    with pytest.raises(KeyError):
        repl.run(step_fn)
    broken[0] = False
    assert [float(v) for v in repl.run(step_fn)] == [2.0, 2.0]
    assert [float(v) for v in repl.run(step_fn)] == [3.0, 3.0]


def test_every_message_is_composed() -> None:
    """An error of a problem and a fix, or of what `compose` returns."""
    raised = [
        (path.name, node)
        for path in pathlib.Path(errors.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and _is_error(node.func)
    ]
    bare = [(name, ast.unparse(node)) for name, node in raised if not _says_more(node)]
    assert len(raised) > 60
    assert not bare


def _says_more(node: ast.Call) -> bool:
    (text, *others) = node.args
    is_composed = isinstance(text, ast.Call) and "compose" in ast.unparse(text.func)
    return is_composed or len(others) == 2 or "fix" in {k.arg for k in node.keywords}


def _is_error(function: ast.expr) -> bool:
    name = ast.unparse(function)
    return name.startswith("errors.") and name.endswith("Error")
