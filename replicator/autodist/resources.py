# SPDX-License-Identifier: Apache-2.0
"""Finds the devices that a resource names, as arguments of Replicator."""

from __future__ import annotations

import os
from typing import Any

from absl import logging

from replicator import errors
from replicator.cluster import addresses, peers, state
from replicator.cluster.resources import ResourceSpec


def devices_of(resource: Any) -> Any:
    """Returns the devices that a resource names, as an argument of Replicator.

    Args:
        resource: AutoDist's argument: the path of a YAML file, a ResourceSpec, or
            whatever Replicator takes.

    Raises:
        ClusterError: The file is invalid, or lists hosts other than those that this
            program is connected to.
    """
    if isinstance(resource, str | os.PathLike):
        resource = ResourceSpec(resource)
    if not isinstance(resource, ResourceSpec):
        return resource
    return _named(resource)


def _named(spec: ResourceSpec) -> list[str]:
    """Returns the devices of hosts under TensorFlow's names."""
    hosts = spec.description.hosts
    facts = peers.process_group()
    connected = facts.addresses if facts is not None else state.connected_hosts()
    listed = [host.address for host in hosts]
    if [*connected] == listed:
        tasks = [f"/job:{state.WORKER}/replica:0/task:{k}/" for k in range(len(hosts))]
    elif connected or len(hosts) > 1:
        raise _elsewhere(spec, listed, connected)
    else:
        tasks = [""]  # this program's own host
        _warn_of_another(spec, hosts[0].name)
    return [
        f"{task}{'device:' if task else ''}{device}"
        for task, host_devices in zip(tasks, spec.by_host, strict=True)
        for device in host_devices
    ]


def _warn_of_another(spec: ResourceSpec, host: str) -> None:
    """Warns if the only host that is listed is none that this one knows itself as."""
    if not addresses.is_own(addresses.split(host)[0]):
        logging.warning(
            "%s lists only %s, which is no name or address that this host knows as its "
            "own; the program runs on this host all the same. To use the listed host, "
            "call replicator.connect with the file first; if it is this one, write "
            "address: localhost.",
            spec.description.source,
            host,
        )


def _elsewhere(spec: ResourceSpec, listed: Any, connected: Any) -> errors.ClusterError:
    there = f"to {', '.join(connected)}" if connected else "to no host"
    return errors.ClusterError(
        f"{spec.description.source} lists {', '.join(listed)}, but this program is "
        f"connected {there}.",
        fix="call replicator.connect with that file first, before any other use of "
        "TensorFlow, with `python -m replicator.serve` running on each host (`python "
        "-m replicator.launch` starts it); or list this host only.",
    )
