# SPDX-License-Identifier: Apache-2.0
"""Measures rates within the hosts of a cluster and on each link between them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from replicator.calibrate import measure
from replicator.costs import hosts, rates
from replicator.hosts import connection

_MOST_PAIRS_OF = 8  # hosts; with more, each is measured with the next one only
_SAMPLE = 1 << 20  # bytes of the message by which links are compared


@dataclasses.dataclass(frozen=True)
class ClusterMeasurement:
    """The measurement of a cluster.

    Attributes:
        devices: The devices of all hosts.
        calibration: The rates of work.
        names: The names of the hosts, by the names that `hosts.host_of` returns.
    """

    devices: Sequence[str]
    calibration: rates.Calibration
    names: Mapping[str, str]


def measure_cluster(rounds: int) -> ClusterMeasurement:
    """Connects to the hosts described by the environment, and measures.

    Args:
        rounds: The number of measurements of each.

    Raises:
        ClusterError: There are no hosts, or they do not answer.
        ValueError: There is only one host.
    """
    connected = connection.connect()
    devices = connected.devices
    members = [[devices[n] for n in host] for host in hosts.by_host(devices)]
    if len(members) < 2:
        raise ValueError("--cluster measures between hosts, but there is only one")
    rates_by_kind: dict[str, rates.Rates] = {}
    several = next((host for host in members if len(host) > 1), None)
    if several is not None:
        rates_by_kind[rates.kind_of(several)] = measure.measure_rates(several, rounds)
    links = {
        frozenset(map(hosts.host_of, ends)): measure.measure_rates(ends, rounds)
        for ends in pairs([host[0] for host in members])
    }
    rates_by_kind["hosts"] = max(links.values(), key=seconds)
    names = {hosts.host_of(host[0]): connected.host_of(host[0]) for host in members}
    return ClusterMeasurement(devices, rates.Calibration(rates_by_kind, links), names)


def pairs(devices: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the pairs of devices on different hosts to measure between.

    Args:
        devices: One device per host.
    """
    if len(devices) <= _MOST_PAIRS_OF:
        return list(itertools.combinations(devices, 2))
    return list(zip(devices, [*devices[1:], devices[0]], strict=True))


def seconds(link: rates.Rates) -> float:
    """Returns the seconds of a message of _SAMPLE bytes on a link."""
    return link.message + _SAMPLE * link.link
