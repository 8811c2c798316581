# SPDX-License-Identifier: Apache-2.0
"""The algorithms of all_reduce: NumPy's values, the same bits on all replicas.

Arrays are larger than a slice's minimum size, so that they are cut; the arrays of other
tests mostly are not.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.costs import cost
from replicator.primitives import algorithms, arithmetic, reductions
from tests import helpers

ON_CPU = ["hub", "shuffled", "tree", "ring"]
IN_REPLICA_ORDER = ["hub", "shuffled"]
NUMPY = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "argmin": np.minimum,
    "argmax": np.maximum,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
}
DTYPES = ["float16", "bfloat16", "float32", "float64", "complex64", "int32", "int8"]


def _replicator(num_replicas: int) -> replicator.Replicator:
    return helpers.make(num_replicas, build="trace")  # steps take operands in turn


def _arrays(
    seed: int, num_replicas: int, shape: Sequence[int], dtype: str
) -> list[np.ndarray]:
    kind, rng = tf.as_dtype(dtype), np.random.RandomState(seed)
    values = rng.randn(num_replicas, *shape)
    if kind.is_bool:
        values = values < 0
    elif kind.is_integer:
        values *= 20
    elif kind.is_complex:
        values = values + 1j * rng.randn(num_replicas, *shape)
    return list(values.astype(kind.as_numpy_dtype))


def _combined(op: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the result, 16-bit floats combined in float32 but not rounded again."""
    half = arrays[0].dtype.itemsize == 2 and op in ("sum", "mean", "prod")
    wide = [a.astype(np.float32) if half else a for a in arrays]
    result = functools.reduce(NUMPY[op], wide)
    return result / np.asarray(len(arrays), result.dtype) if op == "mean" else result


def _run(
    num_replicas: int,
    arrays: Sequence[np.ndarray],
    op: str,
    algorithm: str,
    static: Any = (),
) -> list[Any]:
    """Returns what each replica receives, in two runs that must agree bitwise."""
    repl = _replicator(num_replicas)
    operands = iter(arrays)  # replicas are built in order; repl.replica_id is the same
    step = repl.build(
        lambda: repl.all_reduce(
            helpers.opaque(next(operands), static), op, algorithm=algorithm
        )
    )
    first, second = ([t.numpy() for t in tf.nest.flatten(step())] for _ in "12")
    for one, two in zip(first, second, strict=True):
        assert one.tobytes() == two.tobytes()
    return first


cases = st.fixed_dictionaries(
    {
        "num_replicas": st.integers(1, 8),
        "shape": st.sampled_from(
            [(), (0,), (5,), (3, 0, 2), (7, 31), (64,), (16, 8), (1000,), (2, 3, 50)]
        ),
        "dtype": st.sampled_from(DTYPES),
        "op": st.sampled_from(["sum", "mean", "prod", "min", "max"]),
        "seed": st.integers(0, 99),
        "algorithm": st.sampled_from(ON_CPU),
        "known": st.booleans(),
    }
)


@pytest.mark.slow
@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(cases)
def test_numpys_values_and_equal_bits(case: dict[str, Any]) -> None:
    _check(**case)


@pytest.mark.battery(5)
@pytest.mark.parametrize("algorithm", ON_CPU)
@pytest.mark.parametrize("num_replicas", [2, 3, 8])
@pytest.mark.parametrize("known", [True, False])
def test_a_tensor_that_does_not_divide(
    num_replicas: int, algorithm: str, known: bool
) -> None:
    _check(num_replicas, (7, 31), "float32", "mean", 0, algorithm, known)


def _check(
    num_replicas: int,
    shape: Sequence[int],
    dtype: str,
    op: str,
    seed: int,
    algorithm: str,
    known: bool,
) -> None:
    kind = tf.as_dtype(dtype)
    if kind.is_complex and op in ("min", "max") or kind.is_integer and op == "mean":
        op = "sum"
    arrays = _arrays(seed, num_replicas, shape, dtype)
    static = shape if known else ([None] * len(shape) if seed % 2 else None)
    results = _run(num_replicas, arrays, op, algorithm, static)
    with np.errstate(over="ignore"):
        want = _combined(op, arrays)
    for result in results:
        assert (result.dtype, result.shape) == (arrays[0].dtype, tuple(shape))
        assert result.tobytes() == results[0].tobytes()
        if kind.is_floating or kind.is_complex:
            # Rounded after each of up to seven operations, and to the dtype, in which
            # small
            # products may be subnormal.
            half = dtype in ("float16", "bfloat16")
            eps = 8 * (2**-8 if half else 1e-7 if dtype != "float64" else 1e-15)
            scale = _combined("sum", [abs(a) for a in arrays]) if op != "prod" else 0
            error = abs(result.astype(want.dtype) - want)
            assert np.all(error <= eps * (abs(want) + scale) + 1e-7 * half)
        else:
            np.testing.assert_array_equal(result, want)


