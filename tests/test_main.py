# SPDX-License-Identifier: Apache-2.0
"""`python -m replicator` prints what a bug report needs, whatever is broken."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import tensorflow as tf

import replicator
from replicator import __main__
from replicator.costs import rates


def _printed(capsys, *arguments: str) -> str:
    assert __main__.main(["replicator", *arguments]) == 0
    return capsys.readouterr().out


def test_it_says_versions_devices_and_what_is_installed(capsys) -> None:
    output = _printed(capsys)
    for text in (
        f"- replicator {replicator.__version__}, in ",
        f"- tensorflow {tf.__version__}",
        "- /physical_device:CPU:0",
        "cores",
        "cpu, default: op ",
        "- rich: ",
    ):
        assert text in output
    assert "cannot be determined" not in output


def test_a_calibration_is_named(capsys, monkeypatch, tmp_path) -> None:
    path = tmp_path / "rates.json"
    calibration = rates.Calibration({"cpu": rates.Rates(0.5, 1, 2, 3, 4, False)})
    path.write_text(calibration.to_json())
    monkeypatch.setenv(rates.VARIABLE, str(path))
    output = _printed(capsys)
    assert f"- from {path}" in output and "cpu, measured: op 0.5 s" in output


@pytest.mark.parametrize("content", [None, "{", json.dumps({"rates": {"tpu": {}}})])
def test_what_is_broken_is_a_line(capsys, monkeypatch, tmp_path, content) -> None:
    path = tmp_path / "rates.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv(rates.VARIABLE, str(path))
    output = _printed(capsys)
    assert "- cannot be determined: ArgumentError: cannot read a calibration" in output
    assert "### Environment" in output and "Traceback" not in output


def test_secrets_are_not_shown(capsys, monkeypatch) -> None:
    monkeypatch.setenv("TF_API_TOKEN", "hidden")
    monkeypatch.setenv("TF_VAR_account", "hidden")  # another program's
    monkeypatch.setenv("TF_NUM_THREADS", "shown")
    output = _printed(capsys)
    assert "hidden" not in output and "TF_NUM_THREADS=shown" in output


@pytest.mark.parametrize(
    "argument", ["more", pytest.param("--colour=red", marks=pytest.mark.slow)]
)
def test_bad_arguments_are_one_line(argument) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "replicator", argument],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={"TF_CPP_MIN_LOG_LEVEL": "3", "PATH": "/usr/bin:/bin"},
    )
    assert process.returncode == 2 and not process.stdout
    lines = [
        line for line in process.stderr.splitlines() if argument.strip("-")[:6] in line
    ]
    assert len(lines) == 1 and "Traceback" not in process.stderr
