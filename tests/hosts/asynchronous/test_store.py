# SPDX-License-Identifier: Apache-2.0
"""Variables that programs share, found by their numbers; here two in one process."""

from __future__ import annotations

import pytest
import tensorflow as tf

import replicator
from replicator.hosts.asynchronous.board import LOST, PRESENT, STATES, Board
from replicator.hosts.asynchronous.store import Store
from replicator.variables.components import Components
from replicator.variables.placement import Aggregated, Mirrored, Owned
from replicator.world import World
from tests import helpers

DEVICES = ["CPU:0", "CPU:1"]


@pytest.fixture
def pair(names_of_its_own: None) -> list[Store]:
    """The stores of two programs."""
    stores = []
    for n in range(2):
        board = Board(n, 2, "CPU:0")
        board.create()
        board.write(STATES, PRESENT)
        stores.append(Store(board, ["host-0", "host-1"], DEVICES, 0.2))
    return stores


def test_the_first_program_gives_the_values(pair: list[Store]) -> None:
    for sizes in ((3,), (2, 2), ()):
        one, other = (
            store.share(tf.Variable(tf.fill(sizes, float(n)), name="v"))
            for n, store in enumerate(pair)
        )
        assert one.device == other.device
        assert one.numpy().tolist() == other.numpy().tolist()
        assert not one.numpy().any()
        other.assign_add(tf.ones(sizes))
        assert (one.numpy() == 1.0).all()


def test_variables_go_where_the_fewest_bytes_are(pair: list[Store]) -> None:
    variables = [pair[0].share(tf.Variable(tf.ones([n]))) for n in (4, 1, 2, 9)]
    ends = [variable.device[-1] for variable in variables]
    assert ends == ["0", "1", "1", "1"]


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (tf.zeros([2]), tf.zeros([3]), r"float32\(2,\)(.|\n)*float32\(3,\)"),
        (tf.zeros([2]), tf.zeros([2], tf.float64), "float32(.|\n)*float64"),
        (None, tf.zeros([2]), "host-0 creates none"),
    ],
)
def test_others_are_refused(
    first: tf.Tensor | None, second: tf.Tensor, said: str, pair: list[Store]
) -> None:
    if first is not None:
        pair[0].share(tf.Variable(first))
    with pytest.raises(replicator.MismatchError, match=said):
        pair[1].share(tf.Variable(second))


def test_a_first_program_that_is_lost_is_not_waited_for(pair: list[Store]) -> None:
    board = Board(1, 2, "CPU:0")
    board.write(STATES, LOST, 0)
    store = Store(board, ["host-0", "host-1"], DEVICES, 1000.0)
    with pytest.raises(replicator.MismatchError, match="host-0 creates none"):
        store.share(tf.Variable(1.0))


def test_metrics_and_generators_are_each_programs_own(pair: list[Store]) -> None:
    number, seeds = tf.Variable(1.0), tf.random.Generator.from_seed(1).state
    assert pair[0].takes(Mirrored(), number) and pair[0].takes(Owned(0), number)
    assert not pair[0].takes(Aggregated(tf.VariableAggregation.SUM), number)
    assert not pair[0].takes(Mirrored(), seeds)


def test_a_table_is_created_by_the_first(pair: list[Store]) -> None:
    with pytest.raises(replicator.MismatchError, match="host-0 has no counts"):
        pair[1].table("counts", 3)
    pair[0].table("counts", 3).assign_add([1, 2, 3])
    assert pair[1].table("counts", 3).numpy().tolist() == [1, 2, 3]
    assert pair[0].table("counts", 3).numpy().tolist() == [1, 2, 3]


def test_what_programs_share_stays_where_it_is(pair: list[Store]) -> None:
    repl = helpers.make(2)
    with repl.context():
        v = tf.Variable([1.0])
    components = Components(World.single_process(repl.devices), None, pair[0])
    with pytest.raises(replicator.UnsupportedError, match="several programs share"):
        components.moved(v, Mirrored())
