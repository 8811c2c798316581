# SPDX-License-Identifier: Apache-2.0
"""Objects: values that replicas exchange while they are built."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import errors
from tests import helpers


def _heard(num_replicas: int, talk: Callable[[replicator.Replicator], Any]) -> Any:
    """Runs a step that only exchanges objects; returns what each replica received."""
    repl = helpers.make(num_replicas)
    heard: dict[int, Any] = {}

    def step() -> tf.Tensor:
        heard[repl.replica_id] = talk(repl)
        return tf.constant(0)

    repl.run(step)
    return [heard[r] for r in range(num_replicas)]


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_all_gather_object_gives_all_objects_in_order(num_replicas: int) -> None:
    heard = _heard(
        num_replicas, lambda repl: repl.all_gather_object({"id": repl.replica_id})
    )
    assert heard == [[{"id": r} for r in range(num_replicas)]] * num_replicas


@pytest.mark.parametrize("root", [0, 1, 2])
def test_broadcast_object_gives_the_roots(root: int) -> None:
    heard = _heard(3, lambda repl: repl.broadcast_object("abc"[repl.replica_id], root))
    assert heard == ["abc"[root]] * 3


def test_others_than_the_root_may_hand_in_anything() -> None:
    def talk(repl: replicator.Replicator) -> Any:
        value = 7 if repl.replica_id == 1 else tf.constant(0)
        return repl.broadcast_object(value, 1)

    assert _heard(3, talk) == [7] * 3


def test_what_is_said_may_depend_on_what_was_heard() -> None:
    def talk(repl: replicator.Replicator) -> Any:
        value = repl.replica_id + 1
        for k in range(4):
            value += sum(repl.all_gather_object(value))
            value *= repl.broadcast_object(value, k % repl.num_replicas) % 7
        return value

    values = [1, 2, 3]
    for k in range(4):
        values = [value + sum(values) for value in values]
        values = [value * (values[k % 3] % 7) for value in values]
    assert _heard(3, talk) == values


@pytest.mark.parametrize("mode", helpers.MODES)
def test_objects_shape_the_graph(mode: str) -> None:
    """Replicas pad to the longest, though each knows its own length only."""
    repl = helpers.make(3)

    def step() -> tf.Tensor:
        own_rows = np.ones(repl.replica_id + 1)
        longest = max(repl.all_gather_object(len(own_rows)))
        padded = helpers.opaque(np.pad(own_rows, [0, longest - len(own_rows)]))
        return repl.all_reduce(padded * repl.broadcast_object(longest))

    for result in helpers.run(mode, repl, lambda: step):
        np.testing.assert_array_equal(result, [9, 6, 3])


def test_groups_talk_among_themselves() -> None:
    def talk(repl: replicator.Replicator) -> Any:
        r = repl.replica_id
        halves = repl.groups([[0, 2], [1, 3]])
        gathered = repl.all_gather_object(r, halves)
        if r in (0, 3):  # any number of times
            gathered += repl.all_gather_object(-r, repl.group([3, 0]))
        return gathered, repl.broadcast_object(r, root=2 + r % 2, group=halves)

    even, odd = [0, 2], [1, 3]
    assert _heard(4, talk) == [
        ([*even, 0, -3], 2),
        (odd, 3),
        (even, 2),
        ([*odd, 0, -3], 3),
    ]


def test_everyone_hears_a_copy() -> None:
    messages = []

    def talk(repl: replicator.Replicator) -> Any:
        messages.append([repl.replica_id])
        heard = repl.all_gather_object(messages[-1])
        for one in heard:
            one.append("heard")
        return heard

    assert _heard(2, talk) == [[[0, "heard"], [1, "heard"]]] * 2
    assert all("heard" not in one for one in messages)


def test_what_was_said_first_counts() -> None:
    """The step is built several times, and code may answer differently each time."""
    answers = itertools.count()
    first, second = _heard(2, lambda repl: repl.all_gather_object(next(answers)))
    assert first == second
    assert len(set(first)) == 2


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("place", ["function", "cond", "while", "map_fn", "twice"])
def test_objects_anywhere_in_the_step(place: str, mode: str) -> None:
    repl = helpers.make(3)

    def talk(x: tf.Tensor) -> tf.Tensor:
        (low, *_, high), root = repl.all_gather_object(repl.replica_id), 2
        factor = repl.broadcast_object(10 * (high - low), root)
        return repl.all_reduce(x * float(factor))

    def step() -> tf.Tensor:
        x = helpers.opaque(1.0 + repl.replica_id)
        if place == "function":
            return nested(x)
        if place == "twice":
            return nested(nested(x)) - 7080.0
        if place == "cond":
            return tf.cond(helpers.opaque(True), lambda: talk(x), lambda: 0.0)
        if place == "map_fn":
            return tf.map_fn(talk, tf.stack([x, x]))[1]
        return tf.while_loop(
            lambda k, y: k < 1, lambda k, y: (k + 1, talk(y)), [tf.constant(0), x]
        )[1]

    nested = tf.function(talk)
    assert list(helpers.run(mode, repl, lambda: step)) == [120.0] * 3


@pytest.mark.parametrize("mode", ["eager", "session"])
def test_functions_are_traced_again_for_each_step_that_talks(mode: str) -> None:
    """A trace of another build would repeat that build's values."""
    repl = helpers.make(2)
    names = ["a", "b"]
    heard = []

    @tf.function
    def nested() -> tf.Tensor:
        heard.append(repl.all_gather_object(names[repl.replica_id]))
        heard.append(repl.all_gather_object(len(heard)))
        return tf.constant(0)

    def step(k: int) -> tf.Tensor:
        return nested() + repl.broadcast_object(k, 1)

    with tf.Graph().as_default() if mode == "session" else tf.init_scope():
        for k in range(3):
            names[1] = f"b{k}"
            repl.run(functools.partial(step, k))
            assert heard[-2] == ["a", f"b{k}"]


