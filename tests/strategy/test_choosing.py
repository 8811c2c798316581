# SPDX-License-Identifier: Apache-2.0
"""Variables are created where a strategy says, and follow its other choices."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import tensorflow as tf

import replicator
from replicator import strategy
from replicator.strategy import (
    PS,
    AllReduce,
    AllReduceSynchronizer,
    Builder,
    Node,
    PSLoadBalancing,
    PSSynchronizer,
    Sharded,
    Strategy,
)
from tests import helpers

CPUS = [f"/job:localhost/replica:0/task:0/device:CPU:{k}" for k in range(4)]


def _replicator(*cpus: int, **options: Any) -> replicator.Replicator:
    return replicator.Replicator([f"CPU:{k}" for k in cpus], **options)


class On(Builder):
    """All variables on one device."""

    def __init__(self, device: str, **options: Any) -> None:
        self.device, self.options = device, options

    def nodes(self, variables, resources):  # type: ignore[no-untyped-def]
        for variable in variables:
            yield Node(variable.path, PSSynchronizer(self.device, **self.options))


def test_keras_paths_are_those_of_keras() -> None:
    repl = helpers.make(2, strategy=AllReduce())
    with repl.context():
        model = tf.keras.Sequential(
            [tf.keras.Input([3]), tf.keras.layers.Dense(2), tf.keras.layers.Dense(1)]
        )
        model.build([None, 3])
    assert list(repl.strategy.by_name) == [v.path for v in model.trainable_variables]


def test_paths_are_told_apart() -> None:
    repl = helpers.make(2, strategy=AllReduce())
    with repl.context():
        variables = [tf.Variable(0.0) for _ in range(3)]
        with tf.name_scope("a"):
            variables.append(tf.Variable(0.0, name="w"))
    assert list(repl.strategy.by_name) == [
        "Variable",
        "Variable_1",
        "Variable_2",
        "a/w",
    ]
    del variables[1:3]
    with repl.context():
        variables.append(tf.Variable(0.0))
    assert "Variable_1" in repl.strategy.by_name


def test_only_floats_that_are_trained_are_asked_for() -> None:
    requests = []

    class Note(Builder):
        def nodes(self, variables, resources):  # type: ignore[no-untyped-def]
            for variable in variables:
                requests.append(variable)
                yield None

    repl = helpers.make(2, strategy=Note())
    with repl.context():
        tf.Variable(1.0, trainable=False)
        tf.Variable(1)
        tf.Variable(1.0, synchronization=tf.VariableSynchronization.ON_READ)
        v = tf.Variable([[1.0, 2.0]], name="v")
        w = tf.Variable([1.0, 2.0], name="w", dtype=tf.float64)
        optimizer = tf.keras.optimizers.Adam()
        optimizer.build([v, w])
    assert [(f.path, f.shape, f.dtype, f.order, f.nbytes) for f in requests] == [
        ("v", (1, 2), "float32", 0, 8),
        ("w", (2,), "float64", 1, 16),
    ]
    assert requests[0].trainable


@pytest.mark.battery(5)
@pytest.mark.parametrize("cpus", [(1, 2), (1,)])
@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_server_need_not_be_a_replica(mode: str, cpus: tuple[int, ...]) -> None:
    repl = _replicator(*cpus, strategy=On("CPU:3"))
    created: list[Any] = []

    def make_step() -> Any:
        v = tf.Variable([[1.0, 2.0]], name="v")
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.Adam(0.1))
        created[:] = [v, optimizer]

        def step_fn() -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(v * v) * (1.0 + repl.replica_id)
            optimizer.apply([tape.gradient(loss, v)], [v])
            return v.read_value()

        return step_fn

    actual = helpers.run(mode, repl, make_step, steps=3)
    v, optimizer = created
    if mode != "session":
        slots = [one.value for one in optimizer.variables if one.shape == (1, 2)]
        assert len(slots) == 2
        for variable in (v, *slots):
            assert {c.device for c in variable.components} == {CPUS[3]}
        assert repl.strategy.node("v") == Node("v", PSSynchronizer(CPUS[3]))
    mirrored = _replicator(*cpus, variables="mirrored")
    repl, before = mirrored, actual
    expected = helpers.run(mode, repl, make_step, steps=3)
    assert [x.tolist() for x in before] == [x.tolist() for x in expected]


def test_a_strategy_is_saved_and_followed(tmp_path: pathlib.Path) -> None:
    repl = helpers.make(3, strategy=PSLoadBalancing())

    def variables(repl: replicator.Replicator) -> list[Any]:
        with repl.context():
            new = [tf.Variable([[1.0] * k], name=f"v{k}") for k in (3, 2, 1)]
        assert [v.owner for v in new] == [0, 1, 2]
        return new

    originals = variables(repl)
    assert all(
        isinstance(v.description.synchronizer, PSSynchronizer) for v in originals
    )
    in_force = repl.strategy
    in_force.save(tmp_path / "s.pb")
    for source in (in_force, str(tmp_path / "s.pb"), tmp_path / "s.pb"):
        other = helpers.make(3, strategy=source)
        again = variables(other)
        assert other.strategy == in_force
        del again


def test_nodes_without_variables_are_an_error_at_the_first_build() -> None:
    nodes = [Node(name, AllReduceSynchronizer()) for name in ("v", "gone")]
    repl = helpers.make(2, strategy=Strategy(tuple(nodes)))
    with repl.context():
        v = tf.Variable(1.0, name="v")
    with pytest.raises(replicator.StrategyError, match="(?s)'gone'.*there is v"):
        repl.run(lambda: v + 1.0)


def test_each_graph_is_decided_on_by_itself() -> None:
    repl = helpers.make(2, strategy=PSLoadBalancing())
    owners = []
    for _ in range(2):
        with tf.Graph().as_default(), repl.context():
            variables = [tf.Variable([1.0] * k) for k in (2, 1)]
            owners.append([v.owner for v in variables])
            assert len(repl.strategy.nodes) == 2
    assert owners == [[0, 1], [0, 1]]
    assert repl.strategy.nodes == ()


def test_groups_and_rings_are_communicated_as_said() -> None:
    class Both(Builder):
        def nodes(self, variables, resources):  # type: ignore[no-untyped-def]
            for k, variable in enumerate(variables):
                spec = ("AUTO", "RING", "NCCL")[k % 3]
                how = AllReduceSynchronizer(spec, group=k // 3)
                yield Node(variable.path, how)

    repl = helpers.make(3, strategy=Both(), fusion=True, algorithm=None)
    with repl.context():
        made = [tf.Variable([1.0, 2.0]) for _ in range(6)]
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0))

    def step_fn() -> None:
        optimizer.apply([v * (1.0 + repl.replica_id) for v in made], made)

    repl.run(step_fn)
    for v in made:
        assert v.numpy().tolist() == [-1.0, -2.0]
    (row,) = repl.plan
    # NCCL is for GPUs: the first and the last of a group share a bucket.
    assert row.algorithm.split(", ").count("hub") in (1, 2)
    assert "ring" in row.algorithm
    policies = [v.policy for v in made]
    assert [p.bucket for p in policies] == ["0"] * 3 + ["1"] * 3
    assert [p.algorithm for p in policies] == [None, "ring", None] * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sync": False}, "(?s)sync=False for variable v.*--mode=async"),
        ({"staleness": 2}, "(?s)staleness=2 for variable v.*--mode=async"),
    ],
)
def test_one_process_steps_together(options: Any, said: str) -> None:
    repl = helpers.make(2, strategy=On("CPU:0", **options))
    with pytest.raises(replicator.StrategyError, match=said), repl.context():
        tf.Variable(1.0, name="v")


def test_a_device_that_does_not_exist_is_named() -> None:
    for name in ("CPU:99", "GPU:7", "nonsense"):
        repl = helpers.make(2, strategy=On(name))
        message = f"(?s)puts variable v on '{name}', but .*{name}.*Fix"
        with pytest.raises(replicator.DeviceError, match=message), repl.context():
            tf.Variable(1.0, name="v")


@pytest.mark.parametrize(
    ("compressor", "said"),
    [
        ("bf61", "names 'bf61', which is not a compressor.*Fix: use one of"),
        ("powersgd(rnak=4)", "'rnak', which is not an option of powersgd"),
        ("topk(ratio=2)", "topk was given ratio=2"),
        (object(), "its node was given compressor=<object"),
    ],
)
def test_a_compressor_that_there_is_not_is_refused_with_its_variable(
    compressor: Any, said: str
) -> None:
    for builder in (
        On("CPU:0", compressor=compressor),
        AllReduce(compressor=compressor),
    ):
        repl = helpers.make(2, strategy=builder)
        whole = f"(?s)the gradient of variable v, but .*{said}"
        with pytest.raises(replicator.StrategyError, match=whole), repl.context():
            tf.Variable(1.0, name="v")


@pytest.mark.parametrize("builder", [strategy.Mirrored, strategy.PartitionedPS])
def test_predictions_know_sparse_gradients_once_a_step_was_built(builder: Any) -> None:
    repl = helpers.make(2, strategy=builder())
    with repl.context():
        table = tf.Variable(tf.ones([1000, 4]), name="table")
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.1))
    before = repl.strategy.node("table")

    def step_fn() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [1, 2]))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    repl.run(step_fn)
    after = repl.strategy.node("table")
    assert 0 < after.sent < before.sent / 50  # a hundredth of the rows is assumed
    assert 0 < after.seconds < before.seconds


def test_the_strategy_in_force_is_that_of_the_variables() -> None:
    repl = helpers.make(2, variables="sharded")
    with repl.context():
        v, w = tf.Variable([[1.0, 2.0]], name="v"), tf.Variable(1.0, name="w")
    node = repl.strategy.node("v")
    assert node == Node("v", PSSynchronizer(CPUS[0]))
    assert (node.shape, node.dtype, node.nbytes) == ((1, 2), "float32", 8)
    assert (node.sent, node.seconds is not None) == (16, True)
    assert repl.strategy.node("w") == Node("w", AllReduceSynchronizer())
    assert repl.strategy.replicas == repl.devices
    text = str(repl.strategy)
    for said in ("variable", "float32[1, 2]", "8 B", "CPU:0", "PS", "mirrored", "none"):
        assert said in text
    del v, w


def test_a_table_is_plain_text_where_colors_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels of notebooks set this variable, and rich knows them."""
    repl = helpers.make(2, strategy=strategy.PS())
    with repl.context():
        tf.Variable(tf.zeros([2, 3]), name="w")
    plain = str(repl.strategy)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(repl.strategy) == plain
    assert "\x1b" not in plain


