# SPDX-License-Identifier: Apache-2.0
"""Python functions that a step calls neither write variables nor run steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests import helpers
from tests.variables.writes import FUNCTIONS

v1 = tf.compat.v1


def _python(function: Callable[[], Any], numpy: bool, stateful: bool = True) -> Any:
    """Returns what calls a Python function when it runs."""

    def call() -> Any:
        function()
        return np.float32(0.0)

    if numpy:
        result = tf.numpy_function(call, [], tf.float32, stateful=stateful)
    else:
        result = tf.py_function(call, [], tf.float32)
    return tf.ensure_shape(result, [])


def _in_a_branch(call: Callable[[], Any]) -> Any:
    return tf.cond(helpers.opaque(True), call, lambda: 0.0)


def _in_a_loop(call: Callable[[], Any]) -> Any:
    return tf.while_loop(lambda x: x < 1.0, lambda x: (x + call() + 1.0,), [0.0])


def _in_a_dataset(call: Callable[[], Any]) -> Any:
    dataset = tf.data.Dataset.range(1).map(lambda _: call())
    return helpers.untuned(dataset).reduce(0.0, lambda a, b: a + b)


PLACES: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "step": lambda call: call(),
    "cond": _in_a_branch,
    "while": _in_a_loop,
    "function": lambda call: tf.function(call)(),
    "dataset": _in_a_dataset,
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "assign": lambda v: v.assign([1.0, 2.0]),
    "assign_add": lambda v: v.assign_add([1.0, 1.0]),
    "scatter": lambda v: v.scatter_nd_add([[0]], [1.0]),
    "slice": lambda v: v[0].assign(3.0),
    "v1": lambda v: v1.scatter_add(v, [0], [1.0]),
    "keras": lambda v: keras.optimizers.SGD(1.0).apply([tf.ones([2])], [v]),
}
CASES = [
    *(("eager", "step", write) for write in WRITES),
    *(("eager", place, "assign_add") for place in PLACES if place != "step"),
    *((mode, "step", "assign_add") for mode in ("function", "session")),
]


@pytest.mark.battery(5)
@pytest.mark.parametrize("numpy", [False, True], ids=["py", "numpy"])
@pytest.mark.parametrize(("mode", "place", "write"), CASES)
def test_writes_are_refused(mode: str, place: str, write: str, numpy: bool) -> None:
    repl = helpers.make(2)
    with repl.context():  # eager, in each way of running
        variable = tf.Variable([5.0, 5.0], name="v")

    def step_fn() -> Any:
        return PLACES[place](
            lambda: _python(lambda: WRITES[write](variable) and None, numpy)
        )

    with pytest.raises(
        tf.errors.OpError,
        match=r"(?s)ContextError: a Python function that a step calls .* writes "
        r"variable v:0.*test_python_calls.py:\d+.*Fix: .*assign it in the step",
    ):
        helpers.run(mode, repl, lambda: step_fn)
    values = [list(x) for x in helpers.components(variable)]
    assert values == [[5.0, 5.0]] * 2


# Writes by a handle, which notify the variable afterwards or never.
BY_HANDLE: dict[str, Callable[[Any], Any]] = {
    **FUNCTIONS,
    "batch_scatter_update": lambda v: v1.batch_scatter_update(v, [0], [1.0]),
    "assign": lambda v: v1.assign(v, [1.0, 2.0]),
    "v1 optimizer": lambda v: v1.train.AdamOptimizer().apply_gradients(
        [(tf.ones([2]), v)]
    ),
    "legacy optimizer": lambda v: tf_keras.optimizers.legacy.SGD().apply_gradients(
        [(tf.ones([2]), v)]
    ),
    "raw op": lambda v: tf.raw_ops.AssignVariableOp(
        resource=v.handle, value=[1.0, 2.0]
    ),
}


@pytest.mark.battery(5)
@pytest.mark.parametrize("variables", ["mirrored", "sharded"])
@pytest.mark.parametrize("write", BY_HANDLE)
def test_writes_by_a_handle_are_refused_before_they_write(
    write: str, variables: str
) -> None:
    repl = helpers.make(2, variables=variables)
    with repl.context():
        variable = tf.Variable([5.0, 5.0], name="v")
    with pytest.raises(tf.errors.OpError, match=r"(?s)ContextError: .*v:0.*Fix: "):
        repl.run(lambda: _python(lambda: BY_HANDLE[write](variable) and None, False))
    values = [list(x) for x in helpers.components(variable)]
    assert values == [[5.0, 5.0]] * 2
    if write == "assign":
        BY_HANDLE[write](variable)  # outside of steps, all components
        assert [list(x) for x in helpers.components(variable)] == [[1.0, 2.0]] * 2


def test_reads_by_a_handle_are_accepted() -> None:
    repl, read = helpers.make(2, variables="sharded"), []
    with repl.context():
        variable = tf.Variable([5.0, 5.0])
        layer = keras.layers.Dense(1)
        layer.build([1, 2])

    def look() -> None:
        with tf.GradientTape() as tape:
            tape.watch(variable)
            y = (
                tf.reduce_sum(variable**2)
                + tf.gather(variable, 1)
                + layer(variable[None])
            )
        read.append(tf.convert_to_tensor(tape.gradient(y, variable)).numpy())
        assert variable.is_initialized() and variable.device

    repl.run(lambda: _python(look, False))
    assert len(read) == 2


def test_a_function_that_autograph_converts_is_found() -> None:
    """Its lines are those of a file that autograph writes."""
    repl = helpers.make(2)
    with repl.context():
        variable = tf.Variable(5.0, name="v")

    def step_fn() -> Any:
        def write() -> Any:
            return variable.assign_add(1.0)

        return tf.py_function(write, [], tf.float32)

    line = step_fn.__code__.co_firstlineno + 4
    message = (
        rf"(?s)writes variable v:0.*called by the step at \S+:{line} in step_fn.*Fix:"
    )
    with pytest.raises(tf.errors.OpError, match=message):
        repl.run(step_fn)
    assert helpers.components(variable) == [5.0, 5.0]


def test_of_variables_that_one_replica_owns_too() -> None:
    repl = helpers.make(2, variables="sharded")
    with repl.context():
        variable = tf.Variable([5.0])
    with pytest.raises(tf.errors.OpError, match="writes variable"):
        repl.run(lambda: _python(lambda: variable.assign_add([1.0]), True, False))
    assert list(variable.numpy()) == [5.0]


def test_what_is_right_is_accepted() -> None:
    repl, one = helpers.make(2), helpers.make(1)
    with repl.context():
        variable = tf.Variable(5.0)

    def read() -> None:
        assert variable.numpy() == 5.0

    repl.run(lambda: _python(read, False))
    one.run(lambda: _python(lambda: variable.assign_add(1.0), False))
    assert helpers.components(variable) == [6.0, 6.0]  # once, by one replica
    _python(lambda: variable.assign_add(1.0), False)
    tf.function(lambda: _python(lambda: variable.assign_add(1.0), True))()
    assert helpers.components(variable) == [8.0, 8.0]  # outside of steps


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_step_inside_a_step_is_refused(mode: str, num_replicas: int) -> None:
    """Two replicas would wait for threads that they occupy."""
    repl, other = helpers.make(num_replicas), helpers.make(2)

    def inner() -> tf.Tensor:
        return repl.all_reduce(tf.constant(1.0))

    def traced() -> tf.Tensor:
        return other.all_reduce(tf.constant(1.0))

    other.run(traced)
    for run in (
        lambda: repl.run(inner),
        lambda: other.run(lambda: tf.constant(1.0)),
        lambda: other.run(traced),
    ):
        with pytest.raises(
            tf.errors.OpError,
            match=r"(?s)ContextError: a step was run inside a step, by a Python "
            r"function.*test_python_calls.py:\d+.*Fix: run it outside",
        ):
            helpers.run(mode, repl, lambda run=run: lambda: _python(run, False))
    assert [float(total) for total in repl.run(inner)] == [num_replicas] * num_replicas
