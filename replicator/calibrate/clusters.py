# SPDX-License-Identifier: Apache-2.0
"""What work costs within the hosts of a cluster, and on each link between them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from replicator.calibrate import measure
from replicator.cluster import connection
from replicator.costs import hosts, rates

_MOST_PAIRS_OF = 8  # hosts; of more, each is measured with the next one
_SAMPLE = 1 << 20  # bytes, by which links are compared


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured of a cluster.

    Attributes:
        devices: Those of all hosts.
        calibration: What work costs.
        names: What the hosts are called, by their names of `hosts.host_of`.
    """

    devices: Sequence[str]
    calibration: rates.Calibration
    names: Mapping[str, str]


def measure_cluster(rounds: int) -> Measured:
    """Connects to the hosts that the environment describes, and measures.

    Args:
        rounds: How often each is measured.

    Raises:
        ClusterError: There are no hosts, or they do not answer.
        ValueError: There is one host.
    """
    connected = connection.connect()
    devices = connected.devices
    members = [[devices[n] for n in own] for own in hosts.by_host(devices)]
    if len(members) < 2:
        raise ValueError("--cluster measures between hosts, and there is one")
    found: dict[str, rates.Rates] = {}
    several = next((own for own in members if len(own) > 1), None)
    if several is not None:
        found[rates.kind_of(several)] = measure.measure_rates(several, rounds)
    links = {
        frozenset(map(hosts.host_of, ends)): measure.measure_rates(ends, rounds)
        for ends in pairs([own[0] for own in members])
    }
    found["hosts"] = max(links.values(), key=seconds)
    names = {hosts.host_of(own[0]): connected.host_of(own[0]) for own in members}
    return Measured(devices, rates.Calibration(found, links), names)


def pairs(devices: Sequence[str]) -> list[tuple[str, str]]:
    """Returns between which devices of different hosts it is measured.

    Args:
        devices: One of each host.
    """
    if len(devices) <= _MOST_PAIRS_OF:
        return list(itertools.combinations(devices, 2))
    return list(zip(devices, [*devices[1:], devices[0]], strict=True))


def seconds(link: rates.Rates) -> float:
    """Returns what a message of some size takes on a link."""
    return link.message + _SAMPLE * link.link
