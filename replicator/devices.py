# SPDX-License-Identifier: Apache-2.0
"""The devices on which replicas run: names are checked, logical CPUs created."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeGuard

import tensorflow as tf

from replicator import errors
from replicator.cluster import peers, state
from replicator.costs import paper, rehearsal

# Each costs memory and threads; TensorFlow takes minutes to create a million.
_MOST_CPUS = 1024
_MOST_NAMED = 16  # in a message
ACCELERATORS = ("GPU", "TPU")
_PATIENCE = 60.0  # seconds for other hosts to list their devices


def resolve(
    devices: Sequence[str | Sequence[str]] | None,
) -> tuple[tuple[str, ...], ...]:
    """Returns the full names of the devices of each replica.

    Args:
        devices: One name per replica, e.g. "CPU:0", "/gpu:1" or
            "/job:worker/task:1/device:GPU:0"; or a list of names for a replica with
            several devices. None: all accelerators, else the CPU; once connected to
            other hosts, those of these hosts.

    Returns:
        `resolved[r]` are replica r's devices, e.g.
        ("/job:localhost/replica:0/task:0/device:CPU:0",).

    Raises:
        DeviceError: A device does not exist, is listed twice, or is requested too late.
        ClusterError: A device is on another host, where a step may overtake writes.
    """
    if devices is None:
        devices = default()
    own_task = state.own_task()
    facts = peers.process_group()
    resolved: list[tuple[str, ...]] = []
    seen: set[str] = set()
    for entry in _listed(devices):
        names = entry if _is_nested(entry) else [entry]
        resolved.append(tuple(_full_name(name, own_task) for name in names))
        for name in resolved[-1]:
            if name in seen:
                raise _error(
                    f"{name} is listed more than once among the devices.",
                    "give each replica a device of its own; for several replicas on "
                    "one machine's cores, name CPU:0, CPU:1, ...",
                )
            seen.add(name)
    if not resolved or not all(resolved):
        raise _error(
            f"devices is {errors.repr_of(devices)}, which names no device.",
            "name at least one, or pass None for all accelerators (the CPU, if "
            "there is none).",
        )
    resolved = list(rehearsal.spread(resolved))
    if paper.is_on():
        return paper.spread(resolved)
    flat = [name for names in resolved for name in names]
    if facts is not None:
        _check_peers(flat, facts, own_task)
        return tuple(resolved)
    _make_logical_cpus(flat, own_task)
    _check_existence(flat, own_task)
    for name in _remote(flat):
        state.refuse_unordered(name)
    return tuple(resolved)


def existing(device: str) -> str:
    """Returns the full name of an existing device, which need not be a replica's.

    Args:
        device: Its name, e.g. "CPU:0".

    Raises:
        DeviceError: There is no such device.
    """
    own_task = state.own_task()
    name = _full_name(device, own_task)
    if not paper.is_on():
        _check_existence([name], own_task)
    return name


def processes(devices: Sequence[str]) -> list[int]:
    """Returns the process of each device, in between-graph mode.

    Args:
        devices: The full names of the devices.
    """
    return [int(tf.DeviceSpec.from_string(name).task) for name in devices]


def _check_peers(
    names: Sequence[str], group: peers.ProcessGroup, own_task: tf.DeviceSpec
) -> None:
    """Raises DeviceError unless the devices exist and every host has one of them."""
    existing_names = peers.devices(group, _PATIENCE)
    missing = [name for name in names if name not in existing_names]
    if missing:
        raise _error(
            f"{missing[0]} does not exist; all hosts together have "
            f"{', '.join(existing_names)}.",
            "pass cluster.devices, or None for all of them: in between-graph mode a "
            "Replicator has replicas on every host.",
        )
    idle = set(group.processes).difference(processes(names))
    if idle:
        raise _error(
            f"no device of host {min(idle)} ({group.addresses[min(idle)]}) is listed.",
            "list at least one device of each host, or start the program on fewer "
            "hosts.",
        )


def ordered(run: Callable[[], Any], devices: Sequence[str]) -> Callable[[], Any]:
    """Wraps the run of a step to refuse while it might overtake eager writes.

    Args:
        run: Runs the step.
        devices: The full names of the replicas' devices.
    """
    remote = _remote(devices)
    if not remote:
        return run

    def call() -> Any:
        state.refuse_unordered(remote[0])
        return run()

    return call


def _remote(names: Sequence[str]) -> list[str]:
    """Returns those devices that are on other hosts than this process."""
    own_task = state.own_task()
    return [
        name for name in names if not _is_of(tf.DeviceSpec.from_string(name), own_task)
    ]


def _is_of(spec: tf.DeviceSpec, task: tf.DeviceSpec) -> bool:
    """Whether a device belongs to a task."""
    return (spec.job, spec.task) == (task.job, task.task)


def _error(problem: str, fix: str) -> errors.DeviceError:
    return errors.DeviceError(problem, fix=fix)


def _listed(devices: Any) -> Iterator[Any]:
    """Yields the entries of a list, or of any other ordered iterable."""
    if isinstance(devices, str):
        raise _error(
            f"devices is the string {errors.repr_of(devices)}.",
            f"pass a list, [{errors.repr_of(devices)}].",
        )
    unordered = isinstance(devices, Set | Mapping) or tf.is_tensor(devices)
    try:
        if unordered:
            raise TypeError("names in no order")
        yield from devices
    except (TypeError, AttributeError, RuntimeError) as error:
        raise _error(
            f"devices is {errors.repr_of(devices)}.",
            'pass a list of names, e.g. ["CPU:0", "CPU:1"].',
        ) from error


def _is_nested(entry: Any) -> TypeGuard[Sequence[str]]:
    """Whether an entry lists one replica's devices; a LogicalDevice is also a tuple."""
    return isinstance(entry, list | tuple) and not isinstance(
        entry, tf.config.LogicalDevice
    )


