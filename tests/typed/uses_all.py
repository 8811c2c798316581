# SPDX-License-Identifier: Apache-2.0
"""A user's program that uses every public name, for `mypy --strict`; it is not run.

test_strict.py says which names it has to use, and runs mypy on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from replicator import compressors, plan, strategy

ERRORS: tuple[type[replicator.ReplicatorError], ...] = (
    replicator.ArgumentError,
    replicator.CloneError,
    replicator.ClusterError,
    replicator.ContextError,
    replicator.DeadlockError,
    replicator.DependencyError,
    replicator.DeviceError,
    replicator.HostLostError,
    replicator.InputError,
    replicator.InternalError,
    replicator.MismatchError,
    replicator.PerReplicaError,
    replicator.StrategyError,
    replicator.UnsupportedError,
)


def train(devices: Sequence[str]) -> np.ndarray[Any, Any]:
    """Trains a model, and inspects its steps."""
    print(replicator.__version__)
    repl = replicator.Replicator(devices, build="clone", calibration="rates.json")
    with repl.context(), repl.stages("stages"):
        v = tf.Variable([1.0, 2.0])
        optimizer = repl.wrap_optimizer(
            tf.keras.optimizers.SGD(0.1), compressor="ef(int8)", accumulation_steps=2
        )
    repl.keras_model(tf.keras.Sequential())
    assert isinstance(v, replicator.ReplicatedVariable)
    components: tuple[Any, ...] = tuple(v.components)
    print(components)

    def input_fn(ctx: replicator.InputContext) -> tf.data.Dataset:
        size: int = ctx.per_replica_batch_size(8)
        own = ctx.pipeline_id, ctx.num_pipelines, ctx.host_id, ctx.num_hosts
        return tf.data.Dataset.range(ctx.num_replicas, *own).batch(size)

    def step_fn(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = repl.linked(tf.reduce_sum(x * v))
        optimizer.apply_gradients([(tape.gradient(loss, v), v)])
        return repl.all_reduce(loss, "mean", weight=repl.weight)

    step = repl.build(step_fn, input_fn)
    step.initialize()
    step_plan: plan.Plan = step.plan
    look_at(step_plan)
    look_at(repl.plan)
    repl.initialize()
    positions: object = repl.inputs
    names: tuple[str, ...] = repl.devices
    print(positions, names, repl.num_replicas)
    losses: replicator.PerReplica = repl.run(step_fn, input_fn, steps_per_call=2)
    alone = replicator.PerReplica(1.0, 2.0)
    print(float(alone[0]), len(losses))
    return np.asarray(losses.numpy())


def communicate(repl: replicator.Replicator, x: tf.Tensor) -> list[tf.Tensor]:
    """Calls every primitive."""
    pair: replicator.Group = repl.group([0, 1])
    halves: replicator.Partition = repl.groups([[0, 1], [2, 3]])
    own: replicator.Group = halves.own
    replica_id: int = repl.replica_id
    print(own.index(replica_id), pair.members)
    repl.barrier()
    repl.send(x, (replica_id + 1) % 2, tag=1)
    received = repl.recv(x, (replica_id + 1) % 2, tag=1)
    largest: replicator.Extremum = repl.all_reduce(x, "argmax")
    agreed: int = repl.broadcast_object(3)
    everyone: list[int] = repl.all_gather_object(replica_id)
    print(agreed, everyone, largest.value, largest.owner)
    with tf.device(repl.logical_device(0)):
        received = received + 1.0
    return [
        received,
        repl.all_gather(x, axis=0, group=halves),
        repl.all_max(x),
        repl.all_min(x),
        repl.all_sum(x),
        repl.all_to_all(x, 0, 1),
        repl.broadcast(x, root=1, group=pair),
        repl.gather(x, axis=0),
        *repl.map_gather([tf.square, tf.negative], [x]),
        repl.map_reduce(tf.square, [x, x], "mean"),
        repl.permute(x, [(0, 1), (1, 0)]),
        repl.reduce(x, root=0, op="max"),
        repl.reduce_scatter(x, axis=0),
        repl.scatter(x, axis=0),
        repl.shift(x, 1),
    ]


def look_at(found: plan.Plan) -> int:
    """Inspects a step's communication."""
    row: plan.Row = found[0]
    totals: plan.Totals = found.totals
    total: plan.Total = totals.per_step
    found.print()
    found.plot("plan.svg")
    again = plan.Plan.from_json(found.to_json())
    lines: tuple[str, ...] = row.lines
    print(lines, again.hosts, again.slowest_link)
    return total.nbytes


