# SPDX-License-Identifier: Apache-2.0
"""`pytest --hosts`: tests run on devices of other processes; a list names failures."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from tests import gpus, listed, on_hosts
from tests.cluster import servers

_TESTS = pathlib.Path(__file__).parent


@pytest.mark.slow
def test_the_first_example_runs_on_two_hosts():
    names = ["-k", "ten_line_example or session_program", "tests/test_end_to_end.py"]
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--hosts",
            "-n0",
            "-pno:cacheprovider",
            *names,
        ],
        cwd=_TESTS.parent,
        env=servers.environment(),
        capture_output=True,
        text=True,
        timeout=servers.LIMIT,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    assert " passed" in process.stdout


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("CPU:0", "/job:worker/task:0/device:CPU:0"),
        ("CPU:3", "/job:worker/task:1/device:CPU:3"),
        ("CPU:8", "CPU:8"),
        ("GPU:0", "GPU:0"),
        (["CPU:1", 3], ["/job:worker/task:1/device:CPU:1", 3]),
        (None, None),
    ],
)
def test_neighbours_are_on_different_hosts(name, device):
    assert on_hosts.mapped(name, 8) == device


@pytest.mark.parametrize("path", [on_hosts.LIST, gpus.LIST], ids=["hosts", "gpus"])
def test_what_is_listed_exists(path):
    for entry in listed.read(path):
        path, _, test = entry.partition("::")
        text = (_TESTS.parent / path).read_text()
        assert f"def {test.partition('[')[0]}(" in text, entry
