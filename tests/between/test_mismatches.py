# SPDX-License-Identifier: Apache-2.0
"""Hosts whose programs differ: every host reports both lines, and continues.

Each function of CASES takes a Replicator of two replicas and the host's number. On host
1 it does something else than on host 0, or something that is refused.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import replicator
from replicator import Replicator
from tests.between import processes

Case = Callable[[Replicator, int], None]
CASES: dict[str, Case] = {}
# The error on both hosts and parts of its message; of host 1 alone, and of host 0's.
_SAID: dict[str, tuple[str, ...]] = {}
_FAILED: dict[str, tuple[str, ...]] = {}


def case(table: dict[str, tuple[str, ...]], *said: str) -> Callable[[Case], Case]:
    """Adds a program, with the error's class and parts of its message."""

    def register(function: Case) -> Case:
        CASES[function.__name__], table[function.__name__] = function, said
        return function

    return register


@case(_SAID, "MismatchError", "call 1 of replica 1 has no partner", "replica 0: 1 call")
def number_of_calls(repl: Replicator, host: int) -> None:
    def step_fn() -> tf.Tensor:
        x = repl.all_reduce(tf.zeros([2]))
        return repl.all_reduce(x) if host else x

    repl.run(step_fn)


@case(_SAID, "MismatchError", "not the same shape (float32[2] and float32[3])")
def shape(repl: Replicator, host: int) -> None:
    repl.run(lambda: repl.all_reduce(tf.zeros([2 + host])))


@case(_SAID, "MismatchError", "not the same op", "op=sum", "op=max")
def reduction(repl: Replicator, host: int) -> None:
    repl.run(lambda: repl.all_reduce(tf.zeros([2]), "max" if host else "sum"))


@case(
    _SAID,
    "MismatchError",
    "at the top level on replica 0, inside a conditional on replica 1",
)
def conditional(repl: Replicator, host: int) -> None:
    def step_fn() -> tf.Tensor:
        x = tf.ones([2])
        if host:
            return tf.cond(x[0] > 0.0, lambda: repl.all_reduce(x), lambda: x)
        return repl.all_reduce(x)

    repl.run(step_fn)


@case(_SAID, "MismatchError", "v:0.assign_add and w:0.assign_add")
def variable(repl: Replicator, host: int) -> None:
    with repl.context():
        v, w = tf.Variable(1.0, name="v"), tf.Variable(1.0, name="w")
    repl.run(lambda: (w if host else v).assign_add(repl.replica_id + 1.0))


@case(
    _SAID,
    "MismatchError",
    "every host creates a variable",
    ": '(3,)' at ",
    ": '(4,)' at ",
    "Fix: create the",
)
def new_variable(repl: Replicator, host: int) -> None:
    with repl.context():
        tf.Variable(tf.zeros([3 + host]), name="kernel")


@case(_FAILED, "KeyError", "in step_fn", "KeyError: 'no such feature'")
def step_fn_raises(repl: Replicator, host: int) -> None:
    def step_fn() -> tf.Tensor:
        if host:
            raise KeyError("no such feature")
        return repl.all_reduce(1.0)

    repl.run(step_fn)


@case(_FAILED, "OSError", "in input_fn: OSError: no such file")
def input_fn_raises(repl: Replicator, host: int) -> None:
    def input_fn(ctx: replicator.InputContext) -> tf.data.Dataset:
        if host:
            raise OSError("no such file")
        return tf.data.Dataset.range(4)

    repl.run(lambda x: repl.all_reduce(x), input_fn)


@case(
    _SAID,
    "MismatchError",
    "the hosts do different things",
    "host 0 (127",
    "creates a variable at",
)
def one_step_more(repl: Replicator, host: int) -> None:
    if host:
        repl.run(lambda: repl.all_reduce(1.0))
    with repl.context():
        tf.Variable(1.0)


@case(_SAID, "MismatchError", "builds first at", "builds second at")
def another_step(repl: Replicator, host: int) -> None:
    def first() -> tf.Tensor:
        return repl.all_reduce(1.0)

    def second() -> tf.Tensor:
        return repl.all_reduce(1.0)

    repl.run(second if host else first)


@case(
    _SAID,
    "MismatchError",
    ": fusion=True at ",
    ": fusion=False at ",
    "the same arguments",
)
def options(repl: Replicator, host: int) -> None:
    Replicator(fusion=not host)


@case(_FAILED, "DeviceError", "DeviceError: no device of host 1 (127")
def devices(repl: Replicator, host: int) -> None:
    Replicator(repl.devices[: 2 - host])


@case(_FAILED, "DeviceError", "on /job:worker/", "of another host's program")
def device_of_another(repl: Replicator, host: int) -> None:
    def step_fn() -> tf.Tensor:
        with tf.device(repl.devices[0]):
            return repl.all_reduce(tf.square(1.0 + tf.constant([1.0])))

    repl.run(step_fn)


@case(_FAILED, "DeviceError", "on /job:worker/", "of another host's program")
def device_of_another_in_a_function(repl: Replicator, host: int) -> None:
    @tf.function
    def squared() -> tf.Tensor:
        with tf.device(repl.devices[0]):
            return tf.square(1.0 + tf.constant([1.0]))

    repl.run(lambda: repl.all_reduce(squared()))


