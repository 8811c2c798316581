# SPDX-License-Identifier: Apache-2.0
"""Traces a function for one device: its graph, and the variables that it uses."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf, errors
from replicator.variables import single_device


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
        depth = _tf.stack_depth()
        counts: collections.Counter[Any] = collections.Counter()

        def creator(next_creator: Any, **kwargs: Any) -> Any:
            place = _tf.stack_since(depth)
            counts[place] += 1
            key = place, counts[place]
            if key not in self._variables:
                self._variables[key] = factory.creator(next_creator, **kwargs)
            return self._variables[key]

        with tf.init_scope():  # where layers and optimizers create theirs
            outside = _tf.last_variable_creator(creator)
        with outside, _tf.last_variable_creator(creator):
            yield


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
        factory, view = repl._settings.factory, single_device.View()

        def body(*tensors: tf.Tensor) -> Any:
            with view.tracing(), made.keeping(factory):
                returned = _tf.call_converted(function, tensors)
                return tf.nest.map_structure(_read, returned)

        with factory.traced_by(user):
            traced = tf.function(_tf.not_converted(body)).get_concrete_function(*specs)
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
            errors.compose(
                f"a function for one device returns {errors.shown(leaf)}, which is no "
                "tensor.",
                [f"at {errors.user_line()}"],
                "return tensors, or lists, tuples and dicts of them.",
            )
        ) from error
