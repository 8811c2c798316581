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
    (tmp_path / "train.py").touch()
    source = processes.source_of(ports)

    def said(script: str) -> dict:
        argv = [sys.executable, "-I", "-c", source, script]
        return json.loads(subprocess.check_output(argv, cwd=tmp_path))

    facts = said("train.py")
    assert 0 < facts.pop("port") < 65536
    assert facts == {"missing": False, "folder": str(tmp_path)}
    assert said("there.py")["missing"]
    assert not said("")["missing"]  # a module, which Python finds
