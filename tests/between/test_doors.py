# SPDX-License-Identifier: Apache-2.0
"""Programs for one device in between-graph mode equal one device, or are refused."""

from __future__ import annotations

import numpy as np
import pytest

from tests.between import doors, processes


@pytest.mark.slow
def test_functions_compute_what_one_device_does_and_sessions_are_refused() -> None:
    first, second = processes.run("doors", [1, 2])
    assert first["functions"] == second["functions"]
    for name, expected in doors.trained(None).items():
        for x, y in zip(first["functions"][name], expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    for results in (first, second):
        for name in ("session", "creator"):
            kind, message = results[name]
            assert kind == "ContextError"
            assert "was created in between-graph mode" in message
            assert "doors.py:" in message and "without --mode=between" in message
        kind, message = results["values"]
        assert kind == "MismatchError" and "passes values to a function" in message
        kind, message = results["failing"]
        assert kind == "InvalidArgumentError"
        assert "not invertible" in message and "doors.py:" in message
        assert results["goes on"] == 3.0


@pytest.mark.slow
def test_hosts_that_call_different_functions_do_not_wait_for_one_another() -> None:
    for kind, message in processes.run("differ", [1, 1]):
        assert kind == "MismatchError"
        assert "host 1" in message and "runs the function called at" in message
        assert "doors.py:" in message
