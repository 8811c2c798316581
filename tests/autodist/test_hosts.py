# SPDX-License-Identifier: Apache-2.0
"""Programs for one device on several hosts: real servers, and programs that share."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from tests.cluster import servers


def _run(what: str) -> Any:
    with servers.serving(2, "--cpus=1") as facts:
        module = "tests.autodist.on_hosts"
        result = servers.run_module(module, what, *servers.addresses(facts))
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_sessions_and_functions_compute_what_one_device_does():
    """Elements, files, Python, tables and checkpoints are those of the program."""
    assert _run("equal") == {}


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_host_that_is_lost_in_the_middle_is_named_within_seconds(how):
    results = _run(str(int(how)))
    for name in ("_lost_by_session", "_lost_by_function"):
        for what, (kind, message, seconds) in results[name].items():
            assert seconds < 60  # a busy machine's; at most 6 on a quiet one
            if what == "close":
                assert (kind, message) == ("nothing", "")
                continue
            assert kind == "HostLostError"
            assert message.startswith("1 of 2 hosts is lost: 127.0.0.1:")
            assert "on_hosts.py:" in message and "Fix: connect again" in message
