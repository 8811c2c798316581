# SPDX-License-Identifier: Apache-2.0
"""Steps that several processes build together; one process must get the same results.

Each function of STEPS takes a Replicator of four replicas and returns their results, a
PerReplica or a list of such.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import replicator
from replicator import Replicator

REPLICAS = 4
_DTYPES = (
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
)
_OPS = {
    "float32": ("sum", "mean", "prod", "min", "max", "argmin", "argmax"),
    "int32": ("sum", "prod", "min", "max", "argmax", "bitwise_and", "bitwise_xor"),
    "bool": ("logical_and", "logical_or", "min", "max"),
    "bfloat16": ("sum", "mean", "max"),
    "complex64": ("sum", "mean"),
    "int8": ("sum", "max"),
}


def _own(repl: Replicator, shape: Any = (2, 3), dtype: str = "float32") -> tf.Tensor:
    """Returns a value that differs between replicas."""
    rng = np.random.default_rng(repl.replica_id)
    return tf.cast(tf.constant(rng.integers(0, 9, shape)), dtype)


def _ragged(repl: Replicator) -> tf.Tensor:
    """Returns a tensor with as many rows as the replica's id, of unknown shape."""
    x = _own(repl, (repl.replica_id, 2))
    return tf.compat.v1.placeholder_with_default(x, [None, 2])


def all_reduce(repl: Replicator) -> Any:
    def step_fn() -> Any:
        return {
            dtype: [repl.all_reduce(_own(repl, dtype=dtype), op) for op in ops]
            for dtype, ops in _OPS.items()
        }

    return repl.run(step_fn)


def many_tensors(repl: Replicator) -> Any:
    def step_fn() -> Any:
        shapes = [(), (3,), (2, 3), (1000, 40), (5, 3), (0, 3), (1000, 41)]
        return repl.all_reduce([_own(repl, shape) for shape in shapes], "mean")

    return repl.run(step_fn)


def weighted(repl: Replicator) -> Any:
    return repl.run(
        lambda: repl.all_reduce(_own(repl), "mean", weight=repl.replica_id % 3)
    )


def sparse(repl: Replicator) -> Any:
    def step_fn() -> Any:
        rows = tf.constant([repl.replica_id, 5])
        slices = tf.IndexedSlices(_own(repl), rows, tf.constant([9, 3]))
        return tf.convert_to_tensor(repl.all_reduce(slices, "mean"))

    return repl.run(step_fn)


def dtypes(repl: Replicator) -> Any:
    return repl.run(
        lambda: [repl.all_gather(_own(repl, (3,), dtype)) for dtype in _DTYPES]
    )


def all_gather(repl: Replicator) -> Any:
    def step_fn() -> Any:
        return [
            repl.all_gather(_own(repl)),
            repl.all_gather(_own(repl, (repl.replica_id, 2)), axis=0),
            repl.all_gather(_ragged(repl), axis=0),
        ]

    return repl.run(step_fn)


def changing(repl: Replicator) -> Any:
    """Sizes that change with each step of one graph."""

    def step_fn(x: tf.Tensor) -> Any:
        return repl.all_gather(x[: x[0] + repl.replica_id], axis=0)

    sizes = tf.data.Dataset.from_tensor_slices([3, 1, 40, 0, 9]).map(
        lambda n: tf.range(n, n + 50)
    )
    return [repl.run(step_fn, lambda ctx: sizes) for _ in range(5)]


def all_to_all(repl: Replicator) -> Any:
    def step_fn() -> Any:
        splits = [(repl.replica_id + n) % 3 for n in range(REPLICAS)]
        return [
            repl.all_to_all(_own(repl, (4, 3)), 0, 1),
            repl.all_to_all(_own(repl, (sum(splits), 2)), 0, 0, splits=splits),
        ]

    return repl.run(step_fn)


def rooted(repl: Replicator) -> Any:
    def step_fn() -> Any:
        zeros = tf.zeros([2, 3])
        received = [repl.reduce(_own(repl), root=3), repl.gather(_own(repl), root=1)]
        return [
            repl.broadcast(_own(repl), root=2),
            repl.scatter(_own(repl, (4, 2)), root=1),
            *(zeros if x is None else x for x in received),
        ]

    return repl.run(step_fn)


def reduce_scatter(repl: Replicator) -> Any:
    return repl.run(lambda: repl.reduce_scatter(_own(repl, (8, 2)), "mean"))


def permute(repl: Replicator) -> Any:
    pairs = [(0, 3), (3, 1), (2, 0)]
    return repl.run(
        lambda: [repl.permute(_own(repl), pairs), repl.shift(_own(repl), 1)]
    )