def test_variables_of_a_step_that_talks_are_made_once() -> None:
    repl = helpers.make(2)
    variables = []

    def step() -> tf.Tensor:
        # One line makes it: those of two lines are two variables, each on all replicas.
        size = 0 if repl.replica_id else repl.all_gather_object(3)[1]
        variables.append(tf.Variable(2.0))
        size = repl.all_gather_object(3)[0] if repl.replica_id else size
        return variables[-1].assign_add(float(size))

    assert [float(v) for v in repl.run(step)] == [5.0, 5.0]
    assert [float(v) for v in repl.run(step)] == [8.0, 8.0]


def test_optimizers_beside_objects() -> None:
    """Both cause rebuilds, and neither loses the other's knowledge."""
    repl = helpers.make(2)
    with repl.context():
        used, unused = tf.Variable(1.0), tf.Variable(1.0)
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.5))

    def step() -> tf.Tensor:
        factor = sum(repl.all_gather_object(1.0 + repl.replica_id))
        with tf.GradientTape() as tape:
            loss = factor * (used if repl.replica_id else unused)
        gradients = tape.gradient(loss, [used, unused])
        optimizer.apply_gradients(zip(gradients, [used, unused], strict=True))
        return loss * repl.broadcast_object(repl.replica_id, 1)

    repl.run(step)
    assert [float(used), float(unused)] == [0.25, 0.25]


# --- Errors ---------------------------------------------------------------------------


@dataclasses.dataclass
class _Holder:
    inside: Any


REFUSED = {
    "tensor": (lambda: tf.constant(1), "was given a SymbolicTensor"),
    "variable": (lambda: tf.Variable(1.0), "was given a ReplicatedVariable"),
    "slices": (
        lambda: tf.IndexedSlices(tf.ones([1]), [0]),
        "was given a IndexedSlices",
    ),
    "nested": (lambda: {"a": [1, tf.constant(1)]}, "a dict that holds a SymbolicTen"),
    "hidden": (lambda: _Holder(tf.constant(1)), "a _Holder that holds a SymbolicTen"),
    "lambda": (lambda: lambda: 0, "which cannot be pickled"),
    "file": (lambda: open(__file__), "which cannot be pickled"),
}


