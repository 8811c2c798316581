# SPDX-License-Identifier: Apache-2.0
"""A builder that is asked for one variable after the other answers as for all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from replicator import errors, strategy
from replicator.strategy import live
from replicator.strategy.nodes import Node
from replicator.variables.chooser import VariableFacts

RESOURCES = strategy.Resources(("CPU:0", "CPU:1", "CPU:2"))


def _asked(path: str, sparse: bool | None = False) -> live.Asked:
    return live.Asked(path, (4, 2), "float32", sparse=sparse, nbytes=32)


VARIABLES = [_asked(f"v{k}") for k in range(5)]


@pytest.mark.parametrize(
    "builder",
    [strategy.PS(), strategy.PSLoadBalancing(), strategy.AllReduce()],
    ids=str,
)
def test_nodes_are_those_of_all_at_once(builder: strategy.Builder) -> None:
    one_by_one = live.Live(builder, RESOURCES)
    found = [one_by_one.ask(facts) for facts in VARIABLES]
    assert found == list(builder.nodes(iter(VARIABLES), RESOURCES))


class _Sparse(strategy.Builder):
    """Asks whether gradients are sparse, and keeps any error to itself."""

    def nodes(self, variables: Iterable[Any], resources: Any) -> Iterator[Node]:
        for variable in variables:
            try:
                sparse = variable.sparse
            except Exception:
                sparse = False
            kind = strategy.PS() if sparse else strategy.AllReduce()
            yield from kind.nodes([variable], resources)


def test_facts_that_only_a_step_has_are_waited_for() -> None:
    with pytest.raises(live.Unknown):
        live.Live(_Sparse(), RESOURCES).ask(_asked("v", None))
    for sparse, builder in ((True, strategy.PS()), (False, strategy.AllReduce())):
        found = live.Live(_Sparse(), RESOURCES).ask(_asked("v", sparse))
        assert [found] == list(builder.nodes([_asked("v")], RESOURCES))


class _All(strategy.Builder):
    """Looks at all variables before it answers."""

    def nodes(self, variables: Iterable[Any], resources: Any) -> Iterator[Node]:
        yield from strategy.PS().nodes(list(variables), resources)


def test_who_looks_at_all_variables_waits_for_them() -> None:
    with pytest.raises(live.Unknown):
        live.Live(_All(), RESOURCES).ask(_asked("v"))


class _Text(strategy.Builder):
    def nodes(self, variables: Iterable[Any], resources: Any) -> Iterator[Any]:
        yield "everywhere"


def test_what_is_no_node_is_refused_and_none_is_none() -> None:
    with pytest.raises(errors.StrategyError, match="'everywhere'"):
        live.Live(_Text(), RESOURCES).ask(_asked("v"))


def test_known_facts_are_read_as_they_are() -> None:
    facts = _asked("v", None)
    assert (facts.path, facts.shape, facts.nbytes) == ("v", (4, 2), 32)
    assert VariableFacts("v", (4, 2), "float32").sparse is None
    with pytest.raises(live.Unknown):
        _ = facts.sparse


def test_printing_and_comparing_facts_ask_for_nothing() -> None:
    facts, plain = _asked("v", None), VariableFacts("v", (4, 2), "float32", nbytes=32)
    assert repr(facts) == str(facts) == repr(plain)
    assert facts == plain and facts == _asked("v", None) and facts != _asked("w", None)
    assert facts in {plain} and facts != 1
