# SPDX-License-Identifier: Apache-2.0
"""What is fed is split into parts that are all of it, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import errors
from replicator.autodist import feeds
from replicator.autodist.program import Program

v1 = tf.compat.v1
X = np.arange(14.0).reshape(7, 2)


def _program(**shapes: Any) -> Program:
    """Returns a program of placeholders of some names, shapes and dtypes."""
    with tf.Graph().as_default() as graph:
        for name, (dtype, shape) in shapes.items():
            v1.placeholder(dtype, shape, name)
    return Program(graph, [])


def _split(fed: Any, num_replicas: int) -> tuple[Program, feeds.Feeds]:
    program = _program(
        x=(tf.float32, [None, 2]), y=(tf.int32, None), rate=(tf.float64, [])
    )
    return program, feeds.split(program, fed, num_replicas)


@pytest.mark.parametrize("rows", [7, 6, 2, 1])
@pytest.mark.parametrize("num_replicas", [1, 3, 4])
def test_parts_are_the_whole_in_order(
    rows: int, num_replicas: int, behavior: None
) -> None:
    fed = {"x:0": X[:rows], "y:0": list(range(rows)), "rate:0": 0.5}
    program, found = _split(fed, num_replicas)
    x, y, rate = (program.graph.get_tensor_by_name(name) for name in fed)
    counts = found.counts
    assert counts == [len(part) for part in np.array_split(X[:rows], num_replicas)]
    for tensor, whole in ((x, X[:rows]), (y, np.arange(rows))):
        parts = [own[tensor][:n] for own, n in zip(found.values, counts, strict=True)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
        assert all(part.dtype == tensor.dtype for part in parts)
        for own, n in zip(found.values, counts, strict=True):
            assert len(own[tensor]) == max(n, 1)
            if not n:  # ops fail on no examples
                np.testing.assert_array_equal(own[tensor], whole[:1])
    assert [own[rate] for own in found.values] == [0.5] * num_replicas
    assert found.names == {"x", "y"}
    np.testing.assert_allclose(found.weights, np.divide(counts, rows))


@pytest.mark.parametrize("fed", [None, {}, {"rate:0": 0.5}, {"y:0": 3}], ids=str)
def test_without_examples_nothing_is_split(fed: Any) -> None:
    program, found = _split(fed, 2)
    values = {program.graph.get_tensor_by_name(k): v for k, v in (fed or {}).items()}
    assert found.values == [values, values]
    assert (found.counts, found.weights, found.names) == (None, None, frozenset())


def test_what_is_computed_once_for_all_is_fed_as_a_whole() -> None:
    with tf.Graph().as_default() as graph:
        sizes = v1.placeholder_with_default([1, 2, 3], [None], "sizes")
        data = tf.data.Dataset.from_tensor_slices(sizes)
        v1.data.make_initializable_iterator(data)
        found = feeds.split(Program(graph, []), {sizes: [4, 5]}, 2)
    assert found.counts is None
    for own in found.values:
        np.testing.assert_array_equal(own[sizes], [4, 5])


def test_each_replicas_copies_are_fed_its_parts() -> None:
    program, found = _split({"x:0": X, "rate:0": 2.0}, 2)
    with tf.Graph().as_default():
        places = [
            {
                op: v1.placeholder(op.outputs[0].dtype).op
                for op in program.graph.get_operations()
            }
            for _ in range(2)
        ]
    fed = feeds.fed_to(found, places)
    x, rate = (program.graph.get_operation_by_name(name) for name in ("x", "rate"))
    for own, part in zip(places, (X[:4], X[4:]), strict=True):
        np.testing.assert_array_equal(fed[own[x].outputs[0]], part)
        assert fed[own[rate].outputs[0]] == 2
    assert len(fed) == 4


REFUSED: dict[str, tuple[Callable[[Program], Any], str]] = {
    "no dict": (lambda p: [("x:0", X)], "feed_dict=.*Fix: pass a dict"),
    "no tensor": (
        lambda p: {"z:0": X},
        "fed 'z:0', which is not a tensor of its graph",
    ),
    "an op": (lambda p: {"x": X}, "fed 'x', which is not a tensor"),
    "of another graph": (
        lambda p: {_program(x=(tf.float32, [None])).graph.get_tensor_by_name("x:0"): X},
        "which is not a tensor of its graph",
    ),
    "a sparse tensor": (
        lambda p: {tf.SparseTensor([[0]], [1], [1]): X},
        "a SparseTensor.*Fix: feed a dense placeholder.*tf.sparse.from_dense",
    ),
    "another size": (
        lambda p: {"x:0": X[:, :1]},
        r"x:0, float32\(None, 2\).*of shape \(7, 1\).*created at .*test_feeds.py.*Fix:",
    ),
    "another dtype": (
        lambda p: {"x:0": [["a", "b"]]},
        "x:0, float32.*could not convert",
    ),
    "a number that does not fit": (lambda p: {"y:0": 2**40}, "y:0, int32.*: "),
    "a tensor of a graph": (
        lambda p: {"x:0": p.graph.get_tensor_by_name("x:0")},
        "a symbolic tensor, which has no value",
    ),
    "two sizes": (
        lambda p: {"x:0": X, "y:0": [1, 2]},
        r"differ in their first dim.*x:0: \(7, 2\).*y:0: \(2,\).*number of rows",
    ),
    "no example": (lambda p: {"x:0": X[:0]}, "no example.*Fix: feed at least"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    fed, said = REFUSED[name]
    program = _program(x=(tf.float32, [None, 2]), y=(tf.int32, None))
    with pytest.raises(errors.ArgumentError, match=f"(?s){said}"):
        feeds.split(program, fed(program), 2)
