# SPDX-License-Identifier: Apache-2.0
"""Files of variables on two hosts are the client's; each process has its own folder."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from tests.cluster import servers

_EXPECTED = {
    "checkpoint": [[0.0, 0.0], [-1.0, -2.0]],
    "deferred": [3.0, 4.0],
    "weights": [5.0, 6.0],
    "saved_model": [14.0, 16.0],
    "saver": [9.0, 10.0],
}


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[pathlib.Path]:
    """The working directories of the two servers and the client."""
    return [tmp_path_factory.mktemp(name) for name in ("a", "b", "client")]


@pytest.fixture(scope="module")
def read(folders: list[pathlib.Path]) -> dict[str, Any]:
    """Runs the program; returns the values that it read."""
    with servers.serving(2, folders=folders[:2]) as server_facts:
        result = servers.run_module(
            "tests.variables.files_on_hosts",
            *servers.addresses(server_facts),
            folder=folders[2],
        )
    return json.loads(result.stdout)


@pytest.mark.parametrize("variables", ["mirrored", "sharded"])
@pytest.mark.parametrize("way", _EXPECTED)
def test_what_was_saved_is_restored(read, variables, way):
    assert read[f"{variables} {way}"] == _EXPECTED[way]


def test_only_the_client_writes_files(read, folders):
    *hosts, client = folders
    for host in hosts:
        assert not [*host.iterdir()]
    for variables in ("mirrored", "sharded"):
        written = {path.name for path in (client / variables).iterdir()}
        assert {"checkpoint.index", "saver.index", "weights.weights.h5"} <= written
        assert (client / variables / "saved_model/variables/variables.index").exists()
