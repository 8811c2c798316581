# SPDX-License-Identifier: Apache-2.0
"""Two levels: the values of one host, the same bits for all, one message per host.

Graphs are built for hosts that do not exist, and run on this process's CPUs; messages
are the tensors that TensorFlow itself sends between devices of different hosts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.costs import hosts as places
from tests import helpers, paper_hosts

ON_CPU = ["hub", "shuffled", "tree", "ring"]
WIDE = 320  # widths at which sending the factors pays off

Make = Callable[[replicator.Replicator], Callable[[], Any]]


def _numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _alone(count: int, make_step: Make, **options: Any) -> Any:
    """Returns a step's result on one host."""
    repl = helpers.make(count, **options)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        with repl.context():
            step_fn = make_step(repl)
        fetches = repl.run(step_fn)
        session.run(tf.compat.v1.global_variables_initializer())
        return session.run(fetches)


def _members(layout: Sequence[int]) -> list[list[int]]:
    return places.by_host(paper_hosts.names(layout))


def _most(algorithm: str, count: int) -> int:
    """Returns the maximum number of messages from one host to another."""
    return {"hub": 1, "tree": 1, "shuffled": 2, "ring": 2 * (count - 1)}[algorithm]


@pytest.mark.parametrize("algorithm", ON_CPU)
@pytest.mark.parametrize("layout", paper_hosts.LAYOUTS, ids=str)
def test_all_reduce(layout: tuple[int, ...], algorithm: str) -> None:
    arrays = [_numbers(r, 7, 31) for r in range(len(layout))]
    ran = paper_hosts.run(
        layout,
        lambda repl: (
            lambda: repl.all_reduce(
                helpers.opaque(arrays[repl.replica_id]), algorithm=algorithm
            )
        ),
    )
    for value in ran.values:
        assert value.tobytes() == ran.values[0].tobytes()
        np.testing.assert_allclose(value, sum(arrays), atol=1e-5)
    if algorithm in ("hub", "shuffled"):
        sums = [
            functools.reduce(np.add, [arrays[r] for r in members])
            for members in _members(layout)
        ]
        assert ran.values[0].tobytes() == functools.reduce(np.add, sums).tobytes()
    count = len(set(layout))
    assert ran.sent and max(ran.sent.values()) <= _most(algorithm, count)
    assert ran.sent == ran.planned
    (row,) = ran.plan
    whole = arrays[0].nbytes
    assert row.between == 2 * (count - 1) * whole  # the minimum
    assert row.within == sum(
        2 * (len(members) - 1) * whole for members in _members(layout)
    )


@pytest.mark.battery(5)
@pytest.mark.parametrize("layout", [paper_hosts.MIXED], ids=str)
@pytest.mark.parametrize("algorithm", ON_CPU)
@pytest.mark.parametrize(
    ("op", "dtype"),
    [("mean", "float16"), ("prod", "bfloat16"), ("max", "int32"), ("mean", "float64")],
)
def test_other_reductions_of_unknown_shapes(
    op: str, dtype: str, algorithm: str, layout: tuple[int, ...]
) -> None:
    kind = tf.as_dtype(dtype).as_numpy_dtype

    def make(repl: replicator.Replicator) -> Callable[[], Any]:
        def step() -> Any:
            x = (3 * _numbers(repl.replica_id, 40, 3)).astype(kind)
            return repl.all_reduce(
                helpers.opaque(x, [None, 3]), op, algorithm=algorithm
            )

        return step

    ran = paper_hosts.run(layout, make)
    expected = _alone(len(layout), make)[0].astype(float)
    for value in ran.values:
        assert value.tobytes() == ran.values[0].tobytes()
        assert value.dtype == kind
        rtol = {2: 1e-2, 4: 0.0, 8: 1e-12}[value.dtype.itemsize]
        np.testing.assert_allclose(value.astype(float), expected, rtol, 1e-3 * rtol)


@pytest.mark.battery(5)
@pytest.mark.parametrize("layout", paper_hosts.LAYOUTS, ids=str)
@pytest.mark.parametrize("algorithm", ["hub", "shuffled"])
@pytest.mark.parametrize("op", ["argmin", "argmax"])
def test_extrema_belong_to_the_lowest_owner(
    op: str, algorithm: str, layout: tuple[int, ...]
) -> None:
    arrays = [
        (2 * _numbers(r, 70)).astype(np.int32).astype(np.float32)
        for r in range(len(layout))
    ]
    arrays[-1][3] = arrays[1][3] = np.nan
    ran = paper_hosts.run(
        layout,
        lambda repl: (
            lambda: tuple(
                repl.all_reduce(
                    helpers.opaque(arrays[repl.replica_id]), op, algorithm=algorithm
                )
            )
        ),
    )
    values, owners = ran.values
    extreme = np.minimum if op == "argmin" else np.maximum
    for value, owner in zip(values, owners, strict=True):
        np.testing.assert_array_equal(value, functools.reduce(extreme, arrays))
        np.testing.assert_array_equal(owner, getattr(np, op)(arrays, axis=0))


