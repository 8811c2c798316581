# SPDX-License-Identifier: Apache-2.0
"""Which tests run where, and that they are the same in each process."""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import itertools
import os
import pathlib
import random
import subprocess
import sys
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from replicator import errors
from replicator.options import Options
from tests import refusals, sampling

COUNT = 25  # tests per sample, half a second each on average


@pytest.mark.slow
@pytest.mark.gate
def test_a_sample_of_all_tests_passes_with_random_options() -> None:
    """The sample is fixed as long as the tests are: a commit passes or it does not."""
    _check_sample(f"{COUNT}:fixed")


@pytest.mark.slow
def test_the_sample_of_the_day_passes() -> None:
    """A new one each day; rerun it with the --sample that it prints."""
    _check_sample(f"{4 * COUNT}:{datetime.date.today()}")


def _check_sample(sample: str) -> None:
    root = pathlib.Path(__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--sample", sample],
        capture_output=True,
        text=True,
        cwd=root,
    )
    assert f"--sample {sample}" in run.stdout, run.stdout + run.stderr
    assert run.returncode == 0, run.stdout[-6000:]


class _Item:
    """The parts of a test that `left_to_long_runs` reads."""

    def __init__(self, nodeid: str, battery: int | None) -> None:
        self.nodeid, self._battery = nodeid, battery

    def get_closest_marker(self, name: str) -> Any:
        assert name == "battery"
        return self._battery and pytest.mark.battery(self._battery).mark


@pytest.mark.parametrize(
    ("cases", "battery", "kept"), [(9, 3, 3), (10, 3, 4), (1, 3, 1), (7, None, 7)]
)
def test_each_nth_case_of_a_battery_is_kept(
    cases: int, battery: int | None, kept: int
) -> None:
    items: list[Any] = [_Item(f"a.py::f[{n}]", battery) for n in range(cases)]
    remaining = sampling.left_to_long_runs([_Item("a.py::g[1]", 5), *items])
    assert len({*items} - {*remaining}) == kept
    assert sampling.left_to_long_runs(items[::-1]) == remaining  # in any order


def test_all_options_are_in_the_sample() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(Options)}
    del defaults["calibration"]  # a file; it only selects an algorithm
    choices = {k: v for k, v in sampling.CHOICES.items() if k != "steps_per_call"}
    assert {name: values[0] for name, values in choices.items()} == {
        name: str(value) for name, value in defaults.items()
    }
    expected = {
        f"{name}={value}"
        for name, values in sampling.CHOICES.items()
        for value in values[1:]
    }
    for seed in range(20):  # each value in every sample
        option_sets = sampling.options(random.Random(seed), COUNT)
        assert {option for chosen in option_sets for option in chosen} == expected
        names = [
            [option.partition("=")[0] for option in chosen] for chosen in option_sets
        ]
        assert all(len(chosen) == len(set(chosen)) for chosen in names)


def test_a_seed_tells_the_sample() -> None:
    assert sampling.seeded("5:x") == "5:x"
    assert sampling.seeded("5") == f"5:{datetime.date.today()}"
    one, two, three = (sampling.options(random.Random(s), 9) for s in ("a", "a", "c"))
    assert one == two != three


CLONE, SHARDED = "build=clone", "variables=sharded"
REFUSED = refusals.Refused({CLONE: {"a.py::f", "b.py"}, SHARDED: {"a.py::g[1]"}})


@pytest.mark.parametrize(
    ("test", "options"),
    [
        ("a.py::f", [CLONE]),
        ("a.py::f[3-x]", [CLONE]),
        ("a.py::ff", []),
        ("b.py::h[a::b]", [CLONE]),
        ("a.py::g[1]", [SHARDED]),
        ("a.py::g[2]", []),
    ],
)
def test_an_entry_is_a_case_a_test_or_a_file(test: str, options: list[str]) -> None:
    assert REFUSED.options(test, [CLONE, SHARDED, "fusion=False"]) == options


