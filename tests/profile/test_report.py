# SPDX-License-Identifier: Apache-2.0
"""The report of a profile: sentences, tables, JSON, a trace and a picture."""

from __future__ import annotations

import io
import json

import pytest

from replicator.costs import rates
from replicator.profile import chrome, display, picture, traces
from replicator.profile import report as reports
from tests.profile import made


def _report(network: float = 1e-10, **facts) -> reports.Report:
    rows = made.row(), made.row("broadcast", number=1)
    measured = made.measured(rows, (0.05, 0.02), **facts)
    link = rates.Rates(0.0, 1e-5, network, 0.0, 0.0, True)
    return reports.report("train:make", measured, rates.Calibration(), link)


def test_a_network_that_costs_nothing_pays_as_far_as_it_is_asked() -> None:
    verdict = _report(1e-15).verdict(reports.ON_SEVERAL_HOSTS)
    assert verdict.startswith(
        "on hosts of their own: 64 replicas compute the most examples, 6"
    )
    assert "more may pay further" in verdict


def test_cores_that_are_shared_do_not_pay() -> None:
    assert _report().verdict(reports.ON_THESE_DEVICES) == (
        "on these same 2 cores: no number of replicas pays."
    )


def test_a_slow_network_pays_late_or_never() -> None:
    assert "no number of replicas pays" in _report(1e-4).verdict(
        reports.ON_SEVERAL_HOSTS
    )
    assert "it pays from" in _report(1.57e-8).verdict(reports.ON_SEVERAL_HOSTS)


def test_tables_show_parts_and_powers_of_two() -> None:
    file = io.StringIO()
    display.show(_report(), file)
    text = file.getvalue()
    assert "all_reduce sum" in text and "train.py:41 in step_fn" in text
    assert "computing by one for all" not in text
    assert "Rates of devices: by default." in text and "80 Gbit/s" in text
    first = [line.split()[0] for line in text.splitlines() if line.split()]
    assert [n for n in first if n.isdecimal()] == 2 * [str(2**n) for n in range(7)]


def test_json_has_all_numbers() -> None:
    report = _report()
    facts = json.loads(report.to_json())
    for where, steps in report.predicted.items():
        for own, step in zip(facts["predicted"][where], steps, strict=True):
            assert (own["step"], own["speed_up"]) == (step.step, step.speed_up)
    assert facts["communication"][1]["lines"] == ["train.py:41 in step_fn"]


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_pictures_are_written(tmp_path, suffix) -> None:
    path = tmp_path / f"all{suffix}"
    picture.plot(_report(), path)
    assert path.stat().st_size > 1000
    if suffix == ".svg":
        assert "on hosts of their own" in path.read_text()


def test_a_trace_without_ops_is_one() -> None:
    assert json.loads(chrome.to_json([], []))["traceEvents"] == []


def test_a_trace_has_a_thread_for_each_communication() -> None:
    rows = made.row(), made.row("broadcast", number=1)
    ran = [
        traces.Ran("replica_0/x", "MatMul", "/host:CPU", 3, 5.0, 1.0, 1.0, None, 0),
        traces.Ran(
            "communicate/broadcast/1/y",
            "Identity",
            *("/host:CPU", 3),
            6.0,
            2.0,
            2.0,
            1,
            None,
        ),
    ]
    events = json.loads(chrome.to_json(ran, rows))["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"replica 0", "communication"} < names
    one, other = [event for event in events if event["ph"] == "X"]
    assert (one["ts"], one["dur"]) == (0.0, 1e6) and one["name"] == "MatMul"
    assert (other["ts"], other["tid"]) == (1e6, 1) and other["name"] == "broadcast"
    assert other["args"]["line"] == "train.py:41 in step_fn"
