# SPDX-License-Identifier: Apache-2.0
"""The checks of `make gpu-check` that are programs: `tools.gpu_programs NAME`.

Each configures TensorFlow, so each runs in its own process. The last line of its output
is the result; a failing check raises.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from benchmarks import timing, workloads

_MEMORY = 4096  # MiB per logical GPU, if there is one GPU
_STEPS, _ROUNDS = 100, 10
_NETWORKS = ("large", "resnet20")


def devices() -> str:
    """Returns TensorFlow's description of each GPU, as JSON."""
    gpus = tf.config.list_physical_devices("GPU")
    details = tf.config.experimental.get_device_details
    return json.dumps([details(gpu) for gpu in gpus], default=str)


def two_gpus() -> list[str]:
    """Returns two GPUs: two of the machine's, or the halves of its only one."""
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) == 1:
        half = tf.config.LogicalDeviceConfiguration(memory_limit=_MEMORY)
        tf.config.set_logical_device_configuration(gpus[0], [half] * 2)
    return ["GPU:0", "GPU:1"]


def nccl() -> str:
    """Compares sums by NCCL with sums by a hub, over sizes."""
    gpus = tf.config.list_physical_devices("GPU")
    names = [f"GPU:{k}" for k in range(len(gpus))]
    sizes = (1, 1000, 1 << 20)
    for size in sizes:
        results = []
        for algorithm in ("nccl", "hub"):
            repl = replicator.Replicator(names, algorithm=algorithm)
            draw = tf.random.Generator.from_seed(size)
            x = draw.normal([size])
            step = repl.build(_sum_of(repl, x))
            assert any(algorithm in row.algorithm for row in step.plan), step.plan
            results.append(step().numpy())
        np.testing.assert_allclose(results[0], results[1], rtol=1e-6)
    return f"{len(names)} GPUs, {sizes} float32"


def _sum_of(repl: replicator.Replicator, x: tf.Tensor) -> Callable[[], Any]:
    def step_fn() -> Any:
        return repl.all_reduce(x * float(repl.replica_id + 1))

    return step_fn


def prefetch() -> str:
    """Checks that the elements of a dataset are on the replica's device."""
    names = two_gpus()
    repl = replicator.Replicator(names)

    def input_fn(ctx: replicator.InputContext) -> tf.data.Dataset:
        shard = tf.data.Dataset.range(64).shard(ctx.num_pipelines, ctx.pipeline_id)
        return shard.map(lambda k: tf.fill([1024], tf.cast(k, tf.float32)))

    places = {}  # filled for each replica while the step is built

    def step_fn(x: tf.Tensor) -> tf.Tensor:
        places[repl.replica_id] = x.device.rpartition("/")[2]
        return x[0]

    elements = repl.run(step_fn, input_fn)
    assert places == {r: f"device:{name}" for r, name in enumerate(names)}, places
    assert [float(number) for number in elements] == list(range(len(names)))
    return f"elements are on {', '.join(places.values())}"


def _train(
    names: Sequence[str], policy: str, steps: int = 30
) -> tuple[list[float], Any]:
    """Trains a small network; returns its losses, and the model."""
    tf.keras.utils.set_random_seed(1)
    repl = replicator.Replicator(names)
    with repl.context():
        dense = tf.keras.layers.Dense
        model = tf.keras.Sequential(
            [dense(64, "relu", dtype=policy), dense(1, dtype="float32")]
        )
        model.build([None, 16])
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.05))
    x = np.random.default_rng(1).normal(size=[32, 16]).astype("float32")
    y = x[:, :1] * 2

    def step_fn() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return repl.all_reduce(loss, "mean")

    return [float(repl.run(step_fn)[0]) for _ in range(steps)], model


def mixed_precision() -> str:
    """Compares float16's losses with float32's."""
    names = two_gpus()
    mixed, model = _train(names, "mixed_float16")
    plain, _ = _train(names, "float32")
    assert {v.dtype for v in model.variables} == {"float32"}
    assert model.layers[0].compute_dtype == "float16"
    assert mixed[-1] < mixed[0] / 4, mixed
    np.testing.assert_allclose(mixed, plain, rtol=0.05, atol=0.01)
    return f"loss {mixed[0]:.3f} to {mixed[-1]:.4f}; float32 to {plain[-1]:.4f}"


def memory_growth() -> str:
    """Trains with memory growth, and reports how much memory it took."""
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    names = [f"GPU:{k}" for k in range(len(gpus))]
    repl = replicator.Replicator(names)
    with repl.context():
        v = tf.Variable(tf.ones([1 << 20]))
    repl.run(lambda: repl.all_reduce(tf.reduce_sum(v)))
    peaks = [tf.config.experimental.get_memory_info(name)["peak"] for name in names]
    assert all(4 << 20 <= peak < 1 << 30 for peak in peaks), peaks
    peaks_by_name = zip(names, peaks, strict=True)
    return ", ".join(f"{name}: {peak / 2**20:.0f} MiB" for name, peak in peaks_by_name)


def step_times() -> str:
    """Measures steps on one GPU, by Replicator and by MirroredStrategy."""
    names, told = two_gpus(), []
    for workload in workloads.WORKLOADS:
        if workload.name not in _NETWORKS:
            continue
        measured = timing.measure(
            {name: timing.in_turn(s) for name, s in _contenders(workload, names)},
            *(_STEPS, _ROUNDS),
            warm_up=5,
        )
        times = ", ".join(
            f"{name} {own.median * 1e3:.2f} ms" for name, own in measured.items()
        )
        told.append(f"{workload.title}: {times}")
    return "; ".join(told)


def _contenders(
    workload: workloads.Workload, names: Sequence[str]
) -> list[tuple[str, timing.Step]]:
    from benchmarks import contenders

    weights = workload.make_model().get_weights()
    one = contenders.one_device(workload, 1, weights, names[0])
    ours = contenders.replicated(workload, len(names), weights, names)
    return [
        ("one GPU", one),
        ("Replicator", ours),
        ("MirroredStrategy", _mirrored(workload, names, weights)),
    ]


def _mirrored(
    workload: workloads.Workload, names: Sequence[str], weights: Any
) -> timing.Step:
    """Returns a step of MirroredStrategy on these devices."""
    strategy = tf.distribute.MirroredStrategy(
        list(names), tf.distribute.HierarchicalCopyAllReduce()
    )
    with strategy.scope():
        model = workload.make_model()
        optimizer = workloads.make_optimizer(workload, model)
    model.set_weights(weights)
    parts = workload.parts(len(names))
    batch = strategy.experimental_distribute_values_from_function(
        lambda ctx: tf.nest.map_structure(
            tf.constant, parts[ctx.replica_id_in_sync_group]
        )
    )

    @tf.function
    def step() -> tf.Tensor:
        losses = strategy.run(
            lambda *b: workloads.train_step(model, optimizer, b, 1 / len(names)),
            args=batch,
        )
        return strategy.reduce("MEAN", losses, axis=None)

    return step


PROGRAMS: Mapping[str, Callable[[], str]] = {
    "devices": devices,
    "nccl": nccl,
    "prefetch": prefetch,
    "mixed_precision": mixed_precision,
    "memory_growth": memory_growth,
    "step_times": step_times,
}

if __name__ == "__main__":
    print(PROGRAMS[sys.argv[1]]())
