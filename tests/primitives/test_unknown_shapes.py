# SPDX-License-Identifier: Apache-2.0
"""Shapes that differ only when a step runs: errors that name the replica and the line.

For each primitive, in each way of running; steps with known shapes get no extra op.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests import helpers

# The tensors of replicas 0, 1 and 2; the last is another where something is wrong.
SHAPE, OTHER, TALL, WIDE = (3, 3), (3, 4), (6, 3), (3, 6)


def _ones(shape: Any, ranked: bool = True) -> tf.Tensor:
    """Returns ones of a shape that is not known while a step is built."""
    return helpers.opaque(tf.ones(shape), [None] * 2 if ranked else None)


@dataclasses.dataclass(frozen=True)
class Case:
    """A call that fails where one replica's tensor has another shape.

    Attributes:
        call: Takes a Replicator and the replica's tensor.
        said: The error's description of it, a pattern.
        name: The primitive's, if it is not the case's first word.
        wrong: Its shape on replica 2; the others have SHAPE.
        all_wrong: Whether all have that shape.
    """

    call: Callable[[replicator.Replicator, tf.Tensor], Any]
    said: str
    name: str = ""
    wrong: tuple[int, ...] = TALL
    all_wrong: bool = False

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [self.wrong] * 3 if self.all_wrong else [SHAPE, SHAPE, self.wrong]


def _message(repl: replicator.Replicator, x: tf.Tensor, spec: Any = None) -> tf.Tensor:
    if repl.replica_id == 2:
        repl.send(x, 0)
    elif repl.replica_id == 0:
        return repl.recv(x if spec is None else spec, 2)
    return tf.zeros([])


def _from_root(
    call: Callable[[replicator.Replicator, Any], Any],
) -> Callable[[replicator.Replicator, tf.Tensor], Any]:
    """Returns a call with a spec on all replicas but the root, which is replica 2."""
    spec = tf.TensorSpec(SHAPE)
    return lambda repl, x: call(repl, x if repl.replica_id == 2 else spec)


def _splits(
    repl: replicator.Replicator, x: tf.Tensor, *axes: int, last: Any
) -> tf.Tensor:
    if repl.replica_id != 2:
        last = helpers.opaque([1, 2, 0])
    elif isinstance(last, list):
        last = helpers.opaque(last)
    return repl.all_to_all(x, *axes, splits=last)


def _mapped(repl: replicator.Replicator, x: tf.Tensor, op: str) -> tf.Tensor:
    """Each replica has two entries; for one of them the result is larger."""
    more = helpers.opaque(tf.shape(x)[0] - 2, ())
    return repl.map_reduce(
        lambda k: tf.ones([more if k == 5 else 1]), list(range(6)), op
    )


def _slices(repl: replicator.Replicator, x: tf.Tensor) -> tf.Tensor:
    indices = helpers.opaque(tf.range(3), [None])
    slices = tf.IndexedSlices(x, indices, tf.constant([9, 3]))
    return repl.all_reduce(slices).values


def _weighed(repl: replicator.Replicator, x: tf.Tensor, **options: Any) -> tf.Tensor:
    weight = helpers.opaque(x if repl.replica_id == 2 else 1.0, None)
    return repl.all_reduce(1.0, "mean", weight=weight, **options)


def _applied(repl: replicator.Replicator, x: tf.Tensor) -> tf.Tensor:
    v = tf.Variable(1.0)
    sgd = repl.wrap_optimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0))
    weight = helpers.opaque(x if repl.replica_id == 2 else 1.0, None)
    with tf.control_dependencies([sgd.apply_gradients([(1.0, v)], weight=weight)]):
        return tf.constant(0.0)


ALIKE = "differ in shape"
CASES = {
    "all_reduce": Case(lambda repl, x: repl.all_reduce(x), ALIKE),
    "all_reduce max": Case(lambda repl, x: repl.all_reduce(x, "max"), ALIKE),
    "all_reduce argmin": Case(lambda repl, x: repl.all_reduce(x, "argmin")[0], ALIKE),
    "all_reduce owner": Case(lambda repl, x: repl.all_reduce(x, "argmin")[1], ALIKE),
    **{  # as many elements, and others
        f"all_reduce {name}": Case(
            lambda repl, x, name=name: repl.all_reduce(x, algorithm=name),
            *(ALIKE, "", wrong),
        )
        for name, wrong in {
            **{"hub": (1, 9), "shuffled": (9, 1), "tree": (9, 1), "ring": (1, 9)},
        }.items()
    },
    "all_reduce nest": Case(lambda repl, x: repl.all_reduce([1.0, x])[1], ALIKE),
    "all_reduce weight": Case(
        lambda repl, x: repl.all_reduce(x, "mean", weight=1.0), ALIKE
    ),
    "all_reduce compressed": Case(
        lambda repl, x: repl.all_reduce(x, compressor="fp16"), ALIKE
    ),
    "all_sum": Case(lambda repl, x: repl.all_sum(x), ALIKE, "all_reduce"),
    "reduce": Case(
        lambda repl, x: repl.reduce(x, 1) if repl.replica_id == 1 else _none(repl, x),
        ALIKE,
    ),
    "reduce_scatter": Case(lambda repl, x: repl.reduce_scatter(x), ALIKE),
    "broadcast": Case(
        lambda repl, x: repl.broadcast(x), "shape that the other replicas expect"
    ),
    "broadcast spec": Case(
        _from_root(lambda repl, x: repl.broadcast(x, 2)),
        "shape that the other replicas expect",
    ),
    "scatter": Case(
        lambda repl, x: repl.scatter(x), "shape that the other replicas expect"
    ),
    "scatter spec": Case(
        _from_root(lambda repl, x: repl.scatter(x, 2, axis=0)),
        "shape that the other replicas expect",
    ),
    "scatter entries": Case(
        lambda repl, x: repl.scatter(x), "does not have 3 entries", all_wrong=True
    ),
    "all_gather": Case(lambda repl, x: repl.all_gather(x), ALIKE),
    "all_gather axis": Case(
        lambda repl, x: repl.all_gather(x, axis=-2), "only along axis -2", wrong=OTHER
    ),
    "gather": Case(
        lambda repl, x: (
            repl.gather(x, axis=0) if repl.replica_id == 0 else _gone(repl, x)
        ),
        "only along axis 0",
        wrong=OTHER,
    ),
    "permute": Case(lambda repl, x: repl.permute(x, [(1, 2)]), ALIKE),
    "shift": Case(lambda repl, x: repl.shift(x), ALIKE, "permute"),
    "all_to_all": Case(lambda repl, x: repl.all_to_all(x, 0, 1), ALIKE),
    "all_to_all slices": Case(
        lambda repl, x: repl.all_to_all(x, 1, 0),
        "cannot be cut into 3 slices",
        wrong=OTHER,
        all_wrong=True,
    ),
    "all_to_all rows": Case(
        lambda repl, x: _splits(repl, x, 0, 0, last=[1, 1, 4]), "do not fit", wrong=WIDE
    ),
    "all_to_all splits": Case(
        lambda repl, x: _splits(repl, x, 0, 0, last=[1, 1, 1]), "or their splits"
    ),
    "all_to_all axes": Case(
        lambda repl, x: _splits(repl, x, 0, 1, last=[1, 1, 1]),
        "or their splits",
        wrong=SHAPE,
    ),
    "all_to_all no splits": Case(
        lambda repl, x: _splits(
            repl, tf.ones(SHAPE), 0, 0, last=helpers.opaque(tf.cast(x, tf.int32), None)
        ),
        "splits whose shape is not [3]",
    ),
    "all_reduce slices": Case(_slices, "of values and of indices"),
    "all_reduce weights": Case(_weighed, "weight whose shape is not []"),
    "all_reduce compressed weights": Case(
        lambda repl, x: _weighed(repl, x, compressor="fp16"),
        "weight whose shape is not",
    ),
    "apply_gradients": Case(
        _applied, "weight whose shape is not", "GradientDescentOptimizer"
    ),
    "recv": Case(_message, "from the one passed to recv"),
    "recv spec": Case(
        lambda repl, x: _message(repl, x, tf.TensorSpec(SHAPE)),
        "that recv was given",
        "send",
    ),
    "map_reduce": Case(lambda repl, x: _mapped(repl, x, "sum"), ALIKE),
    "map_reduce max": Case(lambda repl, x: _mapped(repl, x, "max"), ALIKE),
}
NEVER_KNOWN = (
    *("all_to_all axes", "all_to_all splits", "all_to_all no splits"),
    *("all_reduce slices", "all_reduce weights", "all_reduce compressed weights"),
    *("map_reduce", "map_reduce max", "apply_gradients"),
)


def _none(repl: replicator.Replicator, x: tf.Tensor) -> tf.Tensor:
    repl.reduce(x, 1)
    return tf.zeros([])


def _gone(repl: replicator.Replicator, x: tf.Tensor) -> tf.Tensor:
    repl.gather(x, axis=0)
    return tf.zeros([])


def _check(text: str, name: str) -> None:
    """Asserts that an error contains a case's expected parts."""
    case = CASES[name]
    primitive = case.name or name.partition(" ")[0]
    assert primitive in text.partition("\n")[0] or f"[{primitive}" in text
    assert case.said in text
    assert "replica" in text and "tests/primitives/test_unknown_shapes.py:" in text
    assert "Fix: " in text
    if not name.startswith("map_reduce"):
        sizes = [" ".join(map(str, case.wrong)), ", ".join(map(str, case.wrong))]
        assert any(f"[{size}]" in text for size in sizes)


