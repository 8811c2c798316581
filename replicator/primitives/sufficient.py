# SPDX-License-Identifier: Apache-2.0
"""Sums of matrix products, made from the products' thin factors.

What graph/matching/factors.py has recognised, and costs/cost.py finds to pay, is put
together here: the replicas' factors are joined in replica order, each once per device,
and multiplied once. A mean divides one of the joined factors, so that nothing passes
over the large product. Products of 16-bit floats are made in float32.

Where devices share a memory, the product is made on one of them (the hub, or the owner
of what it is for) and read by all; else each device joins and multiplies for itself,
and nothing but factors travels. Of several hosts, each does so as if it were alone, and
the factors of its replicas are joined before they go to the others. All get the same
bits if their processors multiply alike: where hosts differ in kind, say factors=False.
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
from replicator.graph.matching.factors import After, Factor, Product, RowSum
from replicator.primitives import base, levels


def reduce(
    matched: Matched, columns: Sequence[Sequence[tf.Tensor]]
) -> dict[int, list[tf.Tensor]]:
    """Reduces, by sum or mean, the operands whose factors are better moved.

    Args:
        matched: The communication.
        columns: `columns[k][n]` is the k-th operand of participant n.

    Returns:
        By k, what each participant receives. What is left out is to be reduced as it
        is.
    """
    way = matched.crossing
    found = _find(matched, columns)
    joiner = _Joiner(matched)
    made: dict[int, list[tf.Tensor]] = {}
    for k, own in found.items():
        if own and isinstance(own[0], Product):
            if way is not None:
                joiner.note_rows(own, way.factors[k])
            if way or cost.factors_pay(own, matched.policy, matched.devices):
                devices = joiner.devices(own, matched.owner(k))
                made[k] = joiner.for_all(devices, joiner.multiply, own)
    for k, own in found.items():
        if own and isinstance(own[0], RowSum):
            devices = joiner.holders([Factor(one.rows, 0) for one in own])
            if devices:
                made[k] = joiner.for_all(devices, joiner.add_rows, own)
    if way and set(made) != set(way.factors):
        raise errors.InternalError(
            errors.compose(
                "what was told other processes of factors is not so.",
                [call.site() for call in matched.calls],
                "say factors=False, and report this.",
            )
        )
    if made:
        matched.notes.algorithms.append("factors")
    return made


def _find(
    matched: Matched, columns: Sequence[Sequence[tf.Tensor]]
) -> dict[int, list[Any] | None]:
    """Returns the factors of operands that may be made of some, if any pay."""
    way, policy = matched.crossing, matched.policy
    among = [
        k
        for k in range(len(columns))
        if (matched.algorithm(k) is None if way is None else k in way.factors)
    ]
    large = [k for k in among if way or not cost.is_small(columns[k][0], policy)]
    found = {k: factors.find(columns[k]) for k in large}
    if not any(own and isinstance(own[0], Product) for own in found.values()):
        return {}  # what adds up rows, be it small, only goes with a product
    return {k: found[k] if k in found else factors.find(columns[k]) for k in among}


_Joined = Mapping[str, tf.Tensor]  # by the device on which it was joined


class _Joiner:
    """Joins factors on devices, each once.

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
        """Notes how many rows of factors each process has, where there are several."""
        for side in ([p.left for p in products], [p.right for p in products]):
            self._rows[_key(side)] = counts

    def devices(self, products: Sequence[Product], owner: int | None) -> Sequence[str]:
        """Returns the devices that multiply: where a factor is already, if any is."""
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
        """Returns the devices that multiply: one of those that share a memory."""
        chosen: list[str] = []
        for members in hosts.by_host(self._matched.devices):
            own = [self._matched.devices[n] for n in members]
            chosen += own[:1] if cost.share_memory(own) else own
        return chosen

    def for_all(
        self,
        devices: Sequence[str],
        make: Callable[[Sequence[Any], str, Sequence[str]], tf.Tensor],
        column: Sequence[Any],
    ) -> list[tf.Tensor]:
        """Makes a result on some devices; returns what each participant receives."""
        places = _one_per_host(devices)
        made = {
            device: make(column, device, places if len(places) > 1 else [device])
            for device in devices
        }
        if len(made) == 1:
            ((at, result),) = made.items()
            received = levels.hand_out(self._matched, [result], at)
            return [part for (part,) in received]
        of_host = {hosts.host_of(device): made[device] for device in made}
        return [
            made.get(device, of_host[hosts.host_of(device)])
            for device in self._matched.devices
        ]

    def holders(self, column: Sequence[Factor]) -> Sequence[str]:
        """Returns the devices on which a factor of all replicas is joined, if any."""
        return self._holders.get(_key(column), [])

    def multiply(
        self, products: Sequence[Product], device: str, places: Sequence[str]
    ) -> tf.Tensor:
        """Makes the sum, or mean, of the replicas' products on a device.

        Args:
            products: One per participant.
            device: Where.
            places: Where factors are joined: the device, or one device of each host.
        """
        left, right = [p.left for p in products], [p.right for p in products]
        after = [p.after for p in products]
        # What adds up the rows of the right factor, a bias' gradient, shares the scale.
        if products[0].right.width <= 4 * products[0].left.width:
            sides = self._join(left, places), self._scaled(right, after, places)
        else:
            sides = self._scaled(left, after, places), self._join(right, places)
        with tf.device(device):
            product = tf.linalg.matmul(
                *(_near(device, side) for side in sides),
                transpose_a=left[0].axis == 0,
                transpose_b=right[0].axis == 1,
            )
            return _again(after[0], product)

    def add_rows(
        self, sums: Sequence[RowSum], device: str, places: Sequence[str]
    ) -> tf.Tensor:
        """Makes the sum, or mean, of the sums of the replicas' rows on a device."""
        after = [one.after for one in sums]
        rows = self._scaled([Factor(one.rows, 0) for one in sums], after, places)
        with tf.device(device):
            return _again(after[0], tf.reduce_sum(_near(device, rows), 0))

    def _scaled(
        self, column: Sequence[Factor], after: Sequence[After], places: Sequence[str]
    ) -> _Joined:
        """Joins one factor per replica, multiplied by what scales the product."""
        own = tuple(a.scales for a in after)
        key = tuple(places), _key(column), tuple(_scale_key(scales) for scales in own)
        if key not in self._joined:
            joined = self._join(column, places, own)
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
        """Joins one factor per replica, in replica order; its rows along its axis."""
        if not any(scales):
            scales = [()] * len(column)
        key = tuple(places), _key(column), "joined", tuple(map(_scale_key, scales))
        if key not in self._joined:
            parts = [
                _multiplied(_matrix(factor), own, place)
                for factor, own, place in zip(
                    column, scales, self._matched.devices, strict=True
                )
            ]
            self._matched.notes.moved.extend(enumerate(parts))
            axis = column[0].axis
            joined = levels.join_each(self._matched, parts, axis, places)
            if self._matched.crossing is not None:
                here = joined[places[0]]
                counts = self._rows[_key(column)]
                whole = self._matched.crossing.rows(here, axis, counts)
                joined = dict.fromkeys(places, whole)
            for place, tensor in joined.items():
                if tensor.dtype in base.HALF:
                    with tf.device(place):
                        joined = {**joined, place: tf.cast(tensor, tf.float32)}
            self._joined[key] = joined
        return self._joined[key]


