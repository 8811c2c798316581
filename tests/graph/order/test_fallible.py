# SPDX-License-Identifier: Apache-2.0
"""The ops that can fail, and those that write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from replicator.graph.order import fallible

KNOWN, UNKNOWN = tf.TensorSpec([2, 2]), tf.TensorSpec([None, 2])
INTEGERS = tf.TensorSpec([2], tf.int32)


def _op(build: Callable[..., Any], *specs: tf.TensorSpec) -> tf.Operation:
    """Returns the op of a function's result, in a graph."""
    ops: list[tf.Operation] = []

    @tf.function(autograph=False)
    def function(*args: tf.Tensor) -> None:
        result = build(*args)
        ops.append(result if isinstance(result, tf.Operation) else result.op)

    function.get_concrete_function(*specs)
    return ops[0]


SAFE: dict[str, tuple[Callable[..., Any], tuple[tf.TensorSpec, ...]]] = {
    "elementwise": (lambda x: tf.raw_ops.Sin(x=x), (UNKNOWN,)),
    "of known shapes": (lambda x, y: tf.raw_ops.AddV2(x=x, y=y), (KNOWN, KNOWN)),
    "a product": (lambda x, y: tf.raw_ops.MatMul(a=x, b=y), (KNOWN, KNOWN)),
    "to a constant shape": (
        lambda x: tf.raw_ops.Reshape(tensor=x, shape=[4]),
        (KNOWN,),
    ),
    "floats divided": (lambda x, y: tf.raw_ops.FloorDiv(x=x, y=y), (KNOWN, KNOWN)),
    "bits of a known shape": (lambda x: tf.bitcast(x, tf.int32), (KNOWN,)),
    "a band": (lambda x: tf.linalg.band_part(x, 0, -1), (KNOWN,)),
    "a row at a constant place": (lambda x: x[0], (KNOWN,)),
    "a row of integers": (lambda x: x[0], (INTEGERS,)),
    "integers joined": (lambda x, y: tf.concat([x, y], 0), (INTEGERS, INTEGERS)),
    "integers added up": (lambda x: tf.reduce_sum(x), (INTEGERS,)),
    "a safe function": (lambda x: tf.function(tf.sin)(x), (UNKNOWN,)),
}
FAILING: dict[str, tuple[Callable[..., Any], tuple[tf.TensorSpec, ...]]] = {
    "of unknown shapes": (lambda x, y: tf.raw_ops.AddV2(x=x, y=y), (UNKNOWN, KNOWN)),
    "to a computed shape": (
        lambda x, s: tf.ensure_shape(tf.raw_ops.Reshape(tensor=x, shape=s), [2, 2]),
        (KNOWN, INTEGERS),
    ),
    "along a computed axis": (
        lambda x, k: tf.raw_ops.Sum(input=x, axis=k, keep_dims=True),
        (KNOWN, INTEGERS),
    ),
    "integers divided": (
        lambda x, y: tf.raw_ops.FloorDiv(x=x, y=y),
        (INTEGERS, INTEGERS),
    ),
    "rows looked up": (lambda x, k: tf.gather(x, k), (KNOWN, INTEGERS)),
    "a row at a computed place": (lambda x, k: x[k[0]], (KNOWN, INTEGERS)),
    "Python": (lambda x: tf.numpy_function(lambda x: x, [x], tf.float32), (KNOWN,)),
    "an assertion": (
        lambda x: tf.raw_ops.Assert(condition=x[0, 0] > 0, data=[x]),
        (KNOWN,),
    ),
    "numbers checked": (lambda x: tf.debugging.check_numerics(x, "bad"), (KNOWN,)),
    "a function that can": (
        lambda x, k: tf.function(lambda x, k: tf.gather(x, k))(x, k),
        (KNOWN, INTEGERS),
    ),
    "bits of unknown shape": (lambda x: tf.bitcast(x, tf.int32), (UNKNOWN,)),
    "a band with a computed bound": (
        lambda x, k: tf.raw_ops.MatrixBandPart(input=x, num_lower=k[0], num_upper=0),
        (KNOWN, INTEGERS),
    ),
    "a pool of a computed size": (
        lambda x, k: tf.raw_ops.MaxPoolGradV2(
            orig_input=x, orig_output=x, grad=x, ksize=k, strides=k, padding="SAME"
        ),
        (tf.TensorSpec([1, 2, 2, 1]), tf.TensorSpec([4], tf.int32)),
    ),
    "a seed of unknown shape": (
        lambda s: tf.raw_ops.StatelessRandomGetKeyCounter(seed=s).key,
        (tf.TensorSpec([None], tf.int32),),
    ),
    "an unlisted op": (lambda x: tf.raw_ops.Cholesky(input=x), (KNOWN,)),
}


@pytest.mark.parametrize("name", SAFE)
def test_these_cannot_fail(name: str) -> None:
    build, specs = SAFE[name]
    assert not fallible.FailureAnalysis().fails(_op(build, *specs))


@pytest.mark.parametrize("name", FAILING)
def test_these_can_fail(name: str) -> None:
    build, specs = FAILING[name]
    assert fallible.FailureAnalysis().fails(_op(build, *specs))


def _writers(variable: tf.Variable, state: tf.Variable) -> dict[str, tuple[Any, bool]]:
    def in_a_branch() -> tf.Tensor:
        true = tf.constant(1.0) > tf.random.uniform([])
        return tf.cond(true, lambda: variable.assign_add(1.0) + 0.0, lambda: 0.0)

    return {
        "assign": (lambda: variable.assign(1.0, read_value=False), True),
        "add": (lambda: variable.assign_add(1.0, read_value=False), True),
        "read": (lambda: variable.read_value(), False),
        "draw": (
            lambda: tf.raw_ops.RngReadAndSkip(
                resource=state.handle, alg=1, delta=tf.constant(1, tf.uint64)
            ),
            False,
        ),
        "print": (lambda: tf.raw_ops.PrintV2(input="x"), False),
        "in a branch": (in_a_branch, True),
        "read in a function": (tf.function(lambda: variable.read_value()), False),
        "none at all": (lambda: tf.constant(1.0), False),
    }


def test_what_writes_a_variable() -> None:
    variable, state = tf.Variable(0.0), tf.Variable(tf.zeros([3], tf.int64))
    for name, (build, writes) in _writers(variable, state).items():

        def op(build: Callable[..., Any] = build) -> Any:
            result = build()
            if isinstance(result, tf.Tensor) and result.op.type == "Identity":
                result = result.op.inputs[0]
            return result

        assert fallible.FailureAnalysis().writes(_op(op)) == writes, name


def test_a_plain_write_does_not_fail_by_itself() -> None:
    """The guards check beforehand what may not fit."""
    variable = tf.Variable(0.0)
    assert not fallible.FailureAnalysis().fails(
        _op(lambda: variable.assign(1.0, read_value=False))
    )


def test_the_types_that_are_listed_exist() -> None:
    groups = (fallible._ALWAYS, fallible._SHAPED, fallible._PARAMETERIZED)
    listed = [name for names in groups for name in names]
    assert len(listed) == len(set(listed))
    assert not [name for name in listed if not hasattr(tf.raw_ops, name)]
