# SPDX-License-Identifier: Apache-2.0
"""The nodes of each builder: AutoDist's table of rules."""

from __future__ import annotations

import pytest

import replicator
from replicator.strategy import (
    PS,
    AllReduce,
    AllReduceSynchronizer,
    Builder,
    Mirrored,
    Node,
    Parallax,
    Partitioned,
    PartitionedAR,
    PartitionedPS,
    PSLoadBalancing,
    PSSynchronizer,
    RandomAxisPartitionAR,
    Resources,
    Sharded,
    UnevenPartitionedPS,
    VariableFacts,
)

DEVICES = tuple(f"/job:localhost/replica:0/task:0/device:CPU:{k}" for k in range(3))
RESOURCES = Resources(DEVICES)


def facts(
    *shapes: tuple[int, ...], sparse: tuple[int, ...] = ()
) -> list[VariableFacts]:
    """Returns facts of float32 variables v0, v1, ..., some with sparse gradients."""
    result = []
    for k, shape in enumerate(shapes):
        nbytes = 4
        for size in shape:
            nbytes *= size
        result.append(
            VariableFacts(
                f"v{k}", shape, "float32", sparse=k in sparse, order=k, nbytes=nbytes
            )
        )
    return result


def places(nodes: tuple[Node, ...]) -> list[int]:
    """Returns the device index of each node, or of each part of one."""
    flat = [part for node in nodes for part in node.parts or (node,)]
    return [DEVICES.index(n.synchronizer.reduction_destination) for n in flat]


def groups(nodes: tuple[Node, ...]) -> list[int]:
    flat = [part for node in nodes for part in node.parts or (node,)]
    return [n.synchronizer.group for n in flat]


def test_ps_puts_all_on_the_first_cpu() -> None:
    nodes = PS().build(facts((4,), (), (2, 2)), RESOURCES).nodes
    assert [n.synchronizer for n in nodes] == [PSSynchronizer(DEVICES[0])] * 3
    gpus = tuple(name.replace("CPU", "GPU") for name in DEVICES)
    assert Resources(gpus).cpus == DEVICES[:1]
    (node,) = PS(True, True, 2).build(facts((4,)), Resources(gpus)).nodes
    assert node.synchronizer == PSSynchronizer(DEVICES[0], True, True, 2)


def test_ps_load_balancing_takes_the_device_with_the_fewest_bytes() -> None:
    shapes = [(10,), (4,), (3,), (2,), (3,), ()]  # loads 10, 4, 3 -> 5 -> 7 ...
    nodes = PSLoadBalancing().build(facts(*shapes), RESOURCES).nodes
    assert places(nodes) == [0, 1, 2, 2, 1, 2]


@pytest.mark.parametrize(
    ("size", "even", "uneven"),
    [(1, 1, 1), (2, 2, 2), (6, 2, 4), (7, 7, 2), (10000, 2, 3)],
)
def test_the_numbers_of_parts(size: int, even: int, uneven: int) -> None:
    for builder, count in (
        (PartitionedPS(), even),
        (UnevenPartitionedPS(), uneven),
        (PartitionedAR(), even),
    ):
        (node,) = builder.build(facts((size, 3)), RESOURCES).nodes
        assert len(node.parts) == (0 if count == 1 else count), builder
        if count > 1:
            assert (node.axis, sum(node.sizes), len(node.sizes)) == (0, size, count)


def test_uneven_parts_are_the_larger_ones_first() -> None:
    nodes = UnevenPartitionedPS().build(facts((6, 2), (7,)), RESOURCES).nodes
    assert [node.sizes for node in nodes] == [(2, 2, 1, 1), (4, 3)]


def test_parts_are_dealt_to_the_least_loaded() -> None:
    nodes = PartitionedPS().build(facts((4, 3), (), (6, 1), (3, 5)), RESOURCES).nodes
    # Floats: 6, 6; then 1 to device 2; 3 to it, and 3; then three parts of 5.
    assert places(nodes) == [0, 1, 2, 2, 2, 0, 1, 2]
    assert [bool(node.parts) for node in nodes] == [True, False, True, True]
    uneven = UnevenPartitionedPS().build(facts((6, 2)), RESOURCES).nodes
    assert places(uneven) == [0, 1, 2, 2]


def test_all_reduce_has_groups_of_chunk_size() -> None:
    nodes = AllReduce(chunk_size=2).build(facts(*[(4,)] * 5), RESOURCES).nodes
    assert groups(nodes) == [0, 0, 1, 1, 2]
    assert nodes[0].synchronizer == AllReduceSynchronizer("NCCL")
    nodes = AllReduce(128, "RING", "bf16").build(facts(*[(4,)] * 129), RESOURCES).nodes
    assert groups(nodes) == [0] * 128 + [1]
    assert nodes[128].synchronizer == AllReduceSynchronizer("RING", "bf16", 1)


def test_partitioned_ar_counts_parts_in_its_groups() -> None:
    builder = PartitionedAR(chunk_size=2)
    nodes = builder.build(facts((3, 2), (), (4,)), RESOURCES).nodes
    assert groups(nodes) == [0, 0, 1, 1, 2, 2]


