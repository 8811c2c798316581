# SPDX-License-Identifier: Apache-2.0
"""Processes' reports of their ends; tests/between tests that they are found."""

from __future__ import annotations

from replicator.cluster import lookout


def test_what_is_told_is_read_out_of_tensorflows_errors() -> None:
    text = lookout.report(3, "a step failed there:\n \"x\" > 'y' at \\train.py:3")
    around = f'Graph error: Collective ops is aborted by: {text}\\nThe error {{"a": 1}}'
    reports = {3: "a step failed there: x y at train.py:3"}
    assert lookout.read(around) == reports
    assert lookout.read(f"{around} and {lookout.report(0, 'b')}") == {**reports, 0: "b"}
    assert lookout.read("Socket closed") == {}


def test_what_is_told_is_not_long() -> None:
    assert len(lookout.report(1, "text " * 1000)) < 400
