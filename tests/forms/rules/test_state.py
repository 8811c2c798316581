# SPDX-License-Identifier: Apache-2.0
"""The law of the rules of variables, and of what pulls elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import errors
from replicator.forms import engine
from replicator.forms.rules import lookups, state
from tests.forms import helpers, laws

raw = tf.raw_ops
REPLICAS = [2, pytest.param(3, marks=pytest.mark.slow)]
Handles = list[Any]
IDS = tf.TensorSpec([None], tf.int32)
ROWS = tf.TensorSpec([None, 2], tf.float32)
LR = 0.1


def apply(op: str, slots: int, *more: Any, **attributes: Any) -> Callable[..., Any]:
    """Returns the use of an optimizer's op by a mean gradient, given its inputs.

    Args:
        op: The op; "Sparse..." takes the rows of the gradient.
        slots: The number of variables.
        *more: The other inputs, by order; "grad" is the gradient.
        **attributes: Of the op.
    """
    kernel = getattr(raw, f"Resource{op}")
    names = [n for n in kernel.__signature__.parameters if n != "name"]

    def use(handles: Handles, ids: tf.Tensor, x: tf.Tensor) -> None:
        if "Sparse" in op:
            grad = x / tf.cast(tf.shape(x)[0], x.dtype)
        else:
            grad = tf.reduce_mean(x**2, 0) * tf.ones([5, 1])
        found = {"grad": grad, "indices": ids}
        inputs = [
            *handles,
            *(found.get(v, v) if isinstance(v, str) else v for v in more),
        ]
        kernel(**dict(zip(names, inputs, strict=False)), **attributes)

    use.slots = slots  # type: ignore[attr-defined]
    return use


def scatter(name: str) -> Callable[..., Any]:
    def use(handles: Handles, ids: tf.Tensor, x: tf.Tensor) -> None:
        kernel = getattr(raw, f"ResourceScatter{name}")
        kernel(resource=handles[0], indices=ids, updates=x)

    return use


def scatter_nd(name: str) -> Callable[..., Any]:
    def use(handles: Handles, ids: tf.Tensor, x: tf.Tensor) -> None:
        kernel = getattr(raw, f"ResourceScatterNd{name}")
        kernel(ref=handles[0], indices=ids[:, None], updates=x)

    return use


def assign(name: str) -> Callable[..., Any]:
    def use(handles: Handles, ids: tf.Tensor, x: tf.Tensor) -> None:
        kernel = getattr(raw, f"Assign{name}VariableOp")
        kernel(resource=handles[0], value=tf.reduce_mean(x, 0) + tf.ones([5, 1]))

    return use


def assign_slice(handles: Handles, ids: tf.Tensor, x: tf.Tensor) -> None:
    raw.ResourceStridedSliceAssign(
        ref=handles[0], begin=[1, 0], end=[2, 2], strides=[1, 1], value=total(x)[None]
    )


def total(x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(x, 0)


def read(handles: Handles, ids: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    return raw.ReadVariableOp(resource=handles[0], dtype=tf.float32) * total(x)


def gathered(handles: Handles, ids: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    return raw.ResourceGather(resource=handles[0], indices=ids, dtype=x.dtype) * x


def gathered_nd(handles: Handles, ids: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    where = tf.stack([ids, ids % 2], 1)
    found = raw.ResourceGatherNd(resource=handles[0], indices=where, dtype=x.dtype)
    return found[:, None] * x


def shaped(handles: Handles, ids: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    return raw.VariableShape(input=handles[0])


def is_made(handles: Handles, ids: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    return raw.VarIsInitializedOp(resource=handles[0])


PROGRAMS: dict[str, Callable[..., Any]] = {
    "ReadVariableOp": read,
    "ResourceGather": gathered,
    "ResourceGatherNd": gathered_nd,
    "VariableShape": shaped,
    "VarIsInitializedOp": is_made,
    "AssignVariableOp": assign(""),
    "AssignAddVariableOp": assign("Add"),
    "AssignSubVariableOp": assign("Sub"),
    "ResourceStridedSliceAssign": assign_slice,
    **{
        f"ResourceScatter{name}": scatter(name)
        for name in ("Add", "Sub", "Mul", "Div", "Min", "Max")
    },
    **{
        f"ResourceScatterNd{name}": scatter_nd(name)
        for name in ("Add", "Sub", "Min", "Max")
    },
    "ResourceApplyGradientDescent": apply("ApplyGradientDescent", 1, LR, "grad"),
    "ResourceApplyMomentum": apply("ApplyMomentum", 2, LR, "grad", 0.9),
    "ResourceApplyKerasMomentum": apply("ApplyKerasMomentum", 2, LR, "grad", 0.9),
    "ResourceApplyAdam": apply(
        "ApplyAdam", 3, *(0.9, 0.99, LR, 0.9, 0.99, 1e-3), "grad"
    ),
    "ResourceApplyAdagradV2": apply("ApplyAdagradV2", 2, LR, 1e-3, "grad"),
    "ResourceApplyRMSProp": apply("ApplyRMSProp", 3, *(LR, 0.9, 0.5, 1e-3), "grad"),
    "ResourceApplyFtrl": apply("ApplyFtrl", 3, "grad", *(LR, 0.1, 0.1, -0.5)),
    "ResourceSparseApplyMomentum": apply(
        "SparseApplyMomentum", 2, LR, "grad", "indices", 0.9
    ),
    "ResourceSparseApplyAdagradV2": apply(
        "SparseApplyAdagradV2", 2, LR, 1e-3, "grad", "indices"
    ),
}
# Like one of those above, by the table of the same rule.
ALIKE = """
    DestroyResourceOp ResourceApplyAdaMax ResourceApplyAdadelta ResourceApplyAdagrad
    ResourceApplyAdagradDA ResourceApplyAdamWithAmsgrad ResourceApplyAddSign
    ResourceApplyCenteredRMSProp ResourceApplyFtrlV2 ResourceApplyPowerSign
    ResourceApplyProximalAdagrad ResourceApplyProximalGradientDescent
    ResourceCountUpTo ResourceScatterNdUpdate ResourceScatterUpdate
    ResourceSparseApplyAdadelta ResourceSparseApplyAdagrad
    ResourceSparseApplyAdagradDA ResourceSparseApplyCenteredRMSProp
    ResourceSparseApplyFtrl ResourceSparseApplyFtrlV2
    ResourceSparseApplyKerasMomentum ResourceSparseApplyProximalAdagrad
    ResourceSparseApplyProximalGradientDescent ResourceSparseApplyRMSProp
    RngReadAndSkip RngSkip StatefulRandomBinomial StatefulStandardNormal
    StatefulStandardNormalV2 StatefulTruncatedNormal StatefulUniform
    StatefulUniformFullInt StatefulUniformInt IteratorGetNext IteratorGetNextSync
    QueueDequeueManyV2 QueueDequeueUpToV2 IteratorFromStringHandle
    IteratorFromStringHandleV2
