# SPDX-License-Identifier: Apache-2.0
"""What Keras calls per batch: functions of an iterator of global batches.

The size of a batch is known when it comes, and decides how it runs. If it splits
evenly, means over the replicas need no weights. If some replicas would have no example
at all, it runs on one device, as Keras would have it, and what it assigns to replicated
variables all replicas get. One function is traced for each of these, when it is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replicator.cluster import faults
from replicator.inputs import shards
from replicator.keras.steps import Tensors
from replicator.step import draft, repair
from replicator.variables import locks

_do_not_convert = tf.autograph.experimental.do_not_convert

EVEN, UNEVEN, ALONE = "even", "uneven", "alone"

Build = Callable[[str, Tensors, Any], Any]  # of a kind of batch, and its tensors


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """What was traced for batches of one kind and structure.

    Attributes:
        kind: EVEN, UNEVEN or ALONE.
        function: The function, of the tensors of a batch.
        call: Runs it; after an error in it, replicas are equal.
    """

    kind: str
    function: Any
    call: Callable[..., Any]


class BatchFunction:
    """Runs global batches of any structure and size.

    Args:
        build: Runs a batch of a kind, or builds that into the function being traced.
        settings: Those of the Replicator.
        eager: Whether batches run on one device and nothing is traced, for Keras'
            `run_eagerly`.
        needs_all: Whether a batch smaller than that is split all the same.

    Attributes:
        loops: What was made of traced functions, and is forgotten with them.
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
        """Whether batches run on one device and nothing is traced."""
        return self._eager

    @property
    def lock(self) -> locks.StepLock:
        """What is held while a batch runs."""
        return self._settings.lock

    def trace_again(self) -> None:
        """Forgets all functions: variables that they use have other components."""
        self._traced.clear()
        self.loops.clear()
        self._quick = (None, {})

    def __call__(self, data: Any, spec: Any = None) -> Any:
        """Runs one batch.

        Args:
            data: The global batch, of eager tensors or arrays.
            spec: What is known of all batches of its kind, if anything is.
        """
        if self._eager or not is_dense(spec):
            return self.run(data, spec)[0]
        # Batches of one dataset differ in their size only: less Python than a small
        # step takes.
        if self._quick[0] is not spec:
            self._quick = (spec, {})
        traced = self._quick[1]
        leaves = tf.nest.flatten(data)
        sizes = tuple(leaf.shape[:1] for leaf in leaves)
        if sizes not in traced:
            result, found = self.run(data, spec)
            assert found is not None  # as nothing is eager
            self._quick[1][sizes] = found.call
            return result
        return traced[sizes](*leaves)

    def run(self, data: Any, spec: Any) -> tuple[Any, Traced | None]:
        """Runs a batch of any structure; returns its result, and what was called.

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
        """Returns what calls a function; after an error in it, replicas are equal.

        Args:
            function: A traced one.
        """
        owners = self._settings.factory.owners()
        variables = repair.mirrored(function.captured_inputs, owners)
        return repair.equal_after_errors(function, variables, self._settings.peers)

    def is_of(self, kind: str, size: tf.Tensor) -> tf.Tensor:
        """Returns whether a batch of a size that a graph knows is of a kind.

        Args:
            kind: EVEN, UNEVEN or ALONE.
            size: How many examples there are.
        """
        alone = tf.logical_and(size < self._num_replicas, not self._needs_all)
        if kind == ALONE:
            return alone
        even = tf.equal(size % self._num_replicas, 0)
        wanted = even if kind == EVEN else tf.logical_not(even)
        return tf.logical_and(wanted, tf.logical_not(alone))

    def _free(self, kind: str, structure: str, specs: Any) -> tuple[Any, ...]:
        """Returns specs for batches of all the sizes that there were so far.

        Sequences of many lengths are traced twice, then, and not for each length.
        """
        ranks = tuple((type(s), getattr(s, "dtype", None), s.shape.rank) for s in specs)
        place = (kind, structure, ranks)
        known = self._freed.get(place, specs)
        common = tuple(
            one.most_specific_common_supertype([other]) or other
            for one, other in zip(known, specs, strict=True)
        )
        self._freed[place] = common
        return common

    def _trace(self, kind: str, batch: Tensors, specs: Any) -> Traced:
        """Returns a traced function of the tensors of a batch."""

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
    """Returns what Keras calls as predict_function, with a list of batches."""

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
    """Whether batches of a spec, if there is one, consist of dense tensors."""
    return spec is not None and all(
        type(leaf) is tf.TensorSpec for leaf in tf.nest.flatten(spec)
    )


def _specs(tensors: list[Any], spec: Any) -> tuple[Any, ...]:
    """Returns the specs of a function for batches like this one, of any size."""
    known = None
    if spec is not None:
        leaves = tf.nest.flatten(spec)
        known = [
            leaf
            for leaf in leaves
            if not isinstance(leaf, tf.OptionalSpec | tf.NoneTensorSpec)
        ]
        if len(known) == len(tensors):
            return tuple(known)
    return tuple(map(_free_spec, tensors))


def _free_spec(tensor: Any) -> Any:
    """Returns the spec of a tensor, for any number of rows."""
    spec = tf.type_spec_from_value(tensor)
    if isinstance(spec, tf.RaggedTensorSpec):
        shape = tf.TensorShape([None, *spec.shape[1:]])
        return tf.RaggedTensorSpec(
            shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype
        )
    if spec.shape.rank == 0:
        return spec
    return type(spec)(tf.TensorShape([None, *spec.shape[1:]]), spec.dtype)
