# SPDX-License-Identifier: Apache-2.0
"""Converts a replica's copies from one form to another: all communication.

    Partial     -> Replicated   all_reduce
    Sharded     -> Replicated   all_gather
    Replicated  -> Sharded      each replica takes its part: no communication
    Replicated  -> Partial      replica 0 keeps it, and the others have zeros: none
    Own         -> Partial      each replica's, times its share of the rows: none
    others                      by way of Replicated

The primitives are the library's, called as a user's step_fn would call them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from replicator import context, errors
from replicator.forms.forms import (
    REPLICATED,
    Form,
    Layout,
    Own,
    Partial,
    Sharded,
    Unset,
    equal,
)
from replicator.forms.sizes import Size
from replicator.graph.ir import shapes
from replicator.primitives import base

_REDUCTIONS = {"any": "logical_or", "all": "logical_and"}  # others have the same name
Number: TypeAlias = Any  # an int, or an int32 scalar


@contextlib.contextmanager
def in_graph(graph: tf.Graph) -> Iterator[None]:
    """Builds in a graph, which may be around the one under construction."""
    if graph is tf.compat.v1.get_default_graph():
        yield
        return
    with graph.as_default(), tf.control_dependencies(None):
        yield


@dataclasses.dataclass
class _Rows:
    """How many rows of a layout a replica has, are before these, and are there."""

    own: Number | None = None
    offset: Number | None = None
    total: Number | None = None
    is_dealt: bool = False

    def in_their_graph(self) -> contextlib.AbstractContextManager[None]:
        known: Any = self.total if self.own is None else self.own
        is_tensor = tf.is_tensor(known)
        return in_graph(known.graph) if is_tensor else contextlib.nullcontext()


class Conversions:
    """Converts copies of the replica that is being built, in the default graph.

    Args:
        repl: The Replicator whose step is built.
    """

    def __init__(self, repl: Any) -> None:
        self._repl = repl
        self._context: Any = context.require("a program for whole batches")
        self._rows: dict[Layout, _Rows] = {}

    # How many rows the replicas have.

    def define(self, layout: Layout, own_rows: Number) -> None:
        """Says how many rows of a layout this replica has; they tell each other."""
        self._rows[layout] = _Rows(own_rows)

    def deal(self, layout: Layout, total: Number) -> None:
        """Divides rows among the replicas, as evenly as possible.

        Args:
            layout: The layout of the rows.
            total: Their number.
        """
        self._rows[layout] = _Rows(total=total, is_dealt=True)

    def _id(self) -> Number:
        """Returns this replica's number: of copies, as a constant that may differ.

        Nothing is to be computed from that before the step runs: copies have the same
        graph.
        """
        replica = self._context
        return replica.replica_id if replica.build.all_traced else base.differing(int)

    def own_rows(self, layout: Layout) -> Number:
        """Returns the number of rows of this replica: an int or an int32 scalar."""
        rows = self._rows[layout]
        if rows.own is None:
            with rows.in_their_graph():
                count = self._context.num_replicas
                rows.own = (rows.total + count - 1 - self._id()) // count
        return rows.own

    def rows(self, layout: Layout) -> Number:
        """Returns the number of rows on all replicas: an int or an int32 scalar."""
        rows = self._rows[layout]
        if rows.total is None:
            with rows.in_their_graph():
                rows.total = self.sums([rows.own])[0]
        return rows.total

    def offset(self, layout: Layout) -> Number:
        """Returns the number of rows of all replicas before this one."""
        rows = self._rows[layout]
        if rows.offset is None:
            with rows.in_their_graph():
                if rows.is_dealt:
                    r, count = self._id(), self._context.num_replicas
                    more = tf.minimum(r, rows.total % count)
                    rows.offset = r * (rows.total // count) + more
                    return rows.offset
                every = self._repl.all_gather(rows.own)
                rows.offset = tf.reduce_sum(every[: base.differing(lambda r: r)])
        return rows.offset

    def length(self, form: Sharded, x: tf.Tensor) -> Number:
        """Returns the length of the whole sharded axis.

        Args:
            form: The form of a tensor.
            x: This replica's copy of it.
        """
        if form.factor is None:
            return self.sums([tf.shape(x)[form.axis]])[0]
        rows = self.rows(form.layout)
        return rows if form.factor == 1 else rows * form.factor

    def whole_sizes(self, elements: Any, local: tf.Tensor) -> tf.Tensor:
        """Returns a shape of the whole, given that of this replica's part.

        Args:
            elements: The elements of the shape; see sizes.py.
            local: Its local version.
        """
        whole: list[Any] = []
        for k, size in enumerate(elements.flat):
            if isinstance(size, Size) and size.factor is not None:
                rows = self.rows(size.layout)
                one = rows if size.factor == 1 else rows * size.factor
            elif isinstance(size, Size):
                (one,) = self.sums([tf.reshape(local, [-1])[k]])
            else:
                one = size if isinstance(size, int) else tf.reshape(local, [-1])[k]
            whole.append(tf.cast(one, local.dtype))
        return (
            tf.stack(whole) if elements.ndim == 1 else tf.reshape(whole, elements.shape)
        )

    # Conversions.

    def convert(self, x: tf.Tensor, have: Form, want: Form) -> tf.Tensor:
        """Returns this replica's copy of a tensor in another form.

        Args:
            x: Its copy.
            have: The form of which that is.
            want: The other form.

        Raises:
            UnsupportedError: It is a list of tensors, which cannot be converted.
        """
        if isinstance(have, Unset) or equal(have, want):
            return x
        to_sum = have == REPLICATED and isinstance(want, Partial)
        if x.dtype == tf.variant and not to_sum:
            raise errors.UnsupportedError(
                f"a list of tensors of which each replica has a part ({have}) is "
                f"needed as {want}: lists are not communicated.",
                fix="stack the list into a tensor first.",
            )
        if isinstance(have, Own):
            x, have = self.share(x, have.layout), Partial()
            if want == have:
                return x
        if have == REPLICATED:
            if isinstance(want, Sharded):
                return self._part(x, want)
            return self._kept(x, want) if isinstance(want, Partial) else x
        if want != REPLICATED:
            whole = self.convert(x, have, REPLICATED)
            return self.convert(whole, REPLICATED, want)
        if isinstance(have, Partial):
            return self.sums([x], have.how)[0]
        return self.gathered([x], have)[0] if isinstance(have, Sharded) else x

    def sums(self, xs: Sequence[Any], how: str = "sum") -> list[tf.Tensor]:
        """Returns what tensors of all replicas add up to, by one all_reduce.

        Args:
            xs: This replica's tensors.
            how: "sum", or another way of being Partial.
        """
        return self._repl.all_reduce(list(xs), _REDUCTIONS.get(how, how))

    def gathered(self, xs: Sequence[tf.Tensor], form: Sharded) -> list[tf.Tensor]:
        """Returns whole tensors, of which this replica has parts, by one all_gather."""
        if form.outer == 1:
            return self._repl.all_gather(list(xs), form.axis)
        return [self._gathered_blocks(x, form) for x in xs]

    def _gathered_blocks(self, x: tf.Tensor, form: Sharded) -> tf.Tensor:
        axis, length = form.axis, tf.shape(x)[form.axis]
        own = self.own_rows(form.layout) * (form.inner or 1)
        (total,) = self.sums([length])
        blocks = form.outer
        if blocks is None:  # some replica may have no rows
            every = self.rows(form.layout) * (form.inner or 1)
            blocks = total // tf.maximum(every, 1)
        else:
            own = length // blocks
        apart = resized(x, axis, [blocks, own])
        return resized(self._repl.all_gather(apart, axis + 1), axis, [total], 2)

    def share(self, x: tf.Tensor, layout: Layout) -> tf.Tensor:
        """Returns a summand of the mean over the replicas, weighted by their rows."""
        own, rows = self.own_rows(layout), self.rows(layout)
        share = tf.cast(own / tf.maximum(rows, 1), x.dtype)
        return tf.math.multiply_no_nan(x, share)

    def _kept(self, x: tf.Tensor, want: Partial) -> tf.Tensor:
        """Returns a summand, of which all but one are zeros."""
        if want.how != "sum":
            return x
        # tf.zeros_like makes a constant, which is alive in branches that are not.
        if not self._context.build.all_traced:  # copies have the same graph
            is_first = base.differing(lambda r: r == 0)
            return tf.where(is_first, x, tf.raw_ops.ZerosLike(x=x))
        return x if self._context.replica_id == 0 else tf.raw_ops.ZerosLike(x=x)

    def _part(self, x: tf.Tensor, form: Sharded) -> tf.Tensor:
        """Returns this replica's rows of something that it has as a whole."""
        axis, layout, outer, inner = form.axis, form.layout, form.outer, form.inner
        total, first = self.rows(layout), self.offset(layout)
        if form.factor is not None:
            size = total * form.factor
            is_one = shapes.size(x, axis) in (None, 1)
            x = _broadcast(x, axis, size) if is_one else _checked(x, axis, size)
        length = tf.shape(x)[axis]
        if inner is None:
            inner = _times(length, total * outer, x, axis)
        begin, end = first * inner, (first + self.own_rows(layout)) * inner
        if outer == 1:
            return x[(*[slice(None)] * axis, slice(begin, end))]
        if outer is None:
            outer = _times(length, total * inner, x, axis)
        apart = resized(x, axis, [outer, total * inner])
        own = apart[(*[slice(None)] * (axis + 1), slice(begin, end))]
        return resized(own, axis, [outer * (end - begin)], 2)