def _or_zeros(received: Any, *shapes: tuple[tuple[int, ...], tf.DType]) -> Any:
    """Returns what a replica received, or zeros if it received nothing."""
    if received is not None:
        return tuple(received) if isinstance(received, tuple) else (received,)
    return tuple(tf.zeros(*shape) for shape in shapes)


FLOATS = ((5,), tf.float32)


def _own(repl: replicator.Replicator, *shape: int) -> tf.Tensor:
    return helpers.opaque(_numbers(repl.replica_id, *shape))


# For each: the call, and the maximum number of messages from one host to another.
OTHERS: dict[str, tuple[Callable[[replicator.Replicator], Any], int]] = {
    "reduce": (lambda r: _or_zeros(r.reduce(_own(r, 5), 1), FLOATS), 1),
    "reduce argmax": (
        lambda r: _or_zeros(
            r.reduce(_own(r, 5), 1, "argmax"), FLOATS, ((5,), tf.int32)
        ),
        2,
    ),
    "broadcast": (lambda r: r.broadcast(_own(r, 5), 1), 1),
    "gather": (
        lambda r: _or_zeros(r.gather(_own(r, 5), 1), ((r.num_replicas, 5), tf.float32)),
        1,
    ),
    "all_gather": (lambda r: r.all_gather(_own(r, 5)), 1),
    "all_gather of scalars": (lambda r: r.all_gather(_own(r)), 1),
    "all_gather along an axis": (
        lambda r: r.all_gather(_own(r, 2, r.replica_id + 1), axis=-1),
        1,
    ),
    "rows": (
        lambda r: tf.convert_to_tensor(
            r.all_reduce(
                tf.IndexedSlices(
                    _own(r, 3, 4),
                    helpers.opaque([r.replica_id, 0, 1]),
                    tf.constant([9, 4]),
                )
            )
        ),
        2,
    ),
}


@pytest.mark.battery(5)
@pytest.mark.parametrize(
    "layout", [paper_hosts.TWO_BY_TWO, paper_hosts.UNEVEN], ids=str
)
@pytest.mark.parametrize("name", OTHERS)
def test_other_primitives(name: str, layout: tuple[int, ...]) -> None:
    call, most = OTHERS[name]
    ran = paper_hosts.run(layout, lambda repl: lambda: call(repl))
    _assert_close(ran.values, _alone(len(layout), lambda repl: lambda: call(repl)))
    assert ran.sent == ran.planned
    assert ran.sent and max(ran.sent.values()) <= most


@pytest.mark.parametrize("name", OTHERS)
def test_replicas_of_a_host_that_do_not_follow_one_another(name: str) -> None:
    call, _ = OTHERS[name]
    ran = paper_hosts.run(paper_hosts.MIXED, lambda repl: lambda: call(repl))
    _assert_close(
        ran.values, _alone(len(paper_hosts.MIXED), lambda repl: lambda: call(repl))
    )
    assert ran.sent == ran.planned


@pytest.mark.parametrize(
    "layout", [paper_hosts.TWO_BY_TWO, paper_hosts.UNEVEN], ids=str
)
@pytest.mark.parametrize("op", ["sum", "argmin"])
def test_reduce_scatter(op: str, layout: tuple[int, ...]) -> None:
    def make(repl: replicator.Replicator) -> Callable[[], Any]:
        return lambda: repl.reduce_scatter(_own(repl, 12), op)

    ran = paper_hosts.run(layout, make)
    _assert_close(ran.values, _alone(len(layout), make))
    members = _members(layout)
    for (_, destination), count in ran.sent.items():
        # A slice for each replica there, of which the owners are the second half.
        assert count == len(members[destination]) * (2 if op == "argmin" else 1)


