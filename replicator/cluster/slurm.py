# SPDX-License-Identifier: Apache-2.0
"""Finds the hosts of a Slurm job from Slurm's environment variables.

TensorFlow's SlurmClusterResolver queries GPUs, and fails where there are none. The host
from which the job was launched (SLURM_LAUNCH_NODE_IPADDR) does not help: it is often
the login node.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

from replicator.cluster import description

NODES = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
_MOST_HOSTS = 10_000  # a range like [1-999999999] is a mistake
_TASKS = re.compile(r"(\d{1,6})(?:\(x(\d{1,6})\))?")
_PART = re.compile(r"[^,\[\]]+|\[[^\[\]]*\]")


def describe(environment: Mapping[str, str]) -> description.Description | None:
    """Returns the hosts of a Slurm job; None outside of one.

    Each host is expected to have a server at addresses.DEFAULT_PORT, with as many CPU
    devices as there are tasks on the host.

    Args:
        environment: The environment variables of this process.

    Raises:
        ClusterError: Slurm's list of hosts is malformed, or this is not the step's
            first task.
    """
    variable = next((name for name in NODES if environment.get(name)), None)
    if variable is None:
        return None
    task = environment.get("SLURM_PROCID", "0")
    if task != "0" and environment.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        raise description.wrong(
            "Slurm",
            f"this is task {task} of a step, but only one process connects to all "
            "hosts",
            "start the program once, `srun --ntasks=1 python train.py`, beside one "
            "`python -m replicator.serve --port=8888` per host",
        )
    try:
        names = expand_hosts(environment[variable])
    except ValueError as error:
        raise description.wrong(variable, str(error)) from None
    counts = _tasks_per_node(environment.get("SLURM_TASKS_PER_NODE", ""))
    if len(counts) != len(names):  # srun sets it for its step, which may use fewer
        counts = [None] * len(names)
    hosts = [
        description.Host(name=name, address=name, cpus=count)
        for name, count in zip(names, counts, strict=True)
    ]
    return description.checked(
        description.Description(tuple(hosts), f"Slurm ({variable})")
    )


def expand_hosts(text: str) -> list[str]:
    """Expands Slurm's compressed list of host names.

    Args:
        text: E.g. "login,node[1-2,07]-ib", which is login, node1-ib, node2-ib and
            node07-ib.

    Raises:
        ValueError: The text is no such list.
    """
    names: list[str] = []
    for entry in _entries(text):
        choices = [
            list(_range_of(part[1:-1], text)) if part.startswith("[") else [part]
            for part in _PART.findall(entry)
        ]
        count = 1
        for alternatives in choices:
            count *= len(alternatives)
        if count + len(names) > _MOST_HOSTS:
            raise ValueError(f"{text!r} expands to more than {_MOST_HOSTS} hosts")
        names += map("".join, itertools.product(*choices))
    return names


def _entries(text: str) -> list[str]:
    """Splits a list at its commas, but not at those in brackets."""
    entries = re.findall(r"(?:[^,\[\]\s]|\[[^\[\]\s]*\])+", text)
    if not entries or ",".join(entries) != text:
        raise ValueError(f"{text!r} is not a list of hosts")
    return entries


def _range_of(ranges: str, text: str) -> Iterator[str]:
    """Yields the numbers of "1-3,07", with their leading zeros."""
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part, re.ASCII)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(
                f"{text!r} is not a list of hosts: [{ranges}] is not a range"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last - first >= _MOST_HOSTS:
            raise ValueError(f"{text!r} expands to more than {_MOST_HOSTS} hosts")
        for number in range(first, last + 1):
            yield str(number).zfill(len(match[1]))


def _tasks_per_node(text: str) -> list[int | None]:
    """Parses task counts such as "2(x3),1"; returns [] for any other text."""
    counts: list[int | None] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            return []
        counts += [int(match[1]) or None] * min(int(match[2] or 1), _MOST_HOSTS)
    return counts