def default() -> list[str]:
    """Returns all accelerators, or the CPU if there is none.

    Once connected to other hosts, returns all accelerators of these, or all their CPU
    devices; the process that connected only coordinates.
    """
    facts = peers.process_group()
    if facts is not None:
        return peers.devices(facts, _PATIENCE)
    if state.trainer() is not None:
        return local()
    names = [d.name for d in tf.config.list_logical_devices()]
    if state.connected_hosts():
        return of_hosts(names)
    specs = [tf.DeviceSpec.from_string(name) for name in names]
    accelerators = [s.to_string() for s in specs if s.device_type in ACCELERATORS]
    if accelerators:
        return accelerators
    own_task = state.own_task()
    remote = [s for s in specs if s.job and not _is_of(s, own_task)]
    cpus = [s.to_string() for s in remote if s.device_type == "CPU"]
    return cpus or ["CPU:0"]


def of_hosts_cpus() -> list[str]:
    """Returns the first CPU of each host of a connection."""
    names = [device.name for device in tf.config.list_logical_devices("CPU")]
    specs = [tf.DeviceSpec.from_string(name) for name in names]
    remote = [spec for spec in specs if spec.job == state.WORKER]
    return [spec.to_string() for spec in remote if spec.device_index == 0]


def local() -> list[str]:
    """Returns the full names of this process's accelerators, or else its CPUs."""
    names = [device.name for device in tf.config.list_logical_devices()]
    specs = [tf.DeviceSpec.from_string(name) for name in names]
    task = state.own_task()
    local_specs = [spec for spec in specs if _is_of(spec, task)]
    accelerators = [spec for spec in local_specs if spec.device_type in ACCELERATORS]
    cpus = [spec for spec in local_specs if spec.device_type == "CPU"]
    return [spec.to_string() for spec in accelerators or cpus]


def split_cpu(count: int) -> None:
    """Splits this host's CPU into `count` devices, unless the program has split it.

    Args:
        count: The number of devices; TensorFlow must not have started.
    """
    cpu = tf.config.list_physical_devices("CPU")[0]
    if count > 1 and tf.config.get_logical_device_configuration(cpu) is None:
        split = [tf.config.LogicalDeviceConfiguration()] * count
        tf.config.set_logical_device_configuration(cpu, split)


