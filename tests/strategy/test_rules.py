# SPDX-License-Identifier: Apache-2.0
"""Rules: the first pattern that matches a variable's path decides."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import replicator
from replicator.strategy import PS, AllReduce, Mirrored, Partitioned, Rules, Sharded
from tests import helpers
from tests.strategy.builders.test_builders import RESOURCES, facts


def _variables(repl: replicator.Replicator, *names: str) -> list[Any]:
    with repl.context():
        return [tf.Variable([[1.0, 2.0]], name=name) for name in names]


def test_the_first_pattern_that_is_found_decides() -> None:
    repl = helpers.make(
        3,
        variables="mirrored",
        strategy={"embed": PS(), r"d.*/k": Sharded(), "kernel": Mirrored()},
    )
    made = _variables(repl, "embeddings/kernel", "d/kernel", "c/kernel", "d/k", "bias")
    assert [v.owner for v in made] == [0, 0, None, 1, None]
    assert list(repl.strategy.by_name) == [
        "embeddings/kernel",
        "d/kernel",
        "c/kernel",
        "d/k",
        "bias",
    ]


def test_each_builder_sees_its_own_variables_only() -> None:
    variables = facts((2,), (3,), (4,), (5,))
    rules = Rules({"v[02]": AllReduce(chunk_size=1), "v1": AllReduce(chunk_size=1)})
    nodes = rules.build(variables, RESOURCES).nodes
    assert [(node.name, node.synchronizer.group) for node in nodes] == [
        ("v0", 0),
        ("v1", 0),
        ("v2", 1),
    ]
    repl = helpers.make(2, strategy=rules)
    with repl.context():
        made = [tf.Variable([1.0], name=f"v{k}") for k in (0, 1, 2)]
    assert [v.description.synchronizer.group for v in made] == [0, 0, 1]


@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_pattern_that_is_found_nowhere_is_an_error_at_the_first_build(
    mode: str,
) -> None:
    repl = helpers.make(2, strategy={"kernel": Sharded(), "embeding": PS()})

    def make_step() -> Any:
        kernel = tf.Variable([[1.0]], name="dense/kernel")
        bias = tf.Variable([[1.0]], name="dense/bias")
        return lambda: repl.all_reduce(kernel * bias)

    with pytest.raises(
        replicator.StrategyError,
        match="(?s)'embeding'.*there is dense/kernel.*there is dense/bias.*Fix",
    ):
        helpers.run(mode, repl, make_step)


def test_a_rule_behind_a_more_general_one_is_an_error_at_the_first_build() -> None:
    repl = helpers.make(2, strategy={"dense": PS(), "kernel": Sharded()})
    kernel, *_ = _variables(repl, "dense/kernel", "dense/bias")
    with pytest.raises(
        replicator.StrategyError,
        match="(?s)rule of 'kernel' never applies.*'dense', which comes before it"
        ".*both are found in dense/kernel.*Fix: put the more general pattern last",
    ):
        repl.run(lambda: repl.all_reduce(kernel.read_value()))


def test_patterns_that_overlap_or_leave_nothing_to_the_last_are_right() -> None:
    paths = ["one/kernel", "one/bias", "two/kernel"]
    for patterns in (["one", "kernel"], ["kernel", "bias", ".*"], ["one", "two", ""]):
        rules = Rules({pattern: PS() for pattern in patterns})
        assert rules.hidden(paths) == () == rules.missing(paths)
    assert Rules({"one": PS(), "one/k": PS(), "b": PS(), ".*": PS()}).hidden(paths) == (
        ("one/k", "one"),
        ("b", "one"),
    )


def test_a_step_without_variables_finds_nothing_missing() -> None:
    repl = helpers.make(2, strategy={"kernel": Sharded()})
    assert float(repl.run(lambda: repl.all_reduce(1.0))[0]) == 2.0
    _variables(repl, "kernel")
    assert float(repl.run(lambda: repl.all_reduce(2.0))[0]) == 4.0


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"(": PS()}, r"pattern '\(' is not a regular expression.*Fix"),
        ({3: PS()}, "pattern 3"),
        ({b"x": PS()}, "it is not a str"),
        ({"x": PS}, "Call it: a builder is an object"),
        ({"x": "sharded"}, "the rule of 'x' is 'sharded', which is not a builder"),
        ({"x": {"y": PS()}}, "the rule of 'x'"),
        ({"x": Rules({})}, "the rule of 'x'"),
    ],
)
def test_what_is_no_rule_is_refused(rules: Any, said: str) -> None:
    with pytest.raises(replicator.StrategyError, match=f"(?s){said}"):
        helpers.make(2, strategy=rules)


@pytest.mark.parametrize("given", [3, ["x"], PS, object(), True])
def test_what_is_no_strategy_is_refused(given: Any) -> None:
    with pytest.raises(
        replicator.StrategyError, match="(?s)strategy=.*Fix: pass a builder"
    ):
        helpers.make(2, strategy=given)


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ("PartitionedPS", r"strategy=replicator.strategy.PartitionedPS\(\)"),
        ("RandomAxisPartitionAR", "pass the builder"),
        ("sharded", "variables='sharded'"),
    ],
)
def test_a_name_in_place_of_a_builder_is_refused(given: str, fix: str) -> None:
    with pytest.raises(replicator.StrategyError, match=f"(?s)no file.*Fix: .*{fix}"):
        helpers.make(2, strategy=given)


def test_an_axis_that_a_variable_lacks_is_named() -> None:
    repl = helpers.make(2, strategy={"bias": Partitioned(axis=2)})
    with pytest.raises(replicator.StrategyError, match="(?s)bias.*axis 2"):
        _variables(repl, "bias")
