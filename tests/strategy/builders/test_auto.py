# SPDX-License-Identifier: Apache-2.0
"""Auto chooses the fastest prediction, based on rates alone."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

import replicator
from replicator.costs import rates
from replicator.strategy import (
    AllReduceSynchronizer,
    Auto,
    Node,
    PSSynchronizer,
    Resources,
    Strategy,
    VariableFacts,
    predictions,
)
from tests import helpers

_QUICK = hypothesis.settings(max_examples=60, deadline=None)
# Devices that share cores, and devices that work at the same time, as in rates.py.
_SHARED = rates.Rates(1e-7, 2e-6, 0.0, 1e-10, 5e-10, False)
_APART = rates.Rates(1e-6, 1e-5, 1e-10, 1e-10, 1e-12, True)


def _devices(kind: str, count: int) -> tuple[str, ...]:
    return tuple(
        f"/job:worker/replica:0/task:{n}/device:CPU:0"
        if kind == "hosts"
        else f"/job:localhost/replica:0/task:0/device:{kind}:{n}"
        for n in range(count)
    )


def _resources(kind: str, count: int, **rated: rates.Rates) -> Resources:
    calibration = rates.Calibration(rated)
    return Resources(_devices(kind, count), calibration=calibration)


def _facts(
    shape: Sequence[int], path: str = "w", sparse: bool | None = False, **known: Any
) -> VariableFacts:
    nbytes = 4 * math.prod(shape)
    return VariableFacts(
        path, tuple(shape), "float32", sparse=sparse, nbytes=nbytes, **known
    )


def _node(facts: VariableFacts, resources: Resources, **options: Any) -> Node:
    node = Auto(**options).build([facts], resources).node("w")
    assert node is not None
    return node


def test_what_shares_cores_is_updated_once() -> None:
    resources = _resources("CPU", 2, cpu=_SHARED)
    for shape in ((64, 64), (1000, 1000), (3,)):
        node = _node(_facts(shape), resources)
        assert isinstance(node.synchronizer, PSSynchronizer)


def test_what_works_at_the_same_time_shares_large_updates() -> None:
    resources = _resources("GPU", 4, gpu=_APART)
    small, large = (_node(_facts(s), resources) for s in ((8, 8), (4000, 4000)))
    assert small == Node("w", AllReduceSynchronizer())
    assert large.sizes == (1000, 1000, 1000, 1000)
    there = [part.synchronizer.reduction_destination for part in large.parts]
    assert tuple(there) == resources.devices
    whole = _node(_facts((4000, 4000), whole=True), resources)
    assert not whole.parts
    # Where joining parts costs more than updating them, there are none.
    costly = rates.Rates(*(1e-6, 1e-5, 1e-10, 1e-10, 1e-8), True)
    other = _node(_facts((4000, 4000)), _resources("GPU", 4, gpu=costly))
    assert not other.parts


def test_each_owner_has_about_as_much_and_biases_are_beside_their_weights() -> None:
    facts = [
        _facts(shape, f"v{n}")
        for n, shape in enumerate(((9, 9), (9,), (9, 9), (9,), (18, 9), (9, 18), ()))
    ]
    built = Auto().build(facts, _resources("CPU", 2, cpu=_SHARED))
    devices = _devices("CPU", 2)
    owners = [
        devices.index(node.synchronizer.reduction_destination) for node in built.nodes
    ]
    assert owners == [0, 0, 1, 1, 0, 1, 1]


def test_one_replica_or_several_programs_mirror() -> None:
    for resources in (
        _resources("CPU", 1, cpu=_SHARED),
        Resources(_devices("hosts", 3), one_program=False),
    ):
        node = _node(_facts((4000, 400), sparse=True), resources)
        assert node == Node("w", AllReduceSynchronizer())


_SHAPES = st.lists(st.integers(0, 5000), max_size=3)
_RATES = st.builds(
    rates.Rates, *[st.floats(0, 1) for _ in range(5)], apart=st.booleans()
)


@_QUICK
@hypothesis.given(
    st.lists(st.tuples(_SHAPES, st.sampled_from([None, False, True]), st.booleans())),
    st.sampled_from(["CPU", "GPU", "hosts"]),
    st.integers(1, 5),
    st.dictionaries(st.sampled_from(rates.KINDS), _RATES),
    st.integers(0, 3),
)
def test_any_variables_have_nodes(
    drawn: Any, kind: str, count: int, rated: Any, slots: int
) -> None:
    facts = [
        _facts(shape, f"v{n}", sparse, whole=whole)
        for n, (shape, sparse, whole) in enumerate(drawn)
    ]
    built = Auto(slots).build(facts, _resources(kind, count, **rated))
    assert list(built.by_name) == [one.path for one in facts]
    for one, node in zip(facts, built.nodes, strict=True):
        assert node.seconds is not None and math.isfinite(node.seconds)
        assert not (node.parts and one.whole)
        _resembles_no_cheaper(one, node, _resources(kind, count, **rated), slots)
    assert Strategy.from_bytes(built.to_bytes()) == built


def _resembles_no_cheaper(
    facts: VariableFacts, node: Node, resources: Resources, slots: int
) -> None:
    """No node with all-reduce is predicted to be faster than Auto's."""
    other = predictions.predicted(
        Node(facts.path, AllReduceSynchronizer()),
        *(facts.shape, facts.nbytes, resources, bool(facts.sparse)),
        predictions.Assumed(slots),
    )
    assert node.seconds <= other.seconds  # type: ignore[operator]


