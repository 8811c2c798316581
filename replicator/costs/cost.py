# SPDX-License-Identifier: Apache-2.0
"""Where and how a communication is computed.

Which device adds up a matched set of tensors (the hub), which small tensors travel
together (a bucket), and by which algorithm they are reduced: the one that is cheapest
by a small model (costs/rates.py), whose constants `python -m replicator.calibrate`
measures.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any

import tensorflow as tf

from replicator.costs import hosts, rates
from replicator.graph.ir import shapes

# Each tensor that is sent costs some time, however small it is. Measured on CPUs with
# 100 layers of 64 units, buckets of 64 and of 256 KiB were slower than these. The
# reason may be that glibc's malloc asks the system for each buffer from 128 KiB on.
_BUCKET_BYTES = 120_000

_WIDEST = 8  # bytes of a number in a matrix product

_UNKNOWN_BYTES = 1 << 10  # tensors of unknown size are mostly small: losses, counts


ALGORITHM_NAMES = ("hub", "shuffled", "tree", "ring", "nccl")


@dataclasses.dataclass(frozen=True)
class Policy:
    """What the user leaves to be decided here, and what not.

    Attributes:
        algorithm: How all_reduce is done, one of ALGORITHM_NAMES; None: the cheapest
            for each.
        fusion: Whether small tensors that are reduced together travel together.
        factors: Whether sums of matrix products may move the factors instead.
        calibration: What work costs on each kind of device.
    """

    algorithm: str | None = None
    fusion: bool = True
    factors: bool = True
    calibration: rates.Calibration = rates.Calibration()


def shards(variables: str, devices: Sequence[str]) -> bool:
    """Decides whether each variable gets one owner.

    Args:
        variables: What the user says: "mirrored", "sharded", or "auto".
        devices: Where the replicas run.

    Returns:
        For "auto": whether all devices are CPUs of one process, where a read from
        another device costs no copy. Measured with 2 cores and 2 replicas, as a share
        of one device's time with the whole batch, mirrored and sharded: perceptrons of
        32-64-64-10 units 0.79 and 0.75, of 1024-2048x3-10 units 1.38 and 1.17, of 100
        layers 1.18 and 0.94; so it is so for all sizes. On accelerators, which were not
        measured, each read of a variable would be a transfer.
    """
    if variables == "auto":
        return share_memory(devices)
    return variables == "sharded"


def tensor_bytes(tensor: tf.Tensor) -> int:
    """Returns the size of a tensor in bytes, or a guess where that is unknown."""
    nbytes = known_bytes(tensor)
    return _UNKNOWN_BYTES if nbytes is None else nbytes


def known_bytes(tensor: tf.Tensor) -> int | None:
    """Returns the size of a tensor in bytes, or None where that is unknown."""
    if not tensor.shape.is_fully_defined() or not tensor.dtype.size:
        return None
    return math.prod(tensor.shape.as_list()) * tensor.dtype.size


def choose(
    policy: Policy,
    asked: str | None,
    able: Sequence[str],
    nbytes: int | None,
    devices: Sequence[str],
) -> str:
    """Says by which algorithm one tensor per participant is reduced.

    Args:
        policy: Holds what work costs.
        asked: What the call or the user asks for, if anything.
        able: The algorithms that can do it; "hub" always can.
        nbytes: The size of the tensor; None if it is only known when the step runs.
        devices: Where the participants run.

    Returns:
        What was asked for, if that can do it, else the hub; and if nothing was, the
        cheapest. A tensor of unknown size is taken for a small one. NCCL has to be
        asked for, unless what GPUs cost was measured, and so NCCL found to work.
    """
    if len(devices) == 1:
        return "hub"
    if asked is not None:
        return asked if asked in able else "hub"
    kind = rates.kind_of(devices)
    with_nccl = rates.are_gpus(devices) and "gpu" in policy.calibration.rates
    costs = {
        name: policy.calibration.seconds(
            name, kind, len(devices), _UNKNOWN_BYTES if nbytes is None else nbytes
        )
        for name in able
        if name != "nccl" or with_nccl
    }
    return min(costs, key=lambda name: (costs[name], name != "hub"))


def buckets(
    columns: Sequence[Sequence[tf.Tensor]],
    policy: Policy,
    apart: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """Decides which tensors of one communication travel together.

    Args:
        columns: `columns[k][r]` is the k-th operand of replica r.
        policy: Whether any of them may.
        apart: Tensors for which `apart[k]` differs never travel together: those that
            different replicas need, say.

    Returns:
        The indices k, each once, in groups of one dtype and one shape of their rows, so
        that they can be joined as they are. A group of several holds at most
        _BUCKET_BYTES; a tensor of unknown size is alone.
    """
    if not policy.fusion:
        return [[k] for k in range(len(columns))]
    groups: list[list[int]] = []
    open_groups: dict[Any, tuple[list[int], int]] = {}
    for k, column in enumerate(columns):
        nbytes = tensor_bytes(column[0])
        shape = shapes.static(column[0]) or ()
        kind = (column[0].dtype, shape[1:], apart[k] if apart else None)
        group, filled = open_groups.get(kind, ([], 0))
        known = all(tensor.shape.is_fully_defined() for tensor in column)
        if group and known and filled + nbytes <= _BUCKET_BYTES:
            group.append(k)
            open_groups[kind] = (group, filled + nbytes)
        else:
            groups.append([k])
            if known and nbytes < _BUCKET_BYTES:
                open_groups[kind] = (groups[-1], nbytes)
    return groups


def filled(nbytes: int) -> float:
    """Returns what share of a message a tensor takes that travels with others."""
    return min(1.0, nbytes / _BUCKET_BYTES)


class Hubs:
    """Deals hubs so that each host, and each device of it, adds up about as much.

    Hosts come first: what a hub receives and returns crosses the link of its host.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._load = dict.fromkeys(devices, 0)
        self._on_host = {hosts.host_of(device): 0 for device in devices}

    def next(self, nbytes: int, among: Sequence[str] | None = None) -> str:
        """Returns the device with the least load so far and gives it `nbytes` more.

        Args:
            nbytes: How much it will have to do.
            among: The devices to choose from; all, unless given.
        """
        least = min(among or self._load, key=self._loads)
        self._load[least] += nbytes + 1
        self._on_host[hosts.host_of(least)] += nbytes + 1
        return least

    def _loads(self, device: str) -> tuple[int, int]:
        return self._on_host[hosts.host_of(device)], self._load[device]


