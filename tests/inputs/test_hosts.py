# SPDX-License-Identifier: Apache-2.0
"""Inputs of replicas on two hosts: real processes, whose files differ."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import pytest

from tests.cluster import servers
from tests.inputs import on_hosts


class Ran(NamedTuple):
    """The output of a program.

    Attributes:
        results: By check.
        said: Standard error during each check.
    """

    results: dict[str, Any]
    said: dict[str, str]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Runs the program, with the hosts and the client in separate folders."""
    folders = [tmp_path_factory.mktemp(name) for name in ("a", "b", "client")]
    for name, folder in zip("abc", folders, strict=True):
        text = "".join(f"{name}{k}\n" for k in range(6))
        (folder / on_hosts.DATA).write_text(text)
    with servers.serving(2, "--cpus=2", folders=folders[:2]) as server_facts:
        result = servers.run_module(
            "tests.inputs.on_hosts", *servers.addresses(server_facts), folder=folders[2]
        )
    results = dict(json.loads(line) for line in result.stdout.splitlines())
    parts = re.split(r"^--- (\w+)\n", result.stderr, flags=re.MULTILINE)
    return Ran(results, dict(zip(parts[1::2], parts[2::2], strict=True)))


_EXPECTED = {
    "files_are_those_of_the_host": [
        ["a0", "a1", "b0", "b1"],
        ["a2", "a3", "b2", "b3"],
        ["a4", "a5", "b4", "b5"],
        True,
    ],
    "files_in_one_call_of_several_steps": [
        [f"{host}{k}" for k in range(first, 6, 2)] for host in "ab" for first in (0, 1)
    ],
    "files_in_a_session": [["a0", "a1", "b0", "b1"], ["a2", "a3", "b2", "b3"]],
    "contexts_know_the_host": [[0, 0, 2], [1, 0, 2], [2, 1, 2], [3, 1, 2]],
    "started_over_the_first_step_sees_the_first_element": [],
    "a_generator_stays": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], True],
    "python_in_a_nested_function_stays": [0, 0, 0, 0],
    "python_in_a_session_stays": [0, 1, 2, 3],
    "what_is_captured_goes_along": [[11] * 4, [22] * 4],
    "a_seeded_order_is_that_of_one_process": [True] * 8,
    "one_pipeline_is_dealt": [[0, 1, 2, 3], [4, 5, 6, 7], True],
    "one_pipeline_is_of_the_client": [["c0", "c1", "c2", "c3"]] * 2,
    "one_pipeline_for_one_host_is_made_there": [["b0", "b1"], ["b2", "b3"], True],
    "a_global_batch_is_split": [[[0, 1], [2, 3], [4], [5]], [[6], [7], [8], [9]], True],
    "arrays_are_split_and_given": [
        [[[0, 1], [2, 3], [4], [5]]],
        [[[0, 1, 2, 3, 4, 5]] * 4],
    ],
    "rounds_are_padded": [
        [[], [0], [0], [0]],
        [[], [], [1], [1]],
        [[], [], [], [2]],
        True,
    ],
    "functions_run_on_the_device_of_the_replica": ["a0", "a0", "b0", "b0"],
}


@pytest.mark.battery(5)
@pytest.mark.parametrize("check", _EXPECTED)
def test_replicas_on_two_hosts_are_fed(ran, check):
    assert ran.results[check] == _EXPECTED[check]


def test_every_check_of_the_program_is_looked_at():
    assert {*_EXPECTED, "a_variable_is_read_as_it_is"} == set(on_hosts.CHECKS)


def test_a_pipeline_reads_a_variable_as_it_is(ran):
    first, later = ran.results["a_variable_is_read_as_it_is"]
    assert first == [[1, 1, 1, 1]]
    assert later >= 1000


@pytest.mark.parametrize(
    ("check", "input_fn", "reason"),
    [
        ("a_generator_stays", "of_generator", "each calls Python"),
        ("python_in_a_nested_function_stays", "nested", "each calls Python"),
        ("python_in_a_session_stays", "in_session", "each calls Python"),
        ("a_variable_is_read_as_it_is", "scaled", "each reads a variable or a table"),
    ],
)
def test_what_stays_is_said_once_with_the_line(ran, check, input_fn, reason):
    stderr = ran.said[check]
    assert stderr.count("are not created on the hosts of their replicas") == 1, stderr
    assert re.search(rf"on_hosts\.py:\d+ in {input_fn}\b", stderr), stderr
    assert reason in stderr
    assert "cross the network" in stderr


@pytest.mark.parametrize("check", ["files_are_those_of_the_host", "files_in_a_session"])
def test_nothing_is_said_of_what_goes(ran, check):
    assert "hosts of their replicas" not in ran.said[check]
