# SPDX-License-Identifier: Apache-2.0
"""The program `python -m replicator.calibrate`."""

from __future__ import annotations

import json
import os
import pathlib

import pytest

from replicator.costs import rates
from tests import forks, helpers


@pytest.mark.slow
def test_the_program_writes_what_a_replicator_reads(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rates.json"
    flags = ("--devices=CPU:0,CPU:1", "--kibibytes=1,64", "--rounds=1")
    command = ["-m", "replicator.calibrate", *flags, f"--output={path}"]
    result = forks.run(command, timeout=600)
    assert result.returncode == 0, result.stderr
    for shown in ("message", "GB/s", "shuffled", "64.0 KiB"):
        assert shown in result.stdout
    read = rates.load(path)
    facts = json.loads(path.read_text())
    assert list(read.rates) == list(facts["rates"]) == ["cpu"]
    assert [timing["nbytes"] for timing in facts["timings"]] == [1 << 10, 64 << 10]
    helpers.make(2, calibration=path)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--devices=CPU:0", "two or more devices; there is only /job:localhost"),
        ("--replicas=9", "--replicas was given 9; expected 2 to 8 devices"),
        ("--devices=", "--devices is empty"),
        ("--kibibytes=", "--kibibytes is empty"),
        ("--replicas=x", "--replicas was given 'x'"),
        ("--kibibytes=-1", "--kibibytes was given '-1'"),
        (
            "--kibibytes=" + "9" * 5000,
            "expected a positive number of at most 12 digits",
        ),
        ("--output=no/folder/rates.json", "--output: FileNotFoundError"),
        ("--output=/", "--output: IsADirectoryError"),
        ("--devices=GPU:7,GPU:8", "GPU:7 does not exist"),
        ("--cluster --devices=CPU:0", "--cluster takes all devices"),
        ("--cluster --replicas=2", "--cluster takes all devices"),
        ("--cluster", "replicator.launch"),
        ("more", "unknown argument 'more'"),
        ("--what", "Unknown command line flag 'what'"),
    ],
)
def test_bad_arguments_are_one_line(given: str, said: str) -> None:
    hosts = ("REPLICATOR_CLUSTER", "TF_CONFIG", "REPLICATOR_HOSTFILE")
    environment = {k: v for k, v in os.environ.items() if k not in hosts}
    command = ["-m", "replicator.calibrate", *given.split()]
    result = forks.run(command, environment, timeout=600)
    assert result.returncode == 2
    (line,) = [shown for shown in result.stderr.splitlines() if said in shown]
    assert "Traceback" not in result.stderr
