# SPDX-License-Identifier: Apache-2.0
"""Every primitive, with its plain TensorFlow reference on all replicas' tensors.

A new primitive is one entry here: the tests of this folder then run on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from tests import helpers

Tensors = Sequence[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """One primitive with one set of options.

    Attributes:
        call: Applies it to a replica's tensor; None where it receives nothing.
        plain: All replicas' results from all replicas' tensors, in plain TensorFlow.
        sizes: The first dimension of replica r's tensor; by default 2 everywhere.
        may_differ: Whether replicas may hold different shapes.
        axis: The axis that the tensors must have, if any.
        joins: Whether the sizes along that axis may differ.
        same: Whether all replicas receive the same value.
    """

    call: Callable[[replicator.Replicator, tf.Tensor], tf.Tensor | None]
    plain: Callable[[Tensors], Tensors]
    sizes: Callable[[int], int] = lambda r: 2
    may_differ: bool = False
    axis: int | None = None
    joins: bool = False
    same: bool = False

    def inputs(self, num_replicas: int, seed: int = 0) -> list[np.ndarray]:
        """Returns one float64 tensor per replica, of shape [sizes(r), 3]."""
        rng = np.random.RandomState(seed)
        return [rng.randn(self.sizes(r), 3) for r in range(num_replicas)]

    def run(self, repl: replicator.Replicator, x: tf.Tensor) -> tf.Tensor:
        """Runs it; a replica that receives nothing returns an empty tensor."""
        y = self.call(repl, x)
        return nothing() if y is None else y


def nothing() -> tf.Tensor:
    """Returns the placeholder result of a replica that receives nothing."""
    return tf.zeros([0], tf.float64)


# --- Building blocks ------------------------------------------------------------------


def _uneven(r: int) -> int:
    return [2, 0, 3, 1][r % 4]


def _weight(r: int) -> float:
    return [3.0, 0.0, 1.0, 2.5][r % 4]


def _same(reduce: Callable[[Tensors], tf.Tensor]) -> Callable[[Tensors], Tensors]:
    """Every replica receives the same tensor."""

    def plain(xs: Tensors) -> Tensors:
        return [reduce(xs)] * len(xs)

    return plain


def _at(root: int, one: Callable[[Tensors], tf.Tensor]) -> Callable[[Tensors], Tensors]:
    """Only the root receives something; -1 is the last replica."""

    def plain(xs: Tensors) -> Tensors:
        at = root % len(xs)
        return [one(xs) if r == at else nothing() for r in range(len(xs))]

    return plain


def _product(xs: Tensors) -> tf.Tensor:
    # Multiplied out: the second derivative of tf.reduce_prod is wrong at zeros.
    result = xs[0]
    for x in xs[1:]:
        result = result * x
    return result


def _mean(xs: Tensors) -> tf.Tensor:
    return tf.add_n(xs) / len(xs)


def _min(xs: Tensors) -> tf.Tensor:
    return tf.reduce_min(tf.stack(xs), 0)


def _max(xs: Tensors) -> tf.Tensor:
    return tf.reduce_max(tf.stack(xs), 0)


def _weighted(xs: Tensors) -> tf.Tensor:
    weights = [_weight(r) for r in range(len(xs))]
    return tf.add_n([w * x for w, x in zip(weights, xs, strict=True)]) / sum(weights)


REDUCED = {"sum": tf.add_n, "mean": _mean, "min": _min, "max": _max, "prod": _product}
REDUCED["argmin"] = _min


def _value(op: str, result: Any) -> Any:
    return result.value if op == "argmin" and result is not None else result


def _last(repl: replicator.Replicator) -> int:
    return repl.num_replicas - 1


def _scaled(x: tf.Tensor, count: int) -> list[tf.Tensor]:
    return [x * (k + 1.0) for k in range(count)]


def _shares(x: tf.Tensor, axis: int, count: int) -> list[tf.Tensor]:
    # As in NumPy's array_split, the first shares get the extra row.
    rows = np.array_split(np.arange(int(x.shape[axis])), count)
    return tf.split(x, [len(share) for share in rows], axis)


# --- Parts of the replicas ------------------------------------------------------------


def _parity(repl: replicator.Replicator) -> Any:
    """The even and the odd replicas."""
    everyone = range(repl.num_replicas)
    return repl.groups(
        [members for members in (everyone[::2], everyone[1::2]) if members]
    )


def _by_parity(plain: Callable[[Tensors], Tensors]) -> Callable[[Tensors], Tensors]:
    """Does the same among the even replicas and among the odd ones."""

    def both(xs: Tensors) -> Tensors:
        results = list(xs)
        for start in range(min(2, len(xs))):
            results[start::2] = plain(xs[start::2])
        return results

    return both


# --- all_to_all -----------------------------------------------------------------------


def _splits(s: int, size: int, count: int) -> list[int]:
    """One row to the first replica, the others to the next one."""
    splits = [0] * count
    splits[0] += min(size, 1)
    splits[(s + 1) % count] += size - min(size, 1)
    return splits


def _exchanged(
    xs: Tensors, split_axis: int, concat_axis: int, splits: Sequence[Sequence[int]]
) -> Tensors:
    pieces = [tf.split(x, own, split_axis) for x, own in zip(xs, splits, strict=True)]
    return [tf.concat(received, concat_axis) for received in zip(*pieces, strict=True)]


def _columns(count: int) -> list[int]:
    """The distribution of three columns to the replicas: 1, 0, ..., 0, 2."""
    splits = [0] * count
    splits[0] += 1
    splits[-1] += 2
    return splits


def _all_to_all_even(repl: replicator.Replicator, x: tf.Tensor) -> tf.Tensor:
    return repl.all_to_all(tf.concat(_scaled(x, repl.num_replicas), 0), 0, -1)


def _plain_even(xs: Tensors) -> Tensors:
    wholes = [tf.concat(_scaled(x, len(xs)), 0) for x in xs]
    return _exchanged(wholes, 0, 1, [[2] * len(xs)] * len(xs))


def _all_to_all_rows(repl: replicator.Replicator, x: tf.Tensor) -> tf.Tensor:
    r = repl.replica_id
    return repl.all_to_all(x, 0, 0, _splits(r, _uneven(r), repl.num_replicas))


def _plain_rows(xs: Tensors) -> Tensors:
    splits = [_splits(s, _uneven(s), len(xs)) for s in range(len(xs))]
    return _exchanged(xs, 0, 0, splits)


def _all_to_all_columns(repl: replicator.Replicator, x: tf.Tensor) -> tf.Tensor:
    return repl.all_to_all(x, -1, 0, splits=_columns(repl.num_replicas))


def _plain_columns(xs: Tensors) -> Tensors:
    return _exchanged(xs, 1, 0, [_columns(len(xs))] * len(xs))


# --- permute, and distributed work ----------------------------------------------------


def _chain(repl: replicator.Replicator, x: tf.Tensor) -> tf.Tensor:
    return repl.permute(x, [(r, r + 1) for r in range(repl.num_replicas - 1)])


def _square(x: tf.Tensor) -> tf.Tensor:
    return x * x


def _map_gather(repl: replicator.Replicator, x: tf.Tensor) -> tf.Tensor:
    fns = [_square, tf.sin, tf.identity]
    return tf.stack(repl.map_gather(fns, _scaled(x, 3)))


def _works(xs: Tensors) -> Tensors:
    """The k-th of three values, as the replica that does the work holds it."""
    return [_scaled(xs[k % len(xs)], 3)[k] for k in range(3)]


def _plain_map_gather(xs: Tensors) -> tf.Tensor:
    one, two, three = _works(xs)
    return tf.stack([_square(one), tf.sin(two), three])


# --- The battery ----------------------------------------------------------------------


def _all_reduce(op: str) -> Case:
    return Case(
        lambda repl, x: _value(op, repl.all_reduce(x, op)),
        _same(REDUCED[op]),
        same=True,
    )


def _reduce(op: str) -> Case:
    return Case(
        lambda repl, x: _value(op, repl.reduce(x, _last(repl), op)),
        _at(-1, REDUCED[op]),
    )


def _reduce_scatter(op: str, axis: int) -> Case:
    return Case(
        lambda repl, x: _value(op, repl.reduce_scatter(x, op, axis)),
        lambda xs: _shares(REDUCED[op](xs), axis, len(xs)),
        axis=axis,
    )


CASES = {
    **{op: _all_reduce(op) for op in REDUCED},
    "weighted": Case(
        lambda repl, x: repl.all_reduce(
            x, "mean", weight=helpers.opaque(_weight(repl.replica_id))
        ),
        _same(_weighted),
        same=True,
    ),
    "broadcast": Case(
        lambda repl, x: repl.broadcast(x), _same(lambda xs: xs[0]), same=True
    ),
    "broadcast_last": Case(
        lambda repl, x: repl.broadcast(x, _last(repl)),
        _same(lambda xs: xs[-1]),
        same=True,
    ),
    "stack": Case(lambda repl, x: repl.all_gather(x), _same(tf.stack), same=True),
    "concat": Case(
        lambda repl, x: repl.all_gather(x, 0),
        _same(lambda xs: tf.concat(xs, 0)),
        sizes=_uneven,
        may_differ=True,
        same=True,
    ),
    "concat_last": Case(
        lambda repl, x: repl.all_gather(x, -1),
        _same(lambda xs: tf.concat(xs, -1)),
        axis=-1,
        joins=True,
        same=True,
    ),
    **{f"reduce_{op}": _reduce(op) for op in REDUCED},
    "gather": Case(lambda repl, x: repl.gather(x), _at(0, tf.stack)),
    "gather_concat": Case(
        lambda repl, x: repl.gather(x, _last(repl), 0),
        _at(-1, lambda xs: tf.concat(xs, 0)),
        sizes=_uneven,
        may_differ=True,
    ),
    "gather_concat_last": Case(
        lambda repl, x: repl.gather(x, axis=-1),
        _at(0, lambda xs: tf.concat(xs, -1)),
        axis=-1,
        joins=True,
    ),
    "scatter": Case(
        lambda repl, x: repl.scatter(tf.stack(_scaled(x, repl.num_replicas))),
        lambda xs: _scaled(xs[0], len(xs)),
    ),
    "scatter_rows": Case(
        lambda repl, x: repl.scatter(x, _last(repl), 0),
        lambda xs: _shares(xs[-1], 0, len(xs)),
        axis=0,
    ),
    "scatter_last": Case(
        lambda repl, x: repl.scatter(x, axis=-1),
        lambda xs: _shares(xs[0], -1, len(xs)),
        axis=-1,
    ),
    **{f"reduce_scatter_{op}": _reduce_scatter(op, 0) for op in REDUCED},
    "reduce_scatter_last": _reduce_scatter("mean", -1),
    "all_to_all": Case(_all_to_all_even, _plain_even, axis=0),
    "all_to_all_rows": Case(
        _all_to_all_rows, _plain_rows, sizes=_uneven, may_differ=True
    ),
    "all_to_all_columns": Case(
        _all_to_all_columns, _plain_columns, sizes=_uneven, may_differ=True
    ),
    "permute": Case(_chain, lambda xs: [tf.zeros_like(xs[0]), *xs[:-1]]),
    "shift": Case(
        lambda repl, x: repl.shift(x, -1),
        lambda xs: [xs[(r + 1) % len(xs)] for r in range(len(xs))],
    ),
    "all_sum": Case(lambda repl, x: repl.all_sum(x), _same(tf.add_n), same=True),
    "all_min": Case(lambda repl, x: repl.all_min(x), _same(_min), same=True),
    "all_max": Case(lambda repl, x: repl.all_max(x), _same(_max), same=True),
    "map_reduce": Case(
        lambda repl, x: repl.map_reduce(_square, _scaled(x, 3), "mean"),
        _same(lambda xs: _mean([_square(x) for x in _works(xs)])),
        same=True,
    ),
    "map_reduce_max": Case(
        lambda repl, x: repl.map_reduce(_square, _scaled(x, 3), "max"),
        _same(lambda xs: _max([_square(x) for x in _works(xs)])),
        same=True,
    ),
    "map_gather": Case(_map_gather, _same(_plain_map_gather), same=True),
    "groups_sum": Case(
        lambda repl, x: repl.all_reduce(x, group=_parity(repl)),
        _by_parity(_same(tf.add_n)),
        may_differ=True,  # in another group
    ),
    "groups_reduce": Case(
        lambda repl, x: repl.reduce(x, repl.replica_id % 2, group=_parity(repl)),
        _by_parity(_at(0, tf.add_n)),
        may_differ=True,  # in another group
    ),
    "groups_scatter": Case(
        lambda repl, x: repl.scatter(x, repl.replica_id % 2, 0, group=_parity(repl)),
        _by_parity(lambda xs: _shares(xs[0], 0, len(xs))),
        may_differ=True,  # in another group
        axis=0,
    ),
    "groups_shift": Case(
        lambda repl, x: repl.shift(x, group=_parity(repl)),
        _by_parity(lambda xs: [xs[-1], *xs[:-1]]),
        may_differ=True,  # in another group
    ),
}

# Cases without others that differ only in the reduction or the root, for tests that
# do not depend on those.
VARIANTS = {"mean", "min", "max", "broadcast_last", "all_min", "all_max"}
VARIANTS |= {f"{name}_{op}" for name in ("reduce", "reduce_scatter") for op in REDUCED}
VARIANTS -= {"reduce_sum", "reduce_scatter_prod"}
DISTINCT = [name for name in CASES if name not in VARIANTS]