def of_hosts(names: Sequence[str]) -> list[str]:
    """Returns the devices on which the hosts of a connection compute.

    Args:
        names: The full names of all devices.

    Returns:
        All accelerators of the hosts, in order; their CPUs if there are none.
    """
    specs = [tf.DeviceSpec.from_string(name) for name in names]
    remote = [spec for spec in specs if spec.job == state.WORKER]
    accelerators = [spec for spec in remote if spec.device_type in ACCELERATORS]
    cpus = [spec for spec in remote if spec.device_type == "CPU"]
    return [spec.to_string() for spec in accelerators or cpus]


def _full_name(name: Any, own_task: tf.DeviceSpec) -> str:
    """Returns a device's name with job, replica and task, by default this process's."""
    try:
        if not isinstance(name, str) or "*" in name:
            raise ValueError
        spec = tf.DeviceSpec.from_string(name if name.startswith("/") else f"/{name}")
        if spec.device_type is None or not name.isprintable():
            raise ValueError
    except (ValueError, TypeError):
        raise _error(
            f"{errors.repr_of(name)} is not a device name.",
            "name devices as CPU:0, GPU:1 or /job:worker/task:0/device:GPU:0.",
        ) from None
    spec = spec.replace(
        device_type=spec.device_type.upper(),
        device_index=0 if spec.device_index is None else spec.device_index,
        replica=0 if spec.replica is None else spec.replica,
    )
    return own_task.make_merged_spec(spec).to_string()


def _local_cpu_count(names: Sequence[str], own_task: tf.DeviceSpec) -> int:
    specs = [tf.DeviceSpec.from_string(name) for name in names]
    local = [s for s in specs if s.device_type == "CPU" and _is_of(s, own_task)]
    return max((spec.device_index + 1 for spec in local), default=0)


def _make_logical_cpus(names: Sequence[str], own_task: tf.DeviceSpec) -> None:
    """Splits the CPU into as many devices as are named, if it is not too late."""
    needed = _local_cpu_count(names, own_task)
    if needed < 2:
        return
    if needed > _MOST_CPUS:
        raise _error(
            f"CPU:{needed - 1} would be one of {needed} logical CPU devices; the CPU "
            f"can be split into at most {_MOST_CPUS}.",
            f"name CPUs below CPU:{_MOST_CPUS}; one for each core is enough.",
        )
    cpu = tf.config.list_physical_devices("CPU")[0]
    if tf.config.get_logical_device_configuration(cpu) is not None:
        return  # the user's own choice, or an earlier Replicator's
    split = [tf.config.LogicalDeviceConfiguration()] * needed
    try:
        tf.config.set_logical_device_configuration(cpu, split)
    except RuntimeError:
        pass  # the runtime has started; _check_existence raises with a fix


def _check_existence(names: Sequence[str], own_task: tf.DeviceSpec) -> None:
    logical = [_full_name(d.name, own_task) for d in tf.config.list_logical_devices()]
    missing = [name for name in names if name not in logical]
    if not missing:
        return
    needed = _local_cpu_count(names, own_task)
    listing = ", ".join(logical[:_MOST_NAMED])
    if len(logical) > _MOST_NAMED:
        listing += f" and {len(logical) - _MOST_NAMED} more"
    if any(_local_cpu_count([name], own_task) for name in missing):
        fix = (
            "the CPU can only be split before TensorFlow has started: create the "
            "Replicator earlier (in a notebook, restart the kernel first), or call, "
            "before anything else of TensorFlow,\n"
            "  tf.config.set_logical_device_configuration(\n"
            '      tf.config.list_physical_devices("CPU")[0],\n'
            f"      [tf.config.LogicalDeviceConfiguration()] * {needed})"
        )
    else:
        fix = "name devices from this list."
    at = _host_of(missing[0])
    raise _error(f"{missing[0]}{at} does not exist; there are {listing}.", fix)


def _host_of(name: str) -> str:
    """Returns " (on host-b:8888)" for a device of a connected host, else ""."""
    spec, hosts = tf.DeviceSpec.from_string(name), state.connected_hosts()
    is_connected = spec.job == state.WORKER and spec.task in range(len(hosts))
    return f" (on {hosts[spec.task]})" if is_connected else ""
