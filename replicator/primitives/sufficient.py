# SPDX-License-Identifier: Apache-2.0
"""Sums of matrix products, computed from the products' thin factors.

graph/matching/factors.py recognises the factors and costs/cost.py decides whether they
pay. This module concatenates the replicas' factors in replica order, each once per
device, and multiplies once. A mean divides one of the concatenated factors, which are
smaller than the product. Products of 16-bit floats are computed in float32.

Where devices share a memory, one of them (the hub, or the owner of the result) computes
the product and all read it; otherwise each device concatenates and multiplies for
itself, and only factors travel. Several hosts do so independently, and the factors of a
host's replicas are concatenated before they go to the others. All replicas get the same
bits if their processors multiply alike; hosts/likeness.py finds hosts that do not, and
then factors are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator.costs import cost, hosts
from replicator.graph.ir import shapes
from replicator.graph.lowering.matched import Matched
from replicator.graph.matching import factors
from replicator.graph.matching.factors import Epilogue, Factor, Product, RowSum
from replicator.primitives import base, levels


def reduce(
    matched: Matched, columns: Sequence[Sequence[tf.Tensor]]
) -> dict[int, list[tf.Tensor]]:
    """Reduces, by sum or mean, the operands whose factors are cheaper to move.

    Args:
        matched: The communication.
        columns: `columns[k][n]` is the k-th operand of participant n.

    Returns:
        By k, what each participant receives. Operands left out must be reduced as
        usual.
    """
    crossing = matched.crossing
    candidates = _find(matched, columns)
    joiner = _Joiner(matched)
    results: dict[int, list[tf.Tensor]] = {}
    for k, terms in candidates.items():
        if terms and isinstance(terms[0], Product):
            if crossing is not None:
                joiner.note_rows(terms, crossing.factors[k])
            if crossing or cost.factors_pay(terms, matched.policy, matched.devices):
                devices = joiner.devices(terms, matched.owner(k))
                results[k] = joiner.for_all(devices, joiner.multiply, terms)
    for k, terms in candidates.items():
        if terms and isinstance(terms[0], RowSum):
            devices = joiner.holders([Factor(term.rows, 0) for term in terms])
            if devices:
                results[k] = joiner.for_all(devices, joiner.add_rows, terms)
    if crossing and set(results) != set(crossing.factors):
        raise errors.InternalError(
            "other processes were told of different factors than are used here.",
            [call.site() for call in matched.calls],
            "pass factors=False, and report this.",
        )
    if results:
        matched.notes.algorithms.append("factors")
    return results


def _find(
    matched: Matched, columns: Sequence[Sequence[tf.Tensor]]
) -> dict[int, list[Any] | None]:
    """Returns the factors of all eligible operands, or none if none has a product."""
    crossing, policy = matched.crossing, matched.policy
    eligible = [
        k
        for k in range(len(columns))
        if (matched.algorithm(k) is None if crossing is None else k in crossing.factors)
    ]
    large = [
        k for k in eligible if crossing or not cost.is_small(columns[k][0], policy)
    ]
    factors_of = {k: factors.find(columns[k]) for k in large}
    if not any(
        terms and isinstance(terms[0], Product) for terms in factors_of.values()
    ):
        return {}  # sums of rows, even small ones, are only reduced with a product
    return {
        k: factors_of[k] if k in factors_of else factors.find(columns[k])
        for k in eligible
    }


_Joined = Mapping[str, tf.Tensor]  # a concatenated factor, by device


class _Joiner:
    """Concatenates factors on devices, each once.

    Args:
        matched: The communication.
    """

    def __init__(self, matched: Matched) -> None:
        self._matched = matched
        mean = matched.options["op"] == "mean"
        self._constant = 1.0 / len(matched.calls[0].group) if mean else 1.0
        self._rows: dict[Any, Sequence[int | None]] = {}
        self._joined: dict[Any, _Joined] = {}
        self._holders: dict[Any, Sequence[str]] = {}

    def note_rows(
        self, products: Sequence[Product], counts: Sequence[int | None]
    ) -> None:
        """Records how many rows of the products' factors each process has."""
        for side in ([p.left for p in products], [p.right for p in products]):
            self._rows[_key(side)] = counts

    def devices(self, products: Sequence[Product], owner: int | None) -> Sequence[str]:
        """Returns the devices that multiply: the holders of a factor, if any."""
        sides = [[p.left for p in products], [p.right for p in products]]
        size = cost.work(products)
        if owner is not None:
            devices: Sequence[str] = [self._matched.hub(size, owner)]
        elif hosts.are_several(self._matched.devices):
            devices = self._of_hosts()
        elif not cost.share_memory(self._matched.devices):
            devices = self._matched.devices
        else:
            holders = [self.holders(side) for side in sides]
            devices = holders[1] or holders[0] or [self._matched.hub(size)]
        for side in sides:
            self._holders.setdefault(_key(side), devices)
        return devices

    def _of_hosts(self) -> Sequence[str]:
        """Returns the devices that multiply on several hosts: one per shared memory."""
        multipliers: list[str] = []
        for members in hosts.by_host(self._matched.devices):
            devices = [self._matched.devices[n] for n in members]
            multipliers += devices[:1] if cost.share_memory(devices) else devices
        return multipliers

    def for_all(
        self,
        devices: Sequence[str],
        make: Callable[[Sequence[Any], str, Sequence[str]], tf.Tensor],
        column: Sequence[Any],
    ) -> list[tf.Tensor]:
        """Computes a result on some devices; returns what each participant receives."""
        places = _one_per_host(devices)
        results = {
            device: make(column, device, places if len(places) > 1 else [device])
            for device in devices
        }
        if len(results) == 1:
            ((at, result),) = results.items()
            received = levels.distribute(self._matched, [result], at)
            return [part for (part,) in received]
        result_on = {hosts.host_of(device): results[device] for device in results}
        return [
            results.get(device, result_on[hosts.host_of(device)])
            for device in self._matched.devices
        ]

    def holders(self, column: Sequence[Factor]) -> Sequence[str]:
        """Returns the devices on which the replicas' factor is concatenated, if any."""
        return self._holders.get(_key(column), [])

    def multiply(
        self, products: Sequence[Product], device: str, places: Sequence[str]
    ) -> tf.Tensor:
        """Computes the sum or mean of the replicas' products on a device.

        Args:
            products: One per participant.
            device: The device.
            places: The devices that concatenate factors: this one, or one per host.
        """
        left, right = [p.left for p in products], [p.right for p in products]
        epilogues = [p.epilogue for p in products]
        # A bias' gradient sums the right factor's rows and can reuse it once scaled.
        if products[0].right.width <= 4 * products[0].left.width:
            sides = self._join(left, places), self._scaled(right, epilogues, places)
        else:
            sides = self._scaled(left, epilogues, places), self._join(right, places)
        with tf.device(device):
            product = tf.linalg.matmul(
                *(_near(device, side) for side in sides),
                transpose_a=left[0].axis == 0,
                transpose_b=right[0].axis == 1,
            )
            return _reapplied(epilogues[0], product)

    def add_rows(
        self, sums: Sequence[RowSum], device: str, places: Sequence[str]
    ) -> tf.Tensor:
        """Computes the sum or mean of the replicas' sums of rows on a device."""
        epilogues = [row_sum.epilogue for row_sum in sums]
        rows = self._scaled(
            [Factor(row_sum.rows, 0) for row_sum in sums], epilogues, places
        )
        with tf.device(device):
            return _reapplied(epilogues[0], tf.reduce_sum(_near(device, rows), 0))

    def _scaled(
        self,
        column: Sequence[Factor],
        epilogues: Sequence[Epilogue],
        places: Sequence[str],
    ) -> _Joined:
        """Concatenates one factor per replica, multiplied by the product's scales."""
        scales = tuple(epilogue.scales for epilogue in epilogues)
        key = (
            tuple(places),
            _key(column),
            tuple(_scale_key(replica_scales) for replica_scales in scales),
        )
        if key not in self._joined:
            joined = self._join(column, places, scales)
            if self._constant != 1.0:
                for place, tensor in joined.items():
                    with tf.device(place):
                        scale = tf.constant(self._constant, tensor.dtype)
                        joined = {**joined, place: tensor * scale}
            self._joined[key] = joined
        return self._joined[key]

    def _join(
        self,
        column: Sequence[Factor],
        places: Sequence[str],
        scales: Sequence[Any] = (),
    ) -> _Joined:
        """Concatenates one factor per replica along its axis, in replica order."""
        if not any(scales):
            scales = [()] * len(column)
        key = tuple(places), _key(column), "joined", tuple(map(_scale_key, scales))
        if key not in self._joined:
            parts = [
                _multiplied(_matrix(factor), factor_scales, place)
                for factor, factor_scales, place in zip(
                    column, scales, self._matched.devices, strict=True
                )
            ]
            self._matched.notes.moved.extend(enumerate(parts))
            axis = column[0].axis
            joined = levels.join_each(self._matched, parts, axis, places)
            if self._matched.crossing is not None:
                local = joined[places[0]]
                counts = self._rows[_key(column)]
                joined_rows = self._matched.crossing.rows(local, axis, counts)
                joined = dict.fromkeys(places, joined_rows)
            for place, tensor in joined.items():
                if tensor.dtype in base.HALF:
                    with tf.device(place):
                        joined = {**joined, place: tf.cast(tensor, tf.float32)}
            self._joined[key] = joined
        return self._joined[key]


