# SPDX-License-Identifier: Apache-2.0
"""The algorithms of all_reduce: NumPy's values, the same bits on all replicas.

Arrays are larger than a slice's minimum size, so that they are cut; the arrays of other
tests mostly are not.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.costs import cost
from replicator.primitives import algorithms, reductions
from tests import helpers, sampling

ON_CPU = ["hub", "shuffled", "tree", "ring"]
IN_REPLICA_ORDER = ["hub", "shuffled"]
NUMPY = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
}
FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
DTYPES = {"floating": FLOATS, "complex": COMPLEX, "integer": INTEGERS, "bool": ["bool"]}
SUMS = ("sum", "mean", "prod")


def _arrays(
    seed: int, num_replicas: int, shape: Sequence[int], dtype: str
) -> list[np.ndarray]:
    kind, rng = tf.as_dtype(dtype), np.random.RandomState(seed)
    values = rng.randn(num_replicas, *shape)
    if kind.is_bool:
        values = values < 0
    elif kind.is_integer:  # over the whole range: they wrap around, as in NumPy
        values = rng.randint(-(2**63), 2**63, values.shape, np.int64)
    elif kind.is_complex:
        values = values + 1j * rng.randn(num_replicas, *shape)
    return list(values.astype(kind.as_numpy_dtype))


def _combined(op: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the result, 16-bit floats combined in float32 but not rounded again."""
    half = arrays[0].dtype.itemsize == 2 and op in SUMS and arrays[0].dtype.kind in "fV"
    wide = [a.astype(np.float32) if half else a for a in arrays]
    result = functools.reduce(NUMPY[op], wide)
    return result / np.asarray(len(arrays), result.dtype) if op == "mean" else result


# Replicas, shapes, and whether these are known while the step is built.
SHAPES = [
    *((3, (7, 31), True), (8, (1000,), False), (2, (), True), (3, (0,), True)),
    *((5, (3, 0, 2), False), (3, (2, 3, 50), False), (1, (5,), True)),
]
PAIRS = [
    (op, dtype)
    for op in NUMPY
    for kind in reductions.REDUCTIONS[op].kinds
    for dtype in DTYPES[kind]
]


@pytest.mark.battery(5)
@pytest.mark.parametrize(
    ("pair", "algorithm", "case"), sampling.in_turn(PAIRS, ON_CPU, SHAPES), ids=str
)
def test_numpys_values_and_equal_bits(pair: Any, algorithm: str, case: Any) -> None:
    """In two runs, which agree bitwise, too."""
    (op, dtype), (count, shape, known) = pair, case
    kind = tf.as_dtype(dtype)
    arrays = _arrays(len(op), count, shape, dtype)
    static = shape if known else [None, [None] * len(shape)][count % 2]
    repl = helpers.make(count, build="trace")  # takes operands in turn
    operands = itertools.cycle(arrays)
    step = repl.build(
        lambda: repl.all_reduce(
            helpers.opaque(next(operands), static), op, algorithm=algorithm
        )
    )
    first, second = ([y.numpy() for y in step()] for _ in "12")
    with np.errstate(over="ignore"):
        want = _combined(
            {"min": "logical_and", "max": "logical_or"}.get(op, op)
            if kind.is_bool
            else op,
            arrays,
        )
    for result in [*first, *second]:
        assert (result.dtype, result.shape) == (arrays[0].dtype, tuple(shape))
        assert result.tobytes() == first[0].tobytes()
    _assert_close(first[0], want, 0.0 if op == "prod" else sum(map(abs, arrays)))


def _assert_close(result: np.ndarray, want: np.ndarray, scale: Any) -> None:
    kind = tf.as_dtype(result.dtype)
    if not (kind.is_floating or kind.is_complex):
        np.testing.assert_array_equal(result, want)
        return
    # Rounded after each of up to seven operations, and to the dtype, in which small
    # products may be subnormal.
    half = result.dtype.itemsize == 2
    eps = 8 * (
        2**-8 if half else 1e-15 if kind.size // (1 + kind.is_complex) == 8 else 1e-7
    )
    error = abs(result.astype(want.dtype) - want)
    assert np.all(
        error <= eps * (abs(want) + np.asarray(scale, abs(want).dtype)) + 1e-7 * half
    )


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


@pytest.mark.parametrize("algorithm", ["tree", "ring"])
def test_what_the_named_algorithm_cannot_do(algorithm: str) -> None:
    repl = helpers.make(2)
    with pytest.raises(
        ValueError, match=r"(?s)cannot do the argmax of float32.*test_al"
    ):
        repl.run(lambda: repl.all_reduce(1.0, "argmax", algorithm=algorithm))


# --- Senders and receivers ------------------------------------------------------------


EDGES = [(1, 0), (0, 1), (3, 2), (2, 3), (2, 0), (0, 2)]


@pytest.mark.parametrize(
    ("algorithm", "links"),
    [
        ("ring", {(n, (n + 1) % 4): 2 * 3 * 64 for n in range(4)}),
        ("shuffled", {(a, b): 2 * 64 for a in range(4) for b in range(4) if a != b}),
        ("tree", dict.fromkeys(EDGES, 4 * 64)),
    ],
)
def test_who_sends_to_whom(algorithm: str, links: dict[Any, int]) -> None:
    repl = helpers.make(4)
    x = np.ones(16 * 4, np.float32)
    step = repl.build(lambda: repl.all_reduce(helpers.opaque(x), algorithm=algorithm))
    step()
    (row,) = step.plan
    assert {(n.source, n.destination): n.nbytes for n in row.links} == links


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