def test_what_a_builder_raises_comes_through() -> None:
    class Raises(Builder):
        def nodes(self, variables, resources):  # type: ignore[no-untyped-def]
            raise KeyError("mine")
            yield

    repl = helpers.make(2, strategy=Raises())
    with pytest.raises(KeyError, match="mine"), repl.context():
        tf.Variable(1.0)


class NoMethod(Builder):
    pass


class Forgot(Builder):
    def nodes(self, variables, resources):  # type: ignore[no-untyped-def]
        for variable in variables:
            Node(variable.path, AllReduceSynchronizer())
            break


class OnlyTheFirst(Builder):
    def nodes(self, variables, resources):  # type: ignore[no-untyped-def]
        yield Node(next(variables).path, AllReduceSynchronizer())


class OnlyTheFirstOfAll(Builder):
    def nodes(self, variables, resources):  # type: ignore[no-untyped-def]
        return [Node(v.path, AllReduceSynchronizer()) for v in list(variables)[:1]]


@pytest.mark.parametrize(
    "builder, problem",
    [
        (NoMethod(), "NoMethod has no method `nodes`.*Fix: define nodes"),
        (Forgot(), "`nodes` of Forgot returns None.*Fix: yield one Node"),
        (OnlyTheFirst(), "OnlyTheFirst yields nothing for variable w:.*Fix: yield one"),
        (OnlyTheFirstOfAll(), "OnlyTheFirstOfAll yields nothing for variable w:.*Fix"),
    ],
)
def test_a_builder_without_a_node_for_each_variable_is_refused(
    builder: Builder, problem: str
) -> None:
    repl = helpers.make(2, strategy=builder)

    def train() -> None:
        with repl.context():
            variables = [tf.Variable(1.0, name=name) for name in "vw"]
            optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0))
        ones = [tf.ones([])] * 2
        repl.run(lambda: optimizer.apply_gradients(zip(ones, variables, strict=True)))

    with pytest.raises(replicator.StrategyError, match=f"(?s){problem}"):
        train()


def test_slots_of_scalars_follow_their_variable() -> None:
    repl = helpers.make(2, strategy=PS())
    with repl.context():
        v = tf.Variable(1.0, name="v")
        optimizer = repl.wrap_optimizer(tf.compat.v1.train.AdagradOptimizer(0.1))
    repl.run(lambda: optimizer.apply_gradients([(tf.constant(1.0), v)]))
    (slot,) = optimizer.variables()
    assert v.owner == slot.owner == 0
    assert not repl.plan.notes


def test_what_no_rule_decides_is_as_variables_says() -> None:
    for variables, owner in (("mirrored", None), ("sharded", 0)):
        repl = helpers.make(2, variables=variables, strategy={"x": Sharded()})
        with repl.context():
            v = tf.Variable([[1.0]], name="y")
        assert v.owner == owner


def test_names_are_public() -> None:
    assert replicator.strategy is strategy
    assert all(hasattr(strategy, name) for name in strategy.__all__)