def messages(repl: Replicator) -> Any:
    def step_fn() -> Any:
        there, back = (repl.replica_id + 1) % 4, (repl.replica_id + 3) % 4
        repl.send(_own(repl), destination=there, tag=5)
        return repl.recv(tf.TensorSpec([2, 3]), source=back, tag=5)

    return repl.run(step_fn)


def groups(repl: Replicator) -> Any:
    across, within = repl.groups([[0, 2], [1, 3]]), repl.groups([[0, 1], [2, 3]])
    ends = repl.group([0, 3])

    def step_fn() -> Any:
        x = _own(repl)
        results = [repl.all_reduce(x, group=across), repl.all_gather(x, group=within)]
        if repl.replica_id in ends:
            x = repl.all_reduce(x, "mean", group=ends)
        return [*results, x]

    return repl.run(step_fn)


def algorithms(repl: Replicator) -> Any:
    names = ("hub", "shuffled", "tree", "ring")
    return repl.run(
        lambda: [repl.all_reduce(_own(repl), "max", algorithm=name) for name in names]
    )


def gradients(repl: Replicator) -> Any:
    def step_fn() -> Any:
        x, y = _own(repl, (4, 3)), _own(repl, (4,))
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            mean = repl.all_reduce(x * x, "mean")
            joined = repl.all_gather(tf.sin(y))
            largest = repl.all_reduce(x, "max")
            parts = repl.reduce_scatter(x * x, axis=0)
            turned = repl.all_to_all(x * y[:, None], 0, 1)
            root = repl.broadcast(x * 3, root=1)
            loss = sum(
                tf.reduce_sum(part * (repl.replica_id + 1.0))
                for part in (mean, joined, largest, parts, turned, root)
            )
        return tape.gradient(loss, [x, y])

    return repl.run(step_fn)


def message_gradients(repl: Replicator) -> Any:
    def step_fn() -> Any:
        x = _own(repl)
        with tf.GradientTape() as tape:
            tape.watch(x)
            if repl.replica_id == 0:
                repl.send(x * x, destination=3)
                loss = repl.linked(0.0)
            elif repl.replica_id == 3:
                loss = tf.reduce_sum(x * repl.recv(x, source=0))
            else:
                loss = tf.reduce_sum(x)
        return tape.gradient(loss, x)

    return repl.run(step_fn)


def conditionals(repl: Replicator) -> Any:
    def step_fn() -> Any:
        x = _own(repl)
        total = repl.all_reduce(tf.reduce_sum(x))
        return tf.cond(total > 0, lambda: repl.all_reduce(x), lambda: x)

    return repl.run(step_fn)


def loops(repl: Replicator) -> Any:
    def step_fn() -> Any:
        x = _own(repl)
        limit = repl.all_reduce(tf.constant(3), "max")
        for _ in tf.range(limit):
            x = repl.all_reduce(x, "mean") + _own(repl)
            if tf.reduce_sum(repl.all_reduce(x)) > 0.0:
                x = repl.shift(x)
        return x

    return repl.run(tf.autograph.experimental.do_not_convert(_converted(step_fn)))


def _converted(function: Callable[..., Any]) -> Callable[..., Any]:
    return tf.autograph.to_graph(function)


def functions(repl: Replicator) -> Any:
    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        return repl.all_reduce(x, "mean")

    return repl.run(lambda: inner(_own(repl)) + inner(_own(repl) * 2.0))


def objects(repl: Replicator) -> Any:
    def step_fn() -> Any:
        sizes = repl.all_gather_object(repl.replica_id + 1)
        own_facts = {"size": np.int64(repl.replica_id), "rest": (None, b"\0", {1.5})}
        root = repl.broadcast_object(own_facts, root=3)
        assert root["rest"] == (None, b"\0", {1.5})
        return tf.zeros([sum(sizes), root["size"]])

    return repl.run(step_fn)


def barriers(repl: Replicator) -> Any:
    with repl.context():
        v = tf.Variable(1.0)

    def step_fn() -> Any:
        v.assign_add(repl.replica_id + 1.0)
        repl.barrier()
        return v.read_value()

    return repl.run(step_fn)