@case(_SAID, "MismatchError", "reads a dataset, and they differ", ": 4 at ", ": 6 at ")
def dataset(repl: Replicator, host: int) -> None:
    repl.run(lambda x: repl.all_reduce(x), tf.data.Dataset.range(4 + 2 * host))


@case(_SAID, "ReplicatorError", "string cannot cross hosts in between-graph mode")
def strings(repl: Replicator, host: int) -> None:
    repl.run(lambda: repl.broadcast(tf.constant("text"), root=0))


@case(
    _SAID,
    "ReplicatorError",
    "a tensor of unknown rank cannot cross hosts",
    "tensor.set_shape([",
)
def unknown_rank(repl: Replicator, host: int) -> None:
    @tf.function(input_signature=[tf.TensorSpec(None)])
    def reduced(x: tf.Tensor) -> tf.Tensor:
        return repl.all_reduce(x)

    repl.run(lambda: reduced(tf.ones([2])))


@case(
    _SAID, "ContextError", "built into a tf.Graph", "step_fn: ", "or in a tf.function"
)
def in_a_graph(repl: Replicator, host: int) -> None:
    with tf.Graph().as_default():
        repl.run(lambda: repl.all_reduce(1.0))


@case(_SAID, "InputError", 'remainder="pad" cannot fill', "without an InputContext")
def padded(repl: Replicator, host: int) -> None:
    repl.run(
        lambda x: repl.all_reduce(x),
        lambda ctx: tf.data.Dataset.range(4).batch(2),
        remainder="pad",
    )


@case(
    _SAID,
    "ArgumentError",
    "was given a list that holds a PurePosixPath, which cannot be sent to",
    "Fix: pass None, booleans, numbers",
)
def an_object(repl: Replicator, host: int) -> None:
    repl.run(lambda: len(repl.all_gather_object([pathlib.PurePath("/")])))


def mismatches(cluster: Any) -> dict[str, Any]:
    """Returns each case's error, its time, and a correct step's result afterwards."""
    repl = Replicator(cluster.devices)
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        repl.run(lambda: repl.all_reduce(0.0))  # all begin at once
        began = time.monotonic()
        try:
            case(repl, cluster.host_id)
            told = ["nothing", ""]
        except Exception as error:
            told = [type(error).__name__, str(error)]
        seconds = time.monotonic() - began
        try:
            after = float(repl.run(lambda: repl.all_reduce(21.0))[0])
        except Exception as error:
            after = repr(error)
        results[name] = [*told, seconds, after]
    return results


def clash(cluster: Any, kind: str) -> list[Any]:
    """One host runs a step while the other runs another, or builds one.

    Returns:
        The error's class, its message, and the seconds until then.
    """
    repl = Replicator(cluster.devices)
    first = repl.build(lambda: repl.all_reduce(1.0))
    second = repl.build(lambda: repl.all_reduce(tf.ones([3])))
    first()
    if kind == "runs":
        second()
        first()
    began = time.monotonic()
    try:
        (second if cluster.host_id else first)()
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic() - began]
    return ["nothing"]


# --- Tests ----------------------------------------------------------------------------


_LIMIT = 5.0  # seconds; takes a tenth of one on an idle machine
_HERE = "tests/between/test_mismatches.py:"


@pytest.fixture(scope="module")
def found(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each host's errors, by the names of the cases."""
    return [results["test_mismatches.mismatches"] for results in told]


@pytest.mark.parametrize("name", _SAID)
def test_both_hosts_raise(found: list[dict[str, Any]], name: str) -> None:
    kind, *message = _SAID[name]
    for own in found:
        raised, text, seconds, after = own[name]
        assert raised == kind, text
        assert [part for part in message if part not in text] == [], text
        assert text.count(_HERE) >= (2 if kind == "MismatchError" else 1), text
        assert seconds < _LIMIT
        assert after == 42.0, "a right step works afterwards"


@pytest.mark.parametrize("name", _FAILED)
def test_one_host_fails(found: list[dict[str, Any]], name: str) -> None:
    kind, *message = _FAILED[name]
    (raised, text, seconds, after), own = (host[name] for host in found)
    assert raised == "MismatchError"
    expected = [
        ") failed where the others continue",
        "host 1 (127",
        f"failed at {_HERE}",
    ]
    assert [part for part in expected + message if part not in text] == [], text
    assert own[0] == kind
    assert max(seconds, own[2]) < _LIMIT
    assert after == own[3] == 42.0, "a right step works afterwards"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["builds", "runs"])
def test_hosts_that_would_wait_for_one_another(kind: str) -> None:
    """Host 0 runs a step that was built; host 1 builds another, or runs it."""
    results = processes.run("test_mismatches.clash", [1, 1], kind)
    for own, (raised, text, seconds) in enumerate(results):
        assert raised == "MismatchError", text
        assert "would wait for one another forever" in text
        assert f"  host {own} (127.0.0.1:" in text.splitlines()[1]
        assert "Fix: run the same steps on every host" in text
        assert f": runs {_HERE}" in text
        assert text.count(_HERE) == 2
        assert seconds < _LIMIT
