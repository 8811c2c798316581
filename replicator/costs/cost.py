# SPDX-License-Identifier: Apache-2.0
"""Decides where and how a communication is computed.

This covers which device sums a matched set of tensors (the hub), which small tensors
travel together (a bucket), and which algorithm reduces them: the cheapest by a small
model (costs/rates.py), whose constants `python -m replicator.calibrate` measures.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any

import tensorflow as tf

from replicator.costs import hosts, rates

# Every tensor sent takes some time, however small it is. Measured on CPUs with 100
# layers of 64 units, buckets of 64 and of 256 KiB were slower than this size, perhaps
# because glibc's malloc asks the system for every buffer of 128 KiB or more.
_BUCKET_BYTES = 120_000

_WIDEST = 8  # the most bytes of a number in a matrix product

_UNKNOWN_BYTES = 1 << 10  # tensors of unknown size are mostly small: losses, counts


ALGORITHM_NAMES = ("hub", "shuffled", "tree", "ring", "nccl")


@dataclasses.dataclass(frozen=True)
class Policy:
    """The user's constraints on the choices made here, and the costs they are based on.

    Attributes:
        algorithm: The algorithm of all_reduce, one of ALGORITHM_NAMES; None: the
            cheapest for each tensor.
        fusion: Whether small tensors that are reduced together travel together.
        factors: Whether sums of matrix products may move the factors instead.
        calibration: The costs of work on each kind of device.
    """

    algorithm: str | None = None
    fusion: bool = True
    factors: bool = True
    calibration: rates.Calibration = rates.Calibration()


def tensor_bytes(tensor: tf.Tensor) -> int:
    """Returns the size of a tensor in bytes, or an estimate if it is unknown."""
    nbytes = known_bytes(tensor)
    return _UNKNOWN_BYTES if nbytes is None else nbytes


def known_bytes(tensor: tf.Tensor) -> int | None:
    """Returns the size of a tensor in bytes, or None if it is unknown."""
    if not tensor.shape.is_fully_defined() or not tensor.dtype.size:
        return None
    return math.prod(tensor.shape.as_list()) * tensor.dtype.size


def choose(
    policy: Policy,
    requested: str | None,
    able: Sequence[str],
    nbytes: int | None,
    devices: Sequence[str],
) -> str:
    """Chooses the algorithm that reduces one tensor per participant.

    Args:
        policy: Holds the costs of work.
        requested: The algorithm that the call or the user requests, if any.
        able: The algorithms that support the reduction; "hub" always does.
        nbytes: The size of the tensor; None if it is known only at run time.
        devices: The participants' devices.

    Returns:
        The requested algorithm, or the hub if that is not supported; without a request,
        the cheapest. A tensor of unknown size is assumed to be small. NCCL must be
        requested, unless GPUs' costs were measured, which shows that NCCL works.
    """
    if len(devices) == 1:
        return "hub"
    if requested is not None:
        return requested if requested in able else "hub"
    kind = rates.kind_of(devices)
    with_nccl = rates.nccl_reaches(devices) and "gpu" in policy.calibration.rates
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
    kinds: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """Decides which tensors of one communication travel together.

    Args:
        columns: `columns[k][r]` is the k-th operand of replica r.
        policy: Whether any may travel together.
        kinds: Tensors with different `kinds[k]` never travel together, e.g. those that
            different replicas need.

    Returns:
        The indices k, each once, in groups of one dtype and one row shape, so that the
        tensors can be concatenated as they are. A group of several tensors holds at
        most _BUCKET_BYTES; one of unknown size has its own.
    """
    if not policy.fusion:
        return [[k] for k in range(len(columns))]
    groups: list[list[int]] = []
    open_groups: dict[Any, tuple[list[int], int]] = {}
    for k, column in enumerate(columns):
        nbytes = tensor_bytes(column[0])
        is_static = all(tensor.shape.is_fully_defined() for tensor in column)
        row_shape = tuple(column[0].shape.as_list()[1:]) if is_static else None
        kind = (column[0].dtype, row_shape, kinds[k] if kinds else None)
        group, group_bytes = open_groups.get(kind, ([], 0))
        if group and is_static and group_bytes + nbytes <= _BUCKET_BYTES:
            group.append(k)
            open_groups[kind] = (group, group_bytes + nbytes)
        else:
            groups.append([k])
            if is_static and nbytes < _BUCKET_BYTES:
                open_groups[kind] = (groups[-1], nbytes)
    return groups


def filled(nbytes: int, total: int | None = None) -> float:
    """Returns a tensor's share of the message in which it travels with others.

    Args:
        nbytes: The size of the tensor.
        total: The size of all tensors that may share messages, this one included;
            None: enough to fill a message.
    """
    size = _BUCKET_BYTES if total is None else min(_BUCKET_BYTES, total)
    return min(1.0, nbytes / max(1, size))


class Hubs:
    """Assigns hubs so that hosts, and the devices of a host, share the work evenly.

    Hosts come first: what a hub receives and returns crosses the link of its host.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._load = dict.fromkeys(devices, 0)
        self._on_host = {hosts.host_of(device): 0 for device in devices}

    def next(self, nbytes: int, among: Sequence[str] | None = None) -> str:
        """Returns the device with the least load so far and adds `nbytes` to its load.

        Args:
            nbytes: How many bytes it will process.
            among: The devices to choose from; all by default.
        """
        device = min(among or self._load, key=self._loads)
        self._load[device] += nbytes + 1
        self._on_host[hosts.host_of(device)] += nbytes + 1
        return device

    def _loads(self, device: str) -> tuple[int, int]:
        return self._on_host[hosts.host_of(device)], self._load[device]


def share_memory(devices: Sequence[str]) -> bool:
    """Whether tensors pass from device to device without a copy."""
    return rates.kind_of(devices) == "cpu"


def is_small(tensor: tf.Tensor, policy: Policy) -> bool:
    """Whether a tensor is small enough for a bucket, whatever it is cast from.

    If so, its factors do not pay, and finding them would take longer than this check.
    """
    if not policy.fusion or not tensor.shape.is_fully_defined():
        return False
    return math.prod(tensor.shape.as_list()) * _WIDEST < _BUCKET_BYTES


def factors_pay(
    products: Sequence[Any], policy: Policy, devices: Sequence[str]
) -> bool:
    """Decides whether to move the factors of matrix products instead of the products.

    Args:
        products: One per replica, of graph/matching/factors.py.
        policy: Whether small products would travel together, which is cheaper still.
        devices: The replicas' devices.
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
    """Decides whether to move the factors of products instead of the products.

    Args:
        rows: The number of rows of the factors, over all replicas.
        widths: The widths of both factors.
        size: The size of an element in bytes.
        count: The number of products.
        policy: Whether small products would travel together.
        crosses: Whether they go to other hosts.
    """
    m, n = widths
    if policy.fusion and m * n * size < _BUCKET_BYTES:
        return False
    if crosses and rows * (m + n) >= 2 * m * n:
        return False  # a host receives all others' rows, but at most two products
    # Concatenation writes the factors, and scaling one of them. Without factors, each
    # replica writes a product of its own and the hub reads all of them.
    return 2 * rows * (m + n) < count * m * n


def work(products: Sequence[Any]) -> int:
    """Returns the bytes that the device that concatenates and multiplies processes."""
    left, right = products[0].left, products[0].right
    rows = sum(product.left.rows for product in products)
    numbers = rows * (left.width + right.width) + left.width * right.width
    return numbers * left.tensor.dtype.size
