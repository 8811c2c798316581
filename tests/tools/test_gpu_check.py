# SPDX-License-Identifier: Apache-2.0
"""The report of `make gpu-check`, with fake GPUs; none is needed here."""

from __future__ import annotations

import json
import types
from typing import Any

import pytest

from tests import gpus, listed
from tools import gpu_check, gpu_programs

_ALL = [check.name for check in gpu_check.CHECKS]
(_SUITE,) = [check for check in gpu_check.CHECKS if check.tests]


class Machine:
    """A machine with some GPUs, on which some checks fail; records the runs."""

    def __init__(self, count: int, failing: tuple[str, ...] = ()) -> None:
        self.count, self.failing = count, failing
        self.ran: list[str] = []
        self.workers: set[str] = set()

    def run(self, command):
        self.workers |= {part for part in command if part.startswith("--num")}
        name = _SUITE.name if "pytest" in command else command[-1]
        if name == "devices":
            found = [{"device_name": "H100", "compute_capability": [9, 0]}]
            return 0, "a warning\n" + json.dumps(found * self.count)
        self.ran.append(name)
        failures = f"FAILED by {name}\n" * (name in self.failing)
        return int(name in self.failing), f"noise\n{failures}said by {name}\n"


def _statuses(text: str) -> dict[str, str]:
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0].strip("| "): row[2] for row in rows[2:]}


@pytest.mark.parametrize("count", [0, 1, 2])
def test_what_lacks_gpus_is_marked_as_not_run(count: int) -> None:
    machine = Machine(count)
    text, status = gpu_check.check_all(machine.run, processes=3)
    expected = [c.name for c in gpu_check.CHECKS if c.gpus <= count]
    assert machine.ran == expected and status == 0
    assert machine.workers == ({"--numprocesses=3"} if count else set())
    assert _statuses(text) == {
        name: "passed" if name in expected else "not run" for name in _ALL
    }
    assert ("TensorFlow finds no GPU" in text) is (count == 0)
    assert text.count("- H100 (compute_capability [9, 0])") == count


def test_a_failure_fails_the_whole_and_the_rest_is_run() -> None:
    machine = Machine(2, failing=("tests", "prefetch"))
    text, status = gpu_check.check_all(machine.run)
    assert status == 1 and machine.ran == _ALL
    assert _statuses(text)["prefetch"] == "failed" and "said by prefetch" in text
    assert _statuses(text)["nccl"] == "passed"
    assert text.endswith("## Failures\n\n- FAILED by prefetch\n- FAILED by tests\n")


@pytest.mark.parametrize("answer", [(1, "[{}]"), (0, ""), (0, "no JSON"), (0, "{}")])
def test_a_tensorflow_that_does_not_answer_has_no_gpus(answer) -> None:
    assert gpu_check.found_gpus(lambda command: answer) == []


def test_each_check_has_a_program_or_tests() -> None:
    programs = [check.name for check in gpu_check.CHECKS if not check.tests]
    assert {*programs, "devices"} == set(gpu_programs.PROGRAMS)
    for name in _SUITE.tests:
        path = gpu_check.ROOT / name
        assert path.is_file() or any(path.rglob("test_*.py")), name


def test_the_report_is_written_and_status_is_0_without_gpus(
    monkeypatch, tmp_path, capsys
) -> None:
    monkeypatch.setattr(gpu_check, "run", lambda log, command: Machine(0).run(command))
    path = tmp_path / "report.md"
    assert gpu_check.main([str(path)]) == 0
    assert path.read_text() in capsys.readouterr().out


def test_a_tests_outcome_is_its_summary() -> None:
    printed = (
        "FAILED tests/a.py::b\n=== 1 failed, 2 passed in 1s ===\nTensorFlow ends\n"
    )
    outcome = gpu_check.outcome(_SUITE, 1, lambda command: (1, printed))
    assert outcome.said == "1 failed, 2 passed in 1s"
    assert outcome.failures == ("FAILED tests/a.py::b",)


def test_the_log_has_what_each_command_prints(tmp_path) -> None:
    log = tmp_path / "report.log"
    assert gpu_check.run(log, ["-c", "print('one')"]) == (0, "one\n")
    assert gpu_check.run(log, ["-c", "print('two'); exit(3)"]) == (3, "two\n")
    assert log.read_text() == "one\ntwo\n"


_BAD = ["--all", "a.md b.md", "no/where/a.md", "--processes=0", "--processes=two a.md"]


@pytest.mark.parametrize("words", _BAD)
def test_bad_arguments_are_one_line(words: str, capsys) -> None:
    assert gpu_check.main(words.split()) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [("mixed_precision", "loss "), ("step_times", "32-64-64-10 MLP: one GPU ")],
)
def test_programs_run_on_what_devices_there_are(monkeypatch, name, said) -> None:
    monkeypatch.setattr(gpu_programs, "two_gpus", lambda: ["CPU:0", "CPU:1"])
    monkeypatch.setattr(gpu_programs, "_STEPS", 2)
    monkeypatch.setattr(gpu_programs, "_ROUNDS", 2)
    monkeypatch.setattr(gpu_programs, "_NETWORKS", ("small",))
    assert gpu_programs.PROGRAMS[name]().startswith(said)


def test_elements_that_are_elsewhere_are_found(monkeypatch) -> None:
    # Logical CPUs share the memory: all elements are on the first.
    monkeypatch.setattr(gpu_programs, "two_gpus", lambda: ["CPU:0", "CPU:1"])
    with pytest.raises(AssertionError, match="1: 'device:CPU:0'"):
        gpu_programs.prefetch()
    monkeypatch.setattr(gpu_programs, "two_gpus", lambda: ["CPU:0"])
    assert gpu_programs.prefetch() == "elements are on device:CPU:0"


def test_names_of_cpus_become_names_of_gpus() -> None:
    assert gpus.mapped(["CPU:0", ["cpu:1", "/job:w/task:0/device:CPU:1"]], 8) == [
        "GPU:0",
        ["GPU:1", "/job:w/task:0/device:CPU:1"],
    ]
    assert gpus.mapped(None, 8) is None and gpus.mapped(["CPU:9"], 8) == ["CPU:9"]


def test_tests_that_cannot_pass_are_marked_and_those_that_crash_do_not_run() -> None:
    marks: dict[str, list[Any]] = {}

    def item(nodeid: str) -> Any:
        add = marks.setdefault(nodeid, []).append
        return types.SimpleNamespace(nodeid=nodeid, add_marker=add)

    reasons = listed.read(gpus.LIST)
    gpus.mark([item(nodeid) for nodeid in [*reasons, "tests/test_other.py::test_it"]])
    assert marks.pop("tests/test_other.py::test_it") == []
    for nodeid, (mark,) in marks.items():
        assert mark.kwargs["reason"] == reasons[nodeid]
        assert mark.kwargs["run"] == ("crashes" not in reasons[nodeid])
