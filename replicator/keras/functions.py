# SPDX-License-Identifier: Apache-2.0
"""The functions that Keras calls per batch, one trace per kind of batch size.

A batch's size is known when it arrives, and decides how it runs. If it splits evenly,
means over the replicas need no weights. If some replicas would get no example at all,
it runs on one device, as in plain Keras, and its assignments to replicated variables
reach all replicas. A function for each of these kinds is traced when it is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replicator.cluster import faults
from replicator.graph.ir import shapes
from replicator.inputs import shards
from replicator.keras.steps import Tensors
from replicator.step import draft, repair
from replicator.variables import locks

_do_not_convert = tf.autograph.experimental.do_not_convert

EVEN, UNEVEN, ALONE = "even", "uneven", "alone"

Build = Callable[[str, Tensors, Any], Any]  # (kind, batch structure, its tensors)


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """The function traced for batches of one kind and structure.

    Attributes:
        kind: EVEN, UNEVEN or ALONE.
        function: The function of a batch's tensors.
        call: Runs the function; makes the replicas equal after an error in it.
    """

    kind: str
    function: Any
    call: Callable[..., Any]


class BatchFunction:
    """Runs global batches of any structure and size.

    Args:
        build: Runs a batch of a kind, or builds it into the function being traced.
        settings: The Replicator's settings.
        eager: Whether batches run untraced on one device, for Keras' `run_eagerly`.
        needs_all: Whether to split even a batch of fewer examples than replicas.

    Attributes:
        loops: Loops built from traced functions, which are dropped with them.
    """

    def __init__(
        self,
        build: Build,
        settings: draft.Settings,
        eager: bool,
        needs_all: bool = False,
    ) -> None:
        self._build, self._settings = build, settings
        self._num_replicas = settings.world.num_replicas
        self._eager, self._needs_all = eager, needs_all
        self._traced: dict[Any, Traced] = {}
        self.loops: dict[Any, Any] = {}
        self._freed: dict[Any, tuple[Any, ...]] = {}
        self._quick: tuple[Any, dict[Any, Callable[..., Any]]] = (None, {})

    @property
    def eager(self) -> bool:
        """Whether batches run untraced on one device."""
        return self._eager

    @property
    def lock(self) -> locks.StepLock:
        """The lock that is held while a batch runs."""
        return self._settings.lock

    def trace_again(self) -> None:
        """Drops all functions, because variables that they use have new components."""
        self._traced.clear()
        self.loops.clear()
        self._quick = (None, {})

    def __call__(self, data: Any, spec: Any = None) -> Any:
        """Runs one batch.

        Args:
            data: The global batch, of eager tensors or arrays.
            spec: The spec of all batches of the dataset, if known.
        """
        if self._eager or not is_dense(spec):
            return self.run(data, spec)[0]
        # A fast path, with less Python than a small step takes: batches of one dataset
        # differ only in size.
        if self._quick[0] is not spec:
            self._quick = (spec, {})
        calls = self._quick[1]
        leaves = tf.nest.flatten(data)
        sizes = tuple(leaf.shape[:1] for leaf in leaves)
        if sizes not in calls:
            result, trace = self.run(data, spec)
            assert trace is not None  # nothing is eager here
            self._quick[1][sizes] = trace.call
            return result
        return calls[sizes](*leaves)

    def run(self, data: Any, spec: Any) -> tuple[Any, Traced | None]:
        """Runs a batch of any structure; returns its result and the traced function.

        Args:
            data: As for a call.
            spec: As for a call.
        """
        batch = Tensors(data)
        tensors = batch.tensors
        if self._eager:
            return self._build(ALONE, batch, tensors), None
        size = shards.batch_size(tensors)
        kind = self._kind(int(size))
        specs = self._free(kind, batch.key, _specs(tensors, spec))
        key = (kind, batch.key, *specs)
        traced = self._traced.get(key)
        if traced is None:
            with self._settings.factory.traced_by(self):
                traced = self._trace(kind, batch.forget(), specs)
            self._traced[key] = traced
        return traced.call(*tensors), traced

    def equal_after_errors(self, function: Any) -> Callable[..., Any]:
        """Wraps a function to make the replicas equal after an error in it.

        Args:
            function: A traced function.
        """
        owners = self._settings.factory.owners()
        variables = repair.mirrored(function.captured_inputs, owners)
        return repair.equal_after_errors(function, variables, self._settings.peers)

    def is_of(self, kind: str, size: tf.Tensor) -> tf.Tensor:
        """Returns, as a tensor, whether a batch of a symbolic size is of a kind.

        Args:
            kind: EVEN, UNEVEN or ALONE.
            size: The number of examples.
        """
        alone = tf.logical_and(size < self._num_replicas, not self._needs_all)
        if kind == ALONE:
            return alone
        even = tf.equal(size % self._num_replicas, 0)
        matches = even if kind == EVEN else tf.logical_not(even)
        return tf.logical_and(matches, tf.logical_not(alone))

    def _free(self, kind: str, structure: str, specs: Any) -> tuple[Any, ...]:
        """Returns specs that cover batches of all sizes so far.

        Sequences of many lengths are thus traced twice, and not for each length.
        """
        ranks = tuple((type(s), getattr(s, "dtype", None), s.shape.rank) for s in specs)
        key = (kind, structure, ranks)
        widest = self._freed.get(key, specs)
        common = tuple(
            spec.most_specific_common_supertype([other]) or other
            for spec, other in zip(widest, specs, strict=True)
        )
        self._freed[key] = common
        return common

    def _trace(self, kind: str, batch: Tensors, specs: Any) -> Traced:
        """Traces the function of a batch's tensors."""

        @_do_not_convert
        def function(*tensors: Any) -> Any:
            return self._build(kind, batch, tensors)

        traced = tf.function(function).get_concrete_function(*specs)
        return Traced(kind, traced, self.equal_after_errors(traced))

    def _kind(self, size: int) -> str:
        if size < self._num_replicas and not self._needs_all:
            return ALONE
        return UNEVEN if size % self._num_replicas else EVEN


