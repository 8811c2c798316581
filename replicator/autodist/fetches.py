# SPDX-License-Identifier: Apache-2.0
"""Maps session fetches to ops of the replicas and joins their values.

A value equal on all replicas is fetched from one; tensors with a row per example are
concatenated; a value over the examples is what it would be on one device, see kinds.py;
and a value that does not follow from those of the parts is computed once more, from
values that do. Ops, and tensors that depend on a write, run on all replicas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from replicator import errors
from replicator.autodist import flows, joining, kinds, losses, stamping
from replicator.autodist.defaults import Defaults
from replicator.autodist.kinds import SAME, UNKNOWN, Kind, Value
from replicator.autodist.program import Program
from replicator.autodist.shares import Plan, Source
from replicator.autodist.stamping import Places
from replicator.graph.ir.kinds import has_effect

Values = Sequence[Any]  # one per replica
_SUMMARIES = ("ScalarSummary", "MergeSummary", "HistogramSummary", "ImageSummary")


@dataclasses.dataclass(frozen=True)
class Fetch:
    """A fetched tensor or op.

    Attributes:
        what: The tensor or op of the program.
        everywhere: Whether all replicas have to run it.
        value: What the replicas' values are.
        source: The op that deals the elements that it depends on, if any.
        whole: Its value over all examples, if the graph computes that.
    """

    what: Any
    everywhere: bool
    value: Value
    source: Source = None
    whole: tf.Tensor | None = None

    def on(self, places: Sequence[Places]) -> list[Any]:
        """Returns its copies on the replicas that have to run it."""
        if self.whole is not None:
            return [self.whole]
        used_places = places if self.everywhere else places[:1]
        if isinstance(self.what, tf.Operation):
            return [replica_places[self.what] for replica_places in used_places]
        return [
            stamping.of(replica_places, self.what) for replica_places in used_places
        ]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of the fetches.

    Attributes:
        given: The user's tensor, op, variable or name.
        parts: Its fetches: one, or one per component of a sparse value.
    """

    given: Any
    parts: tuple[Fetch, ...]

    def joined(
        self, values: Sequence[Values], counts: Sequence[Sequence[float] | None]
    ) -> Any:
        """Returns the value for all examples.

        Args:
            values: For each part, the values of the replicas.
            counts: For each part, how many examples each replica has.
        """
        if isinstance(self.given, tf.SparseTensor):
            return _sparse(self.parts, values, counts[0])
        parts = [join(*part) for part in zip(self.parts, values, counts, strict=True)]
        if isinstance(self.given, tf.IndexedSlices):
            return tf.compat.v1.IndexedSlicesValue(*parts, dense_shape=None)
        return parts[0]


