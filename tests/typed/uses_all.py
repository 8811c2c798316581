# SPDX-License-Identifier: Apache-2.0
"""Uses every public name and member as a user's program, for `mypy --strict` only.

test_strict.py says what it has to use, and runs mypy on it.
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
    print(replicator.connect(optional=True))
    with repl.context(), repl.stages("stages"):
        v = tf.Variable([1.0, 2.0])
        optimizer = repl.wrap_optimizer(
            tf.keras.optimizers.SGD(0.1), compressor="ef(int8)", accumulation_steps=2
        )
    repl.keras_model(tf.keras.Sequential(), local_statistics=True)
    assert isinstance(v, replicator.ReplicatedVariable)
    components: tuple[tf.Variable, ...] = v.components
    owner: int | None = v.owner
    print(components, owner)

    def input_fn(ctx: replicator.InputContext) -> tf.data.Dataset:
        size: int = ctx.per_replica_batch_size(8)
        own: list[int] = [ctx.replica_id, ctx.num_replicas, ctx.host_id, ctx.num_hosts]
        data = tf.data.Dataset.range(sum(own)).batch(size)
        return data.shard(ctx.num_pipelines, ctx.pipeline_id)

    def step_fn(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = repl.linked(tf.reduce_sum(x * v))
        optimizer.apply_gradients([(tape.gradient(loss, v), v)])
        return repl.all_reduce(loss, "mean", weight=repl.weight)

    step: replicator.Step = repl.build(step_fn, input_fn)
    per_replica: replicator.PerReplica = step()
    loss: float = per_replica.item()
    print(loss)
    step.initialize()
    step_plan: plan.Plan = step.plan
    look_at(step_plan)
    look_at(repl.plan)
    repl.initialize()
    positions: replicator.Positions = repl.inputs
    checkpoint = tf.train.Checkpoint(inputs=positions)
    names: tuple[str, ...] = repl.devices
    print(checkpoint, names, repl.num_replicas)
    losses: replicator.PerReplica = repl.run(step_fn, input_fn, steps_per_call=2)
    for result in repl.epoch(step_fn, input_fn, input_mode="per_replica"):
        print(repl.select(result, 0))
    alone = replicator.PerReplica(1.0, 2.0)
    print(float(alone[0]), len(losses))
    return np.asarray(losses.numpy())


def communicate(repl: replicator.Replicator, x: tf.Tensor) -> list[tf.Tensor]:
    """Calls every primitive."""
    pair: replicator.Group = repl.group([0, 1])
    halves: replicator.Partition = repl.groups([[0, 1], [2, 3]])
    own: replicator.Group = halves.own
    replica_id: int = repl.replica_id
    print(own.index(replica_id), pair.members, halves.groups)
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
    totals: plan.Totals = found.totals
    total: plan.Total = totals.per_step
    in_loops: plan.Totals = found.by_primitive["all_reduce"]
    found.print()
    found.plot("plan.svg")
    again = plan.Plan.from_json(found.to_json())
    rows: tuple[plan.Row, ...] = again.rows
    slowest: plan.Wire | None = again.slowest_link
    if slowest is not None:
        print(again.hosts[slowest.source], again.devices, again.notes)
    communications: int = total.communications + in_loops.per_turn.unknown
    seconds: float | None = again.seconds
    pulled: int | None = again.pulled
    print(communications, seconds, pulled, *map(described, rows))
    return total.nbytes


def described(row: plan.Row) -> str:
    """Describes a communication."""
    value: plan.Value = row.operands[0][0]
    shape: tuple[int | None, ...] | None = value.shape
    words: list[str] = [row.primitive, row.reduction, row.algorithm, value.dtype]
    words += [row.place, row.synchronizer, row.scope, *row.lines, *row.path]
    sizes: list[int | None] = [row.nbytes, row.between, row.within, row.times]
    by_replica: dict[int, int | None] = dict(zip(row.group, row.sent, strict=True))
    links: tuple[plan.Link, ...] = row.links
    for link in links:
        ends: tuple[int, int] = (link.source, link.destination)
        print(ends, link.nbytes, row.backward, row.options.get("root"))
    for wire in row.wires:
        rate: float = (wire.nbytes or 0) / wire.seconds
        print(wire.source, wire.destination, wire.messages, rate, row.seconds)
    return f"{words} {shape} {sizes} {by_replica}"


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
                how = strategy.PS().on(resources.cpus[0])
                yield strategy.Node(variable.path, how)
            elif variable.sparse or not variable.trainable or variable.whole:
                yield None  # as without a strategy
            else:
                both = strategy.AllReduceSynchronizer(group=n // 2)
                yield strategy.Node(variable.path, both)


class Halves(strategy.Builder):
    """Splits large variables."""

    may_divide = True

    def nodes(
        self,
        variables: Iterable[strategy.VariableFacts],
        resources: strategy.Resources,
    ) -> Iterator[strategy.Node | None]:
        """Yields a node for each variable, with the faster synchronizer."""
        calibration = resources.calibration
        for variable in variables:
            size: int = variable.shape[0] if variable.shape else 1
            seconds: float = calibration.seconds(
                "hub", "cpu", resources.num_replicas, variable.nbytes
            )
            bandwidth: float = resources.bandwidth(*resources.devices[:2])
            if size < 2 or seconds < variable.nbytes / bandwidth:
                how = strategy.AllReduce().of(variable.order)
                yield strategy.Node(variable.path, how, dtype=variable.dtype)
            else:
                servers = [strategy.PSSynchronizer(name) for name in resources.cpus[:2]]
                sizes = [size // 2, size - size // 2]
                yield strategy.Node.in_parts(variable.path, 0, sizes, servers)


def costs(resources: strategy.Resources) -> dict[str, float]:
    """Predicts what communication costs."""
    calibration: replicator.Calibration = resources.calibration
    memory: dict[str, int] = dict(resources.memory)
    rates: replicator.Rates = calibration.of("cpu")
    between = calibration.between("/job:worker/task:0", "/job:worker/task:1")
    json: str = calibration.to_json()
    print(memory, json, resources.one_program, calibration.rates, calibration.links)
    return {
        "op": rates.op,
        "message": rates.message,
        "gibibyte": 2**30 * (between.link + rates.add + rates.copy),
        "apart": float(rates.apart),
        "levels": calibration.seconds_in_levels("ring", "gpu", 4, 2, 2**20),
    }


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
    Halves(),
)


def design(facts: Sequence[strategy.VariableFacts]) -> strategy.Strategy:
    """Tries builders on variables that need not exist."""
    resources = strategy.Resources(("CPU:0", "CPU:1"))
    rules = strategy.Rules({"kernel": strategy.Sharded(), ".*": strategy.PS()})
    paths: list[str] = [variable.path for variable in facts]
    number: int | None = rules.matching(paths[0])
    print(number, rules.missing(paths), rules.hidden(paths), rules.may_divide)
    axis, count = strategy.PartitionedAR().cutter()(facts[0])
    print(axis, count, strategy.PartitionedPS().count(6))
    assumed: strategy.Assumed = strategy.Auto(slots=1).assumed
    print(assumed.slots, assumed.rows)
    built: strategy.Strategy = rules.build(facts, resources)
    for node in built.nodes:
        print(told(node))
    return built


def told(node: strategy.Node) -> str:
    """Describes how a variable is kept equal."""
    how = node.synchronizer
    if isinstance(how, strategy.PSSynchronizer):
        place: str = how.reduction_destination
        waits: bool = how.sync and not how.local_replication
        return f"{node.name}: {place} {waits} {how.staleness} {how.compressor}"
    if isinstance(how, strategy.AllReduceSynchronizer):
        group: int = how.group
        return f"{node.name}: {how.spec} {group} {how.compressor}"
    parts: list[str] = [told(part) for part in node.parts]
    size: int = node.shape[node.axis or 0] if node.shape else sum(node.sizes)
    extents: tuple[int, ...] = node.extents(size)
    costs: tuple[int | None, int | None, float | None]
    costs = (node.nbytes, node.sent, node.seconds)
    return f"{node.partitioner} {node.dtype} {parts} {extents} {costs}"


def choose(devices: Sequence[str]) -> strategy.Strategy:
    """Measures which strategy is the fastest, and saves it."""

    def make(chosen: Any) -> tuple[replicator.Replicator, Any]:
        repl = replicator.Replicator(devices, strategy=chosen)
        return repl, lambda: repl.all_reduce(1.0)

    fastest: strategy.Strategy = strategy.tune(make, strategies=BUILDERS)
    trials: tuple[strategy.Trial, ...] = fastest.trials
    times: tuple[float, float | None] = (trials[0].predicted, trials[0].measured)
    print(trials[0].builder, trials[0].strategy, times, trials[0].problem)
    node: strategy.Node | None = fastest.node("dense/kernel")
    print(node, sorted(fastest.by_name), fastest.id, fastest.path, fastest.replicas)
    fastest.save("fastest.pb")
    fastest.plot("fastest.svg")
    for again in (
        strategy.Strategy.from_file("fastest.pb"),
        strategy.Strategy.from_bytes(fastest.to_bytes()),
        strategy.Strategy.from_json(fastest.to_json()),
    ):
        assert again == fastest
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


class Owing(compressors.Compressor):
    """Uses all that a link offers."""

    owes = True
    rows = tf.bfloat16

    def reduce(
        self, tensors: Sequence[tf.Tensor], link: compressors.Link
    ) -> compressors.Sums:
        """Returns the sums of what is not kept for later steps."""
        names: tuple[str, ...] = link.names
        members: tuple[int, ...] = link.members
        print(names, members, link.policies, link.place, link.algorithm)
        if link.size == 1 or link.keeps_rest or link.scale is None:
            inner: compressors.Sums = compressors.BF16().reduce(
                tensors[:1], link.of([0])
            )
            return compressors.Sums([*inner.totals], [*inner.sent])
        residual: compressors.Residual = link.residual(0, tensors[0])
        target = tensors[0] + link.scaled(residual.read())
        noise = link.uniform(target.shape, target.dtype)
        unit = link.factor(0, lambda: tf.constant(1.0))
        sent = tf.where(link.is_spoilt, noise, tf.round(target / unit))
        residual.write(link.unscaled(target - sent))
        rows: list[tf.Tensor] = link.exchange([tf.reshape(sent, [link.size, -1])])
        (total,) = link.collect([tf.reduce_sum(rows[0], 0)])
        (gathered,) = link.gather([{"count": link.count()}])
        link.write(unit, tf.reduce_max(gathered["count"]))
        return compressors.Sums([tf.reshape(total, sent.shape)], [sent])


COMPRESSORS: Sequence[compressors.Compressor] = (
    compressors.BF16(),
    compressors.ErrorFeedback(compressors.TopK(0.1)),
    compressors.FP16(),
    compressors.Int8(),
    compressors.PowerSGD(rank=2),
    Sign(),
    Half(),
    Owing(),
)


def describe() -> str:
    """Returns a compressor's text."""
    kept = compressors.Kept("topk(ratio=0.1)")
    inner: compressors.Compressor = kept.compressor
    parsed: compressors.Compressor | None = compressors.parse("ef(int8)")
    if isinstance(parsed, compressors.ErrorFeedback):
        inner = parsed.compressor
    if isinstance(inner, compressors.TopK):
        print(f"{inner.ratio:.1%}")
    if isinstance(inner, compressors.PowerSGD):
        print(inner.rank, inner.warm_start, inner.start_step)
    return compressors.text(parsed) + f"{inner.rows} {inner.owes}"


