# SPDX-License-Identifier: Apache-2.0
"""The state after an eager step that was interrupted during its writes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import tensorflow as tf

from replicator._tf import cluster
from replicator.cluster import lookout
from replicator.step import eager_calls, repair
from tests import helpers
from tests.cluster.as_threads import two_peers


def _variables(**options: Any) -> tuple[Any, Any]:
    with helpers.make(3, variables="mirrored").context():
        mirrored = tf.Variable([1, 2])
        on_read = tf.Variable(
            0.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
    return mirrored, on_read


@pytest.mark.parametrize(
    "error",  # not by the end of the inputs, which comes before all writes
    [
        tf.errors.ResourceExhaustedError,
        tf.errors.OutOfRangeError,
        eager_calls.ExhaustedError,
    ],
)
def test_components_are_equal_after_an_error_amid_the_writes(error) -> None:
    mirrored, own = _variables()
    both = [c for v in (mirrored, own) for c in v.components]
    owners = {
        id(c.handle): v
        for v, components in ((mirrored, both[:3]), (own, both[3:]))
        for c in components
    }

    def run() -> None:
        mirrored.components[0].assign([5, 6])
        own.components[1].assign(7.0)
        raise error(None, None, "stopped")

    actual = repair.mirrored([c.handle for c in both], owners)
    with pytest.raises(error, match="stopped"):
        repair.equal_after_errors(run, actual)()
    rest = [1, 2] if error is eager_calls.ExhaustedError else [5, 6]
    values = [list(c) for c in helpers.components(mirrored)]
    assert values == [[5, 6], rest, rest]
    assert helpers.components(own) == [0.0, 7.0, 0.0]


def test_a_step_that_writes_rows_that_do_not_exist_leaves_replicas_equal() -> None:
    repl = helpers.make(2, variables="mirrored")
    with repl.context():
        table, count = tf.Variable(tf.zeros([3, 2])), tf.Variable(0)
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0))
        optimizer.build([table])
    row = tf.Variable(7)

    def step() -> None:
        rows = tf.IndexedSlices(tf.ones([1, 2]), tf.reshape(row, [1]), [3, 2])
        optimizer.apply_gradients([(rows, table)])
        count.assign_add(1)

    for _ in range(5):
        with pytest.raises(tf.errors.InvalidArgumentError):
            repl.run(step)
        helpers.assert_replicas_equal([table, count, *optimizer.variables])
    row.assign(1)
    repl.run(step)
    assert table.numpy().tolist() == [[0, 0], [-1, -1], [0, 0]]


def test_an_iterator_that_ends_in_a_branch_leaves_replicas_equal() -> None:
    repl = helpers.make(2, variables="mirrored")
    with repl.context():
        count, goes_on = tf.Variable(0), tf.Variable(True)
    elements = iter(tf.data.Dataset.range(3))  # for all replicas

    def pull() -> tf.Tensor:
        element = next(elements)
        with tf.control_dependencies([element]):
            count.assign_add(1)
        return element

    def step() -> tf.Tensor:
        return tf.cond(goes_on, pull, lambda: tf.constant(0, tf.int64))

    repl.run(step)
    with pytest.raises(tf.errors.OutOfRangeError):
        repl.run(step)
    helpers.assert_replicas_equal([count])


# --- Several processes, with a fake of TensorFlow's store -----------------------------

_ERROR = tf.errors.InvalidArgumentError(
    None, None, 'Graph\n  File "train.py", line 3, in f\n\nx > 2\n\t [[{{node a}}]] [O]'
)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """The processes that ended all others, and their reasons."""
    store: dict[str, str] = {}
    result: list[tuple[int, str]] = []
    monkeypatch.setattr(cluster, "store_put", store.__setitem__)
    monkeypatch.setattr(cluster, "store_get", lambda key, _: store.get(key))
    monkeypatch.setattr(lookout, "fail", lambda own, text: result.append((own, text)))
    monkeypatch.setattr(repair, "_GRACE", 0.2)
    return result


def test_one_ends_the_others(ended: list[tuple[int, str]]) -> None:
    repair._agree(two_peers()[1], _ERROR)
    assert ended == [(1, "a step failed there: InvalidArgumentError: x > 2")]


def test_all_go_on(ended: list[tuple[int, str]]) -> None:
    threads = [
        threading.Thread(target=repair._agree, args=(peer, _ERROR))
        for peer in two_peers()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == []
