# SPDX-License-Identifier: Apache-2.0
"""What a session fetches: which ops of which replicas, and how their values are joined.

What is the same on all replicas is fetched from one; a tensor with a row per example
is put together again; a value over the examples is what it would be on one device, see
kinds.py. An op, and whatever needs one that writes, runs on all replicas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from replicator import errors
from replicator.autodist.kinds import UNSAID, Kind
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
        kind: What the values of the replicas are.
        source: What deals the elements that it depends on, if anything does.
    """

    what: Any
    everywhere: bool
    kind: Kind
    source: Source = None

    def on(self, places: Sequence[Places]) -> list[Any]:
        """Returns what it is on each replica that has to run it."""
        own = places if self.everywhere else places[:1]
        if isinstance(self.what, tf.Operation):
            return [place[self.what] for place in own]
        k = self.what.value_index
        return [place[self.what.op].outputs[k] for place in own]


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
    """

    def __init__(self, program: Program, plan: Plan) -> None:
        self._program, self._plan = program, plan
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
            return Fetch(what, what not in self._program.shared, Kind.SAME)
        if what.op not in self._program.differing(fed):
            return Fetch(what, self._acts(what.op), Kind.SAME)
        kind = self._plan.kinds.of(what)
        if kind is Kind.SAME and what.op not in self._program.differing():
            kind = Kind.ROWS if what.shape.rank else Kind.UNKNOWN
        if checked:
            self._check(what, kind)
        return Fetch(what, True, kind, self._plan.source(what.op))

    def _acts(self, op: tf.Operation) -> bool:
        """Whether an op needs one of a replica's that writes."""
        if op not in self._acting:
            seen, stack = {op}, [op]
            found = False
            while stack and not found:
                one = stack.pop()
                found = has_effect(one) and one not in self._program.shared
                sources = [*(t.op for t in one.inputs), *one.control_inputs]
                stack += [s for s in sources if s not in seen]
                seen.update(sources)
            self._acting[op] = found
        return self._acting[op]

    def _check(self, tensor: tf.Tensor, kind: Kind) -> None:
        """Raises unless there is a value for all examples."""
        inexact = tensor.dtype.is_floating or tensor.dtype.is_complex
        if kind is Kind.MIXED or (
            kind in UNSAID
            and not (inexact and tensor.shape.rank in (0, None))
            and tensor.op.type not in _SUMMARIES
            and tensor.dtype != tf.string
        ):
            raise errors.ArgumentError(
                errors.compose(
                    f"{tensor.name}, {tensor.dtype.name}{tensor.shape}, differs "
                    "between replicas, and nothing says what it is for all examples: "
                    f"it is {_said(kind)}.",
                    [
                        f"made at {errors.line_of(tensor.op)}",
                        f"fetched at {errors.user_line()}",
                    ],
                    "fetch what has a row for each example, or a mean or a sum over "
                    "them, and compute the rest of that.",
                )
            )
        if kind in UNSAID and not tensor.shape.rank:
            if tensor.dtype != tf.string:
                logging.log_first_n(
                    logging.WARNING,
                    "%s (%s) is no mean over the examples, nor a sum: what is fetched "
                    "is the mean of the replicas' own, weighed by their examples.",
                    1,
                    *(tensor.name, errors.line_of(tensor.op)),
                )


def _said(kind: Kind) -> str:
    return {Kind.UNKNOWN: "no row for each example, no mean and no sum over them"}.get(
        kind, kind.value
    )


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
    if all(part.kind is Kind.SAME for part in parts):
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
    if isinstance(fetch.what, tf.Operation) or fetch.kind is Kind.SAME:
        return values[0]
    if fetch.what.op.type in _SUMMARIES or fetch.what.dtype == tf.string:
        if not fetch.what.shape.rank and np.ndim(values[0]) == 0:
            return _summary(fetch.what, values, counts)
    arrays = [np.asarray(value) for value in values]
    kind = fetch.kind
    if arrays[0].ndim and kind in (Kind.ROWS, *UNSAID):
        return _rows(fetch.what, arrays, counts)
    if kind in _JOINED:
        has = [n for n in range(len(arrays)) if counts is None or counts[n]]
        dtype = arrays[0].dtype
        return _scalar(np.asarray(_JOINED[kind]([arrays[n] for n in has])), dtype)
    return _mean(arrays, counts)


_JOINED: Mapping[Kind, Callable[[list[np.ndarray]], Any]] = {
    Kind.SUM: lambda arrays: sum(arrays[1:], arrays[0]),
    Kind.COUNT: lambda arrays: sum(arrays[1:], arrays[0]),
    Kind.MAX: lambda arrays: np.maximum.reduce(arrays),
    Kind.MIN: lambda arrays: np.minimum.reduce(arrays),
}


def _scalar(array: np.ndarray, dtype: Any) -> Any:
    array = array.astype(dtype, copy=False)
    return array if array.ndim else array[()]


def _mean(arrays: Sequence[np.ndarray], counts: Sequence[float] | None) -> Any:
    """Returns the mean, weighed by examples; those that have none are left out."""
    weights = [1.0] * len(arrays) if counts is None else list(counts)
    total = sum(weights)
    dtype = arrays[0].dtype
    wide = np.result_type(dtype, np.float64)
    own = [
        array.astype(wide) * (weight / total)
        for array, weight in zip(arrays, weights, strict=True)
        if weight
    ]
    return _scalar(np.asarray(sum(own[1:], own[0])), dtype)


def _rows(
    tensor: tf.Tensor, arrays: Sequence[np.ndarray], counts: Sequence[float] | None
) -> np.ndarray:
    """Puts rows of examples together; a lent example's are left out."""
    if counts is None:
        return np.concatenate(arrays)
    for array, count in zip(arrays, counts, strict=True):
        if count and len(array) % count:
            raise errors.ArgumentError(
                errors.compose(
                    f"{tensor.name} has {len(array)} rows on a replica of "
                    f"{int(count)} examples, and not some for each: it cannot be put "
                    "together.",
                    [
                        f"made at {errors.line_of(tensor.op)}",
                        f"fetched at {errors.user_line()}",
                    ],
                    "fetch what has a row for each example.",
                )
            )
    return np.concatenate(
        [array for array, n in zip(arrays, counts, strict=True) if n] or arrays[:1]
    )


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