def share_memory(devices: Sequence[str]) -> bool:
    """Whether tensors are handed from device to device without being copied."""
    return rates.kind_of(devices) == "cpu"


def is_small(tensor: tf.Tensor, policy: Policy) -> bool:
    """Whether a tensor travels with others, whatever it is cast from.

    Then its factors do not pay; to find them takes longer than to ask this.
    """
    if not policy.fusion or not tensor.shape.is_fully_defined():
        return False
    return math.prod(tensor.shape.as_list()) * _WIDEST < _BUCKET_BYTES


def factors_pay(
    products: Sequence[Any], policy: Policy, devices: Sequence[str]
) -> bool:
    """Decides whether to move the factors of matrix products, and not the products.

    Args:
        products: One per replica, of graph/matching/factors.py.
        policy: Whether small products would travel together, which is cheaper still.
        devices: Where the replicas run.
    """
    left, right = products[0].left, products[0].right
    return rows_pay(
        sum(product.left.rows for product in products),
        (left.width, right.width),
        left.tensor.dtype.size,
        len(products),
        policy,
        hosts.are_several(devices),
    )


def rows_pay(
    rows: int,
    widths: tuple[int, int],
    size: int,
    count: int,
    policy: Policy,
    crosses: bool,
) -> bool:
    """Decides whether to move the factors of products, and not the products.

    Args:
        rows: How many rows they have, of all replicas.
        widths: Those of both factors.
        size: Bytes of a number.
        count: How many products there are.
        policy: Whether small products would travel together.
        crosses: Whether they go to other hosts.
    """
    m, n = widths
    if policy.fusion and m * n * size < _BUCKET_BYTES:
        return False
    if crosses and rows * (m + n) >= 2 * m * n:
        return False  # a host receives all others' rows; of products, two at most
    # Joining writes the factors and scaling one of them, where without it each replica
    # writes a product of its own and the hub passes over all of them.
    return 2 * rows * (m + n) < count * m * n


def work(products: Sequence[Any]) -> int:
    """Returns how many bytes pass through the device that joins and multiplies."""
    left, right = products[0].left, products[0].right
    rows = sum(product.left.rows for product in products)
    numbers = rows * (left.width + right.width) + left.width * right.width
    return numbers * left.tensor.dtype.size
