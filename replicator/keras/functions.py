# SPDX-License-Identifier: Apache-2.0
"""The functions that Keras calls per batch, one trace per structure of batches.

A batch is split over the replicas, unless some would get no example at all: then each
replica computes the whole batch. Both functions are built, when they are needed, from
one trace of the model's step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator.cluster import faults
from replicator.forms.traced import ByShape, Specs
from replicator.graph.ir import shapes
from replicator.inputs import shards
from replicator.keras.programs import Program, Tensors
from replicator.step import draft, repair
from replicator.variables import locks

_do_not_convert = tf.autograph.experimental.do_not_convert

Make = Callable[[Tensors, Sequence[Any]], Program]  # of a structure and its specs


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """The function traced for batches of one kind and structure.

    Attributes:
        split: Whether each replica has some of the examples; else each has all.
        function: The function of a batch's tensors.
        call: Runs the function; makes the replicas equal after an error in it.
    """

    split: bool
    function: Any
    call: Callable[..., Any]


class BatchFunction:
    """Runs global batches of any structure and size.

    Args:
        make: Traces the model's step.
        settings: The Replicator's settings.
        declared: Returns specs in which sizes that the model leaves open are unknown.
        eagerly: Runs a batch untraced on one device, for Keras' `run_eagerly`.

    Attributes:
        loops: Loops built from traced functions, which are dropped with them.
    """

    def __init__(
        self,
        make: Make,
        settings: draft.Settings,
        declared: Callable[[Specs], Specs],
        eagerly: Callable[[Any], Any] | None = None,
    ) -> None:
        self._make, self._settings, self._eagerly = make, settings, eagerly
        self._declared, self._num_replicas = declared, settings.world.num_replicas
        self._programs: dict[Any, ByShape[Program]] = {}
        self._traced: dict[Any, ByShape[Traced]] = {}
        self.loops: dict[Any, Any] = {}
        self._quick: tuple[Any, dict[Any, Callable[..., Any]]] = (None, {})

    @property
    def eager(self) -> bool:
        """Whether batches run untraced on one device."""
        return self._eagerly is not None

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
        if self.eager or not is_dense(spec):
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
        if self._eagerly is not None:
            return self._eagerly(batch.packed(tensors)), None
        split = int(shards.batch_size(tensors)) >= self._num_replicas
        specs = _specs(tensors, spec)
        kinds = [(type(s), getattr(s, "dtype", None), s.shape.rank) for s in specs]
        kind = batch.key, *kinds

        def trace(specs: Specs) -> Traced:
            return self._trace(self._program(batch, kind, specs), split, specs)

        traced = self._traced.setdefault((split, kind), ByShape()).get(
            specs, trace, self._declared
        )
        return traced.call(*tensors), traced

    def _program(self, batch: Tensors, kind: Any, specs: Specs) -> Program:
        """Returns the model's step for batches of any size, traced for one device."""
        return self._programs.setdefault(kind, ByShape()).get(
            tuple(map(shapes.of_any_rows, specs)),
            lambda specs: self._make(batch.forget(), specs),
        )

    def equal_after_errors(self, function: Any) -> Callable[..., Any]:
        """Wraps a function to make the replicas equal after an error in it.

        Args:
            function: A traced function.
        """
        owners = self._settings.factory.owners()
        variables = repair.mirrored(function.captured_inputs, owners)
        return repair.equal_after_errors(function, variables, self._settings.peers)

    def is_of(self, split: bool, size: tf.Tensor) -> tf.Tensor:
        """Returns, as a tensor, whether a batch of a symbolic size is of a kind.

        Args:
            split: Whether it is to be split over the replicas.
            size: The number of examples.
        """
        return tf.equal(size >= self._num_replicas, split)

    def _trace(self, program: Program, split: bool, specs: Any) -> Traced:
        """Traces the function of a batch's tensors that the replicas run."""

        @_do_not_convert
        def function(*tensors: Any) -> Any:
            return program.add(tensors, split)

        with self._settings.factory.traced_by(self):
            traced = tf.function(function).get_concrete_function(*specs)
        return Traced(split, traced, self.equal_after_errors(traced))


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


def _specs(tensors: list[Any], spec: Any) -> Specs:
    """Returns the function's specs for batches like this one, of any size."""
    own = [shapes.of_any_rows(tf.type_spec_from_value(tensor)) for tensor in tensors]
    if spec is not None:
        leaves = tf.nest.flatten(spec)
        no_tensor = type(tf.type_spec_from_value(None))  # without a name before 2.19
        given = [
            leaf for leaf in leaves if not isinstance(leaf, tf.OptionalSpec | no_tensor)
        ]
        if len(given) == len(tensors):
            pairs = zip(given, own, strict=True)
            own = [one if one.shape.rank is not None else known for one, known in pairs]
    return tuple(own)
