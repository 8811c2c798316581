# SPDX-License-Identifier: Apache-2.0
"""What a session fetches: which ops of which replicas, and how their values are joined.

What is the same on all replicas is fetched from one; a tensor with a row per example
is put together again; a value over the examples is what it would be on one device, see
kinds.py; and what does not follow from those of the parts is computed once more, of
what does. An op, and whatever needs one that writes, runs on all replicas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from replicator import errors
from replicator.autodist import flows, joining, kinds, losses, stamping
from replicator.autodist.kinds import SAME, UNKNOWN, Kind, Value
from replicator.autodist.program import Program
from replicator.autodist.shares import Plan, Source
from replicator.autodist.stamping import Places
from replicator.graph.ir.kinds import has_effect

Values = Sequence[Any]  # one per replica
_SUMMARIES = ("ScalarSummary", "MergeSummary", "HistogramSummary", "ImageSummary")


@dataclasses.dataclass(frozen=True)
class Fetch:
    """A tensor or an op that is fetched.

    Attributes:
        what: That of the program.
        everywhere: Whether all replicas have to run it.
        value: What the values of the replicas are.
        source: What deals the elements that it depends on, if anything does.
        whole: What it is for all examples, if that is computed in the graph.
    """

    what: Any
    everywhere: bool
    value: Value
    source: Source = None
    whole: tf.Tensor | None = None

    def on(self, places: Sequence[Places]) -> list[Any]:
        """Returns what it is on each replica that has to run it."""
        if self.whole is not None:
            return [self.whole]
        own = places if self.everywhere else places[:1]
        if isinstance(self.what, tf.Operation):
            return [place[self.what] for place in own]
        return [stamping.of(place, self.what) for place in own]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of what is fetched.

    Attributes:
        given: What the user has passed.
        parts: What it consists of: one, or the three parts of a SparseTensor.
    """

    given: Any
    parts: tuple[Fetch, ...]

    def joined(
        self, values: Sequence[Values], counts: Sequence[Sequence[float] | None]
    ) -> Any:
        """Returns the value for all examples.

        Args:
            values: Of each part, the values of the replicas.
            counts: Of each part, how many examples each replica has.
        """
        if isinstance(self.given, tf.SparseTensor):
            return _sparse(self.parts, values, counts[0])
        made = [join(*one) for one in zip(self.parts, values, counts, strict=True)]
        if isinstance(self.given, tf.IndexedSlices):
            return tf.compat.v1.IndexedSlicesValue(*made, dense_shape=None)
        return made[0]


