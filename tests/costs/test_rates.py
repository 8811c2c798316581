# SPDX-License-Identifier: Apache-2.0
"""The file of a calibration: its parsing, and its effect on decisions."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import pytest
import tensorflow as tf

import replicator
from replicator.cluster import state
from replicator.costs import cost, rates
from tests import helpers


def _file(tmp_path: pathlib.Path, **costs: Any) -> pathlib.Path:
    facts = {"op": 0, "message": 0, "link": 0, "add": 0, "copy": 0, "apart": False}
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"rates": {"cpu": facts | costs}}))
    return path


def _chosen(repl: replicator.Replicator) -> str:
    step = repl.build(
        lambda: repl.all_reduce(helpers.opaque(tf.ones([1 << 16])), "max")
    )
    (row,) = step.plan
    return row.algorithm


def test_rates_decide_by_which_algorithm(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adding = _file(tmp_path, add=1e-9, apart=True)
    if helpers.make(2)._settings.options.algorithm is not None:
        pytest.skip("an algorithm is named by --with")
    assert _chosen(helpers.make(4)) == "hub"
    assert _chosen(helpers.make(4, calibration=adding)) == "shuffled"
    monkeypatch.setenv(rates.VARIABLE, str(adding))
    assert _chosen(helpers.make(4)) == "shuffled"
    hops = tmp_path / "hops"
    hops.mkdir()
    slow = _file(hops, message=1.0)
    assert _chosen(helpers.make(4, calibration=slow)) == "hub"


LINK = {"op": 0, "message": 0, "link": 0, "add": 0, "copy": 0, "apart": True}
HOSTS = LINK | {"hosts": ["a", "b"]}
BAD: list[Any] = [
    *("", "[]", "{}", '{"rates": []}', '{"rates": {"cpu": {"op": 1}}}'),
    *({"rates": {"cpu": LINK | {"add": bad}}} for bad in (-1.0, math.inf, math.nan)),
    {"rates": {"cpu": LINK | {"add": "1"}}},
    *({"rates": {}, "links": [link]} for link in (3, LINK, HOSTS | {"op": -1})),
    *({"rates": {}, "links": [LINK | {"hosts": h}]} for h in (["a"], ["a", "a"])),
    {"rates": {}, "links": [LINK | {"hosts": ["a", 1]}]},
    {"rates": {}, "links": [{"hosts": ["a", "b"]}]},
    None,  # there is none
]


@pytest.mark.parametrize("held", BAD, ids=str)
def test_a_file_that_holds_no_rates_is_refused(
    held: Any, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "rates.json"
    if held is not None:
        path.write_text(held if isinstance(held, str) else json.dumps(held))
    with pytest.raises(replicator.errors.ArgumentError) as caught:
        helpers.make(2, calibration=path)
    message = str(caught.value)
    assert "cannot read a calibration from" in message and str(path) in message
    assert "Fix: name a file that `python -m replicator.calibrate" in message


def test_the_variable_is_named_where_its_file_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(rates.VARIABLE, "no such file")
    with pytest.raises(replicator.errors.ArgumentError, match=rates.VARIABLE):
        helpers.make(2)


def test_what_is_read_is_what_was_written(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rates.json"
    measured = rates.Rates(1e-6, 2e-6, 3e-9, 4e-9, 5e-9, True)
    path.write_text(rates.Calibration({"gpu": measured}).to_json())
    assert rates.load(path).rates == {"gpu": measured}


def test_every_algorithm_has_a_cost() -> None:
    for name in cost.ALGORITHM_NAMES:
        for kind in rates.KINDS:
            small, large = (
                rates.Calibration().seconds(name, kind, 4, nbytes)
                for nbytes in (1 << 10, 1 << 26)
            )
            assert 0 < small < large < math.inf


# --- Links between hosts --------------------------------------------------------------

ENDS = frozenset(f"/job:worker/replica:0/task:{k}" for k in (0, 1))


def test_links_are_read_as_they_were_written(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rates.json"
    slow, own = (rates.Rates(1e-6, m, 3e-9, 4e-9, 5e-9, True) for m in (2e-3, 1e-3))
    path.write_text(rates.Calibration({"hosts": slow}, {ENDS: own}).to_json())
    read = rates.load(path)
    assert (read.rates, read.links) == ({"hosts": slow}, {ENDS: own})
    assert read.between(*ENDS) == own
    assert read.between("one", "other") == slow  # not measured


def test_a_file_without_links_is_read_as_ever(tmp_path: pathlib.Path) -> None:
    read = rates.load(_file(tmp_path, message=1e-3))
    assert not read.links
    assert read.between(*ENDS) == rates.Calibration().of("hosts")


@pytest.mark.parametrize("name", ["hub", "shuffled", "tree", "ring"])
def test_two_levels_cost_both(name: str) -> None:
    calibration, nbytes = rates.Calibration(), 1 << 20
    between = calibration.seconds(name, "hosts", 4, nbytes)
    within = calibration.seconds("hub", "cpu", 2, nbytes)
    actual = calibration.seconds_in_levels(name, "cpu", 2, 4, nbytes)
    assert actual == pytest.approx(between + within)
    assert calibration.seconds_in_levels(name, "cpu", 1, 4, nbytes) == between
    # One level of 8 replicas sends each tensor once to each of them.
    assert actual < calibration.seconds(name, "hosts", 8, nbytes)


@pytest.mark.parametrize("job", ["localhost", "client"])
@pytest.mark.parametrize(
    ("parts", "devices", "reached"),
    [
        ([1, 1], ["GPU:0", "GPU:1"], True),
        ([2, 1], ["GPU:0", "GPU:1"], False),  # both are parts of the first
        ([2, 1], ["GPU:1", "GPU:2"], True),
        ([1, 1], ["GPU:0", "CPU:0"], False),
    ],
)
def test_nccl_does_not_reach_parts_of_one_gpu(
    monkeypatch: pytest.MonkeyPatch,
    parts: list[int],
    devices: list[str],
    reached: bool,
    job: str,
) -> None:
    own = tf.DeviceSpec(job=job, replica=0, task=0)
    monkeypatch.setattr(state, "own_task", lambda: own)
    gpus = list(range(len(parts)))
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: gpus)
    monkeypatch.setattr(
        tf.config,
        "get_logical_device_configuration",
        lambda gpu: ["part"] * parts[gpu] if parts[gpu] > 1 else None,
    )
    names = [f"/job:{job}/replica:0/task:0/device:{name}" for name in devices]
    assert rates.nccl_reaches(names) == reached
