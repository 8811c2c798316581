# SPDX-License-Identifier: Apache-2.0
"""Finds the description of a cluster: in arguments, files or launchers' variables."""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence, Set
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator.cluster import description, hostfile, resources, slurm

LAUNCHER = "REPLICATOR_CLUSTER"
HOSTFILE = "REPLICATOR_HOSTFILE"
TF_CONFIG = "TF_CONFIG"
ARGUMENT = "the list that connect was given"
# Jobs whose single task is the program itself, and the job whose tasks are hosts.
_CLIENTS = ("chief", "master", "client", "coordinator")
_WORKERS = "worker"
_RESILIENT = "resilient"  # a file beside the launcher's description

_LOOKED = (
    f"{LAUNCHER}, which `python -m replicator.launch` sets: it is not set",
    f"{TF_CONFIG}: it is not set",
    f"Slurm's variables, {slurm.NODES[0]}: it is not set",
    f"{HOSTFILE}: it is not set",
    "mpirun's variables, OMPI_COMM_WORLD_RANK: it is not set",
)


def find(
    hosts: Any, environment: Mapping[str, str], optional: bool = False
) -> description.Description | None:
    """Returns the description of the hosts to connect to.

    Args:
        hosts: The argument of `connect`.
        environment: The environment variables of this process.
        optional: Whether there may be none; the result is then None.

    Raises:
        ClusterError: There is no description, or it is wrong.
    """
    if hosts is not None:
        return _of_argument(hosts)
    if environment.get(LAUNCHER):
        return description.from_json(_current(environment[LAUNCHER]), LAUNCHER)
    if environment.get(TF_CONFIG):
        return _tf_config(environment[TF_CONFIG])
    described = slurm.describe(environment)
    if described is None and environment.get(HOSTFILE):
        described = hostfile.read(environment[HOSTFILE], HOSTFILE)
    if described is None:
        described = hostfile.describe_mpirun(environment)
    if described is not None or optional:
        return described
    raise errors.ClusterError(
        "connect found no description of hosts.",
        [
            "looked at hosts=: it is None",
            *(f"looked at {at}" for at in _LOOKED),
            f"at {errors.user_line()}",
        ],
        'pass hosts=["host:port", ...], or the path of a YAML file, or (for '
        "Kubernetes, say) a resolver of tf.distribute.cluster_resolver; or start "
        "the program with `python -m replicator.launch --hosts=...`.",
    )


def announce_resilience(environment: Mapping[str, str]) -> None:
    """Tells the launcher, if there is one, that this program survives lost hosts.

    Args:
        environment: The environment variables of this process.
    """
    path = _launchers_file(environment.get(LAUNCHER, ""))
    if path is not None and path.exists():
        path.with_name(_RESILIENT).touch()


def _current(text: str) -> str:
    """Returns the launcher's current description; `text` may name lost hosts."""
    path = _launchers_file(text)
    if path is None:
        return text
    try:
        return path.read_text()
    except OSError:  # the launcher has ended
        return text


def _launchers_file(text: str) -> pathlib.Path | None:
    try:
        return pathlib.Path(json.loads(text)["file"])
    except (ValueError, TypeError, KeyError):
        return None


def _of_argument(hosts: Any) -> description.Description:
    """Returns the description that the argument `hosts` of `connect` stands for."""
    if isinstance(hosts, resources.ResourceSpec):
        return hosts.description
    if isinstance(hosts, str | os.PathLike):
        return _file(hosts)
    if isinstance(hosts, tf.distribute.cluster_resolver.ClusterResolver):
        return _resolved(hosts)
    if isinstance(hosts, tf.train.ClusterSpec):
        return _of_jobs(hosts.as_dict(), "the ClusterSpec that connect was given")
    is_list = isinstance(hosts, Sequence | Set) and not isinstance(hosts, Set | bytes)
    if not is_list or not all(isinstance(address, str) for address in hosts):
        raise errors.ClusterError(
            f"connect was given hosts={errors.repr_of(hosts)}.",
            fix='pass a list, ["host:port", ...]; or a ResourceSpec, the path of a '
            "YAML file, or a resolver of tf.distribute.cluster_resolver.",
        )
    return description.of_addresses(hosts, ARGUMENT)


