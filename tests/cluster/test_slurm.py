# SPDX-License-Identifier: Apache-2.0
"""Hosts of Slurm jobs, from their environment variables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicator import ClusterError
from replicator.cluster import slurm

EXPANDED = {
    "login": ["login"],
    "a,b-1": ["a", "b-1"],
    "n[1-3]": ["n1", "n2", "n3"],
    "n[01-02,7],m": ["n01", "n02", "n7", "m"],
    "r[1-2]n[8-9]-ib": ["r1n8-ib", "r1n9-ib", "r2n8-ib", "r2n9-ib"],
    "n[099-101]": ["n099", "n100", "n101"],
}


@pytest.mark.parametrize("text", EXPANDED)
def test_lists_are_expanded(text):
    assert slurm.expand_hosts(text) == EXPANDED[text]


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=9, unique=True), st.integers(0, 3)
)
def test_numbers_of_a_range_are_all_there(numbers, width):
    inside = ",".join(str(n).zfill(width) for n in numbers)
    expected = [f"n{str(n).zfill(width)}" for n in numbers]
    assert slurm.expand_hosts(f"n[{inside}]") == expected


@pytest.mark.parametrize(
    "text",
    ["", "a,,b", "a,", "n[1-", "n[1-2", "n]1[", "n[2-1]", "n[a-b]", "n[]", "a b"]
    + ["n[1-999999999]", "n[0-9999]m[0-9999]", "n[" + "9" * 99 + "]", "n[[1]]"],
)
def test_what_is_no_list_is_refused(text):
    with pytest.raises(ValueError, match="not a list of hosts|more than 10000 hosts"):
        slurm.expand_hosts(text)


def test_a_job_without_gpus():
    described = slurm.describe(
        {
            "SLURM_JOB_NODELIST": "n[1-3]",
            "SLURM_TASKS_PER_NODE": "2(x2),1",
            "SLURM_LAUNCH_NODE_IPADDR": "10.9.9.9",
            "SLURM_PROCID": "0",
        }
    )
    assert [host.address for host in described.hosts] == [
        "n1:8888",
        "n2:8888",
        "n3:8888",
    ]
    assert [host.cpus for host in described.hosts] == [2, 2, 1]
    assert described.client is None
    assert described.source == "Slurm (SLURM_JOB_NODELIST)"


@pytest.mark.parametrize("tasks", ["1", "", "x", "2(x2"])
def test_tasks_of_other_nodes_say_nothing(tasks):
    variables = {"SLURM_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": tasks}
    assert [host.cpus for host in slurm.describe(variables).hosts] == [None, None]


def test_outside_of_a_job_there_is_nothing():
    assert slurm.describe({"SLURM_PROCID": "3", "SLURM_JOB_NODELIST": ""}) is None


def test_only_the_first_task_connects():
    variables = {"SLURM_JOB_NODELIST": "n1", "SLURM_PROCID": "2"}
    with pytest.raises(ClusterError, match="task 2 of a step.*(?s:.*)Fix: .*srun"):
        slurm.describe({**variables, "SLURM_STEP_NUM_TASKS": "4"})


def test_what_slurm_cannot_mean_is_named():
    with pytest.raises(ClusterError, match=r"SLURM_JOB_NODELIST does not.*'n\[1-'"):
        slurm.describe({"SLURM_JOB_NODELIST": "n[1-"})