def _one_per_host(devices: Sequence[str]) -> list[str]:
    return [devices[members[0]] for members in hosts.by_host(devices)]


def _near(device: str, joined: _Joined) -> tf.Tensor:
    """Returns the concatenated factor on the host of a device."""
    (tensor_on_host,) = (
        tensor
        for place, tensor in joined.items()
        if hosts.host_of(place) == hosts.host_of(device)
    )
    return tensor_on_host


def _key(column: Sequence[Factor]) -> Any:
    """Returns a key that is equal for factors that hold the same rows."""
    axis = column[0].axis
    tensors = [factors.origin(f.tensor) if axis == 0 else f.tensor for f in column]
    return axis, tuple(map(id, tensors))


def _scale_key(scales: Sequence[tuple[str, tf.Tensor]]) -> Any:
    return tuple((kind, id(scalar)) for kind, scalar in scales)


def _matrix(factor: Factor) -> tf.Tensor:
    """Reshapes a factor to a matrix: all axes but the last become one."""
    if factor.tensor.shape.rank == 2:
        return factor.tensor
    with tf.device(factor.tensor.device):
        return tf.reshape(factor.tensor, [-1, shapes.sizes(factor.tensor)[-1]])


def _multiplied(
    factor: tf.Tensor, scales: Sequence[tuple[str, tf.Tensor]], device: str
) -> tf.Tensor:
    """Applies the scales of a replica's product to its factor, on its device."""
    with tf.device(device):
        for kind, scalar in reversed(scales):
            if factor.dtype in base.HALF:
                factor = tf.cast(factor, tf.float32)
            scalar = tf.cast(scalar, factor.dtype)
            factor = factor * scalar if kind == "Mul" else factor / scalar
    return factor


def _reapplied(epilogue: Epilogue, tensor: tf.Tensor) -> tf.Tensor:
    """Applies to the reduced tensor the steps that followed each replica's product."""
    for kind, argument in reversed(epilogue.steps):
        change = tf.transpose if kind == "Transpose" else tf.reshape
        tensor = change(tensor, argument)
    return tf.cast(tensor, epilogue.dtype)
