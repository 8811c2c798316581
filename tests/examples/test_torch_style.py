# SPDX-License-Identifier: Apache-2.0
"""examples/torch_style.py, run as a user runs it: in a process of its own."""

from __future__ import annotations

import re

import pytest

from tests.examples import programs

_FOUR = "--devices=CPU:0,CPU:1,CPU:2,CPU:3"


def _parts(*flags: str) -> dict[str, str]:
    """Runs the example; returns the output of each of its parts."""
    text = programs.call_well("torch_style", *flags)
    titles = ("Point to point", "All-reduce", "Initial weights", "Synchronous SGD")
    cut = re.split(rf"^({'|'.join(titles)})$", text, flags=re.MULTILINE)
    assert tuple(cut[1::2]) == titles
    return dict(zip(titles, cut[2::2], strict=True))


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    return _parts("--epochs=1")


def test_ranks_have_what_was_sent_summed_and_broadcast(
    printed: dict[str, str],
) -> None:
    sent, summed = printed["Point to point"], printed["All-reduce"]
    assert "rank 0 has sent [1 -1]" in sent and "rank 1 has received [1 -1]" in sent
    assert "checked: both ranks have it" in sent
    assert "checked: 1 + 2 - 3 is 0 on all ranks" in summed
    for rank in range(3):
        assert f"rank {rank} has [0]" in summed
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
    text = _parts()["Synchronous SGD"]
    assert float(re.findall(r"test accuracy (\S+)", text)[0]) >= 0.93


@pytest.mark.slow
def test_a_larger_world() -> None:
    printed = _parts(_FOUR, "--epochs=1", "--momentum=0", "--batch_size=7")
    assert "rank 3 has the weights" in printed["Initial weights"]
    assert printed["Synchronous SGD"].count("bit for bit") == 3


def test_a_number_that_is_wrong_ends_with_one_line_and_status_1() -> None:
    """A training that diverges has no reproducible numbers on two devices."""
    ended = programs.call("torch_style", "--epochs=1", "--learning_rate=1e20")
    said = "the losses are those of one device: off by "
    programs.assert_refused(ended, "torch_style", said, status=1)
