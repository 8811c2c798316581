"""Which functions count as the same step, and plans; more is in test_replicator.py."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import tensorflow as tf

import replicator
from replicator import steps
from tests import helpers


class _Thing:
    def method(self) -> None:
        """Does nothing."""


def _holding(value: Any) -> Any:
    return lambda: value


def test_bound_methods_are_comparable_by_equality() -> None:
    one, two = _Thing(), _Thing()
    assert steps.comparable(one.method) == steps.comparable(one.method)
    assert steps.comparable(one.method) != steps.comparable(two.method)


def test_partials_are_comparable_by_what_they_are_made_of() -> None:
    def partial(*args: Any, **keywords: Any) -> Any:
        return steps.comparable(functools.partial(_holding, *args, **keywords))

    assert partial(1) == partial(1)
    assert partial(1) != partial(2)
    assert partial(value=1) == partial(value=1) != partial(value=2)


def test_functions_are_comparable_by_identity_unless_asked_by_content() -> None:
    value = object()
    one, two, other = _holding(value), _holding(value), _holding(object())
    assert steps.comparable(one) != steps.comparable(two)
    by_content = functools.partial(steps.comparable, by_content=True)
    assert by_content(one) == by_content(two) != by_content(other)


@pytest.mark.parametrize("by_content", [False, True])
def test_defaults_and_unhashable_arguments_tell_functions_apart(
    by_content: bool,
) -> None:
    functions = [lambda k=k: k for k in ("a", "b")]
    functions += [lambda *, k=k: k for k in ("a", "b")]
    functions += [functools.partial(_holding, [k]) for k in (1, 2)]
    keys = [steps.comparable(f, by_content) for f in functions]
    assert len(set(keys)) == len(functions)


def test_a_function_that_waits_for_its_variable_is_comparable() -> None:
    def recursive() -> Any:
        return later

    assert hash(steps.comparable(recursive, by_content=True))
    later = recursive
    assert later() is recursive


# --- Plans ----------------------------------------------------------------------------


def test_the_plan_of_a_step_is_made_without_running_it() -> None:
    repl = helpers.make(2)
    ran = []

    def step() -> Any:
        tf.py_function(lambda: ran.append(1), [], [])
        return repl.all_reduce(helpers.opaque(1.0))

    built = repl.build(step)
    assert [row.primitive for row in built.plan] == ["all_reduce"]
    assert built.plan is built.plan
    assert not ran
    assert built()[0].numpy() == 2.0
    assert len(ran) == 2


def test_a_step_in_a_graph_has_a_plan_once_it_is_built() -> None:
    repl = helpers.make(2)
    with tf.Graph().as_default():
        built = repl.build(lambda: repl.broadcast(1.0))
        with pytest.raises(replicator.ContextError) as caught:
            _ = built.plan  # asked for here
        message = str(caught.value)
        assert "the plan of a step was asked for before the step was built" in message
        assert f"{__file__.rpartition('/')[2]}:" in message
        assert "Fix: call the step first, which builds it into the graph" in message
        built()
        assert [row.primitive for row in built.plan] == ["broadcast"]
