# SPDX-License-Identifier: Apache-2.0
"""Programs that would make replicas drift apart, or deadlock, fail on all hosts."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def found(told: list[dict[str, Any]]) -> list[dict[str, list[str]]]:
    return [results["proofs"] for results in told]


@pytest.mark.parametrize(
    ("name", "kind", "parts"),
    [
        ("wrapped", "", ()),
        ("own data", "ContextError", ("not equal on all", "IteratorGetNext")),
        ("own argument", "ContextError", ("not equal on all replicas", "proven.py")),
        ("argument", "", ()),
        ("constant", "MismatchError", ("writes variables", "host 0 (", "host 1 (")),
        ("reduced", "", ()),
        ("count", "MismatchError", ("writes variables", "proven.py")),
        (
            "count, by a group",
            "InvalidArgumentError",
            ("replicas disagree in a conditional", "assign_add"),
        ),
        ("unseen write, by a group", "ContextError", ("drift apart", "proven.py")),
        ("written outside", "MismatchError", ("holds variables", "host 1 (")),
        ("equal again", "", ()),
        ("same elements", "", ()),
        ("same elements, repeated", "", ()),
        (
            "other elements",
            "InvalidArgumentError",
            ("read different elements", "proven.py", "host 0 read", "host 1 read"),
        ),
        ("other elements, repeated", "InvalidArgumentError", ("proven.py", "Fix: let")),
        ("other arrays", "MismatchError", ("reads a dataset", "int32[40] with")),
        (
            "other argument",
            "MismatchError",
            ("float32[] 1.5", "proven.py", "PerReplic"),
        ),
        ("argument of each", "", ()),
        ("circle", "DeadlockError", ("in a cycle", "replica 0", "replica 1")),
        ("function_circle", "DeadlockError", ("in a cycle", "replica 0", "replica 1")),
        ("conditional_circle", "DeadlockError", ("in a cycle", "proven.py")),
        ("loop_circle", "DeadlockError", ("in a cycle", "proven.py")),
        ("crossed", "DeadlockError", ("in a cycle", "send source=0", "all_reduce")),
        ("places", "MismatchError", ("at the top level", "inside a conditional")),
        (
            "disagree",
            "InvalidArgumentError",
            ("replicas disagree in a conditional", "replica 1 takes the true branch"),
        ),
        ("right", "", ()),
    ],
)
def test_all_hosts_say_the_same(found, name, kind, parts):
    for own in found:
        assert own[name][0] == kind, own[name]
        for part in parts:
            assert part in own[name][1], own[name]
    fixed = kind in ("", "InvalidArgumentError") or "Fix: " in found[0][name][1]
    assert fixed
