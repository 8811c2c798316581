"""Where a cluster is described: arguments, files, and the variables of launchers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator.cluster import description

LAUNCHER = "REPLICATOR_CLUSTER"


def find(hosts: Any, environment: Mapping[str, str]) -> description.Description:
    """Returns the description of the hosts to connect to.

    Args:
        hosts: What `connect` was given.
        environment: The variables of this process.

    Raises:
        ClusterError: There is none, or it is wrong.
    """
    if hosts is not None:
        return description.of_addresses(list(hosts), "hosts=")
    if LAUNCHER in environment:
        return description.from_json(environment[LAUNCHER], LAUNCHER)
    raise errors.ClusterError("no cluster")
