# SPDX-License-Identifier: Apache-2.0
"""Runs a program in one of its ways, and checks the laws.

The first line of a failure names the law, the program and the way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests import helpers
from tests.programs import program as p
from tests.programs import ways

PLAIN = "replicas compute what plain TensorFlow does"
ALIKE = "all ways compute the same"
EQUAL = "a variable's components are equal after a step"
REFUSED = "what a way refuses is refused by its error"


def check(program: p.Program, way: ways.Way) -> None:
    """Asserts the laws of a program in a way."""
    if refusal := way.refuses(program):
        check_refused(program, way, *refusal)
        return
    results, components = outcome(program, way.mode, way.replicator(), way.together)
    compare(program, results, way.replicas, str(way))
    check_equal(program, str(way), components)


def check_equal(
    program: p.Program, way: str, components: dict[str, list[np.ndarray]]
) -> None:
    """Asserts that the components of each variable hold the same bits."""
    for name, values in components.items():
        if any(value.tobytes() != values[0].tobytes() for value in values):
            fail(EQUAL, program, way, f"{name}: {values}")


def check_refused(program: p.Program, way: Any, error: Any, message: str) -> None:
    """Asserts that a program ends in an error."""
    try:
        outcome(program, way.mode, way.replicator(), way.together)
    except error as caught:
        if message in str(caught):
            return
        fail(REFUSED, program, way, str(caught))
    fail(REFUSED, program, way, "it was not")


def compare(program: p.Program, results: Any, replicas: int, way: str) -> None:
    """Asserts that a program's results are the expected ones.

    Args:
        program: The program.
        results: The results, a nest of all replicas' values.
        replicas: The number of replicas.
        way: What to call the way that they come from.
    """
    law, want = ALIKE, None
    if program.expected is None:
        want = _reference(program, replicas)
    else:
        law, want = PLAIN, program.expected(replicas)
    for where, got, expected in _pairs(results, want, "the result"):
        problem = _difference(got, expected, program.close)
        if problem:
            fail(law, program, way, f"{where}: {problem}")


def fail(law: str, program: p.Program, way: Any, problem: str) -> None:
    """Fails with all that a reader needs in the first line."""
    pytest.fail(f"{law}: {program.name}, {way}: {problem}")


@functools.cache
def _reference(program: p.Program, replicas: int) -> Any:
    way = ways.reference(replicas)
    return outcome(program, way.mode, way.replicator())[0]


def _pairs(got: Any, want: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """Yields all values with the expected ones, and where they are."""
    if isinstance(got, replicator.PerReplica):
        for r, (one, two) in enumerate(zip(got, want, strict=True)):
            yield f"{where} of replica {r}", one, two
    elif isinstance(got, dict):
        for name in {**got, **want}:
            yield from _pairs(got[name], want[name], f"{where}[{name!r}]")
    elif isinstance(got, list | tuple):
        for n, (one, two) in enumerate(zip(got, want, strict=True)):
            yield from _pairs(one, two, f"{where}[{n}]")
    else:
        yield where, got, want


def _difference(got: Any, want: Any, close: float) -> str:
    """Returns what differs, or ""."""
    if got is None or want is None:
        return "" if got is want else f"{got}, expected {want}"
    one, two = np.asarray(got), np.asarray(want)
    if one.shape != two.shape:
        return f"shape {one.shape}, expected {two.shape}"
    if one.dtype.kind not in "fcV":
        return "" if (one == two).all() else f"{one}, expected {two}"
    if one.dtype.kind == "V":  # bfloat16
        one, two = one.astype(np.float32), two.astype(np.float32)
    close = close * 1e-4 if one.dtype in (np.float64, np.complex128) else close
    try:
        np.testing.assert_allclose(one, two, rtol=close, atol=close)
    except AssertionError as error:
        return str(error)
    return ""


def outcome(
    program: p.Program,
    mode: str,
    repl: replicator.Replicator,
    together: bool = False,
) -> tuple[Any, dict[str, list[np.ndarray]]]:
    """Runs a program's steps.

    Args:
        program: The program.
        mode: One of helpers.MODES.
        repl: The Replicator.
        together: Whether all steps are made in one call.

    Returns:
        The last step's results, and the components of variables that the program made
        before it, which must be equal.
    """
    made: list[Any] = []

    def note(create: Callable[..., Any], **arguments: Any) -> Any:
        made.append(create(**arguments))
        return made[-1]

    def make_step() -> p.Step:
        with tf.variable_creator_scope(note):
            return program.make(repl)

    run = _in_session if mode == "session" else _in_python
    results, held = run(program, mode, repl, make_step, made, together)
    return results, {} if p.OWN_STATE in program.tags else held


def _inputs(program: p.Program, step_fn: p.Step) -> Any:
    """Returns the inputs, for a step with a parameter."""
    code = getattr(step_fn, "__code__", None)
    return program.inputs if code is None or code.co_argcount else None


def _mirrored(made: list[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yields the components of the variables whose components are equal."""
    for n, variable in enumerate(made):
        own = variable.synchronization == tf.VariableSynchronization.ON_READ
        own |= "seed_generator" in variable.name  # of a layer of Keras
        if isinstance(variable, replicator.ReplicatedVariable) and not own:
            yield f"{variable.name} ({n})", list(variable.components)


def _in_session(
    program: p.Program, mode: str, repl: Any, make_step: Any, made: Any, together: bool
) -> Any:
    with tf.Graph().as_default():
        with repl.context():
            step_fn = make_step()
        fetches = repl.run(step_fn, _inputs(program, step_fn))
        held = {
            name: [tf.identity(value) for value in values]
            for name, values in _mirrored(made)
        }
        with helpers.monitored_session() as session:
            for _ in range(program.steps):
                results = session.run(fetches)
            return results, session.run(held)


def _in_python(
    program: p.Program, mode: str, repl: Any, make_step: Any, made: Any, together: bool
) -> Any:
    with repl.context():
        step_fn = make_step()
    inputs = _inputs(program, step_fn)
    count = program.steps if together else 1
    if mode == "function":
        call = tf.function(lambda: repl.run(step_fn, inputs, steps_per_call=count))
    else:
        call = repl.build(step_fn, inputs, steps_per_call=count)
    for _ in range(program.steps // count):
        results = call()
    if count > 1:
        results = tf.nest.map_structure(lambda t: t if t is None else t[-1], results)
    results = tf.nest.map_structure(
        lambda t: t.numpy() if hasattr(t, "numpy") else t, results
    )
    held = {name: [value.numpy() for value in own] for name, own in _mirrored(made)}
    return results, held