@pytest.mark.parametrize("algorithm", IN_REPLICA_ORDER)
@pytest.mark.parametrize("op", ["sum", "mean", "prod"])
def test_the_bits_of_replica_order(op: str, algorithm: str) -> None:
    arrays = _arrays(1, 7, [11, 31], "float32")
    for result in _run(7, arrays, op, algorithm):
        assert result.tobytes() == _combined(op, arrays).tobytes()


def test_the_tree_adds_neighbours_first() -> None:
    a, b, c, d, e = arrays = _arrays(2, 5, [200], "float32")
    for result in _run(5, arrays, "sum", "tree"):
        assert result.tobytes() == ((((a + b) + (c + d)) + e).tobytes())


def test_the_ring_adds_each_slice_from_its_own_replica_on() -> None:
    arrays = _arrays(3, 3, [48], "float32")
    want = [
        functools.reduce(np.add, [arrays[(k + n) % 3][16 * k :][:16] for n in range(3)])
        for k in range(3)
    ]
    for result in _run(3, arrays, "sum", "ring"):
        assert result.tobytes() == np.concatenate(want).tobytes()


@pytest.mark.battery(5)
@pytest.mark.parametrize("count", [2, 8, 9, 15, 16, 20])
def test_many_tensors_are_added_in_order(count: int) -> None:
    arrays = _arrays(4, count, [100], "float32")

    @tf.function
    def total() -> tf.Tensor:
        return arithmetic.add_in_order(
            [
                helpers.opaque(a) if k % 3 else tf.constant(a)
                for k, a in enumerate(arrays)
            ]
        )

    assert total().numpy().tobytes() == functools.reduce(np.add, arrays).tobytes()


@pytest.mark.battery(5)
@pytest.mark.parametrize("algorithm", ON_CPU)
@pytest.mark.parametrize(
    ("op", "dtype"),
    [(op, "bool") for op in ("logical_and", "logical_or", "min", "max")]
    + [
        (f"bitwise_{op}", kind)
        for op in ("and", "or", "xor")
        for kind in ("int32", "bool")
    ],
)
def test_truth_values_and_bits(op: str, dtype: str, algorithm: str) -> None:
    arrays = _arrays(5, 3, [70], dtype)
    numpy = {"min": "logical_and", "max": "logical_or"}.get(op, op)
    for result in _run(3, arrays, op, algorithm):
        np.testing.assert_array_equal(result, _combined(numpy, arrays))


@pytest.mark.parametrize("algorithm", ON_CPU)
@pytest.mark.parametrize("op", ["argmin", "argmax"])
def test_extrema_and_their_owners(op: str, algorithm: str) -> None:
    arrays = _arrays(6, 3, [70], "int8")
    repl = helpers.make(3, algorithm=algorithm)
    results = repl.run(lambda: repl.all_reduce(arrays[repl.replica_id], op))
    received = [t.numpy() for t in tf.nest.flatten(results)]
    values, owners = received[:3], received[3:]
    for value, owner in zip(values, owners, strict=True):
        np.testing.assert_array_equal(value, _combined(op, arrays))
        np.testing.assert_array_equal(owner, getattr(np, op)(arrays, axis=0))


@pytest.mark.battery(5)
@pytest.mark.parametrize("algorithm", ON_CPU)
@pytest.mark.parametrize("op", ["sum", "max"])
@pytest.mark.parametrize("shapes", [([6], [1]), ([2, 3], [3, 2]), ([4], [4, 1])])
def test_shapes_that_differ_when_the_step_runs(
    shapes: Any, op: str, algorithm: str
) -> None:
    repl = helpers.make(2, algorithm=algorithm)
    with pytest.raises(tf.errors.InvalidArgumentError):
        repl.run(
            lambda: repl.all_reduce(
                helpers.opaque(tf.ones(shapes[repl.replica_id]), None), op
            )
        )