class Fetches:
    """Looks up fetches.

    Args:
        program: The single-device graph.
        plan: Infers what the replicas' values are.
        whole: Returns a tensor's value over all examples, computed in the graph of all
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
        self._defaults = Defaults(program)

    def leaf(self, given: Any, fed: frozenset[str]) -> Leaf:
        """Returns the Leaf for a leaf of the user's fetches.

        Args:
            given: A tensor, op, variable, or the name of one.
            fed: The names of ops that are fed parts, whether placeholders or not.

        Raises:
            ArgumentError: It is not in the graph, or has no joined value.
        """
        checked = not isinstance(given, tf.SparseTensor)
        found = [self._find(part, fed, checked) for part in _parts_of(given)]
        return Leaf(given, tuple(found))

    def defaults(
        self, leaves: Iterable[Any], fed: Collection[tf.Operation]
    ) -> dict[tf.Tensor, np.ndarray]:
        """Returns the defaults to split in a run; see `Defaults.needed`.

        Args:
            leaves: The leaves of the user's fetches.
            fed: The ops whose results are fed.
        """
        graph = self._program.graph
        elements = [_element(graph, part) for x in leaves for part in _parts_of(x)]
        ops = [x if isinstance(x, tf.Operation) else x.op for x in elements]
        return self._defaults.needed(ops, fed)

    def _find(self, leaf: Any, fed: frozenset[str], checked: bool) -> Fetch:
        element = _element(self._program.graph, leaf)
        key = id(element), fed
        if key not in self._known:
            self._known[key] = self._look(element, fed, checked)
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
        """Returns a tensor recomputed for all examples, or None."""
        if value.mixed is not None:
            cut = joining.cut(self._plan.kinds, what)
            if cut is None or not joining.is_light(cut):
                return None
        return self._whole(what)

    def _acts(self, op: tf.Operation) -> bool:
        """Whether an op depends on a write that replicas copy."""
        if op not in self._acting:
            shared = self._program.shared
            self._acting[op] = any(
                has_effect(source) and source not in shared
                for source in flows.needed(op)
            )
        return self._acting[op]

    def _check(self, tensor: tf.Tensor, value: Value) -> None:
        """Raises if a tensor has no value for all examples; warns if it is inexact.

        A floating-point number computed by Python is taken for a mean.

        Raises:
            ArgumentError: Nothing says how the replicas' values combine.
        """
        inexact = tensor.dtype.is_floating or tensor.dtype.is_complex
        is_number = inexact and tensor.shape.rank in (0, None)
        if value.mixed is not None and joining.joins(kinds.alone([value])[0]):
            logging.warning("%s", losses.mixes(value.mixed))
        elif value.kind is Kind.DRAWN or tensor.op.type in _SUMMARIES:
            return
        elif not is_number or not flows.asks_python(tensor) and value.mixed is None:
            raise errors.ArgumentError(
                errors.compose(
                    f"{tensor.name}, {tensor.dtype.name}{tensor.shape}, differs "
                    "between replicas, and its value for all examples is unknown: "
                    f"it is {_said(value)}.",
                    [
                        f"created at {errors.line_of(tensor.op)}",
                        f"fetched at {errors.user_line()}",
                    ],
                    "fetch a tensor that has a row for each example, or a mean or a "
                    "sum over them, and compute the rest from that.",
                )
            )
        else:
            logging.warning(
                "%s (%s) is neither a mean nor a sum over the examples: what is "
                "fetched is the mean of the replicas' values, weighted by their "
                "numbers of examples.",
                *(tensor.name, errors.line_of(tensor.op)),
            )


def _said(value: Value) -> str:
    if value.kind is Kind.UNKNOWN:
        return "neither a row for each example nor a mean or a sum over them"
    return value.said


def _parts_of(given: Any) -> list[Any]:
    """Returns the tensors, or the op, of a leaf of the user's fetches."""
    if isinstance(given, tf.SparseTensor):
        return [given.indices, given.values, given.dense_shape]
    if isinstance(given, tf.IndexedSlices):
        return [given.values, given.indices]
    if isinstance(given, tf.RaggedTensor):
        raise _no_fetch(given, "", "fetch given.to_tensor() instead of a RaggedTensor.")
    return [given]