def over_list(function: BatchFunction) -> Callable[[Any], Any]:
    """Returns a predict_function for Keras, which takes a list of batches."""

    def run(batches: Any) -> Any:
        with faults.named():
            outputs = [function(batch) for batch in batches]
        if len(outputs) == 1:
            return outputs[0]
        return tf.nest.map_structure(_behind, *outputs)

    return run


def _behind(*parts: Any) -> Any:
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(parts))
    return tf.stack(parts) if parts[0].shape.rank == 0 else tf.concat(parts, 0)


def is_dense(spec: Any) -> bool:
    """Whether a spec is known and consists of dense tensors only."""
    return spec is not None and all(
        type(leaf) is tf.TensorSpec for leaf in tf.nest.flatten(spec)
    )


def _specs(tensors: list[Any], spec: Any) -> tuple[Any, ...]:
    """Returns the function's specs for batches like this one, of any size."""
    tensor_specs = None
    if spec is not None:
        leaves = tf.nest.flatten(spec)
        no_tensor = type(tf.type_spec_from_value(None))  # without a name before 2.19
        tensor_specs = [
            leaf for leaf in leaves if not isinstance(leaf, tf.OptionalSpec | no_tensor)
        ]
        if len(tensor_specs) == len(tensors):
            return tuple(tensor_specs)
    return tuple(map(_free_spec, tensors))


def _free_spec(tensor: Any) -> Any:
    """Returns a tensor's spec with an unknown number of rows."""
    spec = tf.type_spec_from_value(tensor)
    if isinstance(spec, tf.RaggedTensorSpec):
        shape = shapes.with_rows(spec.shape)
        return tf.RaggedTensorSpec(
            shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype
        )
    if spec.shape.rank == 0:
        return spec
    return type(spec)(shapes.with_rows(spec.shape), spec.dtype)
