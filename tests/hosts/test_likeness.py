# SPDX-License-Identifier: Apache-2.0
"""Hosts that round differently compute no products of joined factors."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

import replicator
from replicator.hosts import likeness
from replicator.options import Options
from tests.between import processes
from tests.cluster import as_threads, servers


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Hosts whose names end in an odd number round differently; the warnings."""
    warnings: list[str] = []
    monkeypatch.setattr(likeness, "bits", lambda name: str(int(_task(name)) % 2))
    monkeypatch.setattr(
        likeness.logging,
        "log_first_n",
        lambda level, form, n, text: warnings.append(text),
    )
    return warnings


def _task(device: str) -> str:
    return device.partition("/task:")[2].partition("/")[0]


def _devices(*tasks: int) -> list[str]:
    return [f"/job:worker/replica:0/task:{k}/device:CPU:0" for k in tasks]


def test_unlike_hosts_of_one_program_have_no_factors(warned: list[str]) -> None:
    options = Options()
    assert likeness.checked(_devices(0, 2), options, None) == options
    assert warned == []
    assert not likeness.checked(_devices(0, 2, 1), options, None).factors
    (text,) = warned
    assert "task:1/device:CPU:0: its products have the bits 1" in text
    assert "factors=False" in text
    assert "Fix: use hosts with processors of one kind" in text
    assert 'or pass variables="sharded"' in text


@pytest.mark.parametrize("other", [1, 2])
def test_unlike_processes_have_no_factors(
    warned: list[str], monkeypatch: pytest.MonkeyPatch, other: int
) -> None:
    as_threads.fake_store(monkeypatch)
    options = Options()

    def check(number: int) -> Any:
        return lambda own: likeness.checked(_devices(number), options, own)

    found = as_threads.together(check(0), check(other))
    assert [own.factors for own in found] == [other == 2] * 2
    assert len(warned) == (0 if other == 2 else 2)  # one in each process
    for text in warned:
        assert "of host 1 (b:2): its products have the bits 1" in text
        assert "sharded" not in text  # which one program needs


def test_one_host_compares_nothing(warned: list[str]) -> None:
    replicator.Replicator(["CPU:0", "CPU:1"])
    assert likeness.checked(_devices(1), Options(), None) == Options()
    assert warned == []


@pytest.mark.slow
def test_bits_depend_on_the_number_of_threads() -> None:
    code = "from replicator.hosts import likeness; print(likeness.bits('CPU:0'))"
    found = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=servers.ROOT,
            env={**os.environ, "TF_NUM_INTRAOP_THREADS": str(count)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for count in (2, 5)
    ]
    assert len(set(found)) == 2


@pytest.mark.slow
def test_unlike_processes_train_with_equal_bits() -> None:
    """The second one's products use older instructions."""
    older = {"ONEDNN_MAX_CPU_ISA": "SSE41"}
    one, other = processes.run("trains_by_factors", [1, 1], settings=[{}, older])
    assert one == other
    uses_factors, _ = one
    alike, _ = processes.run("trains_by_factors", [1, 1])[0]
    assert alike and not uses_factors