@pytest.mark.battery(5)
@pytest.mark.parametrize("ranked", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_the_error_says_whose_shapes_and_where(name: str, ranked: bool) -> None:
    repl, case = helpers.make(3), CASES[name]

    def step() -> Any:
        return case.call(repl, _ones(case.shapes[repl.replica_id], ranked))

    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        repl.run(step)
    text = str(caught.value)
    _check(text, name)
    assert "\n  replica" in text or "\n  at " in text  # in the form of composed errors
    assert "AddN" not in text and "/replicator/" not in text


# One of each kind of comparison: what is compared does not depend on how steps run.
_KINDS = ("all_reduce", "scatter spec", "all_gather axis", "all_to_all slices")
_KINDS += ("all_to_all splits", "all_reduce slices", "recv spec", "map_reduce")


@pytest.mark.battery(3)
@pytest.mark.parametrize("mode", ["function", "session", "several steps", "in a loop"])
@pytest.mark.parametrize("name", _KINDS)
def test_the_error_is_told_however_the_step_is_run(name: str, mode: str) -> None:
    repl, case = helpers.make(3), CASES[name]

    def call() -> Any:
        return case.call(repl, _ones(case.shapes[repl.replica_id]))

    def step() -> Any:
        if mode != "in a loop":
            return call()
        return tf.while_loop(lambda k: k < 2, lambda k: (_done(call(), k),), [0])

    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        if mode == "several steps":
            repl.run(step, steps_per_call=2)
        elif mode == "in a loop":
            repl.run(step)
        else:
            helpers.run(mode, repl, lambda: step)
    _check(str(caught.value), name)


def _done(made: Any, k: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies(tf.nest.flatten(made)):
        return k + 1


@pytest.mark.battery(5)
@pytest.mark.parametrize("name", [name for name in CASES if name not in NEVER_KNOWN])
def test_what_is_known_beforehand_is_not_asserted(name: str) -> None:
    repl, case = helpers.make(3), CASES[name]
    with tf.Graph().as_default() as graph:
        if name == "all_to_all rows":
            repl.run(lambda: repl.all_to_all(tf.ones(SHAPE), 0, 0, splits=[1, 2, 0]))
        else:
            repl.run(lambda: case.call(repl, tf.ones(SHAPE)))
        names = [op.name for op in graph.get_operations() if op.type == "Assert"]
    assert not [name for name in names if "communicate" in name or "replica_" in name]


@pytest.mark.parametrize("size", [0, 1, 4])
def test_what_fits_passes(size: int) -> None:
    """Unknown sizes that match, or may differ, give the results of known ones."""
    repl = helpers.make(3)

    def step() -> Any:
        r = repl.replica_id
        x = helpers.opaque(tf.ones([size, 3]) * (r + 1.0), None)
        rows = helpers.opaque(tf.ones([size + r, 3]), None)
        return (
            repl.all_reduce(x),
            repl.all_reduce(x, "max"),
            repl.broadcast(x, 1),
            repl.shift(x),
            tf.shape(repl.all_gather(rows, axis=0)),
            repl.all_to_all(helpers.opaque(tf.ones([3, size]), None), 0, 1),
        )

    sums, largest, sent, shifted, gathered, exchanged = repl.run(step)
    for r in range(3):
        assert sums[r].shape == (size, 3)
        for value, number in ((sums, 6), (largest, 3), (sent, 2), (shifted, r or 3)):
            assert tf.reduce_all(value[r] == number)
        assert gathered[r].numpy().tolist() == [3 * size + 3, 3]
        assert exchanged[r].shape == (1, 3 * size)


def test_functions_of_map_reduce_that_return_different_things_are_refused() -> None:
    repl = helpers.make(2)
    for other in (tf.ones([3]), (tf.ones([2]), 1.0), tf.ones([2], tf.int32)):
        with pytest.raises(
            replicator.ArgumentError,
            match=r"(?s)map_reduce on replica 0 was given a function that returns .* "
            r"for another.*test_unknown_shapes\.py:\d+.*Fix: return tensors of one",
        ):
            repl.run(
                lambda other=other: repl.map_reduce(
                    lambda k: tf.ones([2]) if k < 2 else other, [0, 1, 2, 3]
                )
            )


def test_slices_that_are_known_not_to_fit_are_refused() -> None:
    repl = helpers.make(2)
    for values, indices in (([3, 2], [2]), ([], []), ([2, 2], [2, 1])):
        slices = tf.IndexedSlices(tf.ones(values), tf.zeros(indices, tf.int32))
        with pytest.raises(
            replicator.ArgumentError,
            match=r"(?s)all_reduce on replica 0 was given IndexedSlices of values .*and"
            r" indices .*test_unknown_shapes\.py:\d+.*Fix: give each row its index",
        ):
            repl.run(lambda slices=slices: repl.all_reduce(slices).values)


def test_gradients_of_what_is_looked_up_are_not_compared() -> None:
    """But the write has a guard."""
    repl = helpers.make(2)
    with tf.Graph().as_default() as graph:
        with repl.context():
            table = tf.Variable(tf.ones([4, 2]))
            optimizer = repl.wrap_optimizer(
                tf.compat.v1.train.GradientDescentOptimizer(1.0)
            )

        def step() -> None:
            rows = helpers.opaque([1, 2], [None])
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, rows))
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])

        repl.run(step)
        compared = [op for op in graph.get_operations() if op.type == "Assert"]
        assert compared and all("guard" in op.name for op in compared)


def test_what_one_has_too_many_another_cannot_have_too_few() -> None:
    """In all there are as many values as indices: rows would be mixed up."""
    repl = helpers.make(2)

    def step() -> Any:
        r = repl.replica_id
        values = helpers.opaque(tf.ones([2 + r, 2]), None)
        slices = tf.IndexedSlices(values, helpers.opaque(tf.range(3 - r), None))
        return repl.all_reduce(slices).values

    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"shapes of both: \[[23], 2"
    ):
        repl.run(step)


@pytest.mark.parametrize("rows", [3, 4])
def test_what_each_replica_compares_may_be_copied(rows: int) -> None:
    repl = helpers.make(3, build="clone")

    def step(indices: tf.Tensor) -> tf.Tensor:
        values = _ones([rows, 2])
        slices = tf.IndexedSlices(values, helpers.opaque(indices, [None]), [9, 2])
        return repl.all_reduce(slices).values

    arguments = (replicator.PerReplica([tf.range(3)] * 3),)
    if rows == 3:
        for replica_result in repl.run(step, args=arguments):
            np.testing.assert_array_equal(replica_result, np.full([3, 2], 3.0))
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match="and of indices"):
            repl.run(step, args=arguments)
