# SPDX-License-Identifier: Apache-2.0
"""Runs a program with the library, and compares it with the simulator.

The text from `listing` is compiled and run as a step_fn; the functions that it calls
are here, in plain TensorFlow.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import linecache
import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests import helpers
from tests.spmd import listing, mismatches, simulator
from tests.spmd import program as p

_LIMIT = 120  # seconds, for a program that takes one on a bad day
FILE = "program.py"  # the file name of a program in messages
_TOLERANCE = {"int32": 0.0, "float32": 2e-5, "float64": 1e-12}
_MIXED = {**_TOLERANCE, "float64": 2e-5}  # where float32 values are absorbed


def run(program: p.Program) -> tuple[Any, Any]:
    """Runs a program on its replicas.

    Returns:
        The registers and the gradients: a PerReplica of arrays for each. MISSING stands
        for a replica's missing value.
    """
    repl = helpers.make(
        program.num_replicas, build="trace"
    )  # programs ask who they are
    with _ended_if_it_hangs():
        return helpers.run(program.mode, repl, lambda: step_of(program, repl))


@contextlib.contextmanager
def _ended_if_it_hangs() -> Iterator[None]:
    """Ends the process with the tracebacks of all threads if the block hangs."""
    faulthandler.dump_traceback_later(_LIMIT, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def check_refused(wrong: mismatches.Wrong) -> None:
    """Asserts that a program raises the expected error, and that it names the line."""
    with pytest.raises(wrong.error) as caught:
        run(wrong.program)
    message = str(caught.value)
    assert type(caught.value) is wrong.error, message
    assert re.search(wrong.says, message), message
    if issubclass(wrong.error, replicator.ReplicatorError):
        assert re.search(rf"replica \d.*{FILE}:\d+ in .*\nFix: ", message, re.S), (
            message
        )


def step_of(program: p.Program, repl: replicator.Replicator) -> Any:
    """Returns the step_fn of a program."""
    text = listing.source(program)
    linecache.cache[FILE] = (len(text), None, text.splitlines(True), FILE)
    names = {"repl": repl, "tf": tf, **HELPERS}
    names["agreed"] = functools.partial(_agreed, repl)
    names["loss_of"] = functools.partial(_loss_of, repl)
    names["linked"] = repl.linked
    names["data"] = functools.partial(_data, repl)
    names["times_own"] = _where_present(functools.partial(_times_own, repl))
    names["groups"] = repl.groups
    exec(compile(text, FILE, "exec"), names)
    return tf.autograph.experimental.do_not_convert(names["step_fn"])


def check(program: p.Program) -> None:
    """Asserts that a program computes the simulator's results."""
    world = simulator.World(program.num_replicas)
    want = simulator.observe(program, world)
    results, gradients = run(program)
    tolerances = _MIXED if program.differentiate else _TOLERANCE
    for name, got in zip(program.results, results, strict=True):
        for r in world.replica_ids:
            what = f"{name} on replica {r}"
            _assert_close(got[r], want[name][r], tolerances, world.peak, what)
    if program.differentiate:
        _check_gradients(program, gradients)


def _assert_close(
    got: Any, want: Any, tolerances: dict[str, float], peak: float, what: str
) -> None:
    if want is None:
        assert np.asarray(got).dtype == np.bool_, f"{what} is not there"
        return
    got = np.asarray(got)
    assert got.dtype == want.dtype, (what, got.dtype, want.dtype)
    tolerance = tolerances[str(want.dtype)]
    np.testing.assert_allclose(
        got, want, rtol=tolerance, atol=tolerance * peak, err_msg=what
    )


