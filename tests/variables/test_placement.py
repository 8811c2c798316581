# SPDX-License-Identifier: Apache-2.0
"""Values written outside a step are read back there, for every placement."""

from __future__ import annotations

import ast
import dataclasses
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import replicator
from replicator.variables import collected, placement
from replicator.variables.placement import Write
from replicator.variables.seeds import Seed
from replicator.world import World

AGGREGATIONS = list(tf.VariableAggregation)
PLACEMENTS = [
    placement.Mirrored(),
    placement.Owned(1),
    placement.Owned(0, "CPU:5", proxies=True),
    *(placement.Aggregated(how) for how in AGGREGATIONS),
    placement.Seeded(Seed(position=0, resets=False)),
    collected.Rows(tf.VariableAggregation.MEAN),
    collected.Rows(tf.VariableAggregation.SUM),
]


@dataclasses.dataclass
class _Variable:
    """The facts of a variable that a placement uses."""

    components: list[tf.Variable]

    @property
    def outside(self) -> list[tf.Variable]:
        return self.components

    @property
    def dtype(self) -> tf.DType:
        return self.components[0].dtype

    @property
    def shape(self) -> tf.TensorShape:
        return self.components[0].shape


@pytest.mark.battery(5)
@pytest.mark.parametrize("placed", PLACEMENTS, ids=str)
@given(
    value=st.lists(st.integers(-1000, 1000), min_size=1, max_size=4),
    count=st.integers(1, 4),
)
@settings(deadline=None)
def test_what_is_read_is_what_was_written(
    placed: placement.Placement, value: list[int], count: int
) -> None:
    dtype = tf.int64 if isinstance(placed, placement.Seeded) else tf.float64
    written = tf.constant(value, dtype)
    components = [tf.Variable(tf.zeros_like(written)) for _ in range(count)]
    variable = _Variable(components)
    parts = [
        placed.written(written, Write(variable, replica_id))
        for replica_id, _ in enumerate(placed.outside(components))
    ]
    np.testing.assert_allclose(placed.read(parts), written, rtol=1e-15)
    if placed.is_copied:
        for part in parts:
            np.testing.assert_array_equal(part, written)


@given(value=st.lists(st.integers(-1000, 1000), min_size=1, max_size=4))
@settings(deadline=None)
def test_what_is_owed_is_owed_by_whoever_owed_it_or_by_the_first(
    value: list[int],
) -> None:
    """One row each, if there are as many replicas; else their sum."""
    placed = collected.Owed(3)
    rows = np.array(value, "d")[:, np.newaxis]
    components = [tf.Variable(np.zeros([1, 1])) for _ in range(3)]
    own = [placed.written(rows, Write(_Variable(components), r)) for r in range(3)]
    assert all(part.shape == [1, 1] for part in own)
    expected = value if len(value) == 3 else [sum(value), 0, 0]
    np.testing.assert_array_equal(placed.read(own)[:, 0], expected)


def test_rows_of_all_replicas_are_read_in_their_order() -> None:
    rows = np.arange(8.0).reshape(4, 2)
    own = [tf.constant(rows[:1]), tf.constant(rows[1:1]), tf.constant(rows[1:])]
    for how, count in (
        (tf.VariableAggregation.SUM, 1),
        (tf.VariableAggregation.MEAN, 3),
    ):
        np.testing.assert_array_equal(collected.Rows(how).read(own), rows / count)


@pytest.mark.parametrize("placed", [*PLACEMENTS, collected.Owed(3)], ids=str)
def test_a_placement_is_copied_or_owned_or_differs(placed: placement.Placement) -> None:
    assert placed.is_copied + placed.differs + (placed.owner is not None) == 1
    assert not placed.adds_up or placed.is_aggregated
    with pytest.raises(dataclasses.FrozenInstanceError):
        placed.replica = 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("placed", PLACEMENTS, ids=str)
def test_generators_draw_from_seeds_that_differ(placed: placement.Placement) -> None:
    state = tf.constant([5, 6], tf.int64)
    variable = _Variable([tf.Variable(state)])
    states = {
        tuple(placed.written(state, Write(variable, r)).numpy()) for r in range(3)
    }
    assert (len(states) == 3) is isinstance(placed, placement.Seeded)


def test_the_first_component_is_created_at_the_owner() -> None:
    world = World.single_process(["a", "b"])
    assert placement.Owned(1).device(world) == "b"
    assert placement.Mirrored().device(world) == "a"
    assert placement.Owned(1, "c").device(world) == "c"


def test_copies_are_one_for_each_replica_and_what_is_apart_comes_last() -> None:
    world = World.single_process(["a", "b"])
    near, apart = placement.Owned(1, proxies=True), placement.Owned(1, "c", True)
    for placed, components in ((near, [0, 1]), (apart, [0, 1, "first"])):
        made = placed.components("first", lambda r: r, world)  # type: ignore
        assert made == components
        assert placed.first(made, world) == components[-1]
        assert placed.outside(made) == tuple(components)
        assert placed.slot == placement.Owned(1, placed.on)
        assert placed.has_copies and not placed.slot.has_copies
    assert placement.Mirrored().slot == placement.Mirrored()


def test_nothing_else_asks_which_placement_it_is() -> None:
    """Only the creation of variables names one; all other code uses its properties."""
    room = pathlib.Path(replicator.__file__).parent
    names = {type(placed).__name__ for placed in PLACEMENTS}
    asking = {
        path.name
        for path in room.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "isinstance"
        and names & {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
    }
    assert asking == set()
