# SPDX-License-Identifier: Apache-2.0
"""The functions that Keras calls per batch.

What a model's step does with whole batches is traced once for one device, for each
structure of batches; the engine of whole-batch programs (forms/) runs it on replicas.

A model compiled with `run_eagerly=True` runs on one device, op by op, so that its
tensors have values to inspect. Its variables are replicated all the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from replicator import errors
from replicator.cluster import faults
from replicator.forms.engine import WholeBatchFunction
from replicator.forms.traced import ByShape, Specs, filled
from replicator.graph.ir import shapes
from replicator.inputs import shards
from replicator.keras import state

_do_not_convert = tf.autograph.experimental.do_not_convert  # as Keras' own are not

Step = Callable[[Any], Any]  # takes a global batch


def step_of(model: Any, name: str) -> Step:
    """Returns a model's step for whole batches on one device.

    Args:
        model: The Keras model.
        name: Its method, such as "train_step".
    """

    @_do_not_convert
    def step(batch: Any) -> Any:
        try:
            returned = getattr(model, name)(batch)
        except errors.ContextError as error:
            outside = errors.called_outside(error)
            if outside is None:
                raise
            raise _communicates(model, name, *outside) from error
        return tf.nest.map_structure(_read, returned)

    return step


def _communicates(model: Any, name: str, call: str, line: str) -> errors.ContextError:
    return errors.ContextError(
        f"{call} was called in {name} of the model {model.name}, which is written for "
        "one device and whole batches: there is no other replica to communicate with.",
        [f"at {line}"],
        f"leave {call} out: means, sums and metrics are those of the whole batch.",
    )


def _read(leaf: Any) -> Any:
    """Returns a result; a variable's value, which must be read in the trace."""
    import keras

    is_variable = isinstance(leaf, keras.Variable | tf.Variable)
    return tf.convert_to_tensor(leaf) if is_variable else leaf


class BatchFunction:
    """Runs a step of a model on replicas, for global batches of any structure and size.

    Args:
        step: The step, for one device.
        repl: The Replicator.
        declared: Returns specs in which sizes that the model leaves open are unknown.

    Attributes:
        repl: The Replicator.
    """

    def __init__(
        self,
        step: Step,
        repl: Any,
        declared: Callable[[Specs], Specs],
    ) -> None:
        self._step, self.repl, self._declared = step, repl, declared
        self._traces: dict[Any, ByShape[WholeBatchFunction]] = {}
        self._quick: tuple[Any, dict[Any, Callable[..., Any]]] = (None, {})

    def __call__(self, data: Any, spec: Any = None) -> Any:
        """Runs one batch.

        Args:
            data: The global batch, of eager tensors or arrays.
            spec: The spec of all batches of the dataset, if known.
        """
        # A fast path, with less Python than a small step takes: batches of one dataset
        # differ only in size.
        if spec is None or self._quick[0] is not spec:
            if not is_dense(spec):
                return self.run(data, spec)[0]
            self._quick = (spec, {})
        calls = self._quick[1]
        leaves = tf.nest.flatten(data)
        sizes = tuple([shapes.sizes(leaf)[:1] for leaf in leaves])
        if sizes in calls:
            return calls[sizes](leaves)
        result, calls[sizes] = self.run(data, spec)
        return result

    def run(self, data: Any, spec: Any) -> tuple[Any, Callable[..., Any]]:
        """Runs a batch of any structure; returns its result, and what ran it.

        Args:
            data: As for a call.
            spec: As for a call.
        """
        batch = tensors_of(data)
        leaves = tf.nest.flatten(batch)
        known = leaves if spec is None else tf.nest.flatten(spec)
        trace = self.trace(batch, list(map(_spec, leaves, known)))
        tensors = [leaf for leaf in leaves if leaf is not None]
        shards.batch_size(tensors)  # they must agree
        flat = tf.nest.flatten(tensors, expand_composites=True)
        which = trace.pattern(flat)
        assert which is not None, "eager tensors have sizes"
        run = functools.partial(trace.run, which)
        return run(flat), run

    def trace(
        self, batch: Any, leaves: Sequence[tf.TypeSpec | None]
    ) -> WholeBatchFunction:
        """Returns the trace for batches like one, of any size.

        Args:
            batch: Such a batch, or its spec.
            leaves: Specs of its leaves, and None for None.
        """
        indices = [k for k, leaf in enumerate(leaves) if leaf is not None]
        specs = tuple([leaf for leaf in leaves if leaf is not None])
        structure = tf.nest.map_structure(lambda _: None, batch)

        @_do_not_convert
        def step(*tensors: Any) -> Any:
            return self._step(filled(structure, indices, tensors))

        def trace(specs: Specs) -> WholeBatchFunction:
            with self.repl.context():
                return WholeBatchFunction(step, self.repl, specs)

        kinds = [(type(s), getattr(s, "dtype", None), s.shape.rank) for s in specs]
        traces = self._traces.setdefault((repr(structure), *indices, *kinds), ByShape())
        return traces.get(specs, trace, self._declared)


