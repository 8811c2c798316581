# SPDX-License-Identifier: Apache-2.0
"""The hosts of replicas, and the hosts of the pipelines that feed them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import tensorflow as tf

from replicator._tf import cluster
from replicator.cluster import state

_LOCAL_TASK = ("localhost", 0)  # the task of an unconnected process


def hosts(devices: Sequence[str]) -> list[int]:
    """Numbers the hosts of the replicas in order of first occurrence.

    Args:
        devices: The full name of each replica's device.

    Returns:
        Each replica's host number.
    """
    tasks = [_task(device) for device in devices]
    order = list(dict.fromkeys(tasks))
    return [order.index(task) for task in tasks]


def cpu_beside(device: str) -> str:
    """Returns the first CPU of a device's host."""
    spec = tf.DeviceSpec.from_string(device)
    return str(spec.replace(device_type="CPU", device_index=0).to_string())


def is_here(device: str) -> bool:
    """Whether a device belongs to this process, the client."""
    return _task(device) == _own_task()


def home(devices: Sequence[str]) -> str | None:
    """Returns the host on which to create the pipeline of replicas on these devices.

    Returns:
        The CPU of their host. None: this process, because it is their host or because
        they are on several.
    """
    if len(set(hosts(devices))) > 1 or is_here(devices[0]):
        return None
    return cpu_beside(devices[0])


def middle(devices: Sequence[str]) -> str | None:
    """Returns where to divide something for all replicas: next to its pipeline.

    None: where the session puts it, which may not know this process.
    """
    if len(set(hosts(devices))) == 1:
        return cpu_beside(devices[0])
    job, task = _own_task()
    with tf.init_scope():
        eager = tf.executing_eagerly()
    return f"/job:{job}/replica:0/task:{task}/device:CPU:0" if eager else None


def of_program(devices: Sequence[str]) -> str | None:
    """Returns the CPU of the program, if it runs on the devices of other processes.

    In a tf.Graph: for sessions of which the program is the master.
    """
    if cluster.joined() is not None or all(map(is_here, devices)):
        return None
    job, task = _own_task()
    with tf.init_scope():
        if not tf.executing_eagerly():
            job, task = state.MASTER, 0
    return f"/job:{job}/replica:0/task:{task}/device:CPU:0"


def at(place: str | None) -> contextlib.AbstractContextManager[object]:
    """Returns a context that places ops; with None, it changes nothing."""
    return contextlib.nullcontext() if place is None else tf.device(place)


def _task(device: str) -> tuple[str, int]:
    spec = tf.DeviceSpec.from_string(device)
    return spec.job, spec.task


def _own_task() -> tuple[str, int]:
    token, joined = cluster.connection(), cluster.joined()
    if joined is not None:
        return state.WORKER, joined[0]
    return _LOCAL_TASK if token is None else (token.job_name, token.task_index)
