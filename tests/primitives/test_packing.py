# SPDX-License-Identifier: Apache-2.0
"""Unpacking restores the packed tensors, in place, with few ops."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

from replicator.costs import cost
from replicator.graph.ir.placeholder import Call, OperandPolicy
from replicator.graph.lowering.matched import Matched
from replicator.primitives import packing
from tests import helpers

Shapes = Sequence[Sequence[int]]

_WIDTHS = st.sampled_from([[], [3], [2, 2]])


@st.composite
def _buckets(draw: st.DrawFn) -> list[Shapes]:
    """Draws the shapes of a bucket's tensors: scalars and vectors, or wider."""
    buckets = []
    for width in draw(st.lists(_WIDTHS, min_size=1, max_size=3)):
        rows = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
        shapes = [[n, *width] for n in rows]
        if not width:
            shapes = [shape if draw(st.booleans()) else [] for shape in shapes]
        buckets.append(shapes)
    return buckets


def _matched(
    operands: Sequence[Sequence[tf.Tensor]], owners: Sequence[int] | None = None
) -> Matched:
    devices = tuple(helpers.make(len(operands)).devices)
    calls = tuple(
        Call(
            primitive="all_reduce",
            options={"op": "sum"},
            replica_id=r,
            device=device,
            group=tuple(range(len(devices))),
            key="0",
            operands=(),
            agreed=(),
            line="",
            policies=tuple(OperandPolicy(owner=owner) for owner in owners or ()),
        )
        for r, device in enumerate(devices)
    )
    policy = helpers.make(1)._settings.options.policy
    return Matched(
        calls, tuple(map(tuple, operands)), devices, cost.Hubs(devices), policy
    )


def _numbers(r: int, shapes: Shapes) -> list[np.ndarray]:
    rng = np.random.default_rng(r)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@hypothesis.settings(deadline=None)
@hypothesis.given(_buckets(), st.integers(1, 3))
def test_what_is_packed_comes_back(buckets: list[Shapes], num_replicas: int) -> None:
    flat = [shape for shapes in buckets for shape in shapes]
    arrays = [_numbers(r, flat) for r in range(num_replicas)]
    numbers = iter(range(len(flat)))
    places = [[next(numbers) for _ in shapes] for shapes in buckets]

    @tf.function(autograph=False)
    def function() -> list[list[list[tf.Tensor]]]:
        operands = []
        for device, own in zip(helpers.make(num_replicas).devices, arrays, strict=True):
            with tf.device(device):
                operands.append([tf.constant(x) for x in own])
        matched = _matched(operands)
        packs = packing.pack(matched, places)
        for bucket, pack in zip(places, packs, strict=True):
            assert [tensor.device for tensor in pack] == list(matched.devices)
            assert len(bucket) == 1 or pack[0].shape[0] == sum(
                np.prod(flat[k][:1], dtype=int) for k in bucket
            )
        reduced = [[[part] for part in pack] for pack in packs]
        pieces = packing.unpack(matched, places, reduced)
        for own in pieces:
            for device, parts in zip(matched.devices, own, strict=True):
                assert {tensor.device for tensor in parts[0]} == {device}
        return [[parts[0] for parts in split] for split in pieces]

    for bucket, own in zip(places, function(), strict=True):
        for r, tensors in enumerate(own):
            for k, tensor in zip(bucket, tensors, strict=True):
                assert tensor.shape == flat[k]
                np.testing.assert_array_equal(tensor, arrays[r][k])


@pytest.mark.parametrize("owners", [None, (1, 1)])
def test_a_pack_that_all_received_is_taken_apart_where_it_is_needed(
    owners: Sequence[int] | None,
) -> None:
    with tf.Graph().as_default() as graph:
        matched = _matched([[tf.zeros([2]), tf.zeros([])]] * 3, owners)
        (pack, *_) = packing.pack(matched, [[0, 1]])[0]
        pieces = packing.unpack(matched, [[0, 1]], [[[pack]] * 3])
        splits = [op for op in graph.get_operations() if op.type == "SplitV"]
    devices = list(matched.devices)
    assert [op.device for op in splits] == ([devices[1]] if owners else devices)
    assert all(len(parts[0]) == 2 for parts in pieces[0])


def test_a_single_tensor_stays_as_it_is() -> None:
    with tf.Graph().as_default() as graph:
        operands = [[tf.zeros([2, 3])], [tf.ones([2, 3])]]
        matched = _matched(operands)
        count = len(graph.get_operations())
        assert packing.pack(matched, [[0]]) == [[operand[0] for operand in operands]]
        received = [[operands[0][0]], [operands[1][0]]]
        (pieces,) = packing.unpack(matched, [[0]], [received])
        assert [parts[0][0] for parts in pieces] == [operand[0] for operand in operands]
        assert len(graph.get_operations()) == count