class Alternating(strategy.Builder):
    """Places every other variable on the first CPU."""

    def nodes(
        self,
        variables: Iterable[strategy.VariableFacts],
        resources: strategy.Resources,
    ) -> Iterator[strategy.Node | None]:
        """Yields a node for each variable."""
        for n, variable in enumerate(variables):
            if n % 2:
                how = strategy.PSSynchronizer(resources.cpus[0])
                yield strategy.Node(variable.path, how)
            else:
                both = strategy.AllReduceSynchronizer(group=n // 2)
                yield strategy.Node(variable.path, both)


BUILDERS: Sequence[strategy.Builder] = (
    strategy.AllReduce(chunk_size=64),
    strategy.Auto(slots=1),
    strategy.Mirrored(),
    strategy.PS(staleness=1),
    strategy.PSLoadBalancing(),
    strategy.Parallax(),
    strategy.Partitioned(axis=1, parts=2),
    strategy.PartitionedAR(),
    strategy.PartitionedPS(),
    strategy.RandomAxisPartitionAR(seed=1),
    strategy.Rules({".*": strategy.Sharded()}),
    strategy.Sharded(),
    strategy.UnevenPartitionedPS(),
    Alternating(),
)


def choose(devices: Sequence[str]) -> strategy.Strategy:
    """Measures which strategy is the fastest, and saves it."""

    def make(chosen: Any) -> tuple[replicator.Replicator, Any]:
        repl = replicator.Replicator(devices, strategy=chosen)
        return repl, lambda: repl.all_reduce(1.0)

    fastest: strategy.Strategy = strategy.tune(make, strategies=BUILDERS)
    trials: tuple[strategy.Trial, ...] = fastest.trials
    print(trials[0].measured)
    fastest.save("fastest.pb")
    repl = replicator.Replicator(devices, strategy=strategy.Strategy.load("fastest.pb"))
    return repl.strategy


class Sign(compressors.Compressor):
    """Sends signs."""

    def compress(self, tensor: tf.Tensor) -> Any:
        """Returns the payload."""
        return tf.cast(tensor > 0, tf.int8)

    def decompress(self, payload: Any, shape: tf.Tensor) -> tf.Tensor:
        """Returns the payload's approximation of the tensor."""
        return tf.reshape(tf.cast(payload, tf.float32) * 2 - 1, shape)


class Half(compressors.Compressor):
    """Sums half of everything."""

    def reduce(
        self, tensors: Sequence[tf.Tensor], link: compressors.Link
    ) -> compressors.Sums:
        """Returns the sums, and this replica's contribution to them."""
        halves = [tensor / 2 for tensor in tensors]
        return compressors.Sums(link.sum(halves), halves)


COMPRESSORS: Sequence[compressors.Compressor] = (
    compressors.BF16(),
    compressors.ErrorFeedback(compressors.TopK(0.1)),
    compressors.FP16(),
    compressors.Int8(),
    compressors.PowerSGD(rank=2),
    Sign(),
    Half(),
)


def describe() -> str:
    """Returns a compressor's text."""
    kept = compressors.Kept("topk(ratio=0.1)")
    parsed: compressors.Compressor | None = compressors.parse("ef(int8)")
    return compressors.text(parsed) + str(kept)


def on_hosts() -> int:
    """Trains on several hosts."""
    spec = replicator.ResourceSpec("resources.yml")
    print(spec.chief, spec.devices)

    def train_on(cluster: replicator.Cluster) -> int:
        repl = replicator.Replicator(cluster.devices)
        kept: replicator.Checkpoint = cluster.checkpoint("checkpoints", inputs=repl)
        steps_done = 0
        for step in kept.steps(100, every=10):
            steps_done = step
            cluster.check()
        print(kept.latest, kept.save())
        return steps_done

    with replicator.connect(timeout=10.0) as connected:
        print(connected.num_hosts, connected.hosts, connected.host_of("CPU:0"))
    steps: int = replicator.resilient(train_on, max_restarts=3)
    return steps


def for_one_device(x: np.ndarray[Any, Any]) -> Any:
    """Runs a program that knows nothing of replicas."""
    with replicator.AutoDist(["CPU:0", "CPU:1"]).scope() as autodist:
        loss = tf.reduce_mean(x)
        session = autodist.create_distributed_session()
    train_step = autodist.function(lambda batch: tf.reduce_sum(batch))
    autodist.keras_model(tf.keras.Sequential())
    print(autodist.replicator.num_replicas, train_step(x))
    return session.run(loss)