def on_hosts() -> int:
    """Trains on several hosts."""
    spec = replicator.ResourceSpec("resources.yml")
    by_host: tuple[tuple[str, ...], ...] = spec.by_host
    print(spec.chief, spec.devices, by_host)

    def train_on(cluster: replicator.Cluster) -> int:
        repl = replicator.Replicator(cluster.devices)
        kept: replicator.Checkpoint = cluster.checkpoint("checkpoints", inputs=repl)
        steps_done = 0
        for step in kept.steps(100, every=10):
            steps_done = step
            cluster.check()
            with cluster.named():
                repl.run(lambda: repl.all_reduce(1.0))
        latest: str | None = kept.latest
        if cluster.host_id == 0:
            print(latest, kept.save(), kept.step)
        return steps_done

    with replicator.connect(timeout=10.0) as connected:
        print(connected.num_hosts, connected.hosts, connected.host_of("CPU:0"))
        arguments: dict[str, Any] = connected.session_arguments()
        tf.compat.v1.Session(**arguments)
        print(connected.source, connected.heartbeat)
    if isinstance(connected, replicator.AsynchronousCluster):
        print(connected.num_hosts)  # of the programs that train
    if connected.connected:
        connected.close()
    try:
        return replicator.resilient(train_on, max_restarts=3)
    except replicator.HostLostError as error:
        lost: tuple[str, ...] = error.hosts
        print(lost)
    except replicator.ContextError as error:
        print(error.outside)
    return 0


def for_one_device(x: np.ndarray[Any, Any]) -> Any:
    """Runs a program that knows nothing of replicas."""
    with replicator.AutoDist(["CPU:0", "CPU:1"]).scope() as autodist:
        loss = tf.reduce_mean(x)
        session: replicator.DistributedSession
        session = autodist.create_distributed_session()
        creator: tf.compat.v1.train.SessionCreator = autodist.session_creator()
        print(creator.create_session())
    train_step: replicator.DistributedFunction
    train_step = autodist.function(lambda batch: tf.reduce_sum(batch))

    @autodist.function(input_signature=[tf.TensorSpec([None])], loss="mean")
    def evaluate(batch: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(batch)

    autodist.keras_model(tf.keras.Sequential())
    print(autodist.replicator.num_replicas, train_step(x), evaluate(x))
    in_force: strategy.Strategy = session.strategy
    print(in_force, [device.name for device in session.list_devices()])
    try:
        session.partial_run(session.partial_run_setup([loss]), loss)
    except replicator.UnsupportedError:
        run = session.make_callable(loss)
        print(run())
    value = session.run(loss)
    session.close()
    return value
