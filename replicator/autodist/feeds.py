# SPDX-License-Identifier: Apache-2.0
"""Splits the feeds of a session into a part for each replica.

A feed is split along its first axis, if the fed tensor has one of unknown size; where
that does not divide evenly, the first replicas get one example more. A replica left
without any is lent the first example, which then counts for nothing, because many ops
fail on an empty batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replicator import errors
from replicator.autodist import stamping
from replicator.autodist.program import Program
from replicator.inputs import shards


@dataclasses.dataclass(frozen=True)
class Feeds:
    """The feeds of the replicas in one run.

    Attributes:
        values: `values[r]` has replica r's feeds, by tensors of the program.
        counts: How many examples each replica has; None if nothing is split.
        names: The names of the ops that are fed parts.
    """

    values: list[dict[tf.Tensor, Any]]
    counts: list[int] | None
    names: frozenset[str]

    @property
    def weights(self) -> list[float] | None:
        """Each replica's share of all examples; None if nothing is split."""
        if self.counts is None:
            return None
        total = sum(self.counts)
        return [count / total for count in self.counts]


def split(
    program: Program,
    fed: Any,
    num_replicas: int,
    defaults: Callable[[Collection[tf.Operation]], Mapping[tf.Tensor, np.ndarray]]
    | None = None,
) -> Feeds:
    """Returns the feeds of each replica.

    Args:
        program: The single-device graph.
        fed: The user's feed_dict, or None.
        num_replicas: The number of replicas.
        defaults: Returns the defaults to split as well, given the ops that are fed.

    Raises:
        ArgumentError: A key is no tensor of the graph, a value does not fit it, or the
            first axes of values to split differ.
    """
    if fed is not None and not isinstance(fed, Mapping):
        raise errors.ArgumentError(
            errors.compose(
                f"session.run was given feed_dict={errors.shown(fed)}.",
                fix="pass a dict that maps tensors to their values.",
            )
        )
    whole: dict[tf.Tensor, Any] = {}
    parts: dict[tf.Tensor, np.ndarray] = {}
    for key, value in _flat(fed or {}):
        tensor = _tensor(program, key)
        array = _array(tensor, value)
        if array.ndim and program.splits(tensor) and tensor.op not in program.shared:
            parts[tensor] = array
        else:
            whole[tensor] = array
    if defaults is not None:
        parts |= defaults({tensor.op for tensor in (*whole, *parts)})
    names = frozenset(tensor.op.name for tensor in parts)
    values: list[dict[tf.Tensor, Any]] = [dict(whole) for _ in range(num_replicas)]
    if not parts:
        return Feeds(values, None, names)
    total = _examples(parts)
    sizes = [shards.count(total, r, num_replicas) for r in range(num_replicas)]
    first = 0
    for replica_values, size in zip(values, sizes, strict=True):
        examples = slice(first, first + size) if size else slice(0, 1)
        replica_values.update(
            {tensor: array[examples] for tensor, array in parts.items()}
        )
        first += size
    return Feeds(values, sizes, names)


def _flat(fed: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """Returns pairs of tensors and values; refuses sparse and ragged tensors."""
    flat: list[tuple[Any, Any]] = []
    for key, value in fed.items():
        if isinstance(key, tf.SparseTensor | tf.IndexedSlices | tf.RaggedTensor):
            raise errors.ArgumentError(
                errors.compose(
                    f"session.run was fed a {type(key).__name__}, {errors.shown(key)}, "
                    "which cannot be split over the replicas.",
                    fix="feed a dense placeholder, and create the "
                    f"{type(key).__name__} from it in the graph "
                    "(tf.sparse.from_dense, tf.RaggedTensor.from_tensor).",
                )
            )
        flat.append((key, value))
    return flat


def _tensor(program: Program, key: Any) -> tf.Tensor:
    try:
        element = program.graph.as_graph_element(
            key, allow_tensor=True, allow_operation=False
        )
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise errors.ArgumentError(
            errors.compose(
                f"session.run was fed {errors.shown(key)}, which is not a tensor of "
                f"its graph: {errors.told(error)}.",
                fix="feed placeholders and tensors of the scope's graph.",
            )
        ) from error
    assert isinstance(element, tf.Tensor), "operations are not allowed"
    return element


def _array(tensor: tf.Tensor, value: Any) -> np.ndarray:
    """Returns a value as an array of a tensor's dtype and shape."""
    if isinstance(value, tf.Tensor) and tf.is_symbolic_tensor(value):
        raise _unfit(tensor, value, "it is a symbolic tensor, which has no value")
    dtype = tensor.dtype.as_numpy_dtype
    try:
        array = np.asarray(value, dtype=dtype)
    except (TypeError, ValueError, OverflowError, NotImplementedError) as error:
        raise _unfit(tensor, value, errors.told(error)) from error
    if isinstance(value, int) and array.dtype.kind in "iu" and int(array) != value:
        raise _unfit(tensor, value, "the number does not fit")
    if not tensor.shape.is_compatible_with(array.shape):
        raise _unfit(tensor, value, f"the value is of shape {array.shape}")
    return array


def _unfit(tensor: tf.Tensor, value: Any, why: str) -> errors.ArgumentError:
    return errors.ArgumentError(
        errors.compose(
            f"{tensor.name}, {tensor.dtype.name}{tensor.shape}, was fed "
            f"{errors.shown(value)}: {why}.",
            [
                f"created at {errors.line_of(tensor.op)}",
                f"fed at {errors.user_line()}",
            ],
            "feed a value of the placeholder's dtype and shape.",
        )
    )


def _examples(parts: Mapping[tf.Tensor, np.ndarray]) -> int:
    """Returns the number of examples."""
    sizes = {len(array) for array in parts.values()}
    if len(sizes) > 1 or 0 in sizes:
        sites = [
            f"{tensor.name}: {array.shape}, created at {errors.line_of(tensor.op)}"
            for tensor, array in parts.items()
        ]
        if len(sizes) > 1:
            problem = (
                "fed values and defaults differ in their first dimension, along which "
                "they are split."
            )
            fix = (
                "feed the same number of rows for each; if every replica is to get all "
                "of a value, give its placeholder a static first dimension."
            )
        else:
            problem, fix = "the fed values hold no examples.", "feed at least one."
        raise errors.ArgumentError(errors.compose(problem, sites, fix))
    return sizes.pop()


def fed_to(
    feeds: Feeds, places: Sequence[Mapping[tf.Operation, tf.Operation]]
) -> dict[tf.Tensor, Any]:
    """Returns the feeds of the session of all replicas, by its tensors."""
    fed: dict[tf.Tensor, Any] = {}
    for replica_values, replica_places in zip(feeds.values, places, strict=True):
        for tensor, value in replica_values.items():
            fed[stamping.of(replica_places, tensor)] = value
    return fed