@pytest.mark.parametrize(
    ("listed", "error", "said"),
    [
        ([], None, ""),
        ([], ValueError(), ""),  # fails by itself
        ([], errors.CloneError(), "refused by build=clone, and not listed"),
        ([CLONE], errors.CloneError(), ""),
        ([], errors.CloneError("it cannot be known: step_fn is called once"), ""),
        ([CLONE], None, "which did not refuse it"),
        ([CLONE], AssertionError(), "which did not refuse it"),
        ([SHARDED], errors.UnsupportedError('use variables="mirrored"'), ""),
        ([SHARDED], errors.UnsupportedError("other"), "which did not refuse it"),
    ],
)
def test_what_is_listed_must_be_refused_and_nothing_else(
    listed: list[str], error: Any, said: str
) -> None:
    verdict = refusals.verdict(listed, [CLONE, SHARDED], error)
    assert said in verdict and bool(said) == bool(verdict)


def test_the_list_is_written_as_it_is_read(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "LIST", tmp_path / "refused.txt")
    old = {"a.py::old", "a.py::f[1]"}
    outcomes = {
        "a.py::f[1]": False,
        "a.py::f[2]": True,
        "a.py::g": True,
        "a.py::h": False,
    }
    refusals.Refused({CLONE: old, SHARDED: {"b.py"}}).note(CLONE, outcomes)
    assert refusals.Refused.read().entries == {
        CLONE: {"a.py::old", "a.py::f[2]", "a.py::g"},
        SHARDED: {"b.py"},
    }


def test_listed_tests_exist() -> None:
    root = pathlib.Path(__file__).parents[1]
    for entries in refusals.Refused.read().entries.values():
        for entry in entries:
            file, _, function = entry.partition("[")[0].partition("::")
            assert f"def {function.split('::')[-1]}(" in (root / file).read_text(), (
                entry
            )


def test_each_two_values_meet() -> None:
    axes = "abc", "xyzw", [0, 1, 2]
    cases = sampling.in_turn(*axes)
    assert len(cases) == len(set(cases)) == 12
    for i, j in itertools.combinations(range(3), 2):
        pairs = {(case[i], case[j]) for case in cases}
        assert pairs == set(itertools.product(axes[i], axes[j]))


def test_options_are_for_what_runs_here() -> None:
    names = "tests/launch/test_x.py::test", "tests/step/test_x.py::test"
    items = [_Item(name, None) for name in names]
    assert sampling.concerned(items) == items[1:]


def test_each_test_is_in_one_part() -> None:
    items = [_Item(f"tests/test_x.py::test[{n}]", None) for n in range(100)]
    parts = [sampling.part(f"{k}/10", items) for k in range(10)]
    assert sorted(sum(parts, []), key=items.index) == items
    assert all(parts)


# --- Names and draws that do not depend on the process --------------------------------


@pytest.mark.slow
def test_names_of_tests_are_the_same_in_each_process() -> None:
    # The processes that pytest-xdist starts hash strings differently, and it refuses to
    # run tests that not all of them have.
    def names(seed: str) -> list[str]:
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests"],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        return [line for line in run.stdout.splitlines() if "::" in line]

    first, second = names("1"), names("2")
    assert len(first) > 1000
    assert set(first) ^ set(second) == set()


def _drawn() -> list[object]:
    """Returns one seed's draws."""
    draws: list[object] = []

    @hypothesis.settings(max_examples=300, database=None, derandomize=False)
    @hypothesis.seed(0)
    @hypothesis.given(st.lists(st.integers(0, 10**6)), st.floats(-1, 1))
    def note(whole: list[int], broken: float) -> None:
        draws.append((whole, broken))

    note()
    return draws


def test_what_is_drawn_does_not_depend_on_what_was_imported(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _drawn()
    numbers = ", ".join(f"{n}, {n / 2001}" for n in range(1000, 1200))
    (tmp_path / "imported_by_another.py").write_text(f"NUMBERS = [{numbers}]\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("imported_by_another")
    assert _drawn() == before
