# SPDX-License-Identifier: Apache-2.0
"""The facts that are probed on a host."""

from __future__ import annotations

import json
import pathlib
import socket
import subprocess
import sys

from replicator.launch import ports, processes


def test_a_port_is_free() -> None:
    with socket.create_server(("", ports.free_port())) as listening:
        assert listening.getsockname()[1] != 0


def test_its_source_runs_anywhere(tmp_path: pathlib.Path) -> None:
    argv = [sys.executable, "-I", "-c", processes.source_of(ports)]
    assert 0 < json.loads(subprocess.check_output(argv, cwd=tmp_path)) < 65536