def _file(path: str | os.PathLike[str]) -> description.Description:
    suffix = pathlib.PurePath(path).suffix
    if suffix in (".yml", ".yaml"):
        return resources.ResourceSpec(path).description
    if isinstance(path, str) and not os.path.exists(path):
        raise errors.ClusterError(
            f"connect was given hosts={errors.repr_of(path)}, but there is no such "
            "file.",
            fix=f"if it is a host, pass a list, [{errors.repr_of(path)}].",
        )
    return hostfile.read(path, "the file that connect was given")


def _resolved(
    resolver: tf.distribute.cluster_resolver.ClusterResolver,
) -> description.Description:
    """Returns the hosts that a cluster resolver finds."""
    name = type(resolver).__name__
    try:
        jobs = resolver.cluster_spec().as_dict()
    except Exception as error:  # from Kubernetes' client, a subprocess, the network
        raise description.wrong(
            name, f"it failed with {errors.summary(error)}"
        ) from error
    return _of_jobs(jobs, name)


def _tf_config(text: str) -> description.Description:
    """Returns the hosts that the variable TF_CONFIG describes."""
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise description.wrong(
            TF_CONFIG, f"it is not JSON: {errors.summary(error)}"
        ) from None
    jobs = facts.get("cluster") if isinstance(facts, dict) else None
    if not isinstance(jobs, dict):
        raise description.wrong(TF_CONFIG, 'it has no "cluster": {"worker": [...]}')
    described = _of_jobs(jobs, TF_CONFIG)
    task = facts.get("task")
    kind = task.get("type") if isinstance(task, dict) else None
    index = task.get("index", 0) if isinstance(task, dict) else 0
    has_chief = described.client is not None
    is_ours = kind in _CLIENTS if has_chief else (kind, index) == (_WORKERS, 0)
    if kind is not None and not is_ours:
        raise description.wrong(
            TF_CONFIG,
            f"this is task {errors.repr_of(index)} of {errors.repr_of(kind)}, but the "
            f"{'chief' if has_chief else 'first worker'} connects to all hosts",
            "run `python -m replicator.serve` here, and the program there",
        )
    return described


def _of_jobs(jobs: Mapping[str, Any], source: str) -> description.Description:
    """Returns the hosts of a cluster that is described by jobs, as in TensorFlow.

    The workers are the hosts; the chief, if any, is the program that connects.
    """
    workers = _tasks(jobs.get(_WORKERS), source)
    chiefs = [a for job in _CLIENTS for a in _tasks(jobs.get(job), source)]
    if not workers:
        names = ", ".join(map(repr, jobs)) or "nothing"
        raise description.wrong(
            source,
            f'it has no job "{_WORKERS}", but {names}',
            f'list the hosts\' servers as the job "{_WORKERS}"',
        )
    if len(chiefs) > 1:
        raise description.wrong(source, f"it has {len(chiefs)} chiefs")
    return description.of_addresses(
        workers, source, client=chiefs[0] if chiefs else None
    )


def _number(task: Any) -> tuple[float, str]:
    """Returns the place of a task in the order of tasks, which JSON has as text."""
    text = str(task)
    return (int(text) if text.isascii() and text.isdigit() else math.inf), text


def _tasks(listed: Any, source: str) -> list[str]:
    if isinstance(listed, Mapping):  # {task: address}, as ClusterSpec allows
        listed = [listed[key] for key in sorted(listed, key=_number)]
    if listed is None:
        return []
    if not isinstance(listed, list) or not all(isinstance(a, str) for a in listed):
        raise description.wrong(
            source, f"{errors.repr_of(listed)} is not a list of addresses"
        )
    return listed