@pytest.mark.parametrize("algorithm", ON_CPU)
def test_many_tensors_in_one_call(algorithm: str) -> None:
    repl = helpers.make(3, algorithm=algorithm)
    columns = [_arrays(k, 3, [30, 5 + k % 2], "float32") for k in range(6)]
    results = repl.run(
        lambda: repl.all_reduce([helpers.opaque(c[repl.replica_id]) for c in columns])
    )
    for column, received in zip(columns, results, strict=True):
        for result in received:
            np.testing.assert_allclose(result, sum(column), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("algorithm", ON_CPU)
def test_in_a_loop(algorithm: str) -> None:
    repl = helpers.make(3, algorithm=algorithm)

    def step_fn() -> tf.Tensor:
        start = tf.fill([100], 1.0 + repl.replica_id)
        turns = helpers.opaque(3)
        return tf.while_loop(
            lambda k, x: k < turns,
            lambda k, x: (k + 1, repl.all_reduce(x, "mean")),
            [0, start],
        )[1]

    for result in repl.run(step_fn):
        np.testing.assert_array_equal(result, np.full(100, 2.0))


# --- The choice of an algorithm -------------------------------------------------------


def _rows(repl: replicator.Replicator, **options: Any) -> list[tuple[str, bool]]:
    """Returns the algorithm of each communication, and whether it is a gradient's."""

    def step_fn() -> Any:
        x = helpers.opaque(np.ones(100, np.float32))
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(repl.all_reduce(x, **options))
        return tape.gradient(y, x)

    step = repl.build(step_fn)
    step()
    return [(row.algorithm, row.backward) for row in step.plan]


@pytest.mark.parametrize("algorithm", ON_CPU)
def test_the_plan_shows_it_and_gradients_take_the_same_way(algorithm: str) -> None:
    repl = helpers.make(3, algorithm="tree")
    assert _rows(repl) == [("tree", False), ("tree", True)]
    assert _rows(repl, algorithm=algorithm) == [(algorithm, False), (algorithm, True)]


def test_the_plan_shows_several_in_one_call() -> None:
    repl = helpers.make(3, algorithm="ring")
    repl.run(
        lambda: repl.all_reduce([tf.ones([9]), tf.ones([9])], "argmax"),
    )
    assert [row.algorithm for row in repl.plan] == ["hub"]
    step = repl.build(lambda: repl.all_reduce(tf.ones([9]), "max"))
    step()
    assert [row.algorithm for row in step.plan] == ["ring"]


def test_replicas_must_name_the_same() -> None:
    repl = helpers.make(2)
    with pytest.raises(replicator.MismatchError, match="not the same algorithm"):
        repl.run(
            lambda: repl.all_reduce(1.0, algorithm=["hub", "ring"][repl.replica_id])
        )


def test_an_algorithm_that_does_not_exist() -> None:
    repl = helpers.make(2)
    with pytest.raises(ValueError, match=r"algorithm='star'.*\n.*\nFix: .*shuffled"):
        repl.run(lambda: repl.all_reduce(1.0, algorithm="star"))


@pytest.mark.parametrize("algorithm", ["tree", "ring"])
def test_what_the_named_algorithm_cannot_do(algorithm: str) -> None:
    repl = helpers.make(2)
    with pytest.raises(ValueError, match="cannot do the argmax of float32") as caught:
        repl.run(lambda: repl.all_reduce(1.0, "argmax", algorithm=algorithm))
    assert "test_algorithms.py" in str(caught.value)


# --- Senders and receivers ------------------------------------------------------------


def _links(algorithm: str, num_replicas: int, size: int) -> dict[Any, int]:
    repl = helpers.make(num_replicas)
    step = repl.build(
        lambda: repl.all_reduce(
            helpers.opaque(np.ones(size, np.float32)), algorithm=algorithm
        )
    )
    step()
    (row,) = step.plan
    return {(link.source, link.destination): link.nbytes for link in row.links}


def test_everyone_sends_to_the_next_in_a_ring() -> None:
    size = 16 * 4
    assert _links("ring", 4, size) == {
        (n, (n + 1) % 4): 2 * 3 * size // 4 * 4 for n in range(4)
    }


def test_everyone_sends_slices_to_everyone_when_shuffled() -> None:
    size = 16 * 4
    links = _links("shuffled", 4, size)
    assert links == {
        (a, b): 2 * size // 4 * 4 for a in range(4) for b in range(4) if a != b
    }


def test_only_neighbours_talk_in_a_tree() -> None:
    links = _links("tree", 4, 100)
    assert set(links) == {(1, 0), (0, 1), (3, 2), (2, 3), (2, 0), (0, 2)}
    assert set(links.values()) == {400}


def test_nothing_of_a_ring_is_optimized_away() -> None:
    """On the devices where it is built, tensors are also sent in the end."""
    repl = helpers.make(3)
    with tf.Graph().as_default():
        out = repl.run(
            lambda: repl.all_reduce(helpers.opaque(np.ones(48, "f")), algorithm="ring")
        )
        options = tf.compat.v1.RunOptions(output_partition_graphs=True)
        metadata = tf.compat.v1.RunMetadata()
        with helpers.session() as session:
            session.run(list(out), options=options, run_metadata=metadata)
    links = set()
    for node in [node for graph in metadata.partition_graphs for node in graph.node]:
        if node.op == "_Send" and node.name.startswith("communicate"):
            ends = [node.attr[f"{end}_device"].s.decode() for end in ("send", "recv")]
            links.add(tuple(int(end[-1]) for end in ends))
    assert links == {(0, 1), (1, 2), (2, 0)}


# --- NCCL: without a GPU, the graph is inspected, not run -----------------------------


def _gpu_task(op: str, dtype: str = "float32") -> algorithms.ReduceTask:
    devices = [f"/job:localhost/replica:0/task:0/device:GPU:{n}" for n in range(2)]
    column = []
    for device in devices:
        with tf.device(device):
            column.append(tf.zeros([5], dtype))
    return algorithms.ReduceTask(op, column, devices, (0, 1), 0, "3:x")


@pytest.mark.parametrize(
    ("op", "reduction"),
    [("sum", "sum"), ("mean", "sum"), ("min", "min"), ("max", "max"), ("prod", "prod")],
)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_nccl_is_one_op_on_each_gpu(op: str, reduction: str, dtype: str) -> None:
    with tf.Graph().as_default() as graph:
        task = _gpu_task(op, dtype)
        results = algorithms.nccl(task)
        ops = [o for o in graph.get_operations() if o.type == "NcclAllReduce"]
        assert [o.device for o in ops] == list(task.devices)
        assert len({o.get_attr("shared_name") for o in ops}) == 1
        for graph_op in ops:
            assert graph_op.get_attr("num_devices") == 2
            assert graph_op.get_attr("reduction").decode() == reduction
        wide = tf.float32 if op in ("sum", "mean", "prod") else tf.as_dtype(dtype)
        assert {o.get_attr("T") for o in ops} == {wide}
        for (result,), device in zip(results, task.devices, strict=True):
            assert (result.dtype, result.device) == (dtype, device)


@pytest.mark.parametrize("given", ["call", "replicator"])
def test_nccl_needs_gpus(given: str) -> None:
    repl = helpers.make(2, algorithm="nccl" if given == "replicator" else None)
    options = {"algorithm": "nccl"} if given == "call" else {}
    with pytest.raises(
        ValueError, match="needs GPUs on one host, of which none"
    ) as caught:
        repl.run(lambda: repl.all_reduce(1.0, **options))
    message = str(caught.value)
    assert "replica 1" in message and "CPU:1" in message and "Fix: " in message


@pytest.mark.parametrize("op", reductions.REDUCTIONS)
@pytest.mark.parametrize("name", cost.ALGORITHM_NAMES)
def test_which_algorithms_can_do_what(name: str, op: str) -> None:
    located = op in ("argmin", "argmax")
    if name == "nccl":
        able = op in ("sum", "mean", "min", "max", "prod")
    else:
        able = name in IN_REPLICA_ORDER or not located
    assert algorithms.supports(name, op, tf.float32) == able
