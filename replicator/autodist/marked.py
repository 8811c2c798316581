# SPDX-License-Identifier: Apache-2.0
"""Variables of a single-device graph whose reads and gradients are marked.

The user's graph stays one of plain TensorFlow: variables are resource variables, and
the only ops added pass on their input. A variable is read through an identity of its
handle. The gradient of that identity is the variable's gradient, whichever optimizer
asks for it, and passes through another such op, a marker. At the markers, replicas.py
reduces the gradients of all replicas.

Source: AutoDist (Zhang et al. 2020) found gradients by patching every optimizer;
nothing is patched here, so gradients applied by hand are found, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from replicator import _tf, errors
from replicator.graph.ir import shapes

READ = "_replicator_read"  # on an identity of a variable's handle: the variable's name
GRADIENT = "_replicator_gradient"  # on a marker: whose gradient it passes on
TAKEN = "_replicator_taken"  # on a marker: the scope of tf.gradients, or ""
LOSS = "_replicator_loss"  # on a marker: the loss of a tape, see `_losses`
BEGUN = "_replicator_begun"  # on a marker: the ops that a tape began with, or ""
BACK = "_replicator_back"  # on a marker: "1" if it leads through another one, or ""
PART = "_replicator_part"  # on a marker: "dense", or "values" or "indices" of rows
_TYPE = "ReplicatorSingleDeviceRead"
_MARKER_TYPE = "ReplicatorSingleDeviceMarker"

# The arguments of a variable creator that a resource variable takes.
_FACTS = (
    *("initial_value", "trainable", "collections", "validate_shape", "name", "dtype"),
    *("constraint", "synchronization", "aggregation", "shape"),
)


class MarkedVariable(_tf.ResourceVariable):
    """A resource variable whose reads and gradients can be found in the graph.

    Attributes:
        is_by_reference: Whether it stands for a reference variable of TensorFlow 1.
    """

    is_by_reference = False

    def __init__(self, **facts: Any) -> None:
        self._read_by: tf.Tensor | None = None  # during a read
        self._shared_read: tf.Tensor | None = None  # where no tape records
        super().__init__(**facts)

    @property
    def handle(self) -> tf.Tensor:
        """The handle; during a read, the identity that the read goes through."""
        return self._handle if self._read_by is None else self._read_by

    @contextlib.contextmanager
    def _marked(self) -> Iterator[None]:
        """Makes reads in this block go through an identity of the handle."""
        is_nested = self._read_by is not None
        if not is_nested and self.dtype.is_floating and _tf.stands_in(self.graph):
            self._read_by = self._identity()
        try:
            yield
        finally:
            if not is_nested:
                self._read_by = None

    def _identity(self) -> tf.Tensor:
        """Returns the identity for a read, outside all control flow.

        A tape must see one of its own, made after the variable was watched.
        """
        if _tf.place_of_reads() is None:
            _tf.note_read(self)
            return _identity(self)
        if self._shared_read is None:
            self._shared_read = _identity(self)
        return self._shared_read

    def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
        with self._marked():
            return super()._read_variable_op(no_copy)

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Gathers rows `indices` of the value."""
        with self._marked():
            return super().sparse_read(indices, name)

    def gather_nd(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Gathers slices `indices` of the value."""
        with self._marked():
            return super().gather_nd(indices, name)


def creator(made: list[MarkedVariable]) -> Callable[..., MarkedVariable]:
    """Returns a variable creator that makes marked variables.

    Args:
        made: The list that it appends them to.
    """

    def create(_: Any, **kwargs: Any) -> MarkedVariable:
        facts = {k: v for k, v in kwargs.items() if k in _FACTS and v is not None}
        variable = MarkedVariable(**facts)
        variable.is_by_reference = _is_by_reference(kwargs)
        made.append(variable)
        return variable

    return create


def _is_by_reference(arguments: Mapping[str, Any]) -> bool:
    """Whether a variable creator's arguments ask for a reference variable."""
    if "use_resource" not in arguments:  # tf.Variable of TensorFlow 2
        return False
    asked = arguments["use_resource"]
    return not (tf.compat.v1.resource_variables_enabled() if asked is None else asked)


def _identity(variable: MarkedVariable) -> tf.Tensor:
    handle, graph = variable.handle, variable.graph
    name = variable.op.name
    with (
        graph.as_default(),
        graph.colocate_with(None, ignore_existing=True),
        tf.control_dependencies(None),
        tf.device(None),
        tf.name_scope(""),
        graph.gradient_override_map({"Identity": _TYPE}),
    ):
        with _tf.stop_recording():
            read = tf.identity(handle, name=f"{name}/AutoDist")
        _tf.set_text_attr(read.op, READ, name)
        _tf.copy_handle_data(handle, read)
        _tf.record_gradient(
            "Identity", [read], [handle], lambda d: [_mark(name, "", d)]
        )
    return read


@tf.RegisterGradient(_TYPE)
def _of_read(op: tf.Operation, gradient: Any) -> Any:
    """Registered with tf.gradients, which calls it in the scope of the identity."""
    scope = tf.compat.v1.get_default_graph().get_name_scope()
    return _mark(_text(op, READ), scope.removesuffix(f"{op.name}_grad"), gradient)


def _mark(variable: str, taken: str, gradient: Any, back: str = "") -> Any:
    """Returns a variable's gradient, passed on by markers.

    Args:
        variable: The variable's name.
        taken: The scope of tf.gradients, or "".
        gradient: Dense or sparse.
        back: "1" if it is the gradient of another gradient.
    """
    if gradient is None:
        return None
    facts = {GRADIENT: variable, TAKEN: taken, LOSS: _losses(), BACK: back}
    texts = {**facts, BEGUN: "" if taken else _begun()}
    if not isinstance(gradient, tf.IndexedSlices):
        return _passed_on(gradient, gradient.shape, {**texts, PART: "dense"})
    rows = tf.TensorShape([None])  # the replicas' rows may be more or fewer in total
    values, indices = gradient.values, gradient.indices
    return tf.IndexedSlices(
        _passed_on(values, rows + values.shape[1:], {**texts, PART: "values"}),
        _passed_on(indices, rows, {**texts, PART: "indices"}),
        gradient.dense_shape,
    )


def _begun() -> str:
    """Returns the names of the running tape's starts, joined by ",", or ""."""
    call = _tf.differentiated()
    if call is None or any(initial is not None for initial in call.given):
        return ""
    graph = tf.compat.v1.get_default_graph()
    return ",".join(op.name for op in _tf.begun_by_tape(graph, len(call.targets)))


def _losses() -> str:
    """Returns the names of a tape's targets, ";", and their initial gradients.

    "" if these are unknown.
    """
    call = _tf.differentiated()
    graph = tf.compat.v1.get_default_graph()
    if call is None or any(
        getattr(tensor, "graph", None) is not graph for tensor in call.targets
    ):
        return ""
    names = [
        [tensor.name if tf.is_tensor(tensor) else "" for tensor in part]
        for part in (call.targets, call.given)
    ]
    return ";".join(map(",".join, names))


def _passed_on(tensor: Any, shape: tf.TensorShape, texts: dict[str, str]) -> tf.Tensor:
    """Returns a marker of a gradient.

    Its own gradient is summed over all replicas as well, so that gets a marker, too.
    """
    graph = tf.compat.v1.get_default_graph()
    # An identity that hides the static shape.
    with _tf.stop_recording(), graph.gradient_override_map({_IDENTITY: _MARKER_TYPE}):
        marker = tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=shape)
    for name, text in texts.items():
        _tf.set_text_attr(marker.op, name, text)
    if tensor.dtype.is_floating:
        _tf.record_gradient(
            _IDENTITY,
            [marker],
            [tensor],
            lambda gradient: [_back_through(marker.op, "", gradient)],
        )
    return marker