def factors(repl: Replicator) -> Any:
    """Products whose factors are sent, with any number of rows, and sums of rows."""

    def step_fn() -> Any:
        rows = 3 + repl.replica_id
        layers = []
        for shape in ([rows, 400], [None, 400]):
            x = tf.compat.v1.placeholder_with_default(_own(repl, (rows, 400)), shape)
            layers.append((x, _own(repl, (rows, 500)) * 0.5))
        products = [tf.matmul(x, y, transpose_a=True) for x, y in layers]
        sums = [tf.reduce_sum(y, 0) for _, y in layers]
        return repl.all_reduce([*products, *sums], "mean")

    means = repl.run(step_fn)
    return [means, any("factors" in row.algorithm for row in repl.plan)]


def variables(repl: Replicator) -> Any:
    with repl.context():
        v = tf.Variable([1.0, 2.0])
        count = tf.Variable(0)
        once = tf.Variable(
            0.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    def step_fn() -> Any:
        v.assign(v * repl.replica_id)
        count.assign_add(1)
        once.assign_add(repl.replica_id + 1.0)
        return [v.read_value(), count.read_value()]

    results = [repl.run(step_fn) for _ in range(3)]
    return [results, float(once), v.numpy(), int(count)]


def random_numbers(repl: Replicator) -> Any:
    tf.random.set_seed(3)
    with repl.context():
        generator = tf.random.Generator.from_seed(1)

    def step_fn() -> Any:
        return [generator.normal([2]), tf.random.uniform([2], seed=5)]

    return [repl.run(step_fn) for _ in range(2)]


def inputs(repl: Replicator) -> Any:
    tf.random.set_seed(1)  # shuffling depends on it, and other tests set another

    def of_replica(ctx: replicator.InputContext) -> tf.data.Dataset:
        shard = tf.data.Dataset.range(24).shard(ctx.num_pipelines, ctx.pipeline_id)
        return shard.batch(ctx.per_replica_batch_size(8))

    whole = tf.data.Dataset.range(24).shuffle(24, seed=7).batch(2)
    step_fn = lambda x: tf.cast(x, tf.int32)  # noqa: E731
    split = tf.data.Dataset.range(30).batch(10)
    return [
        [repl.run(step_fn, of_replica) for _ in range(3)],
        [repl.run(step_fn, whole) for _ in range(3)],
        [repl.run(step_fn, lambda: whole) for _ in range(2)],
        [repl.run(lambda x: tf.reduce_sum(x), split, "global_batch") for _ in range(2)],
        repl.run(step_fn, args=(np.arange(4),)),
        repl.run(lambda x: tf.reduce_sum(x), np.arange(10), "global_batch"),
    ]


def training(repl: Replicator) -> Any:
    """A Keras model, batch normalization over all, Adam: losses and weights."""
    keras.utils.set_random_seed(1)
    with repl.context():
        model = keras.Sequential(
            [
                keras.Input([6]),
                keras.layers.Dense(8, activation="relu"),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.Dense(3),
            ]
        )
        optimizer = repl.wrap_optimizer(keras.optimizers.Adam(0.05))
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=[64, 6]).astype("float32"), rng.integers(0, 3, [64])
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4).repeat()

    def step_fn(batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        weights = model.trainable_variables
        gradients = tape.gradient(loss, weights)
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return repl.all_reduce(loss, "mean")

    losses = [repl.run(step_fn, data) for _ in range(12)]
    return [losses, [weight.numpy() for weight in model.weights]]


def compressed(repl: Replicator) -> Any:
    """The received values, and the kept state, which is read from all processes."""
    results = []
    for name in ("bf16", "int8", "topk(ratio=0.3)", "powersgd(rank=1)"):
        for text in (name, f"ef({name})"):
            with repl.context():
                w = tf.Variable(tf.zeros([6, 5]))
                optimizer = repl.wrap_optimizer(
                    keras.optimizers.SGD(1.0), compressor=text
                )

            def step_fn(
                w: Any = w, optimizer: Any = optimizer, text: str = text
            ) -> Any:
                x = _own(repl, (6, 5)) + 0.01
                optimizer.apply([x], [w])
                return repl.all_reduce(x, compressor=text)

            received = [repl.run(step_fn) for _ in range(1 if name == "int8" else 2)]
            memory = optimizer._replicator_combiner.compression.memory
            state = [v.numpy() for v in memory.variables if "noise" not in v.name]
            results.append([received, w.numpy(), state])
    return results


STEPS: dict[str, Callable[[Replicator], Any]] = {
    function.__name__: function
    for function in (
        *(all_reduce, many_tensors, weighted, sparse, dtypes, all_gather, changing),
        all_to_all,
        *(rooted, reduce_scatter, permute, messages, groups, algorithms, gradients),
        *(message_gradients, conditionals, loops, functions, objects, barriers),
        *(factors, variables, random_numbers, inputs, training, compressed),
    )
}
