# SPDX-License-Identifier: Apache-2.0
"""examples/torch_style.py, run as a user runs it: in a process of its own."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess

import pytest

from tests import forks

_ROOT = pathlib.Path(__file__).parents[2]
_PROGRAM = _ROOT / "examples" / "torch_style.py"
_ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if not k.startswith("COVERAGE_")},
    "PYTHONPATH": str(_ROOT),
}
_FOUR = "--devices=CPU:0,CPU:1,CPU:2,CPU:3"


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    """Runs the example to its end."""
    return forks.run([_PROGRAM, *flags], _ENVIRONMENT)


def programs(*flags: str) -> dict[str, str]:
    """Runs the example, which must succeed; returns each program's output."""
    result = run(*flags)
    assert result.returncode == 0, result.stderr
    titles = ("Point to point", "All-reduce", "Initial weights", "Synchronous SGD")
    cut = re.split(rf"^({'|'.join(titles)})$", result.stdout, flags=re.MULTILINE)
    assert tuple(cut[1::2]) == titles
    return dict(zip(titles, cut[2::2], strict=True))


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    return programs("--epochs=1")


def test_what_rank_0_sends_rank_1_receives(printed: dict[str, str]) -> None:
    text = printed["Point to point"]
    assert "rank 0 has sent [1 -1]" in text
    assert "rank 1 has received [1 -1]" in text
    assert "checked: both ranks have it" in text


def test_the_sum_is_zero_on_three_ranks(printed: dict[str, str]) -> None:
    for rank in range(3):
        assert f"rank {rank} has [0]" in printed["All-reduce"]
    assert "checked: 1 + 2 - 3 is 0 on all ranks" in printed["All-reduce"]


def test_all_ranks_begin_with_the_weights_of_rank_0(printed: dict[str, str]) -> None:
    for rank in range(3):
        message = f"checked: rank {rank} has the weights that rank 0 drew"
        assert message in printed["Initial weights"]


def test_training_is_that_of_one_device(printed: dict[str, str]) -> None:
    text = printed["Synchronous SGD"]
    assert text.count("checked: the ranks have stayed in step, bit for bit") == 2
    assert re.search(
        r"checked: the losses are those of one device, to \S+e-0[678]\n", text
    )
    assert re.search(r"checked: and so are the weights, to \S+e-0[678]\n", text)
    first, last = re.findall(r"from (\S+) to (\S+)\n", text)[0]
    assert float(last) < float(first)


@pytest.mark.slow
def test_the_default_run_learns_the_digits() -> None:
    text = programs()["Synchronous SGD"]
    assert float(re.findall(r"test accuracy (\S+)", text)[0]) >= 0.93


@pytest.mark.slow
def test_a_larger_world() -> None:
    printed = programs(_FOUR, "--epochs=1", "--momentum=0", "--batch_size=7")
    assert "rank 3 has the weights" in printed["Initial weights"]
    assert printed["Synchronous SGD"].count("bit for bit") == 3


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--devices=CPU:0,CPU:1"], "CPU:0,CPU:1: the tutorial's world has 3 ranks"),
        pytest.param(
            ["--devices=CPU:0,CPU:1,GPU:99"],
            "GPU:99 does not exist",
            marks=pytest.mark.slow,
        ),
        (["--batch_size=500"], "more than the 479 training images of each rank"),
        pytest.param(
            ["--batch_size=0"],
            "--batch_size=0: 0 is not an integer in the range",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--momentum=2"],
            "--momentum=2: 2.0 is not a number in the range",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--momentum=nan"],
            "--momentum=nan: must be a number",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--learning_rate=0"],
            "--learning_rate=0.0: must be a positive number",
            marks=pytest.mark.slow,
        ),
        (["extra"], "unexpected argument 'extra'"),
    ],
    ids=lambda value: value[0].lstrip("-") if isinstance(value, list) else "",
)
def test_a_mistake_ends_with_one_line_and_status_2(flags: list[str], said: str) -> None:
    result = run(*flags)
    assert_ends(result, 2, said)
    assert not result.stdout


def test_a_number_that_is_wrong_ends_with_one_line_and_status_1() -> None:
    """A training that diverges has no reproducible numbers on two devices."""
    result = run("--epochs=1", "--learning_rate=1e20")
    assert_ends(result, 1, "the losses are those of one device: off by ")


def assert_ends(
    result: subprocess.CompletedProcess[str], status: int, said: str
) -> None:
    """Asserts that the example ended with this status and one line with a text."""
    assert result.returncode == status, result.stderr
    (line,) = forks.own_lines(result.stderr)
    assert line.startswith("torch_style.py: error: ")
    assert said in line
