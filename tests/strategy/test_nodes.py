# SPDX-License-Identifier: Apache-2.0
"""A node is valid, or its error says what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import replicator
from replicator.strategy import AllReduceSynchronizer, Node, PSSynchronizer

PS = PSSynchronizer("CPU:0")
PARTS = tuple(Node(f"w/part_{k}", PS) for k in range(3))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Node("", PS), "name ''.*Fix: pass the path of a variable"),
        (lambda: Node(3, PS), "name 3"),  # type: ignore[arg-type]
        (lambda: Node("w"), "'w' has no synchronizer.*Fix: give it one"),
        (lambda: Node("w", "PS"), "synchronizer 'PS'"),  # type: ignore[arg-type]
        (lambda: Node("w", PS, dtype="float99"), "dtype 'float99'"),
        (lambda: Node("w", PS, axis=0), "parts without an axis, or an axis"),
        (lambda: Node("w", parts=PARTS), "parts without an axis, or an axis"),
        (lambda: Node("w", PS, sizes=(1,)), "sizes of parts but no parts"),
        (lambda: Node("w", parts=PARTS[:1], axis=0), "one part.*two or more parts"),
        (lambda: Node("w", parts=PARTS, axis=-1), "along axis -1"),
        (lambda: Node("w", parts=PARTS, axis=0, sizes=(1, 2)), "3 parts of 2 sizes"),
        (lambda: Node("w", parts=PARTS, axis=0, sizes=(1, 0, 2)), r"sizes \(1, 0, 2\)"),
        (
            lambda: Node("w", parts=(Node.in_parts("p", 0, [1, 1], [PS] * 2),) * 2),
            "parts without an axis",
        ),
        (
            lambda: Node(
                "w", parts=(Node.in_parts("p", 0, [1, 1], [PS] * 2),) * 2, axis=0
            ),
            "a part that is not a Node, or that has parts",
        ),
        (lambda: PSSynchronizer(""), "reduction_destination=''.*Fix: name a device"),
        (lambda: PSSynchronizer("CPU:0", sync=1), "sync 1"),  # type: ignore[arg-type]
        (lambda: PSSynchronizer("CPU:0", staleness=-1), "staleness=-1"),
        (
            lambda: PSSynchronizer("CPU:0", sync=False, staleness=2),
            "staleness=2 with sync=False.*Fix: pass sync=True",
        ),
        (lambda: PSSynchronizer("CPU:0", compressor=8), "compressor=8"),
        (lambda: AllReduceSynchronizer("TREE"), "spec='TREE'.*AUTO, NCCL, RING"),
        (lambda: AllReduceSynchronizer(group=-1), "group=-1"),
        (lambda: AllReduceSynchronizer(compressor=None), "compressor=None"),
    ],
)
def test_what_is_wrong_is_said(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(replicator.StrategyError, match=f"(?s){said}"):
        make()


def test_parts_and_synchronizers_are_as_many() -> None:
    message = (
        r"(?s)'w' has parts of sizes \[2, 2\] and 3 synchronizers.*Fix: .*for each"
    )
    with pytest.raises(replicator.StrategyError, match=message):
        Node.in_parts("w", 0, [2, 2], [PS] * 3)


def test_a_node_in_parts_says_its_partitioner_and_its_extents() -> None:
    node = Node.in_parts("w", 1, [2, 2, 1], [PS] * 3)
    assert node.partitioner == "1,3"
    assert [part.name for part in node.parts] == ["w/part_0", "w/part_1", "w/part_2"]
    assert node.extents(5) == (2, 2, 1)
    with pytest.raises(replicator.StrategyError, match=r"(?s)\[2, 2, 1\].* 6.*add up"):
        node.extents(6)
    known = Node("w", parts=PARTS, axis=1, shape=(4, 7, 2, 2), dtype="float64")
    assert known.partitioner == "1,3,1,1"
    assert known.extents(7) == (3, 2, 2)
    assert known.nbytes == 4 * 7 * 2 * 2 * 8
    with pytest.raises(replicator.StrategyError, match="3 parts .* has 2"):
        known.extents(2)


def test_what_is_known_of_a_variable_tells_no_nodes_apart() -> None:
    assert Node("w", PS, shape=(2,), dtype="float32", sent=8, seconds=0.1) == Node(
        "w", PS
    )
    assert Node("w", PS) != Node("w", PSSynchronizer("CPU:0", True))
    assert Node("w", PS) != Node("v", PS)
