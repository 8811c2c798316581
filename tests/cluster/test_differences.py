# SPDX-License-Identifier: Apache-2.0
"""The description of two different values is the first part in which they differ."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from replicator.cluster import differences

CASES = {
    "a fact": ({"a": 1, "b": 2}, {"a": 1, "b": 3}, ("b=2", "b=3")),
    "a fact that one lacks": ({"a": 1, "b": 2}, {"a": 1}, ("b=2", "no b")),
    "a fact that the other lacks": ({"a": 1}, {"a": 1, "b": None}, ("no b", "b=None")),
    "an entry": ([1, [2, "x"]], [1, [3, "x"]], ("2, x", "3, x")),
    "a plain entry": (["one", "two"], ["one", "2"], ("'two'", "'2'")),
    "how many": ([1, 2, 3], [1, 2], ("3 of them", "2 of them")),
    "of two types": ({"a": 1}, [1], ("{'a': 1}", "[1]")),
    "a number": (1, 2, ("1", "2")),
    "text and none": ("one", None, ("'one'", "None")),
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_difference_is_shown(name: str) -> None:
    one, other, message = CASES[name]
    assert differences.describe(one, other) == message
    assert differences.describe(*map(_through_json, (one, other))) == message


def _through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_values_that_differ_are_shown_differently() -> None:
    """For any values: otherwise nobody would see the problem."""
    values = [None, 0, 1, "x", [], [1], [1, "x"], [[1]], {}, {"a": 1}, {"a": [1]}]
    values += [{"a": 1, "b": None}, {"b": None, "a": 1, "c": 2}]
    for one, other in itertools.permutations(values, 2):
        first, second = differences.describe(one, other)
        assert first != second, (one, other)
