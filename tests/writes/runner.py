# SPDX-License-Identifier: Apache-2.0
"""Runs a program with the library, and checks the law.

A step is refused, with the user's line, or leaves all components of each mirrored
variable bitwise equal; right programs are not refused, and wrong ones are.
"""

from __future__ import annotations

import collections
import linecache
import re
from typing import Any

import keras
import numpy as np
import sonnet as snt
import tensorflow as tf

import replicator
from tests import helpers
from tests.writes import optimizers
from tests.writes import program as p

STEPS = 3
FILE = "program.py"  # the file name of a program in messages
Held = dict[str, list[np.ndarray]]  # by variable: the value of each component


def check(program: p.Program, outcomes: collections.Counter[str] | None = None) -> None:
    """Asserts that a program has its expected outcome, or leaves components equal.

    Args:
        program: The program.
        outcomes: Counts how many are "refused" and "accepted".
    """
    held, error = run(program)
    if error is not None:
        _check_message(error)
    assert error is None or program.verdict != p.RIGHT, f"refused: {error}"
    assert error is not None or program.verdict != p.WRONG, "not refused"
    for variable in program.variables:
        if not variable.on_read:
            first, *others = held[variable.name]
            for other in others:
                assert first.tobytes() == other.tobytes(), (variable, first, other)
    if error is None:
        _check_values(program, held)
    if outcomes is not None:
        outcomes["accepted" if error is None else "refused"] += 1


def _check_message(error: Exception) -> None:
    """Asserts that an error is one of ours, and names a line of the program."""
    message = str(error)
    if not isinstance(error, replicator.ReplicatorError):
        assert isinstance(error, tf.errors.OpError), repr(error)
        assert re.search("ContextError|replicas (dis)?a", message), message
    assert re.search(rf"{FILE}:\d+|writes/optimizers.py:\d+", message), message


def _check_values(program: p.Program, held: Held) -> None:
    """Compares with NumPy's values, as far as they are known."""
    for name, want in program.simulate(STEPS).items():
        if want is not None:
            for r, (got, own) in enumerate(zip(held[name], want, strict=True)):
                np.testing.assert_allclose(
                    got, own, rtol=1e-4, atol=1e-4, err_msg=f"{name} on replica {r}"
                )


def run(program: p.Program) -> tuple[Held, Exception | None]:
    """Runs the steps of a program; returns the components' values, and the error."""
    repl = helpers.make(program.num_replicas, **dict(program.options))
    make_step = _compiled(program, repl)

    def input_fn(context: Any) -> tf.data.Dataset:
        values = program.inputs(context.replica_id, STEPS)
        return helpers.untuned(tf.data.Dataset.from_tensor_slices(values).repeat())

    if program.mode == "session":
        return _run_in_session(repl, make_step, input_fn)
    with repl.context():
        step_fn, variables = make_step()
    error = None
    try:
        if program.mode == "eager":
            step = repl.build(step_fn, input_fn)
        else:
            step = tf.function(lambda: repl.run(step_fn, input_fn))
        for _ in range(STEPS):
            step()
    except (replicator.ReplicatorError, tf.errors.OpError) as raised:
        error = raised
    return {
        _name(v): [x.numpy() for x in _components(v, repl)] for v in variables
    }, error


def _run_in_session(
    repl: replicator.Replicator, make_step: Any, input_fn: Any
) -> tuple[Held, Exception | None]:
    with tf.Graph().as_default():
        with repl.context():
            step_fn, variables = make_step()
        error: Exception | None = None
        fetches: Any = tf.no_op()
        try:
            fetches = repl.run(step_fn, input_fn)
        except replicator.ReplicatorError as raised:
            error = raised
        reads = {
            _name(v): [x.read_value() for x in _components(v, repl)] for v in variables
        }
        with tf.compat.v1.train.MonitoredSession() as session:
            try:
                for _ in range(STEPS):
                    session.run(fetches)
            except tf.errors.OpError as raised:
                error = raised
            return session.run(reads), error


def _name(variable: Any) -> str:
    return str(variable.name).partition(":")[0]


def _components(variable: Any, repl: replicator.Replicator) -> list[Any]:
    """Returns a component per replica; of a sharded variable, the only one."""
    components = list(variable.components)
    return components * (repl.num_replicas // len(components))


def _compiled(program: p.Program, repl: replicator.Replicator) -> Any:
    """Returns the function of a program's text."""
    text = program.text
    linecache.cache[FILE] = (len(text), None, text.splitlines(True), FILE)
    names = {
        "repl": repl,
        "tf": tf,
        "v1": tf.compat.v1,
        "keras": keras,
        "snt": snt,
        "np": np,
        "opaque": helpers.opaque,
        "optimizers": optimizers,
        "python": _python,
    }
    exec(compile(text, FILE, "exec"), names)
    return tf.autograph.experimental.do_not_convert(names["make_step"])


def _python(function: Any, dtype: tf.DType) -> tf.Tensor:
    """Returns the result of a Python function without arguments."""
    return tf.ensure_shape(tf.py_function(function, [], dtype), [p.SIZE])
