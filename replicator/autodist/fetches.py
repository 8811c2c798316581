# SPDX-License-Identifier: Apache-2.0
"""Maps session fetches to ops of the replicas.

A value equal on all replicas is fetched from one. A value that does not follow from
those of the parts is computed once more, from values that do. Ops, and tensors that
depend on a write, run on all replicas. How values are joined is in fetched.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from replicator import errors
from replicator.autodist import flows, handles, joining, kinds, losses
from replicator.autodist.defaults import Defaults
from replicator.autodist.fetched import SUMMARIES, Fetch, Leaf
from replicator.autodist.kinds import SAME, UNKNOWN, Kind, Value
from replicator.autodist.program import Program
from replicator.autodist.shares import Plan
from replicator.graph.ir.kinds import has_effect


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
        parts = [part for x in leaves for part in _parts_of(x)]
        elements = [handles.seen(self._program, _element(graph, x)) for x in parts]
        ops = [x if isinstance(x, tf.Operation) else x.op for x in elements]
        return self._defaults.needed(ops, fed)

    def _find(self, leaf: Any, fed: frozenset[str], checked: bool) -> Fetch:
        element = handles.seen(self._program, _element(self._program.graph, leaf))
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
        elif value.kind is Kind.DRAWN or tensor.op.type in SUMMARIES:
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