def test_random_axis_partition_ar_draws_axes_that_are_longer_than_1() -> None:
    shapes = [(4, 1, 6)] * 40
    nodes = RandomAxisPartitionAR(seed=3).build(facts(*shapes), RESOURCES).nodes
    assert {node.partitioner for node in nodes} == {"2", "1,1,2"}
    again = RandomAxisPartitionAR(seed=3).build(facts(*shapes), RESOURCES).nodes
    assert nodes == again
    assert nodes != RandomAxisPartitionAR(seed=4).build(facts(*shapes), RESOURCES).nodes
    sparse = facts(*shapes, (1, 6), sparse=tuple(range(41)))
    nodes = RandomAxisPartitionAR().build(sparse, RESOURCES).nodes
    assert {node.partitioner for node in nodes[:40]} == {"2"}
    assert {node.axis for node in nodes[:40]} == {0}
    whole = RandomAxisPartitionAR().build(facts((1,), (), (1, 1)), RESOURCES).nodes
    assert not any(node.parts for node in whole)


def test_sparse_variables_of_one_row_are_whole() -> None:
    nodes = (
        RandomAxisPartitionAR().build(facts((1, 6, 2), sparse=(0,)), RESOURCES).nodes
    )
    assert not nodes[0].parts


def test_parallax_tells_dense_from_sparse() -> None:
    variables = facts((8, 2), (2,), (4, 2), (3,), sparse=(0, 2))
    builder = Parallax(chunk_size=1, local_proxy_variable=True)
    nodes = builder.build(variables, RESOURCES).nodes
    assert [n.synchronizer for n in nodes] == [
        PSSynchronizer(DEVICES[0]),
        AllReduceSynchronizer("NCCL", group=0),
        PSSynchronizer(DEVICES[1]),
        AllReduceSynchronizer("NCCL", group=1),
    ]


def test_sharded_keeps_vectors_with_what_is_before_them() -> None:
    variables = facts((4, 4), (4,), (), (4, 5), (5,), (2, 2))
    nodes = Sharded().build(variables, RESOURCES).nodes
    assert nodes[2].synchronizer == AllReduceSynchronizer()
    assert places(tuple(n for k, n in enumerate(nodes) if k != 2)) == [0, 0, 1, 1, 2]
    nodes = Mirrored().build(variables, RESOURCES).nodes
    assert {n.synchronizer for n in nodes} == {AllReduceSynchronizer()}


def test_partitioned_has_a_part_for_each_replica() -> None:
    nodes = Partitioned(axis=1).build(facts((2, 7), (5, 2)), RESOURCES).nodes
    assert [n.sizes for n in nodes] == [(3, 2, 2), (1, 1)]
    assert places(nodes) == [0, 1, 2, 1, 2]
    (node,) = Partitioned(axis=-1, parts=2).build(facts((2, 7)), RESOURCES).nodes
    assert (node.axis, node.sizes) == (1, (4, 3))
    with pytest.raises(replicator.StrategyError, match=r"(?s)v0.*axis 1.*\[4\].*Fix"):
        Partitioned(axis=1).build(facts((4,)), RESOURCES)


@pytest.mark.parametrize("builder", [PS, PSLoadBalancing, PartitionedPS, Parallax])
def test_staleness_demands_sync(builder: type[Builder]) -> None:
    with pytest.raises(replicator.StrategyError, match="(?s)staleness=1.*sync=False"):
        builder(sync=False, staleness=1)  # type: ignore[call-arg]
    with pytest.raises(replicator.StrategyError, match="staleness=-1"):
        builder(staleness=-1)  # type: ignore[call-arg]
    builder(sync=True, staleness=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "builder", [AllReduce, PartitionedAR, RandomAxisPartitionAR, Parallax]
)
@pytest.mark.parametrize("size", [0, -1, 1.5, None, True])
def test_chunks_hold_something(builder: type[Builder], size: object) -> None:
    with pytest.raises(replicator.StrategyError, match="(?s)chunk_size=.*at least 1"):
        builder(chunk_size=size)  # type: ignore[call-arg]


def test_other_options_are_checked() -> None:
    for make, message in (
        (lambda: AllReduce(all_reduce_spec="MPI"), "AllReduce was given spec='MPI'"),
        (lambda: PartitionedAR(compressor=3), "PartitionedAR was given compressor=3"),
        (lambda: RandomAxisPartitionAR(seed="x"), "seed='x'"),  # type: ignore[arg-type]
        (lambda: Partitioned(parts=0), "parts=0"),
        (lambda: Partitioned(axis="rows"), "axis='rows'"),  # type: ignore[arg-type]
        (lambda: PS(local_proxy_variable=1), "local replication 1"),  # type: ignore[arg-type]
    ):
        with pytest.raises(replicator.StrategyError, match=message):
            make()


def test_a_builder_answers_for_the_variable_that_it_is_asked_for() -> None:
    class Wrong(Builder):
        def nodes(self, variables, resources):  # type: ignore[no-untyped-def]
            for _ in variables:
                yield Node("other", AllReduceSynchronizer())

    with pytest.raises(replicator.StrategyError, match="(?s)Wrong yields other.*v0"):
        Wrong().build(facts((2,)), RESOURCES)

    class Parts(Builder):
        def nodes(self, variables, resources):  # type: ignore[no-untyped-def]
            for v in variables:
                how = [AllReduceSynchronizer()] * 2
                yield Node.in_parts(v.path, 1, [1, 1], how)

    with pytest.raises(replicator.StrategyError, match=r"(?s)v0.*axis 1.*\[2\]"):
        Parts().build(facts((2,)), RESOURCES)
    with pytest.raises(replicator.StrategyError, match=r"\[1, 1\] along axis 1.* 3"):
        Parts().build(facts((2, 3)), RESOURCES)