@pytest.mark.parametrize("primitive", ["all_gather_object", "broadcast_object"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_plain_value_is_refused(name: str, primitive: str) -> None:
    make, message = REFUSED[name]
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        getattr(repl, primitive)(make())
        return tf.constant(0)

    with pytest.raises(
        errors.ArgumentError,
        match=rf"(?s)^{primitive} on replica 0 .*{message}"
        r".*at tests.*test_objects.py:\d+ in step\n.*Fix: ",
    ):
        repl.run(step)


def _ring(repl: replicator.Replicator) -> Any:
    pairs = [[0, 1], [1, 2], [0, 2]]
    for k in range(2):
        group = repl.group(pairs[(repl.replica_id + k * 2) % 3])
        repl.all_gather_object(k, group)


def _only(repl: replicator.Replicator, *replicas: int) -> bool:
    return repl.replica_id in replicas


MISMATCHES: dict[str, Any] = {
    "one replica gathers": (
        lambda repl: _only(repl, 0) and repl.all_gather_object(1),
        "Object call 0 of group [0, 1, 2] of replica 0 has no partner.",
        [
            "0 (DEVICE0): waits in all_gather_object group=[0, 1, 2] at LINE",
            "1 (DEVICE1): makes no such call",
            "2 (DEVICE2): makes no such call",
        ],
    ),
    "the last gathers once more": (
        lambda repl: [repl.all_gather_object(1) for _ in range(1 + _only(repl, 2))],
        "Object call 1 of group [0, 1, 2] of replica 2 has no partner.",
        [
            "0 (DEVICE0): makes no such call",
            "1 (DEVICE1): makes no such call",
            "2 (DEVICE2): waits in all_gather_object group=[0, 1, 2] at LINE",
        ],
    ),
    "one does not listen": (
        lambda repl: _only(repl, 0, 1) and repl.broadcast_object(1),
        "Object call 0 of group [0, 1, 2] of replica 0 has no partner.",
        [
            "0 (DEVICE0): broadcast_object root=0 group=[0, 1, 2] at LINE",
            "1 (DEVICE1): broadcast_object root=0 group=[0, 1, 2] at LINE",
            "2 (DEVICE2): makes no such call",
        ],
    ),
    "the root does not speak": (
        lambda repl: _only(repl, 0, 1) and repl.broadcast_object(1, 2),
        "Object call 0 of group [0, 1, 2] of replica 0 has no partner.",
        ["2 (DEVICE2): makes no such call"],
    ),
    "roots": (
        lambda repl: repl.broadcast_object(1, repl.replica_id),
        "Object call 0 of group [0, 1, 2] differs between replicas.",
        [
            "0 (DEVICE0): broadcast_object root=0 group=[0, 1, 2] at LINE",
            "1 (DEVICE1): broadcast_object root=1 group=[0, 1, 2] at LINE",
        ],
    ),
    "primitives": (
        lambda repl: (
            repl.broadcast_object(1) if _only(repl, 1) else repl.all_gather_object(1)
        ),
        "Object call 0 of group [0, 1, 2] differs between replicas.",
        [
            "0 (DEVICE0): all_gather_object group=[0, 1, 2] at LINE",
            "1 (DEVICE1): broadcast_object root=0 group=[0, 1, 2] at LINE",
        ],
    ),
    "groups": (
        lambda repl: repl.all_gather_object(1, [0, 1] if _only(repl, 0) else None),
        "Object call 0 of group [0, 1] of replica 0 has no partner.",
        [
            "0 (DEVICE0): waits in all_gather_object group=[0, 1] at LINE",
            "1 (DEVICE1): waits in all_gather_object group=[0, 1, 2] at LINE",
        ],
    ),
    "roots of other groups": (
        lambda repl: (
            _only(repl, 0, 1)
            and repl.broadcast_object(
                1, repl.replica_id, [[0, 1], [1, 2]][repl.replica_id]
            )
        ),
        "Object call 0 of group [0, 1] of replica 0 has no partner.",
        [
            "1 (DEVICE1): makes no such call, but one in another group: "
            "broadcast_object root=1 group=[1, 2] at LINE",
        ],
    ),
    "a circle": (
        _ring,
        "Object call 0 of group [0, 1] of replica 0 has no partner.",
        [
            "0 (DEVICE0): waits in all_gather_object group=[0, 1] at LINE",
            "1 (DEVICE1): waits in all_gather_object group=[1, 2] at LINE",
        ],
    ),
}


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("name", MISMATCHES)
def test_disagreement_says_who_called_and_who_did_not(name: str, mode: str) -> None:
    talk, problem, sites = MISMATCHES[name]
    repl = helpers.make(3)

    def step() -> tf.Tensor:
        talk(repl)
        return tf.constant(0)

    with pytest.raises(replicator.MismatchError) as raised:
        helpers.run(mode, repl, lambda: step)
    text = str(raised.value)
    assert problem in text
    for site in sites:
        for r, device in enumerate(repl.devices):
            site = site.replace(f"DEVICE{r}", device)
        line = r"tests.*test_objects\.py:\d+ in "
        assert re.search(re.escape(f"  replica {site}").replace("LINE", line), text)
    assert "Fix: let every replica of a group exchange the same objects" in text


def test_a_root_outside_the_group() -> None:
    repl = helpers.make(3)
    with pytest.raises(
        errors.ArgumentError, match=r"broadcast_object.*root=1, which is not in the gr"
    ):
        repl.run(lambda: repl.broadcast_object(1, 1, [0, 2]))


def test_errors_of_the_step_pass_through_while_others_wait() -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        if repl.replica_id:
            raise KeyError("mine")
        repl.all_gather_object(1)
        return tf.constant(0)

    with pytest.raises(KeyError, match="mine"):
        repl.run(step)
    assert [int(v) for v in repl.run(lambda: repl.all_reduce(1))] == [2, 2]


def test_a_failed_exchange_leaves_later_steps_alone() -> None:
    repl = helpers.make(2)

    def bad() -> tf.Tensor:
        repl.all_gather_object(1, [repl.replica_id])
        return tf.constant(len(repl.all_gather_object(1)) if repl.replica_id else 0)

    with pytest.raises(replicator.MismatchError):
        repl.run(bad)
    good = repl.run(lambda: tf.constant(sum(repl.all_gather_object(1))))
    assert [int(v) for v in good] == [2, 2]