class Fetches:
    """Looks up what is fetched.

    Args:
        program: The single-device graph.
        plan: What is known of its values.
        whole: Returns a tensor of all examples that is computed in the graph of all
            replicas, or None.
    """

    def __init__(
        self,
        program: Program,
        plan: Plan,
        whole: Callable[[tf.Tensor], tf.Tensor | None],
    ) -> None:
        self._program, self._plan, self._whole = program, plan, whole
        self._known: dict[tuple[int, frozenset[str]], Fetch] = {}
        self._acting: dict[tf.Operation, bool] = {}

    def leaf(self, given: Any, fed: frozenset[str]) -> Leaf:
        """Returns what a leaf of a user's fetches is.

        Args:
            given: A tensor, op, variable, or the name of one.
            fed: The names of ops that are fed parts, be they placeholders or not.

        Raises:
            ArgumentError: It is none of the graph, or has no joined value.
        """
        parts = [given]
        if isinstance(given, tf.SparseTensor):
            parts = [given.indices, given.values, given.dense_shape]
        elif isinstance(given, tf.IndexedSlices):
            parts = [given.values, given.indices]
        elif isinstance(given, tf.RaggedTensor):
            raise _no_fetch(given, "", "of a RaggedTensor, fetch given.to_tensor().")
        checked = not isinstance(given, tf.SparseTensor)
        return Leaf(given, tuple(self._find(part, fed, checked) for part in parts))

    def _find(self, leaf: Any, fed: frozenset[str], checked: bool) -> Fetch:
        what = _element(self._program.graph, leaf)
        key = id(what), fed
        if key not in self._known:
            self._known[key] = self._look(what, fed, checked)
        return self._known[key]

    def _look(self, what: Any, fed: frozenset[str], checked: bool) -> Fetch:
        if isinstance(what, tf.Operation):
            return Fetch(what, what not in self._program.shared, SAME)
        if what.op not in self._program.differing(fed):
            return Fetch(what, self._acts(what.op), SAME)
        value, source = self._plan.kinds.of(what), self._plan.source(what.op)
        if kinds.is_same(value) and what.op not in self._program.differing():
            value = Value(Kind.ROWS) if what.shape.rank else UNKNOWN
        if joining.joins(value) or not checked:
            return Fetch(what, True, value, source)
        whole = self._computed(what, value)
        if whole is not None:
            return Fetch(what, True, value, source, whole)
        self._check(what, value)
        return Fetch(what, True, value, source)

    def _computed(self, what: tf.Tensor, value: Value) -> tf.Tensor | None:
        """Returns a tensor of all examples, computed once more; None if it is not."""
        if value.mixed is not None:
            cut = joining.cut(self._plan.kinds, what)
            if cut is None or not joining.is_light(cut):
                return None
        return self._whole(what)

    def _acts(self, op: tf.Operation) -> bool:
        """Whether an op needs one of a replica's that writes."""
        if op not in self._acting:
            shared = self._program.shared
            self._acting[op] = any(
                has_effect(one) and one not in shared for one in flows.needed(op)
            )
        return self._acting[op]

    def _check(self, tensor: tf.Tensor, value: Value) -> None:
        """Raises unless there is a value for all examples; warns if it is another.

        What Python computes is believed to be a mean.
        """
        inexact = tensor.dtype.is_floating or tensor.dtype.is_complex
        number = inexact and tensor.shape.rank in (0, None)
        if value.mixed is not None and joining.joins(kinds.alone([value])[0]):
            logging.warning("%s", losses.mixes(value.mixed))
        elif value.kind is Kind.DRAWN or tensor.op.type in _SUMMARIES:
            return
        elif not number or not flows.asks_python(tensor) and value.mixed is None:
            raise errors.ArgumentError(
                errors.compose(
                    f"{tensor.name}, {tensor.dtype.name}{tensor.shape}, differs "
                    "between replicas, and nothing says what it is for all examples: "
                    f"it is {_said(value)}.",
                    [
                        f"made at {errors.line_of(tensor.op)}",
                        f"fetched at {errors.user_line()}",
                    ],
                    "fetch what has a row for each example, or a mean or a sum over "
                    "them, and compute the rest of that.",
                )
            )
        else:
            logging.warning(
                "%s (%s) is no mean over the examples, nor a sum: what is fetched "
                "is the mean of the replicas' own, weighed by their examples.",
                *(tensor.name, errors.line_of(tensor.op)),
            )


def _said(value: Value) -> str:
    if value.kind is Kind.UNKNOWN:
        return "no row for each example, no mean and no sum over them"
    return value.said


def _element(graph: tf.Graph, leaf: Any) -> Any:
    """Returns the tensor or op of a graph that is meant."""
    try:
        return graph.as_graph_element(leaf, allow_tensor=True, allow_operation=True)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        fix = (
            "fetch tensors, operations and variables of the graph of the scope, their "
            "names, or a nest of these."
        )
        raise _no_fetch(leaf, f": {errors.told(error)}", fix) from error


def _no_fetch(leaf: Any, why: str, fix: str) -> errors.ArgumentError:
    return errors.ArgumentError(
        errors.compose(f"session.run cannot fetch {errors.shown(leaf)}{why}.", fix=fix)
    )


def _sparse(
    parts: Sequence[Fetch], values: Sequence[Values], counts: Sequence[float] | None
) -> Any:
    """Puts the rows of sparse tensors together."""
    made = tf.compat.v1.SparseTensorValue
    own = [made(*one) for one in zip(*values, strict=False)]
    if all(kinds.is_same(part.value) for part in parts):
        return own[0]
    if counts is not None:
        own = [one for one, n in zip(own, counts, strict=True) if n]
    begin, indices = 0, []
    for one in own:
        offset = np.zeros(one.indices.shape[1], np.int64)
        offset[:1] = begin
        indices.append(one.indices + offset)
        begin += one.dense_shape[0]
    shape = np.max([one.dense_shape for one in own], axis=0)
    shape[0] = begin
    return made(
        np.concatenate(indices), np.concatenate([one.values for one in own]), shape
    )


