# SPDX-License-Identifier: Apache-2.0
"""Traces a function for one device: its graph, and the variables that it uses.

Also says how often: which arguments share a trace.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import tensorflow as tf
from absl import logging

from replicator import errors
from replicator._tf import autograph, frames, variables
from replicator.graph.ir import shapes
from replicator.variables import single_device

T = TypeVar("T")
Specs = tuple[tf.TypeSpec, ...]


class Made:
    """The variables that a function makes when it is called, as long as it lives.

    Its k-th creation at one place in its code is the same variable in all traces of it,
    as in a step_fn.
    """

    def __init__(self) -> None:
        self._variables: dict[Any, Any] = {}

    @contextlib.contextmanager
    def keeping(self, factory: Any) -> Iterator[None]:
        """Makes variables created in this block the library's, and keeps them.

        Args:
            factory: Creates them, a variables.creation.VariableFactory.
        """
        depth = frames.stack_depth()
        counts: collections.Counter[Any] = collections.Counter()

        def creator(next_creator: Any, **kwargs: Any) -> Any:
            place = frames.stack_since(depth)
            counts[place] += 1
            key = place, counts[place]
            if key not in self._variables:
                self._variables[key] = factory.creator(next_creator, **kwargs)
            return self._variables[key]

        with tf.init_scope():  # where layers and optimizers create theirs
            outside = variables.last_variable_creator(creator)
        with outside, variables.last_variable_creator(creator):
            yield


class ByShape(Generic[T]):
    """What is traced for arguments of one kind: of the first shapes, and then of any.

    Static shapes are worth something: layers are built from them. So what varies is
    found at the second call, and lengths are traced twice, however many there are.
    Where a shape must be known, there is a trace for each after all.
    """

    def __init__(self) -> None:
        self._traces: dict[Specs, T] = {}
        self._failed: set[Specs] = set()

    def get(
        self,
        specs: Specs,
        trace: Callable[[Specs], T],
        widen: Callable[[Specs], Specs] = lambda specs: specs,
    ) -> T:
        """Returns what was traced for specs that cover these, or is traced now.

        Args:
            specs: Of the arguments.
            trace: Traces for specs.
            widen: Returns specs in which what is declared to vary is unknown.
        """
        for others, traced in self._traces.items():
            if all(map(_covers, others, specs)):
                return traced
        last = [*self._traces][-1] if self._traces else specs
        widest = tuple(map(_common, last, widen(specs)))
        if widest != specs and widest not in self._failed:
            try:
                return self._traced(widest, trace)
            except Exception as error:
                logging.debug("traced for one shape only: %s", error)
                self._failed.add(widest)
        return self._traced(specs, trace)

    def _traced(self, specs: Specs, trace: Callable[[Specs], T]) -> T:
        self._traces[specs] = trace(specs)
        return self._traces[specs]


def filled(structure: Any, indices: Sequence[int], tensors: Sequence[Any]) -> Any:
    """Returns a structure with tensors in place of some of its leaves.

    Args:
        structure: The structure.
        indices: The indices of these leaves.
        tensors: What to put there.
    """
    leaves = tf.nest.flatten(structure)
    for k, tensor in zip(indices, tensors, strict=True):
        leaves[k] = tensor
    return tf.nest.pack_sequence_as(structure, leaves)


def _common(one: Any, other: Any) -> Any:
    return one.most_specific_common_supertype([other]) or other


def _covers(one: Any, other: Any) -> bool:
    return bool(other.is_subtype_of(one))


class Traced:
    """A function for one device as a graph.

    Args:
        function: The function, of flat tensors.
        repl: The Replicator whose variables it uses.
        specs: Of its arguments.
        made: The variables that it has made so far.
        user: Whose trace it is: it is told when what it relies on changes.

    Attributes:
        graph: The graph.
        captured: What its further inputs are: tensors, and the library's variables in
            place of their handles.
        structure: What it returns, of tensors of the graph.
        compressions: How wrapped optimizers compress gradients; see View.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        repl: Any,
        specs: Sequence[tf.TensorSpec],
        made: Made,
        user: Any,
    ) -> None:
        factory = repl._settings.factory

        def trace() -> tuple[Any, single_device.View]:
            view = single_device.View()

            def body(*tensors: tf.Tensor) -> Any:
                with view.tracing(), made.keeping(factory):
                    returned = autograph.call_converted(function, tensors)
                    return tf.nest.map_structure(_read, returned)

            with factory.traced_by(user), _noting_rows(specs):
                whole = tf.function(autograph.not_converted(body))
                return whole.get_concrete_function(*specs), view

        before = list(factory.owners().values())
        traced, view = trace()
        if not {id(v) for v in factory.owners().values()} <= set(map(id, before)):
            # As tf.function does: `if optimizer.built` may do something else now.
            traced, view = trace()
        self.graph: Any = traced.graph
        self.structure = traced.structured_outputs
        # The functions of a SavedModel, traced before, have handles of components.
        # Those of a sum are not the variable: what reads it outside adds them up.
        owners = {
            handle: v
            for handle, v in factory.owners().items()
            if not v.placement.is_aggregated
        }
        behind = [
            (t, owners.get(id(t)) if (v := view.variable_of(t)) is None else v)
            for t in traced.captured_inputs
        ]
        self.captured = [t if variable is None else variable for t, variable in behind]
        self.compressions = view.compressions
        self._alive = traced


@contextlib.contextmanager
def _noting_rows(specs: Sequence[tf.TensorSpec]) -> Iterator[None]:
    """Says of an error that may be due to it that the number of rows is unknown."""
    try:
        yield
    except (TypeError, ValueError) as error:
        is_open = any((shapes.static(s) or ())[:1] == (None,) for s in specs)
        if is_open and "None" in str(error):
            error.add_note(
                "The number of rows of a batch is unknown in a trace, which is for "
                "batches of all sizes: x.shape[0] is None.\nFix: use tf.shape(x)[0]."
            )
        raise


def _read(leaf: Any) -> Any:
    """Returns what a function returns as a tensor, while variables are seen as plain.

    Raises:
        ArgumentError: It is none.
    """
    inner = getattr(leaf, "value", leaf)  # a Keras variable's
    if isinstance(leaf, tf.Variable) or isinstance(inner, tf.Variable):
        return tf.convert_to_tensor(leaf)
    if leaf is None or tf.is_tensor(leaf) or isinstance(leaf, tf.TensorArray):
        return leaf
    try:
        return tf.convert_to_tensor(leaf)
    except (TypeError, ValueError) as error:
        raise errors.ArgumentError(
            f"a function for one device returns {errors.repr_of(leaf)}, which is no "
            "tensor.",
            fix="return tensors, or lists, tuples and dicts of them.",
        ) from error
