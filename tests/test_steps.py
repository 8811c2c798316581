"""Which functions count as the same step; the rest of Step is in test_replicator.py."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from replicator import steps


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