@_QUICK
@hypothesis.given(
    st.sampled_from(["CPU", "GPU", "hosts"]),
    st.integers(2, 6),
    st.integers(1, 10**7),
    st.integers(1, 10**7),
    st.booleans(),
    _RATES,
)
def test_predictions_grow_with_bytes_and_replicas(
    kind: str, count: int, rows: int, more: int, sparse: bool, drawn: Any
) -> None:
    rated = {"cpu": drawn, "gpu": drawn, "hosts": drawn}
    first, second = _devices(kind, 2)
    servers = [PSSynchronizer(first), PSSynchronizer(second)]
    for node in (
        Node("w", AllReduceSynchronizer()),
        Node("w", AllReduceSynchronizer("RING")),
        Node("w", servers[0]),
        Node("w", PSSynchronizer(first, local_replication=True)),
        Node("w", parts=[Node("p", how) for how in servers], axis=0),
    ):

        def seconds(rows: int, count: int, node: Node = node) -> float:
            resources = _resources(kind, count, **rated)
            shape = rows + 1, 8
            actual = predictions.predicted(
                node, shape, 32 * shape[0], resources, sparse
            )
            assert actual.seconds is not None
            return actual.seconds * (1 + 1e-12)

        few = seconds(rows, count)
        assert few <= seconds(rows + more, count) * (1 + 1e-9)
        assert few <= seconds(rows, count + 1) * (1 + 1e-9)


def _language_model(repl: replicator.Replicator) -> Any:
    with repl.context():
        table = tf.Variable(tf.reshape(tf.range(2e3), [-1, 2]) / 1e3, name="table")
        kernel = tf.Variable([[0.5], [-0.25]], name="kernel")
        bias = tf.Variable([0.1], name="bias")
        wrapped = repl.wrap_optimizer(tf.keras.optimizers.Adam(0.1))
    variables = [table, kernel, bias]

    def step_fn() -> Any:
        ids = tf.constant([1, 3]) + repl.replica_id
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.gather(table, ids) @ kernel + bias) ** 2)
        gradients = tape.gradient(loss, variables)
        wrapped.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step_fn, variables


# Rates that make Auto share cores, split variables, and wait for the layout of
# gradients: by the rows that a step touches, the table of _language_model should not be
# split; by its full size, it should be.
_FILES = {
    "shared": {"add": 1e-9, "apart": False},
    "parts": {"add": 1e-9, "apart": True},
    "waits": {"add": 1e-9, "op": 1e-6, "apart": True},
}


@pytest.mark.battery(5)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("kind", list(_FILES))
def test_results_are_those_without(
    kind: str, count: int, tmp_path: pathlib.Path
) -> None:
    nothing = {"op": 0.0, "message": 0.0, "link": 0.0, "copy": 0.0}
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"rates": {"cpu": {**nothing, **_FILES[kind]}}}))
    results = []
    for options in ({}, {"strategy": Auto(), "calibration": path}):
        repl = helpers.make(count, **options)
        step_fn, variables = _language_model(repl)
        if options and count > 1:
            waits = kind == "waits"
            assert getattr(variables[0], "parts", ()) or kind != "parts"
            assert [v.description.undecided for v in variables] == [waits] * 3
        losses = [list(repl.run(step_fn)) for _ in range(3)]
        results.append([*np.ravel(losses), *(v.numpy() for v in variables)])
    assert not any(v.description.undecided for v in variables)
    if count > 1:
        node = repl.strategy.node("table")
        assert node is not None and node.seconds is not None
        assert bool(node.parts) == (kind == "parts")
        if kind == "waits":
            assert node.synchronizer == AllReduceSynchronizer()
            assert node.sent is not None and node.nbytes is not None
            assert node.sent < node.nbytes  # only rows are sent
    for one, two in zip(*results, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-7)


def test_the_table_has_the_prediction() -> None:
    repl = helpers.make(2, strategy=Auto())
    step_fn, _ = _language_model(repl)
    repl.run(step_fn)
    resources = repl._resources
    facts = [
        VariableFacts(n.name, n.shape, n.dtype, True, n.name == "table", 0, n.nbytes)  # type: ignore[arg-type]
        for n in repl.strategy.nodes
    ]
    prediction = repl._settings.chooser.run.known("table")[0]  # type: ignore[union-attr]
    nodes = repl.strategy.nodes
    known = [(prediction and bool(one.sparse), predictions.Assumed()) for one in facts]
    expected = predictions.predicted_together(nodes, resources, known)
    assert [node.seconds for node in nodes] == [node.seconds for node in expected]
    assert "predicted" in str(repl.strategy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": -1}, "slots=-1.*an int from 0"),
        ({"slots": 1.5}, "slots=1.5.*an int from 0"),
        ({"rows": 0}, "rows=0.*more than 0, at most 1"),
        ({"rows": float("nan")}, "rows=nan.*more than 0"),
        ({"rows": "a"}, "rows='a'.*more than 0"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(replicator.StrategyError, match="(?s)Auto was given " + message):
        Auto(**options)
