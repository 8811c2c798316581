# SPDX-License-Identifier: Apache-2.0
"""Random programs compute what plain TensorFlow does, and wrong ones are refused.

A failing program is shrunk, and printed.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import strategies as st

import replicator
from tests import helpers
from tests.programs import drawn, elementwise, mistakes, runner, ways

_BY = [elementwise.by_tape, elementwise.by_tf_gradients, elementwise.by_persistent_tape]


@st.composite
def _cases(draw: Any) -> tuple[drawn.Text, ways.Way, elementwise.Differentiate, int]:
    """Draws a program, a way, how it is differentiated and how often."""
    text, order = draw(drawn.texts()), draw(st.sampled_from([1, 1, 1, 2]))
    return text, draw(st.sampled_from(ways.WAYS)), draw(st.sampled_from(_BY)), order


def _check(case: tuple[drawn.Text, ways.Way, Any, int]) -> None:
    text, way, by, order = case
    runner.check(text.program(by, order), way)


def _check_refused(wrong: mistakes.Wrong) -> None:
    """Asserts that a program raises the expected error, and that it names the line."""
    program, error = wrong.text.program(elementwise.by_tape), wrong.change.error
    with pytest.raises(error) as caught:
        runner.outcome(program, "eager", helpers.make(wrong.count, build="trace"))
    message = str(caught.value)
    assert type(caught.value) is error, message
    assert re.search(wrong.change.says, message), message
    if issubclass(error, replicator.ReplicatorError):
        named = r"replica \d.*(program|elementwise)\.py:\d+ in .*\nFix: "
        assert re.search(named, message, re.S), message


def test_programs() -> None:
    assert drawn.for_all(_cases(), _check, 12, seed=0) >= 12


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_many_programs(seed: int) -> None:
    drawn.for_all(_cases(), _check, 100, seed)


@pytest.mark.battery(4)
@pytest.mark.parametrize("kind", mistakes.KINDS)
def test_wrong_programs(kind: str) -> None:
    drawn.for_all(mistakes.wrong_programs(kind), _check_refused, 3, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", mistakes.KINDS)
def test_many_wrong_programs(kind: str) -> None:
    drawn.for_all(mistakes.wrong_programs(kind), _check_refused, 30, seed=1)


def test_a_wrong_result_is_found() -> None:
    """One replica computes something else."""
    text = drawn.Text(
        (
            "def program(world, x):",
            "    if getattr(world, 'repl', None) and world.repl.replica_id == 1:",
            "        x = 2.0 * x",
            "    return world.all_reduce(x)",
        )
    )
    way = ways.reference(2)
    with pytest.raises(pytest.fail.Exception, match=r"^replicas compute what plain"):
        runner.check(text.program(elementwise.by_tape), way)
