# SPDX-License-Identifier: Apache-2.0
"""A graph with partitioned variables computes the same as with whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from replicator.autodist.program import Program
from tests.autodist import parts

v1 = tf.compat.v1


def _reads(w: Any) -> Any:
    return [
        *(w.read_value(), tf.gather(w, [3, 0, 3]), tf.gather_nd(w, [[3, 1], [0, 0]])),
        *(tf.shape(w), v1.is_variable_initialized(w), w[2:4]),
        tf.raw_ops.VariableShape(input=w.handle),
        tf.raw_ops.ResourceGather(
            resource=w.handle,
            indices=[[0], [1], [1], [0]],
            dtype=tf.float32,
            batch_dims=1,
        ),
    ]


def _writes(w: Any) -> Any:
    after = [
        *(
            lambda: w.assign(w * 2),
            lambda: w.assign_add(w),
            lambda: w.assign_sub(w / 3),
        ),
        lambda: w.scatter_add(tf.IndexedSlices([[1.0, 2.0]] * 3, [3, 0, 3])),
        lambda: w.scatter_update(tf.IndexedSlices(5.0, [1])),
        lambda: w.scatter_nd_update([[2, 1]], [7.0]),
        lambda: w[1:3, 0].assign([8.0, 9.0]),
    ]
    values, before = [], []
    for write in after:
        with tf.control_dependencies(before):
            before = [write()]
            with tf.control_dependencies(before):
                values.append(w.read_value())
            before = [values[-1].op]
    return values


@pytest.mark.parametrize("cut", parts.CUTS)
@pytest.mark.parametrize("build", [_reads, _writes], ids=["reads", "writes"])
def test_it_computes_what_the_whole_one_does(build: Any, cut: str) -> None:
    parts.check(parts.divide(build, parts.CUTS[cut]))


def test_each_part_is_a_variable_in_the_place_of_the_whole() -> None:
    def build(w: Any) -> Any:
        return tf.Variable([1], name="n", trainable=False) + 1

    for cut, shapes in ((parts.ROWS, [[1, 2], [3, 2]]), (parts.COLUMNS, [[4, 1]] * 2)):
        variables = parts.divide(build, cut).divided.program.variables
        assert list(variables) == ["w/part_0", "w/part_1", "n"]
        part_variables = [variables[name] for name in cut.names]
        assert [one.shape.as_list() for one in part_variables] == shapes
        assert (
            all(one.trainable for one in part_variables)
            and not variables["n"].trainable
        )
        assert part_variables[0].initializer is not part_variables[1].initializer


def test_what_is_added_is_divided_too() -> None:
    graphs = parts.divide(lambda w: w)
    with graphs.program.graph.as_default():
        double = 2 * graphs.fetches
    program = Program(
        graphs.program.graph, list(graphs.program.variables.values()), graphs.program
    )
    graphs.divided.extend(program)
    parts.check(parts.Made(program, graphs.divided, [double]))
    assert len(graphs.divided.program.ops) < len(graphs.types())  # only the new ops


def test_values_that_are_known_as_a_whole_pass_through_one_op() -> None:
    def build(w: Any) -> Any:
        return [w.assign(tf.ones([4, 2])).op, w.assign_add(tf.ones([4, 2])).op]

    graphs = parts.divide(build, whole=lambda fetches: fetches[:1])
    op, at = graphs.divided.value_of(graphs.fetches[0])
    assert (op.type, at) == ("EnsureShape", 0)
    assert graphs.divided.value_of(graphs.fetches[1])[0].type == "NoOp"
    parts.check(graphs)


def test_lines_of_what_uses_parts_are_those_of_the_user() -> None:
    graphs = parts.divide(lambda w: tf.gather(w, [0]))
    copy = graphs.divided.places[graphs.fetches.op]
    assert copy.traceback[-1].lineno == graphs.fetches.op.traceback[-1].lineno
