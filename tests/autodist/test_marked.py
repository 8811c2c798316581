# SPDX-License-Identifier: Apache-2.0
"""Variables and their gradients are found in the user's unmodified graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.autodist import marked
from tests.autodist import helpers
from tests.autodist.programs import examples

v1 = tf.compat.v1
X = np.arange(12, dtype=np.float32).reshape(3, 4) / 10


@pytest.fixture
def made() -> Iterator[list[Any]]:
    """A graph in which variables are marked; yields the marked ones."""
    made: list[Any] = []
    with (
        tf.Graph().as_default(),
        tf.variable_creator_scope(marked.creator(made)),
    ):
        yield made


def _markers() -> list[tf.Operation]:
    ops = v1.get_default_graph().get_operations()
    return [op for op in ops if marked.text(op, marked.GRADIENT) is not None]


def _texts(op: tf.Operation) -> dict[str, str]:
    names = "GRADIENT", "TAKEN", "LOSS", "BEGUN", "BACK", "PART"
    return {name: marked.text(op, getattr(marked, name)) or "" for name in names}


def _run(*what: Any) -> Any:
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        return session.run(what)


def test_variables_are_noted_in_order_and_compute_what_others_do(made: Any) -> None:
    w = tf.Variable(examples(4, 2), name="w")
    n = tf.Variable(3, trainable=False, name="n")
    actual = _run(w + 1, tf.gather(w, [2]), tf.gather_nd(w, [[1, 0]]), n + 1)
    initial = examples(4, 2)
    for one, two in zip(
        actual, (initial + 1, initial[[2]], initial[1, :1], 4), strict=True
    ):
        np.testing.assert_allclose(one, two)
    assert [one.op.name for one in made] == ["w", "n"]
    assert w.trainable and not n.trainable


def test_each_read_is_known_by_its_variable(made: Any) -> None:
    w = tf.Variable([1.0, 2.0], name="w")
    reads = [op for op in (w + 1).graph.get_operations() if op.type == "ReadVariableOp"]
    handles = {op.inputs[0].op for op in reads if op.inputs[0].op.type == "Identity"}
    assert {marked.text(op, marked.READ) for op in handles} == {"w"}
    assert marked.text(w.op, marked.READ) is None
    assert marked.text((w + 1).op, marked.READ) is None


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_go_through_markers_that_say_what_they_are(
    made: Any, sparse: bool
) -> None:
    w = tf.Variable(examples(4, 2), name="w")
    loss = tf.nn.l2_loss(tf.gather(w, [3, 0, 3]) if sparse else tf.matmul(X, w))
    (gradient,) = tf.gradients(loss, [w], name="slopes")
    markers = _markers()
    parts = ["values", "indices"] if sparse else ["dense"]
    assert [_texts(op)["PART"] for op in markers] == parts
    for op in markers:
        assert op.type == "PlaceholderWithDefault"
        assert _texts(op)["GRADIENT"] == "w" and not _texts(op)["BACK"]
        assert _texts(op)["TAKEN"].rstrip("/") == "slopes"
    (actual,) = _run(tf.convert_to_tensor(gradient))
    expected = np.zeros([4, 2], np.float32)
    if sparse:
        np.add.at(expected, [3, 0, 3], examples(4, 2)[[3, 0, 3]])
    else:
        expected = X.T @ X @ examples(4, 2)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_those_of_tapes_name_what_is_differentiated(made: Any) -> None:
    w = tf.Variable(examples(4, 2), name="w")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.matmul(X, w))
    gradient = tape.gradient(loss, w)
    (op,) = _markers()
    texts = _texts(op)
    assert texts["LOSS"].partition(";")[0] == loss.name and not texts["TAKEN"]
    begun = v1.get_default_graph().get_operation_by_name(texts["BEGUN"])
    start, actual = _run(begun.outputs[0], gradient)
    assert start == 1
    np.testing.assert_allclose(actual, X.T @ np.ones([3, 2]), rtol=1e-6)


def test_gradients_of_gradients_lead_back_through_markers(made: Any) -> None:
    w = tf.Variable(2.0, name="w")
    (first,) = tf.gradients(w**3, [w])
    (second,) = tf.gradients(first, [w])
    assert _run(first, second) == (12, 12)
    assert {_texts(op)["BACK"] for op in _markers()} == {"", "1"}


def test_whole_numbers_have_no_gradients_and_are_read_as_they_are(made: Any) -> None:
    n = tf.Variable([3, 4], name="n")
    read = tf.convert_to_tensor(n)
    assert read.op.type == "ReadVariableOp" and read.op.inputs[0] is n.handle


def test_some_value_has_the_shape_and_dtype_of_a_variable(made: Any) -> None:
    text = tf.Variable(["a", "b"])
    assert marked.empty(text).dtype == tf.string
    some = tf.Variable([1.0], shape=[None])
    placeholder = marked.empty(tf.Variable(tf.ones([2, 3], tf.float16)))
    assert placeholder.shape == [2, 3] and placeholder.dtype == tf.float16
    assert marked.empty(some).shape == [0]


def test_a_sparse_gradient_in_a_session_is_not_differentiated():
    with tf.Graph().as_default(), helpers.make(2).scope():
        w = tf.Variable(examples(3, 2))
        ids = v1.placeholder(tf.int32, [None])
        (rows,) = tf.gradients(tf.reduce_mean(tf.gather(w, ids) ** 3), [w])
        with pytest.raises(
            replicator.UnsupportedError,
            match=r"(?s)variable Variable is differentiated and sparse.*Fix: look up",
        ):
            tf.gradients(tf.reduce_sum(rows.values**2), [w])