"""
REFUSED = "IteratorGetNextAsOptional " + state._DATASETS


def test_each_type_has_a_sample() -> None:
    rules = laws.ruled(state) | {"ResourceGather", "ResourceGatherNd"}
    assert {"ResourceGather", "ResourceGatherNd"} <= laws.ruled(lookups)
    assert not rules - set(PROGRAMS) - set(ALIKE.split()) - set(REFUSED.split())


def _variables() -> dict[str, list[tf.Variable]]:
    value = np.arange(10, dtype=np.float32).reshape(5, 2) / 5 + 0.5
    return {
        name: [tf.Variable(value + k) for k in range(getattr(program, "slots", 1))]
        for name, program in PROGRAMS.items()
    }


def _step(variables: dict[str, list[tf.Variable]], names: Any) -> Any:
    def step(ids: tf.Tensor, x: tf.Tensor) -> Any:
        results = {}
        for name in names:
            handles = [v.handle for v in variables[name]]
            made = PROGRAMS[name](handles, ids, x)
            if isinstance(made, tf.Tensor):
                results[name] = made
        return results

    return step


@pytest.mark.parametrize("replicas", REPLICAS)
def test_law(replicas: int) -> None:
    repl = replicator.Replicator([f"cpu:{k}" for k in range(replicas)])
    plain = _variables()
    with repl.context():
        variables = _variables()
    run = engine.WholeBatchFunction(_step(variables, PROGRAMS), repl, [IDS, ROWS])
    alone = tf.function(_step(plain, PROGRAMS))
    random = np.random.default_rng(0)
    for rows in (5, 3):
        ids = random.permutation(5)[:rows].astype(np.int32)
        x = random.uniform(0.5, 2, (rows, 2)).astype(np.float32)
        want, have = alone(tf.constant(ids), tf.constant(x)), run(ids, x)
        for name, result in want.items():
            np.testing.assert_allclose(have[name], result, 1e-5, err_msg=name)
        for name in PROGRAMS:
            for v, w in zip(variables[name], plain[name], strict=True):
                np.testing.assert_allclose(v, w, 1e-5, 1e-6, err_msg=name)


def test_elements_of_an_iterator_are_dealt() -> None:
    def batches() -> tf.data.Dataset:
        x = tf.range(22.0)
        return tf.data.Dataset.from_tensor_slices((x[:, None] * [1.0, 2.0], x)).batch(5)

    source, alone = iter(batches()), iter(batches())
    repl = replicator.Replicator(["cpu:0", "cpu:1"])

    def step(one: tf.Tensor) -> Any:
        x, y = next(source)
        return x * y[:, None] - tf.reduce_mean(x), tf.reduce_sum(y)

    run = engine.WholeBatchFunction(step, repl, [tf.TensorSpec([])])
    types = {op.type: plan for op, plan in run.program((None,)).plan.plans.items()}
    assert "Sharded" in str(types["IteratorGetNext"].makes)
    for _ in range(5):  # the last one has two rows
        x, y = next(alone)
        want, total_ = x * y[:, None] - tf.reduce_mean(x), tf.reduce_sum(y)
        have = run(1.0)
        np.testing.assert_allclose(have[0], want, 1e-6)
        np.testing.assert_allclose(have[1], total_)


def test_batches_of_one_element_that_differ_in_length_are_an_error() -> None:
    spec = (tf.TensorSpec([None]), tf.TensorSpec([None]))
    data = tf.data.Dataset.from_generator(
        lambda: iter([(np.ones(3, "f"), np.ones(4, "f"))]), output_signature=spec
    )
    source, repl = iter(data), replicator.Replicator(["cpu:0", "cpu:1"])

    def step(one: tf.Tensor) -> Any:
        a, b = next(source)
        return tf.reduce_sum(a) + tf.reduce_sum(b)

    run = engine.WholeBatchFunction(step, repl, [tf.TensorSpec([])])
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"(?s)different numbers of rows.*Fix:"
    ):
        run(1.0)


def test_effects_happen_once(tmp_path: Any) -> None:
    seen: list[Any] = []

    def note(x: np.ndarray) -> np.float32:
        seen.append(x)
        return np.float32(len(seen))

    def step(x: tf.Tensor) -> Any:
        count = tf.numpy_function(note, [x * 2.0], tf.float32)
        return x + count

    repl = replicator.Replicator(["cpu:0", "cpu:1"])
    run = engine.WholeBatchFunction(step, repl, [tf.TensorSpec([None, 3])])
    x = np.arange(15, dtype=np.float32).reshape(5, 3)
    np.testing.assert_array_equal(run(x), x + 1)
    np.testing.assert_array_equal(run(x), x + 2)
    assert len(seen) == 2
    np.testing.assert_array_equal(seen[0], x * 2)


def test_tables_are_looked_up_for_all() -> None:
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(tf.range(5), tf.range(5) * 10), -1
    )
    repl = replicator.Replicator(["cpu:0", "cpu:1"])
    run = engine.WholeBatchFunction(
        lambda ids: table.lookup(ids) + 1, repl, [tf.TensorSpec([None], tf.int32)]
    )
    np.testing.assert_array_equal(run(np.array([4, 9, 0], np.int32)), [41, 0, 1])


def test_each_replica_looks_up_the_keys_of_its_rows() -> None:
    words = tf.constant(["a", "b", "c", "d"])
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(words, tf.range(4)), -1
    )
    repl = replicator.Replicator(["cpu:0", "cpu:1", "cpu:2"])

    def nested(keys: tf.Tensor) -> tf.Tensor:
        return tf.function(table.lookup)(keys)

    for look_up in (table.lookup, nested):
        run = engine.WholeBatchFunction(
            look_up, repl, [tf.TensorSpec([None], tf.string)]
        )
        for keys in (["d", "?", "b", "a"], ["c"]):
            np.testing.assert_array_equal(
                run(np.array(keys)), look_up(tf.constant(keys))
            )
        moved = [value.dtype for row in repl.plan for value in row.operands[0]]
        assert "string" not in moved


@pytest.mark.parametrize("is_nested", [False, True])
def test_tables_that_a_program_changes_are_those_of_one_device(is_nested: bool) -> None:
    ids = np.array([3, 1, 3, 2, 1], np.int64)

    def outcome(repl: Any) -> list[Any]:
        table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)

        def count(keys: tf.Tensor) -> None:
            kinds, _, counts = tf.unique_with_counts(keys, tf.int64)
            table.insert(kinds, table.lookup(kinds) + counts)

        def step(keys: tf.Tensor) -> tf.Tensor:
            before = table.lookup(keys)
            (tf.function(count) if is_nested else count)(keys)
            return tf.stack([before, table.lookup(keys)], axis=1)

        spec = [tf.TensorSpec([None], tf.int64)]
        run = engine.WholeBatchFunction(step, repl, spec) if repl else tf.function(step)
        return [np.asarray(run(ids)) for _ in range(2)]

    expected = outcome(None)
    actual = outcome(replicator.Replicator(["cpu:0", "cpu:1"]))
    np.testing.assert_array_equal(actual, expected)


def test_generators_continue_as_on_one_device() -> None:
    repl = replicator.Replicator(["cpu:0", "cpu:1"])
    with repl.context():
        source = tf.random.Generator.from_seed(3)
    alone = tf.random.Generator.from_seed(3)
    run = engine.WholeBatchFunction(
        lambda x: source.normal(tf.shape(x)), repl, [tf.TensorSpec([None, 3])]
    )
    for rows in (5, 4):
        x = np.zeros([rows, 3], np.float32)
        np.testing.assert_allclose(run(x), alone.normal([rows, 3]), 1e-6)


def _looping(source: Any, v: tf.Variable) -> Any:
    def step(x: tf.Tensor) -> tf.Tensor:
        for y in source:
            v.assign_add(tf.reduce_sum(y))
        return x + v

    return step


@pytest.mark.parametrize("kind", ["iterator", "dataset"])
def test_loops_over_elements_are_refused_with_the_way_out(kind: str) -> None:
    data = tf.data.Dataset.range(3).map(lambda n: tf.cast(n, tf.float32))
    source = iter(data) if kind == "iterator" else data
    repl = replicator.Replicator(["cpu:0", "cpu:1"])
    with repl.context():
        v = tf.Variable(0.0)
    spec = tf.TensorSpec([None])
    run = engine.WholeBatchFunction(_looping(source, v), repl, [spec])
    says = r"(?s)test_state.py.*Fix: loop.* outside of the function"
    with pytest.raises(errors.UnsupportedError, match=says):
        run(np.ones(4, np.float32))


@pytest.mark.parametrize("name", ["Mul", "Div", "Max", "Min"])
def test_a_sum_is_updated_by_sums_only(name: str) -> None:
    """Each replica holds a summand: the largest of each is no sum of the largest."""
    repl = replicator.Replicator(["cpu:0", "cpu:1"])
    with repl.context():
        total = tf.Variable(
            tf.ones([5, 2]),
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    def step(ids: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        scatter(name)([total.handle], ids, x)
        return tf.reduce_sum(x)

    run = engine.WholeBatchFunction(step, repl, [IDS, ROWS])
    with pytest.raises(errors.UnsupportedError) as raised:
        run(tf.zeros([2], tf.int32), tf.ones([2, 2]))
    message = str(raised.value)
    assert "by other than a sum" in message and "test_state.py" in message
    assert "Fix: update it by assign()" in message
    assert (total.numpy() == 1).all()


def test_rows_of_a_sum_are_sums() -> None:
    def make() -> Any:
        total = tf.Variable(
            tf.ones([5, 2]),
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

        def step(ids: tf.Tensor, x: tf.Tensor) -> Any:
            total.assign_add(tf.ones([5, 1]) * tf.reduce_sum(x, 0))
            pairs = tf.stack([ids, ids % 2], 1)
            return [
                tf.gather(total, ids),
                tf.gather(total, ids % 2, axis=1, batch_dims=0),
                tf.gather_nd(total, pairs),
                tf.nn.embedding_lookup(total, ids[:, None]),
                tf.gather(tf.convert_to_tensor(total), [[1], [0]], batch_dims=0),
            ]

        return step, [total]

    helpers.run(make, [IDS, ROWS])
