# SPDX-License-Identifier: Apache-2.0
"""Finds hosts that round differently, on which equal computations differ in their bits.

Replicas stay equal because each computes the same from equal values: products of joined
factors, and updates of its copy of a variable. Products depend on the instructions that
a processor has, on its caches and on TensorFlow's build; sums, and products of a vector
and a matrix, on the number of threads as well. So one device of each host and kind
computes a fixed set of products, and their bits are compared.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import zlib
from collections.abc import Mapping, Sequence

import tensorflow as tf
from absl import logging

from replicator import errors
from replicator.cluster import faults, peers
from replicator.costs import hosts, paper
from replicator.options import Options

# (rows, inner size, columns) of the products. Long inner sizes are added in an order
# that depends on the processor; the last one's depends on the number of threads.
_PRODUCTS = ((256, 1024, 64), (64, 4096, 8), (16, 4096, 16), (1, 16384, 64))
_FIX = (
    "use hosts with processors of one kind, the same build of TensorFlow and the same "
    "number of threads, which the environment variable TF_NUM_INTRAOP_THREADS sets"
)


def bits(device: str) -> str:
    """Returns a digest of fixed products that a device computes.

    Args:
        device: The name of a device, on any host of the connection.
    """
    # In a thread of its own, which executes eagerly: the caller may build a graph.
    with concurrent.futures.ThreadPoolExecutor(1) as pool, faults.named():
        return pool.submit(_bits, device).result()


def _bits(device: str) -> str:
    checksum = 0
    with tf.device(device):
        for rows, inner, columns in _PRODUCTS:
            product = _numbers(rows, inner) @ _numbers(inner, columns)
            checksum = zlib.crc32(product.numpy().tobytes(), checksum)
    return f"{checksum:08x}"


def _numbers(rows: int, columns: int) -> tf.Tensor:
    """Returns a matrix whose values are exact in float32; their products are not."""
    numbers = (tf.range(rows * columns, dtype=tf.int64) * 7919) % 1048573 - 524286
    return tf.reshape(tf.cast(numbers, tf.float32) / 524288.0, [rows, columns])


def checked(
    devices: Sequence[str], options: Options, processes: peers.Peers | None
) -> Options:
    """Returns the options, without factors if hosts round differently.

    Args:
        devices: The devices of the replicas that are built here.
        options: The options of their Replicator.
        processes: The processes that build the other replicas, if any; all call this.
    """
    kinds = {(hosts.host_of(d), d.rpartition("/")[2].split(":")[1]): d for d in devices}
    if processes is None and (len(kinds) == 1 or paper.is_on()):
        return options
    digests = {name: bits(name) for name in kinds.values()}
    if processes is not None:
        digests = {
            f"{name} of {processes.name(process)}": digest
            for process, process_digests in enumerate(
                processes.exchange("compares products", digests)
            )
            for name, digest in process_digests.items()
        }
    if len({*digests.values()}) == 1:
        return options
    _warn(digests, processes is not None)
    return dataclasses.replace(options, factors=False)


def _warn(digests: Mapping[str, str], between: bool) -> None:
    owned = '; or pass variables="sharded", with which one replica computes each update'
    logging.log_first_n(
        logging.WARNING,
        "%s",
        1,
        errors.compose(
            "the devices of this Replicator round products and sums differently. It "
            "uses factors=False, so that all replicas get the same sums; but copies of "
            "variables may drift apart by rounding where updates contain products or "
            "sums, as in clipping by norms.",
            [
                *(
                    f"{name}: its products have the bits {d}"
                    for name, d in digests.items()
                ),
                f"at {errors.user_line()}",
            ],
            f"{_FIX}{'' if between else owned}.",
        ),
    )
