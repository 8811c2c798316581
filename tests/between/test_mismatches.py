# SPDX-License-Identifier: Apache-2.0
"""Hosts whose programs differ: every host reports both lines, and continues."""

from __future__ import annotations

from typing import Any

import pytest

from tests.between import mismatched, processes

_LIMIT = 5.0  # seconds; takes a tenth of one on an idle machine
_HERE = "tests/between/mismatched.py:"
# The error on both hosts, and its message, without a line of each.
_SAID: dict[str, tuple[str, list[str]]] = {
    "number_of_calls": (
        "MismatchError",
        ["call 1 of replica 1 has no partner", "replica 0: 1 call"],
    ),
    "shape": ("MismatchError", ["not the same shape (float32[2] and float32[3])"]),
    "reduction": ("MismatchError", ["not the same op", "op=sum", "op=max"]),
    "conditional": (
        "MismatchError",
        ["at the top level on replica 0, inside a conditional on replica 1"],
    ),
    "variable": ("MismatchError", ["v:0.assign_add and w:0.assign_add"]),
    "new_variable": (
        "MismatchError",
        [
            "every host creates a variable",
            ": '(3,)' at ",
            ": '(4,)' at ",
            "Fix: create the",
        ],
    ),
    "one_step_more": (
        "MismatchError",
        ["the hosts do different things", "host 0 (127", "creates a variable at"],
    ),
    "another_step": ("MismatchError", ["builds first at", "builds second at"]),
    "options": (
        "MismatchError",
        [": fusion=True at ", ": fusion=False at ", "the same arguments"],
    ),
    "dataset": (
        "MismatchError",
        ["reads a dataset, and they differ", ": 4 at ", ": 6 at "],
    ),
    "strings": ("ReplicatorError", ["string cannot cross hosts in between-graph mode"]),
    "unknown_rank": (
        "ReplicatorError",
        ["a tensor of unknown rank cannot cross hosts", "tensor.set_shape(["],
    ),
    "in_a_graph": (
        "ContextError",
        ["built into a tf.Graph", "step_fn: ", "or in a tf.function"],
    ),
    "padded": (
        "InputError",
        ['remainder="pad" cannot fill', "without an InputContext"],
    ),
    "an_object": (
        "ArgumentError",
        [
            "was given a list that holds a PurePosixPath, which cannot be sent to",
            "Fix: pass None, booleans, numbers",
        ],
    ),
}
# The error on host 1 alone, and host 0's message about it.
_FAILED: dict[str, tuple[str, list[str]]] = {
    "step_fn_raises": ("KeyError", ["in step_fn", "KeyError: 'no such feature'"]),
    "input_fn_raises": ("OSError", ["in input_fn: OSError: no such file"]),
    "devices": ("DeviceError", ["DeviceError: no device of host 1 (127"]),
}


@pytest.fixture(scope="module")
def found(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each host's errors, by the names of the cases."""
    return [results["mismatches"] for results in told]


def test_there_is_an_expectation_for_each() -> None:
    assert {*_SAID, *_FAILED} == {*mismatched.CASES}


@pytest.mark.parametrize("name", _SAID)
def test_both_hosts_raise(found: list[dict[str, Any]], name: str) -> None:
    kind, message = _SAID[name]
    for own in found:
        raised, text, seconds, after = own[name]
        assert raised == kind, text
        assert [part for part in message if part not in text] == [], text
        assert text.count(_HERE) >= (2 if kind == "MismatchError" else 1), text
        assert seconds < _LIMIT
        assert after == 42.0, "a right step works afterwards"


@pytest.mark.parametrize("name", _FAILED)
def test_one_host_fails(found: list[dict[str, Any]], name: str) -> None:
    kind, message = _FAILED[name]
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
    results = processes.run("clash", [1, 1], kind)
    for own, (raised, text, seconds) in enumerate(results):
        assert raised == "MismatchError", text
        assert "would wait for one another forever" in text
        assert f"  host {own} (127.0.0.1:" in text.splitlines()[1]
        assert "Fix: run the same steps on every host" in text
        assert f": runs {_HERE}" in text
        assert text.count(_HERE) == 2
        assert seconds < _LIMIT