def _broadcast(x: tf.Tensor, axis: int, size: Number) -> tf.Tensor:
    """Repeats something of one row, which is used along with the rows of a batch."""
    shape = tf.tensor_scatter_nd_update(tf.shape(x), [[axis]], [size])
    return tf.broadcast_to(x, shape)


def _checked(x: tf.Tensor, axis: int, size: Number) -> tf.Tensor:
    """Fails if the axis has another size: parts of it would be other rows, or none."""
    check = tf.debugging.assert_equal(size, shapes.size(x, axis), _along(x, axis))
    with tf.control_dependencies([check]):
        return tf.identity(x)


def _times(length: tf.Tensor, rows: Number, x: tf.Tensor, axis: int) -> tf.Tensor:
    """Returns how many elements an axis has per row; fails if rows share one."""
    rows = tf.maximum(rows, 1)
    check = tf.debugging.assert_equal(length % rows, 0, _along(x, axis))
    with tf.control_dependencies([check]):
        return length // rows


def _along(x: tf.Tensor, axis: int) -> str:
    return errors.compose(
        f"axis {axis} of a tensor of shape {x.shape} is used along with the rows of a "
        "batch, and is of another length.",
        [f"at {errors.user_line()}"],
        "give axes of unknown length a number, by tf.reshape or tf.ensure_shape.",
    )


def resized(
    x: tf.Tensor, axis: int, sizes: Sequence[Number], axes: int = 1
) -> tf.Tensor:
    """Reshapes so many axes of a tensor to sizes."""
    shape = tf.shape(x)
    middle = tf.stack([tf.convert_to_tensor(size, tf.int32) for size in sizes])
    return tf.reshape(x, tf.concat([shape[:axis], middle, shape[axis + axes :]], 0))