def _one_per_host(devices: Sequence[str]) -> list[str]:
    return [devices[members[0]] for members in hosts.by_host(devices)]


def _near(device: str, joined: _Joined) -> tf.Tensor:
    """Returns what was joined on the host of a device."""
    (found,) = (
        tensor
        for place, tensor in joined.items()
        if hosts.host_of(place) == hosts.host_of(device)
    )
    return found


def _key(column: Sequence[Factor]) -> Any:
    """Returns what is the same for factors that hold the same rows."""
    axis = column[0].axis
    tensors = [factors.origin(f.tensor) if axis == 0 else f.tensor for f in column]
    return axis, tuple(map(id, tensors))


def _scale_key(scales: Sequence[tuple[str, tf.Tensor]]) -> Any:
    return tuple((kind, id(scalar)) for kind, scalar in scales)


def _matrix(factor: Factor) -> tf.Tensor:
    """Returns a factor with all but its last axis made one."""
    if factor.tensor.shape.rank == 2:
        return factor.tensor
    with tf.device(factor.tensor.device):
        return tf.reshape(factor.tensor, [-1, shapes.sizes(factor.tensor)[-1]])


def _multiplied(
    factor: tf.Tensor, scales: Sequence[tuple[str, tf.Tensor]], device: str
) -> tf.Tensor:
    """Scales a replica's factor as its product was, on its device."""
    with tf.device(device):
        for kind, scalar in reversed(scales):
            if factor.dtype in base.HALF:
                factor = tf.cast(factor, tf.float32)
            scalar = tf.cast(scalar, factor.dtype)
            factor = factor * scalar if kind == "Mul" else factor / scalar
    return factor


def _again(after: After, tensor: tf.Tensor) -> tf.Tensor:
    """Does to the reduced tensor what was done to each replica's."""
    for kind, argument in reversed(after.steps):
        change = tf.transpose if kind == "Transpose" else tf.reshape
        tensor = change(tensor, argument)
    return tf.cast(tensor, after.dtype)