def eagerly(repl: Any, model: Any, step: Step) -> Callable[..., Any]:
    """Returns a function that runs a model's step, without a trace, on one device.

    Args:
        repl: The Replicator.
        model: The Keras model.
        step: Its step.
    """
    device = repl._settings.world.devices[0]
    if repl.num_replicas > 1:
        logging.log_first_n(
            logging.WARNING,
            "The model %s is compiled with run_eagerly=True, which is for debugging: "
            "its whole batches run on one device, %s, op by op, with the same "
            "results. Compile it with run_eagerly=False to run on all %d replicas.",
            1,
            model.name,
            device,
            repl.num_replicas,
        )

    def run(data: Any, spec: Any = None) -> Any:
        with repl.context(), tf.device(device), _accumulating(model):
            return step(tensors_of(data))

    return run


@contextlib.contextmanager
def _accumulating(model: Any) -> Iterator[None]:
    """Makes wrapped optimizers accumulate gradients outside of steps in this block."""
    combiners = [o._replicator_combiner for o in state.wrapped_in(model)]
    settings = [combiner.accumulates_outside for combiner in combiners]
    for combiner in combiners:
        combiner.accumulates_outside = True
    try:
        yield
    finally:
        for combiner, previous in zip(combiners, settings, strict=True):
            combiner.accumulates_outside = previous


def tensors_of(data: Any) -> Any:
    """Returns a batch of tensors and None."""
    return tf.nest.map_structure(_value, data)


def _value(leaf: Any) -> Any:
    """Returns a leaf as a tensor, or None for None and Keras' placeholder for it."""
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return None
    if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
        return leaf
    return tf.convert_to_tensor(leaf)


def _spec(tensor: Any, known: Any) -> tf.TypeSpec | None:
    """Returns the spec of a tensor of any number of rows, by that of its dataset."""
    if tensor is None:
        return None
    is_known = isinstance(known, tf.TypeSpec) and known.shape.rank is not None
    return shapes.of_any_rows(known if is_known else tf.type_spec_from_value(tensor))


def declared(model: Any, specs: Specs) -> Specs:
    """Returns specs in which sizes that a model's keras.Input leaves open are unknown.

    Targets and sample weights are like the outputs.

    Args:
        model: The Keras model.
        specs: Of the tensors of a batch: inputs, targets and sample weights.
    """
    inputs, outputs = (getattr(model, name, None) for name in ("inputs", "outputs"))
    known = [*(inputs or []), *(outputs or []), *(outputs or [])]
    known += [None] * (len(specs) - len(known))
    return tuple(map(_opened, specs, known))


def _opened(spec: Any, like: Any) -> Any:
    if like is None or type(spec) is not tf.TensorSpec or not spec.shape.rank:
        return spec
    rows, *sizes = shapes.sizes(spec)
    for axis, size in enumerate(like.shape[1 : len(sizes) + 1]):
        sizes[axis] = sizes[axis] if size is not None else None
    return tf.TensorSpec([rows, *sizes], spec.dtype)


def over_list(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a predict_function for Keras, which takes a list of batches."""

    def run(batches: Any) -> Any:
        with faults.named():
            outputs = [function(batch) for batch in batches]
        if len(outputs) == 1:
            return outputs[0]
        return tf.nest.map_structure(_joined, *outputs)

    return run


def _joined(*parts: Any) -> Any:
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(parts))
    return tf.stack(parts) if parts[0].shape.rank == 0 else tf.concat(parts, 0)


def is_dense(spec: Any) -> bool:
    """Whether a spec is known and consists of dense tensors of known ranks only."""
    return spec is not None and all(
        type(leaf) is tf.TensorSpec and leaf.shape.rank is not None
        for leaf in tf.nest.flatten(spec)
    )
