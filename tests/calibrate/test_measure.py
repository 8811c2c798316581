"""The program `python -m replicator.calibrate`, and how its file is read.

What is measured depends on the machine; what is done with it does not.
"""

from __future__ import annotations

import json
import math
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import tensorflow as tf

import replicator
from replicator.calibrate import measure
from replicator.graph import cost, rates
from tests import helpers

DEVICES = [f"/job:localhost/replica:0/task:0/device:CPU:{n}" for n in range(3)]


def _program(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "replicator.calibrate", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_rates_are_finite_and_of_cpus() -> None:
    measured = measure.measure_rates(DEVICES, rounds=1, large=1 << 20)
    assert not measured.apart and measured.link == 0
    for seconds in (measured.op, measured.message, measured.add, measured.copy):
        assert 0 <= seconds < math.inf


def test_each_algorithm_is_measured() -> None:
    calibration = rates.Calibration()
    timing = measure.measure_algorithms(DEVICES, 1 << 10, 1, calibration)
    assert (timing.replicas, timing.nbytes) == (3, 1 << 10)
    assert list(timing.measured) == ["hub", "shuffled", "tree", "ring"]
    assert timing.none > 0 and min(timing.measured.values()) >= 0
    for name, seconds in timing.expected.items():
        assert seconds == calibration.seconds(name, "cpu", 3, 1 << 10)


def test_contenders_take_turns() -> None:
    calls = []

    def contender(name: str) -> Any:
        return lambda: calls.append(name) or tf.constant(0)

    seconds = measure.shortest({"a": contender("a"), "b": contender("b")}, 2)
    assert set(seconds) == {"a", "b"}
    turns = [name for k, name in enumerate(calls[2:]) if calls[k + 1] != name]
    assert calls[:2] == ["a", "b"] and turns == ["a", "b", "a", "b"]


@pytest.mark.slow
def test_the_program_writes_what_a_replicator_reads(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rates.json"
    done = _program(
        "--devices=CPU:0,CPU:1", "--kibibytes=1,64", "--rounds=1", f"--output={path}"
    )
    assert done.returncode == 0, done.stderr
    for shown in ("message", "GB/s", "shuffled", "64.0 KiB"):
        assert shown in done.stdout
    read = rates.load(path)
    facts = json.loads(path.read_text())
    assert list(read.rates) == list(facts["rates"]) == ["cpu"]
    assert [timing["nbytes"] for timing in facts["timings"]] == [1 << 10, 64 << 10]
    helpers.make(2, calibration=path)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--devices=CPU:0", "2 replicas on 1 devices"),
        ("--replicas=9", "[9] replicas on 8 devices"),
        ("--replicas=x", "--replicas was given 'x'"),
        ("--kibibytes=-1", "--kibibytes was given '-1'"),
        ("--devices=GPU:7,GPU:8", "GPU:7 does not exist"),
        ("more", "unknown argument 'more'"),
        ("--what", "Unknown command line flag 'what'"),
    ],
)
def test_bad_arguments_are_one_line(given: str, said: str) -> None:
    done = _program(given)
    assert done.returncode == 2
    (line,) = [shown for shown in done.stderr.splitlines() if said in shown]
    assert "Traceback" not in done.stderr


# --- The file -------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "text", [None, "", "[]", "{}", '{"rates": {"cpu": {"op": 1}}}', '{"rates": []}']
)
def test_a_file_that_holds_no_rates(text: str | None, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rates.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(replicator.errors.ArgumentError) as caught:
        helpers.make(2, calibration=path)
    assert str(path) in str(caught.value)
    assert "Fix: name a file that `python -m replicator.calibrate" in str(caught.value)


@pytest.mark.parametrize("bad", [-1.0, math.inf, math.nan, "1"])
def test_rates_that_cannot_be(bad: Any, tmp_path: pathlib.Path) -> None:
    with pytest.raises(replicator.errors.ArgumentError, match="cannot read"):
        rates.load(_file(tmp_path, add=bad))


def test_the_variable_is_named_where_its_file_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(rates.VARIABLE, "no such file")
    with pytest.raises(replicator.errors.ArgumentError, match=rates.VARIABLE):
        helpers.make(2)


def test_what_is_read_is_what_was_written(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rates.json"
    own = rates.Rates(1e-6, 2e-6, 3e-9, 4e-9, 5e-9, True)
    path.write_text(rates.Calibration({"gpu": own}).to_json())
    assert rates.load(path).rates == {"gpu": own}


def test_every_algorithm_has_a_cost() -> None:
    for name in cost.ALGORITHMS:
        for kind in rates.KINDS:
            small, large = (
                rates.Calibration().seconds(name, kind, 4, nbytes)
                for nbytes in (1 << 10, 1 << 26)
            )
            assert 0 < small < large < math.inf
