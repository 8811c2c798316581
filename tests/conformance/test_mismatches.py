# SPDX-License-Identifier: Apache-2.0
"""Replicas that call a primitive differently get an error when the step is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import replicator
from replicator import errors
from tests import helpers

Call = Callable[[replicator.Replicator, int], Any]


def _x(shape: Any = (4, 6), dtype: str = "float32") -> tf.Tensor:
    return tf.zeros(shape, dtype)


def _grown(r: int, axis: int = 0) -> tf.Tensor:
    """A tensor with one size that differs by replica."""
    shape = [4, 6]
    shape[axis] += 2 * r
    return _x(shape)


def _cast(r: int) -> tf.Tensor:
    return _x(dtype=["float32", "float64"][r])


# The difference between the two replicas, and its text in the error.
DIFFERENT: dict[str, tuple[Call, str]] = {
    "all_reduce op": (
        lambda repl, r: repl.all_reduce(_x(), ["sum", "max"][r]),
        "op",
    ),
    "all_reduce algorithm": (
        lambda repl, r: repl.all_reduce(_x(), algorithm=["hub", "ring"][r]),
        "algorithm",
    ),
    "all_reduce weight": (
        lambda repl, r: repl.all_reduce(_x(), "mean", [None, 1][r]),
        "op",
    ),
    "all_reduce dtype": (
        lambda repl, r: repl.all_reduce(_cast(r)),
        r"dtype \(float32\[4, 6\] and float64\[4, 6\]\)",
    ),
    "all_reduce shape": (lambda repl, r: repl.all_reduce(_grown(r)), "shape"),
    "all_reduce leaves": (
        lambda repl, r: repl.all_reduce([_x()] * (r + 1)),
        "number of tensors",
    ),
    "all_gather axis": (lambda repl, r: repl.all_gather(_x(), r), "axis"),
    "all_gather rows": (
        lambda repl, r: repl.all_gather(_grown(r, 1), 0),
        r"shape \(float32\[\?, 6\] and float32\[\?, 8\]\)",
    ),
    "broadcast root": (lambda repl, r: repl.broadcast(_x(), r), "root"),
    "broadcast dtype": (lambda repl, r: repl.broadcast(_cast(r)), "dtype"),
    "broadcast spec shape": (
        lambda repl, r: repl.broadcast(tf.TensorSpec([4, 5]) if r else _x()),
        r"shape \(float32\[4, 6\] and float32\[4, 5\]\)",
    ),
    "broadcast spec dtype": (
        lambda repl, r: repl.broadcast(tf.TensorSpec([4, 6], tf.int32) if r else _x()),
        "dtype",
    ),
    "broadcast spec leaves": (
        lambda repl, r: repl.broadcast([tf.TensorSpec([4, 6])] if r else [_x(), _x()]),
        "number of tensors",
    ),
    "reduce root": (lambda repl, r: repl.reduce(_x(), r), "root"),
    "reduce op": (lambda repl, r: repl.reduce(_x(), 0, ["sum", "max"][r]), "op"),
    "reduce dtype": (lambda repl, r: repl.reduce(_cast(r)), "dtype"),
    "reduce shape": (lambda repl, r: repl.reduce(_grown(r)), "shape"),
    "gather root": (lambda repl, r: repl.gather(_x(), r), "root"),
    "gather axis": (lambda repl, r: repl.gather(_x(), axis=r), "axis"),
    "gather new axis": (lambda repl, r: repl.gather(_x(), axis=[None, 0][r]), "axis"),
    "gather dtype": (lambda repl, r: repl.gather(_cast(r)), "dtype"),
    "gather shape": (lambda repl, r: repl.gather(_grown(r)), "shape"),
    "gather other shape": (lambda repl, r: repl.gather(_grown(r, 1), axis=0), "shape"),
    "scatter root": (lambda repl, r: repl.scatter(_x(), r, axis=0), "root"),
    "scatter axis": (lambda repl, r: repl.scatter(_x(), axis=r), "axis"),
    "scatter dtype": (lambda repl, r: repl.scatter(_cast(r), axis=0), "dtype"),
    "scatter shape": (lambda repl, r: repl.scatter(_grown(r, 1), axis=0), "shape"),
    "scatter spec": (
        lambda repl, r: repl.scatter(tf.TensorSpec([2, 6]) if r else _x(), axis=0),
        r"shape \(float32\[4, 6\] and float32\[2, 6\]\)",
    ),
    "reduce_scatter op": (
        lambda repl, r: repl.reduce_scatter(_x(), ["sum", "mean"][r]),
        "op",
    ),
    "reduce_scatter axis": (lambda repl, r: repl.reduce_scatter(_x(), axis=r), "axis"),
    "reduce_scatter dtype": (lambda repl, r: repl.reduce_scatter(_cast(r)), "dtype"),
    "reduce_scatter shape": (lambda repl, r: repl.reduce_scatter(_grown(r)), "shape"),
    "all_to_all split_axis": (
        lambda repl, r: repl.all_to_all(_x(), r, 0),
        "split_axis",
    ),
    "all_to_all concat_axis": (
        lambda repl, r: repl.all_to_all(_x(), 0, r),
        "concat_axis",
    ),
    "all_to_all splits": (
        lambda repl, r: repl.all_to_all(_x(), 0, 1, splits=[None, [2, 2]][r]),
        "splits",
    ),
    "all_to_all dtype": (lambda repl, r: repl.all_to_all(_cast(r), 0, 1), "dtype"),
    "all_to_all shape": (lambda repl, r: repl.all_to_all(_grown(r), 0, 0), "shape"),
    "permute pairs": (lambda repl, r: repl.permute(_x(), [(0, r)]), "pairs"),
    "permute dtype": (lambda repl, r: repl.permute(_cast(r), [(0, 1)]), "dtype"),
    "permute shape": (lambda repl, r: repl.permute(_grown(r), [(0, 1)]), "shape"),
    "shift offset": (lambda repl, r: repl.shift(_x(), r), "pairs"),
    "map_reduce op": (
        lambda repl, r: repl.map_reduce(tf.sin, [_x()], ["sum", "max"][r]),
        "op",
    ),
    "map_gather values": (
        lambda repl, r: repl.map_gather(tf.sin, [_x()] * (r + 1)),
        "number of tensors",
    ),
    "another primitive": (
        lambda repl, r: repl.scatter(_x(), axis=0) if r else repl.reduce_scatter(_x()),
        "primitive",
    ),
}


@pytest.mark.battery(3)
@pytest.mark.parametrize("name", DIFFERENT)
def test_the_error_names_both_sides_and_what_differs(name: str) -> None:
    call, text = DIFFERENT[name]
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        call(repl, repl.replica_id)
        return _x()

    with pytest.raises(
        errors.MismatchError,
        match=rf"(?s)Communication call 0 differs between replicas: not the same {text}"
        r".*replica 0 .* at tests.*test_mismatches.py:\d+ in "
        r".*replica 1 .* at tests.*test_mismatches.py:\d+ in .*Fix: ",
    ):
        repl.run(step)


COLLECTIVES: dict[str, Callable[..., Any]] = {
    "broadcast": lambda repl, **kwargs: repl.broadcast(_x(), **kwargs),
    "reduce": lambda repl, **kwargs: repl.reduce(_x(), **kwargs),
    "gather": lambda repl, **kwargs: repl.gather(_x(), **kwargs),
    "scatter": lambda repl, **kwargs: repl.scatter(_x(), axis=0, **kwargs),
    "reduce_scatter": lambda repl, **kwargs: repl.reduce_scatter(_x(), **kwargs),
    "all_to_all": lambda repl, **kwargs: repl.all_to_all(_x(), 0, 1, **kwargs),
    "permute": lambda repl, **kwargs: repl.permute(_x(), [], **kwargs),
    "shift": lambda repl, **kwargs: repl.shift(_x(), **kwargs),
    "map_reduce": lambda repl, **kwargs: repl.map_reduce(tf.sin, [_x()], **kwargs),
    "map_gather": lambda repl, **kwargs: repl.map_gather(tf.sin, [_x()], **kwargs),
    "all_reduce": lambda repl, **kwargs: repl.all_sum(_x(), **kwargs),
    "barrier": lambda repl, **kwargs: repl.barrier(**kwargs),
}
ROOTED = ("broadcast", "reduce", "gather", "scatter")


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_group_without_the_caller_is_refused(name: str) -> None:
    repl = helpers.make(3)

    def step() -> tf.Tensor:
        COLLECTIVES[name](repl, group=repl.group([0, 2]))
        return _x()

    with pytest.raises(
        errors.ArgumentError,
        match=rf"(?s)^{name} on replica 1 was given the group \[0, 2\], in which it is "
        r"not.*at tests.*Fix: ",
    ):
        repl.run(step)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_call_that_some_replicas_leave_out_is_refused(name: str) -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        if repl.replica_id:
            COLLECTIVES[name](repl)
        return _x()

    placed = {
        "shift": "permute",
        "map_reduce": "all_reduce",
        "map_gather": "all_gather",
    }
    with pytest.raises(
        errors.MismatchError,
        match=rf"(?s)call 0 of replica 1 has no partner: {placed.get(name, name)} "
        r".*replica 0: 0 calls.*Fix: ",
    ):
        repl.run(step)


@pytest.mark.parametrize(
    "root", [-1, 3, True, 1.0, None, "0", pytest.param(1, id="no member")], ids=repr
)
@pytest.mark.parametrize("name", ROOTED)
def test_a_root_that_is_no_member_is_refused(name: str, root: Any) -> None:
    repl = helpers.make(3)

    def step() -> tf.Tensor:
        if repl.replica_id != 1:
            COLLECTIVES[name](repl, root=root, group=[0, 2])
        return _x()

    with pytest.raises(
        errors.ArgumentError,
        match=rf"(?s)^{name} on replica 0 was given root=.*at tests.*Fix: .*root",
    ):
        repl.run(step)


@pytest.mark.parametrize("name", ROOTED)
def test_a_gradient_on_one_side_only_names_the_way_out(name: str) -> None:
    """With TensorSpecs, or without a linked loss, the others' tapes miss the call."""
    repl = helpers.make(2)
    receives = name in ("broadcast", "scatter")
    options = {"axis": 0} if name == "scatter" else {}

    def step(linked: bool) -> tf.Tensor:
        x = _x()
        with tf.GradientTape() as tape:
            tape.watch(x)
            spec = receives and repl.replica_id and not linked
            handed_in = tf.TensorSpec(x.shape) if spec else x
            y = getattr(repl, name)(handed_in, **options)
            loss = tf.reduce_sum(x if y is None else y)
            if linked:
                loss = repl.linked(loss)
        return tape.gradient(loss, x) if linked or not spec else x

    with pytest.raises(
        errors.MismatchError,
        match=r"(?s)A gradient of communication call 0 of replica 0 has no partner.*"
        r"in the gradient.*Fix: .*repl\.linked\(loss\).*in place of the TensorSpec",
    ):
        repl.run(lambda: step(linked=False))
    repl.run(lambda: step(linked=True))
