# SPDX-License-Identifier: Apache-2.0
"""A model's own step for whole batches, traced once for one device.

A batch is passed as the list of its tensors, with the structure that the model's step
expects. The engine of whole-batch programs (forms/) runs what is traced on replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator.forms.engine import WholeBatchFunction
from replicator.forms.traced import Specs
from replicator.graph.ir import shapes
from replicator.keras import alone

_do_not_convert = tf.autograph.experimental.do_not_convert  # as Keras' own are not


class Tensors:
    """The structure of a batch, with its leaves that are not tensors.

    Args:
        batch: The argument of a model's step: a nest of tensors, arrays and None.
    """

    def __init__(self, batch: Any) -> None:
        batch = tf.nest.map_structure(_value, batch)
        self._leaves = tf.nest.flatten(batch)
        self._structure = batch

    @property
    def tensors(self) -> list[Any]:
        """The tensors of the batch, as a list."""
        return [leaf for leaf in self._leaves if leaf is not None]

    @property
    def key(self) -> str:
        """Equal for batches of the same structure."""
        return repr(self.forget()._structure)

    def packed(self, tensors: Sequence[Any]) -> Any:
        """Returns a batch of this structure with other tensors."""
        remaining = iter(tensors)
        filled = [None if leaf is None else next(remaining) for leaf in self._leaves]
        return tf.nest.pack_sequence_as(self._structure, filled)

    def forget(self) -> Tensors:
        """Returns the structure without the tensors, to be kept."""
        copy = object.__new__(Tensors)
        copy._leaves = [None if leaf is None else 0 for leaf in self._leaves]
        copy._structure = tf.nest.pack_sequence_as(self._structure, copy._leaves)
        return copy


def _value(leaf: Any) -> Any:
    """Returns a leaf as a tensor, or None for None and Keras' placeholder for it."""
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return None
    if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
        return leaf
    return tf.convert_to_tensor(leaf)


def _read(leaf: Any) -> Any:
    """Returns a result; a variable's value, which must be read in the trace."""
    import keras

    is_variable = isinstance(leaf, keras.Variable | tf.Variable)
    return tf.convert_to_tensor(leaf) if is_variable else leaf


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


class Program:
    """A step of a model for batches of one structure, traced for one device.

    Ragged and sparse tensors are the tensors that they consist of, which are not split:
    each replica has all of them, and takes what it needs.

    Args:
        repl: The Replicator.
        model: The Keras model.
        name: Its method, such as "train_step".
        batch: The structure of the batches.
        specs: The specs of their tensors.
        local_statistics: Whether batch normalization uses those of each replica's rows.
    """

    def __init__(
        self,
        repl: Any,
        model: Any,
        name: str,
        batch: Tensors,
        specs: Sequence[Any],
        local_statistics: bool = False,
    ) -> None:
        specs = list(specs)

        def step(*components: Any) -> Any:
            packed = tf.nest.pack_sequence_as(specs, components, expand_composites=True)
            returned = getattr(model, name)(batch.packed(packed))
            return tf.nest.map_structure(_read, returned)

        self._has_rows = [
            type(spec) is tf.TensorSpec and bool(spec.shape.rank)
            for spec in specs
            for _ in tf.nest.flatten(spec, expand_composites=True)
        ]
        signature = tf.nest.flatten(specs, expand_composites=True)
        try:
            with repl.context():
                self._function = WholeBatchFunction(
                    *(_do_not_convert(step), repl, signature),
                    local_statistics=local_statistics,
                )
        except errors.ContextError as error:
            call = errors.called_outside(error)
            if call is None:
                raise
            raise alone.refused(model, name, call) from error

    def add(self, tensors: Sequence[Any], split: bool) -> Any:
        """Adds the replicas' steps for a batch to the function that is being traced.

        Args:
            tensors: The tensors of the batch.
            split: Whether each replica has some of the examples; else all have all.

        Returns:
            What the model's step returns for the batch.
        """
        rows = 0 if split else None
        which = tuple(rows if has_rows else None for has_rows in self._has_rows)
        flat = tf.nest.flatten(list(tensors), expand_composites=True)
        return self._function.add(which, flat)
