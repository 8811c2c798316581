# SPDX-License-Identifier: Apache-2.0
"""A server ends with the process that started it."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from tests.cluster import servers

_PACKAGE = str(pathlib.Path(__file__).parents[2] / "replicator")

_ALONE = """
import os, signal, sys
sys.modules["replicator"] = type(sys)("replicator")  # without TensorFlow
sys.modules["replicator"].__path__ = [sys.argv[1]]
from replicator.serve import watch
"""


def _run(program, **options):
    result = subprocess.run(
        [sys.executable, "-c", _ALONE + program, _PACKAGE],
        stdout=subprocess.PIPE,
        text=True,
        timeout=servers.LIMIT,
        **options,
    )
    return result.returncode, result.stdout.split()


def test_a_pipe_has_somebody_at_its_other_end():
    program = "print(watch.is_piped())"
    assert _run(program, input="") == (0, ["True"])
    assert _run(program, stdin=subprocess.DEVNULL) == (0, ["False"])
    closed = "os.close(0); print(watch.is_piped())"
    assert _run(closed, input="") == (0, ["False"])


def test_waiting_ends_with_standard_input():
    program = "watch.wait_for_end(); print('ended')"
    assert _run(program, input="much\nis\nsaid") == (0, ["ended"])
    assert _run("os.close(0); " + program, input="") == (0, ["ended"])


def test_following_leads_a_session_and_can_be_done_twice():
    program = "watch.follow_parent(); watch.follow_parent(); "
    program += "print(os.getsid(0) == os.getpid())"
    assert _run(program, input="") == (0, ["True"])


@pytest.mark.skipif(sys.platform != "linux", reason="needs a parent-death signal")
def test_who_follows_dies_with_its_parent():
    """The grandchild holds the pipe: it closes when both are gone."""
    program = (
        "if os.fork(): input(); os._exit(0)\n"
        "watch.follow_parent(); print('follows', flush=True); signal.pause()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", _ALONE + program, _PACKAGE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "follows\n"
        process.kill()
        assert process.stdout.read() == ""  # at the end of the grandchild
    finally:
        process.kill()
        process.communicate()