def _element(graph: tf.Graph, leaf: Any) -> Any:
    """Returns the tensor or op of a graph that a fetch names."""
    try:
        return graph.as_graph_element(leaf, allow_tensor=True, allow_operation=True)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        fix = (
            "fetch tensors, operations and variables of the scope's graph, their "
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
    """Concatenates the rows of sparse tensors."""
    new_value = tf.compat.v1.SparseTensorValue
    sparse_values = [new_value(*sparse) for sparse in zip(*values, strict=False)]
    if all(kinds.is_same(part.value) for part in parts):
        return sparse_values[0]
    if counts is not None:
        sparse_values = [
            sparse for sparse, n in zip(sparse_values, counts, strict=True) if n
        ]
    first_row, indices = 0, []
    for sparse in sparse_values:
        offset = np.zeros(sparse.indices.shape[1], np.int64)
        offset[:1] = first_row
        indices.append(sparse.indices + offset)
        first_row += sparse.dense_shape[0]
    shape = np.max([sparse.dense_shape for sparse in sparse_values], axis=0)
    shape[0] = first_row
    return new_value(
        np.concatenate(indices),
        np.concatenate([sparse.values for sparse in sparse_values]),
        shape,
    )


def join(
    fetch: Fetch,
    values: Values,
    counts: Sequence[float] | None,
) -> Any:
    """Returns the value for all examples.

    Args:
        fetch: What was fetched.
        values: The replicas' values; a single one if that is enough.
        counts: How many examples each replica has; None if equally many.

    Raises:
        ArgumentError: The number of rows does not fit the number of examples.
    """
    value = fetch.value
    if fetch.whole is not None or isinstance(fetch.what, tf.Operation):
        return values[0]
    if kinds.is_same(value) or value.kind is Kind.DRAWN:
        return values[0]
    if fetch.what.op.type in _SUMMARIES or fetch.what.dtype == tf.string:
        if not fetch.what.shape.rank and np.ndim(values[0]) == 0:
            return _summary(fetch.what, values, counts)
    arrays = [np.asarray(replica_value) for replica_value in values]
    if value.kind is Kind.ROWS or (arrays[0].ndim and value.kind is Kind.UNKNOWN):
        return _rows(fetch, arrays, counts)
    if value.kind in (Kind.MAX, Kind.MIN):
        choose = np.maximum if value.kind is Kind.MAX else np.minimum
        nonempty = [n for n in range(len(arrays)) if counts is None or counts[n]]
        dtype = arrays[0].dtype
        return _scalar(np.asarray(choose.reduce([arrays[n] for n in nonempty])), dtype)
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
    """Returns a mean weighted by examples, without the replicas that have none.

    Args:
        arrays: The replicas' values.
        counts: How many examples each has; None if equally many.
        power: The exponent of the number of examples as a factor of the values.
    """
    weights = [1.0] * len(arrays) if counts is None else list(counts)
    total = sum(weights)
    dtype = arrays[0].dtype
    if power == 1:  # a sum, and exact
        terms = [array for array, weight in zip(arrays, weights, strict=True) if weight]
        return _scalar(np.asarray(sum(terms[1:], terms[0])), dtype)
    wide = np.result_type(dtype, np.float64)
    terms = [
        array.astype(wide) * (weight / total) ** (1 - power)
        for array, weight in zip(arrays, weights, strict=True)
        if weight
    ]
    return _scalar(np.asarray(sum(terms[1:], terms[0])), dtype)


def _rows(
    fetch: Fetch, arrays: Sequence[np.ndarray], counts: Sequence[float] | None
) -> np.ndarray:
    """Concatenates rows of examples, leaving out those of lent examples."""
    value, tensor = fetch.value, fetch.what
    if counts is None:
        return np.concatenate(arrays, value.axis)
    for array, count in zip(arrays, counts, strict=True):
        if count and array.shape[value.axis] % count and value.some is None:
            raise errors.ArgumentError(
                errors.compose(
                    f"{tensor.name} has {array.shape[value.axis]} rows on a replica of "
                    f"{int(count)} examples, not equally many for each: the replicas' "
                    "rows cannot be joined.",
                    [
                        f"created at {errors.line_of(tensor.op)}",
                        f"fetched at {errors.user_line()}",
                    ],
                    "fetch a tensor that has a row for each example.",
                )
            )
    total = sum(counts)
    nonempty_arrays = [
        _scalar(array * (n / total) ** -value.power, array.dtype)
        if value.power
        else array
        for array, n in zip(arrays, counts, strict=True)
        if n
    ]
    return np.concatenate(nonempty_arrays or arrays[:1], value.axis)


def _summary(
    tensor: tf.Tensor, values: Values, counts: Sequence[float] | None
) -> bytes:
    """Returns a summary of all examples, whose numbers are means."""
    if all(value == values[0] for value in values):
        return bytes(values[0])
    summaries = []
    for value in values:
        summary = tf.compat.v1.Summary()
        try:
            summary.ParseFromString(value)
        except Exception:  # protobuf's error for bytes that are no summary
            raise errors.ArgumentError(
                errors.compose(
                    f"{tensor.name} is a string that differs between replicas.",
                    [
                        f"created at {errors.line_of(tensor.op)}",
                        f"fetched at {errors.user_line()}",
                    ],
                    "fetch a tensor that has one for each example.",
                )
            ) from None
        summaries.append(summary)
    joined = summaries[0]
    for k, value in enumerate(joined.value):
        if value.HasField("simple_value"):
            numbers = [np.float64(other.value[k].simple_value) for other in summaries]
            value.simple_value = float(_mean([np.asarray(n) for n in numbers], counts))
    return bytes(joined.SerializeToString())