_IDENTITY = "PlaceholderWithDefault"


@tf.RegisterGradient(_MARKER_TYPE)
def _of_marker(op: tf.Operation, gradient: Any) -> Any:
    """Registered with tf.gradients, which calls it in the scope of the marker."""
    scope = tf.compat.v1.get_default_graph().get_name_scope()
    return _back_through(op, scope.removesuffix(f"{op.name}_grad"), gradient)


def _back_through(marker: tf.Operation, taken: str, gradient: Any) -> Any:
    """Returns the marked gradient of a variable's gradient."""
    if gradient is None:
        return None
    if _text(marker, PART) != "dense":
        raise errors.UnsupportedError(
            errors.compose(
                f"the gradient of variable {_text(marker, GRADIENT)} is differentiated "
                "and sparse: it holds the rows that were looked up, which differ "
                "between replicas.",
                [f"at {errors.user_line()}"],
                "look up rows of tf.identity(variable), whose gradient is dense.",
            )
        )
    return _mark(
        _text(marker, GRADIENT), taken, tf.convert_to_tensor(gradient), back="1"
    )


def text(op: tf.Operation, name: str) -> str | None:
    """Returns an attribute set in this file on an op, or None."""
    if op.type not in ("Identity", "PlaceholderWithDefault"):
        return None
    try:
        return _text(op, name)
    except ValueError:
        return None


def _text(op: tf.Operation, name: str) -> str:
    value: bytes = op.get_attr(name)
    return value.decode()


def empty(variable: tf.Variable) -> tf.Tensor:
    """Returns a value with a variable's dtype and, as far as known, shape."""
    shape = [size or 0 for size in shapes.static(variable) or ()]
    if variable.dtype == tf.string:
        return tf.fill(shape, "")
    return tf.zeros(shape, variable.dtype)
