# SPDX-License-Identifier: Apache-2.0
"""No placeholder is left in the ops that a step runs; if one is, it is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from replicator import errors
from replicator.graph.ir import placeholder
from replicator.graph.lowering import rewrite
from replicator.graph.matching import leftover
from tests import helpers


def _call(x: tf.Tensor) -> tf.Tensor:
    """Puts a placeholder into the default graph."""
    value = placeholder.Value.of(x)
    call = placeholder.Call(
        primitive="all_reduce",
        options={"op": "sum"},
        replica_id=1,
        device="/device:CPU:1",
        group=(0, 1),
        key="0",
        operands=(value,),
        agreed=(value,),
        line="train.py:4 in step_fn",
    )
    return placeholder.put(call, [x], [value]).outputs[0]


def _cond(x: tf.Tensor) -> tf.Tensor:
    return tf.cond(helpers.opaque(True), lambda: _call(x), lambda: x)


def _under_two_tapes(x: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as outer, tf.GradientTape() as inner:
        outer.watch(x)
        inner.watch(x)
        # A function around it knows neither of the branches.
        return tf.cond(
            helpers.opaque(True), lambda: tf.stop_gradient(_call(x)), lambda: x
        )


def _loop_condition(x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(lambda x: _call(x) < 3.0, lambda x: (x + 1.0,), (x,))[0]


def _returned_by_a_function(x: tf.Tensor) -> tf.Tensor:
    return tf.function(_call, autograph=False)(x)


def _in_a_loop_in_a_function(x: tf.Tensor) -> tf.Tensor:
    def turn(x: tf.Tensor) -> tuple[tf.Tensor]:
        return (_cond(x) + 1.0,)

    return tf.function(
        lambda x: tf.while_loop(lambda x: x < 3.0, turn, (x,))[0], autograph=False
    )(x)


def _waited_for(x: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies([_call(x).op]):
        return tf.identity(x)


PLACES = [
    _call,
    _cond,
    _under_two_tapes,
    _loop_condition,
    _returned_by_a_function,
    _in_a_loop_in_a_function,
    _waited_for,
]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_what_is_left_is_named_where_a_result_or_an_effect_needs_it(
    place: Callable[[tf.Tensor], tf.Tensor],
) -> None:
    message = (
        r"(?s)bug in Replicator.*replica 1 \(/device:CPU:1\): all_reduce op=sum "
        r"float32\[\] at train\.py:4 in step_fn\nFix: please report"
    )
    for needed in ("result", "effect", "op"):
        with tf.Graph().as_default() as graph:
            y = place(tf.constant(1.0)) + 1.0
            if needed == "effect":
                tf.raw_ops.Assert(condition=y > 0.0, data=[y])
            returned = {"result": {"y": [y, None]}, "effect": None, "op": y.op}
            with pytest.raises(errors.InternalError, match=message):
                leftover.check(graph.get_operations(), returned[needed])


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_what_nothing_needs_may_be_left(
    place: Callable[[tf.Tensor], tf.Tensor],
) -> None:
    with tf.Graph().as_default() as graph:
        x = tf.constant(1.0)
        place(x)
        unused = place(x) * 2.0
        inner = tf.function(lambda x: (place(x), x + 1.0)[1], autograph=False)
        leftover.check(
            graph.get_operations(), [inner(x), tf.cond(x > 0, lambda: x, lambda: x)]
        )
        with pytest.raises(errors.InternalError):
            leftover.check(graph.get_operations(), [unused])


def test_ops_of_others_of_the_same_type_may_be_left() -> None:
    with tf.Graph().as_default() as graph:
        y = tf.numpy_function(
            lambda x: x, [tf.constant(1.0)], tf.float32, stateful=False
        )
        leftover.check(graph.get_operations(), y)


@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_build_in_which_something_is_left_fails(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rewires_nothing(replicas: Any, *_: Any) -> rewrite.Rewritten:
        return rewrite.Rewritten([list(ops) for ops in replicas], ())

    monkeypatch.setattr(rewrite, "rewrite", rewires_nothing)
    repl = helpers.make(2)
    with pytest.raises(
        errors.InternalError, match=r"(?s)replica 0 .*test_leftover\.py:\d+ in .*Fix: "
    ):
        helpers.run(mode, repl, lambda: lambda: repl.all_reduce(helpers.opaque(1.0)))