def test_small_tensors_cross_in_one_message() -> None:
    columns = [[_numbers(9 * r + k, 5, 4) for r in range(4)] for k in range(6)]
    ran = paper_hosts.run(
        paper_hosts.TWO_BY_TWO,
        lambda repl: (
            lambda: repl.all_reduce(
                [helpers.opaque(column[repl.replica_id]) for column in columns],
                algorithm="hub",
            )
        ),
    )
    assert ran.sent == {(0, 1): 1, (1, 0): 1}
    for column, values in zip(columns, ran.values, strict=True):
        np.testing.assert_allclose(values[3], sum(column), atol=1e-5)


# --- Gradients ------------------------------------------------------------------------


def _dense(repl: replicator.Replicator) -> Callable[[], Any]:
    def step() -> Any:
        x = helpers.opaque(_numbers(repl.replica_id, 3, WIDE))
        dy = helpers.opaque(_numbers(repl.replica_id + 50, 3, WIDE))
        weights = tf.matmul(x, dy, transpose_a=True)
        return repl.all_reduce([weights, tf.reduce_sum(dy, 0)], "mean")

    return step


@pytest.mark.parametrize("layout", paper_hosts.LAYOUTS, ids=str)
def test_factors(layout: tuple[int, ...]) -> None:
    ran = paper_hosts.run(layout, _dense, factors=True)
    _assert_close(ran.values, _alone(len(layout), _dense))
    assert [row.algorithm for row in ran.plan] == ["factors"]
    assert ran.sent == ran.planned
    if layout != paper_hosts.MIXED:  # there, consecutive sends are joined
        count = len(set(layout))
        assert len(ran.sent) == count * (count - 1)
        assert set(ran.sent.values()) == {2}
    (row,) = ran.plan
    for wire in row.wires:
        rows = 3 * layout.count(wire.source)
        assert wire.nbytes == 2 * 4 * rows * WIDE


def _train(
    repl: replicator.Replicator, accumulation_steps: int = 1
) -> Callable[[], Any]:
    """Returns a step of a small network with an embedding."""
    table = tf.Variable(_numbers(1, 9, 20))
    weights = [tf.Variable(_numbers(k + 2, 20, 20) / 5) for k in range(3)]
    variables = [table, *weights]
    optimizer = repl.wrap_optimizer(
        tf.compat.v1.train.MomentumOptimizer(0.1, 0.9),
        accumulation_steps=accumulation_steps,
    )

    def step() -> Any:
        ids = helpers.opaque([repl.replica_id, 3, 3])
        with tf.GradientTape() as tape:
            y = tf.gather(table, ids)
            for matrix in weights:
                y = tf.tanh(y @ matrix)
            loss = tf.reduce_sum(y * y)
        gradients = tape.gradient(loss, variables)
        update = optimizer.apply_gradients(zip(gradients, variables, strict=True))
        with tf.control_dependencies([update]):
            return [tf.identity(v.read_value()) for v in variables]

    return step


def _trained(layout: tuple[int, ...] | None, steps: int, **options: Any) -> Any:
    accumulation = options.pop("accumulation_steps", 1)

    def make(repl: replicator.Replicator) -> Callable[[], Any]:
        return _train(repl, accumulation)

    return paper_hosts.run(layout or (0, 0, 0, 0), make, steps, **options)


@pytest.mark.battery(6)
@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize("variables", ["mirrored", "sharded"])
def test_training(variables: str, accumulation_steps: int) -> None:
    options = {"variables": variables, "accumulation_steps": accumulation_steps}
    ran = _trained(paper_hosts.TWO_BY_TWO, 4, **options)
    alone = _trained(None, 4, **options)
    assert not alone.plan[0].wires
    _assert_close(ran.values, alone.values, 1e-4)
    for values in ran.values:
        assert len({value.tobytes() for value in values}) == 1


def test_one_host_adds_nothing() -> None:
    """With all replicas on one host, or one on each, no op belongs to the levels."""
    for layout in ((0, 0, 0, 0), (0, 1, 2, 3)):
        repl = paper_hosts.make(layout, algorithm="hub")
        with tf.Graph().as_default() as graph:
            repl.run(lambda repl=repl: repl.all_reduce(_own(repl, 100)))
            sums = [o for o in graph.get_operations() if o.type == "AddN"]
        assert len(sums) == 3 and len({o.device for o in sums}) == 1


def _assert_close(found: Any, expected: Any, atol: float = 2e-5) -> None:
    tf.nest.assert_same_structure(found, expected)
    for one, other in zip(
        tf.nest.flatten(found), tf.nest.flatten(expected), strict=True
    ):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_allclose(one, other, atol=atol)
