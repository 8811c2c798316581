# SPDX-License-Identifier: Apache-2.0
"""examples/graph_mode.py trains, on two devices as on one."""

import re

import pytest

from tests.examples import programs


def _run(*flags):
    printed = programs.call_well("graph_mode", *flags)
    return [float(x) for x in re.findall(r"(?:loss|accuracy) ([\d.]+)", printed)]


@pytest.mark.slow
def test_the_program_learns_the_same_on_one_device_and_on_two():
    one, two = (_run(f"--devices={names}") for names in ("CPU:0", "CPU:0,CPU:1"))
    assert one[-1] > 0.93
    assert len(one) == len(two)
    assert all(abs(a - b) < 0.01 for a, b in zip(one, two, strict=True))


def test_three_lines_of_it_know_of_replicas():
    text = (programs.EXAMPLES / "graph_mode.py").read_text()
    assert [int(n) for n in re.findall(r"  # (\d)$", text, re.M)] == [1, 2, 3]
    program = [line for line in text.splitlines() if not line.endswith(("1", "2", "3"))]
    code = "\n".join(program).partition('"""\n')[2]
    assert not re.search(r"replica|autodist", code)