def join(
    fetch: Fetch,
    values: Values,
    counts: Sequence[float] | None,
) -> Any:
    """Returns the value for all examples.

    Args:
        fetch: What was fetched.
        values: That of each replica; of one, if that is enough.
        counts: How many examples each replica has; None: as many as another.

    Raises:
        ArgumentError: The rows are not as many as the examples.
    """
    value = fetch.value
    if fetch.whole is not None or isinstance(fetch.what, tf.Operation):
        return values[0]
    if kinds.is_same(value) or value.kind is Kind.DRAWN:
        return values[0]
    if fetch.what.op.type in _SUMMARIES or fetch.what.dtype == tf.string:
        if not fetch.what.shape.rank and np.ndim(values[0]) == 0:
            return _summary(fetch.what, values, counts)
    arrays = [np.asarray(one) for one in values]
    if value.kind is Kind.ROWS or (arrays[0].ndim and value.kind is Kind.UNKNOWN):
        return _rows(fetch, arrays, counts)
    if value.kind in (Kind.MAX, Kind.MIN):
        choose = np.maximum if value.kind is Kind.MAX else np.minimum
        has = [n for n in range(len(arrays)) if counts is None or counts[n]]
        dtype = arrays[0].dtype
        return _scalar(np.asarray(choose.reduce([arrays[n] for n in has])), dtype)
    power = value.power if value.kind in (Kind.SAME, Kind.MEAN) else 0
    return _mean(arrays, counts, power)


def _scalar(array: np.ndarray, dtype: Any) -> Any:
    if np.dtype(dtype).kind in "iu" and array.dtype.kind == "f":
        array = np.round(array)
    array = array.astype(dtype, copy=False)
    return array if array.ndim else array[()]


def _mean(
    arrays: Sequence[np.ndarray], counts: Sequence[float] | None, power: float = 0
) -> Any:
    """Returns a mean, weighed by examples; those that have none are left out.

    Args:
        arrays: Those of the replicas.
        counts: How many examples each has; None: as many as another.
        power: By which power of the number of examples it was multiplied.
    """
    weights = [1.0] * len(arrays) if counts is None else list(counts)
    total = sum(weights)
    dtype = arrays[0].dtype
    if power == 1:  # a sum, and exact
        own = [array for array, weight in zip(arrays, weights, strict=True) if weight]
        return _scalar(np.asarray(sum(own[1:], own[0])), dtype)
    wide = np.result_type(dtype, np.float64)
    own = [
        array.astype(wide) * (weight / total) ** (1 - power)
        for array, weight in zip(arrays, weights, strict=True)
        if weight
    ]
    return _scalar(np.asarray(sum(own[1:], own[0])), dtype)


def _rows(
    fetch: Fetch, arrays: Sequence[np.ndarray], counts: Sequence[float] | None
) -> np.ndarray:
    """Puts rows of examples together; a lent example's are left out."""
    value, tensor = fetch.value, fetch.what
    if counts is None:
        return np.concatenate(arrays, value.axis)
    for array, count in zip(arrays, counts, strict=True):
        if count and array.shape[value.axis] % count and value.some is None:
            raise errors.ArgumentError(
                errors.compose(
                    f"{tensor.name} has {array.shape[value.axis]} rows on a replica of "
                    f"{int(count)} examples, and not some for each: it cannot be put "
                    "together.",
                    [
                        f"made at {errors.line_of(tensor.op)}",
                        f"fetched at {errors.user_line()}",
                    ],
                    "fetch what has a row for each example.",
                )
            )
    total = sum(counts)
    own = [
        _scalar(array * (n / total) ** -value.power, array.dtype)
        if value.power
        else array
        for array, n in zip(arrays, counts, strict=True)
        if n
    ]
    return np.concatenate(own or arrays[:1], value.axis)


def _summary(
    tensor: tf.Tensor, values: Values, counts: Sequence[float] | None
) -> bytes:
    """Returns a summary of all examples: its numbers are means."""
    if all(value == values[0] for value in values):
        return bytes(values[0])
    own = []
    for value in values:
        summary = tf.compat.v1.Summary()
        try:
            summary.ParseFromString(value)
        except Exception:  # whatever protobuf raises for what is none
            raise errors.ArgumentError(
                errors.compose(
                    f"{tensor.name} is a text that differs between replicas.",
                    [
                        f"made at {errors.line_of(tensor.op)}",
                        f"fetched at {errors.user_line()}",
                    ],
                    "fetch one with a row for each example.",
                )
            ) from None
        own.append(summary)
    joined = own[0]
    for k, value in enumerate(joined.value):
        if value.HasField("simple_value"):
            numbers = [np.float64(one.value[k].simple_value) for one in own]
            value.simple_value = float(_mean([np.asarray(n) for n in numbers], counts))
    return bytes(joined.SerializeToString())