def _check_gradients(program: p.Program, gradients: Any) -> None:
    """Compares with the slopes of the loss in a random direction for each input."""
    inputs = {data.target: data for data in program.inputs}
    places, directions = [], []
    for name, gradient in zip(program.watched, gradients, strict=True):
        for r in range(program.num_replicas):
            random = np.random.RandomState(inputs[name].seed + r)
            shape = inputs[name].shapes[r]
            directions.append({(name, r): np.asarray(random.uniform(0.5, 1, shape))})
            places.append(
                (f"gradient of {name} on replica {r}", np.asarray(gradient[r]))
            )
    slopes = simulator.slopes(program, directions)
    for (what, gradient), direction, slope in zip(
        places, directions, slopes, strict=True
    ):
        if slope is None:
            continue  # a kink
        [along] = direction.values()
        got = float((gradient.astype(np.float64) * along).sum())
        error = 1e-3 if gradient.dtype == np.float32 else 1e-5
        bound = error * max(1.0, abs(slope), np.abs(gradient).max(initial=0.0))
        assert abs(got - slope) < bound, f"{what}: {got}, expected {slope}"


# --- Functions that a program's text calls -------------------------------------------


def _data(
    repl: replicator.Replicator,
    dtype: str,
    shape: tuple[int, ...],
    seed: int,
    known: bool = True,
) -> tf.Tensor:
    r = repl.replica_id
    data = p.Data("", dtype, (shape,) * (r + 1), seed)
    return helpers.opaque(data.value(r), shape if known else [None] * len(shape))


def _agreed(
    repl: replicator.Replicator, constant: int, *source: tf.Tensor, below: int
) -> tf.Tensor:
    """A number that is the same on all replicas."""
    total = helpers.opaque(constant)
    if source:
        total += repl.all_reduce(tf.reduce_sum(source[0]), "max")
    return tf.math.floormod(total, below)


def _loss_of(repl: replicator.Replicator, *values: tf.Tensor | None) -> tf.Tensor:
    total = tf.zeros([], tf.float64)
    for k, value in enumerate(values):
        if value is not None and value.dtype.is_floating:
            weight = (k + 1 + repl.replica_id) / 8
            total += weight * tf.reduce_sum(tf.cast(value, tf.float64))
    return repl.linked(total)


def _present(*values: tf.Tensor | None) -> tuple[tf.Tensor, ...]:
    """Makes results of all replicas alike: a bool stands for a missing value."""
    return tuple(tf.constant(False) if value is None else value for value in values)


def _where_present(function: Any) -> Any:
    """Makes a function of tensors return None where a tensor is missing."""

    def local(*values: tf.Tensor | None) -> tf.Tensor | None:
        return None if any(value is None for value in values) else function(*values)

    return local


def _mix(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    return (a + b) / 2 if a.dtype.is_floating else tf.math.floormod(a + b, 97)


def _multiply(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    return a * b if a.dtype.is_floating else tf.math.floormod(a * b, 97)


def _times_own(repl: replicator.Replicator, a: tf.Tensor) -> tf.Tensor:
    factor = repl.replica_id + 1
    return a * factor / 2 if a.dtype.is_floating else tf.math.floormod(a * factor, 97)


def _squash(a: tf.Tensor) -> tf.Tensor:
    return tf.tanh(a) if a.dtype.is_floating else tf.math.floormod(a, 5)


def _first(*given: tf.Tensor | None) -> tf.Tensor | None:
    return next((value for value in given if value is not None), None)


def _absorb(value: tf.Tensor, *others: tf.Tensor | None) -> tf.Tensor:
    for other in others:
        if other is not None:
            value += tf.cast(0.125 * tf.reduce_sum(other), value.dtype)
    return value


HELPERS = {
    "ZERO": {"unconnected_gradients": tf.UnconnectedGradients.ZERO},
    "present": _present,
    "like": lambda value, other: tf.ensure_shape(value, other.shape),
    "mix": _where_present(_mix),
    "multiply": _where_present(_multiply),
    "squash": _where_present(_squash),
    "twice": _where_present(lambda a: tf.concat([a, a], 0)),
    "total": _where_present(lambda a: tf.reduce_sum(a, 0)),
    "first": _first,
    "stopped": tf.stop_gradient,
    "absorb": _absorb,
}
