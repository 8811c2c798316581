# SPDX-License-Identifier: Apache-2.0
"""The programs into which bad values go: a line of a user's code, and where it is.

Each is the source of a file, user_program.py, which nothing but this line makes wrong.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

FILE = "user_program.py"

STEP_MODES = ("eager", "function", "graph", "clone", "branch", "outside")
PLAIN_MODES = ("eager", "graph")

# What a line may use, and the lines that make it.
_SETUP = {
    "v": "with repl.context(): v = tf.Variable([1.0, 2.0])",
    "n": "with repl.context(): n = tf.Variable(1)",
    "keras": (
        "with repl.context(): "
        "keras = repl.wrap_optimizer(tf.keras.optimizers.Adam(0.1))"
    ),
    "v1": (
        "with repl.context(): v1 = repl.wrap_optimizer("
        "tf.compat.v1.train.MomentumOptimizer(0.1, 0.9))"
    ),
    "sonnet": "with repl.context(): sonnet = repl.wrap_optimizer(Sonnet())",
    "autodist": "autodist = replicator.AutoDist(['CPU:0', 'CPU:1'])",
    "single": (
        "def single(call):\n    with tf.Graph().as_default(), autodist.scope():\n"
        "        return call(tf.compat.v1.placeholder(tf.float32, [None]))"
    ),
    "whole": (
        "with replicator.Replicator(['CPU:0', 'CPU:1'], strategy="
        "replicator.strategy.PartitionedPS()).context():\n"
        "    whole = tf.Variable(tf.ones([4, 2]))"
    ),
    "plan": "plan = repl.build(lambda: repl.all_reduce(1.0)).plan",
}
_MODES = {
    "plain": "{setup}\nresult = {line}\n",
    "eager": "{setup}\ndef step():\n    return {line}\nresult = repl.run(step)\n",
    "function": (
        "{setup}\ndef step():\n    return {line}\n"
        "@tf.function\ndef call():\n    return repl.run(step)\nresult = call()\n"
    ),
    "graph": (
        "{setup}\ndef step():\n    return {line}\nresult = repl.run(step)\n"
        "with tf.compat.v1.Session() as session:\n"
        "    session.run(tf.compat.v1.global_variables_initializer())\n"
        "    result = session.run(result)\n"
    ),
    "branch": (
        "{setup}\ndef step():\n    return tf.cond(tf.constant(True), lambda: {line},\n"
        "        lambda: {line})\nresult = repl.run(step)\n"
    ),
}
_TEMPLATES = {"clone": "eager", "outside": "plain"}


@dataclasses.dataclass(frozen=True)
class Program:
    """A line of a user's code.

    Attributes:
        line: An expression with the value, `bad`.
        modes: The ways of running it.
        pool: The values of `bad`, one of cases.POOLS.
        want: The expected result on each replica if the value is accepted, as an
            expression of plain TensorFlow; "" if unknown.
        plain: The same line for plain TensorFlow, whose own error is right, too.
    """

    line: str
    modes: Sequence[str]
    pool: str = "values"
    want: str = ""
    plain: str = ""

    def source(self, mode: str) -> str:
        """Returns the source of the file that runs the line in a mode."""
        used = [
            lines
            for name, lines in _SETUP.items()
            if re.search(rf"\b{name}\b", self.line)
        ]
        in_step = self.modes == STEP_MODES
        template = _MODES[_TEMPLATES.get(mode, mode) if in_step else "plain"]
        return template.format(setup="\n".join(used), line=self.line)


def _step(line: str, want: str = "", plain: str = "") -> Program:
    return Program(line, STEP_MODES, want=want, plain=plain)


def _plain(
    line: str, pool: str = "values", modes: Sequence[str] = PLAIN_MODES
) -> Program:
    return Program(line, modes, pool)


def _command(line: str) -> Program:
    return Program(line, ("cold",), "texts")


_TWICE = "each(lambda t: t + t, bad)"
_SAME = "each(tf.identity, bad)"

# Examples, the flags by which they are small, and others of theirs.
_EXAMPLES: Mapping[str, tuple[Mapping[str, int], Sequence[str]]] = {
    "resnet": ({"epochs": 1, "width": 2, "blocks": 1}, ["learning_rate"]),
    "gan": (
        {"steps": 1, "channels": 2, "noise": 4, "global_batch_size": 8},
        ["generator_rate", "discriminator_rate"],
    ),
    "language_model": (
        {
            **{"steps": 1, "width": 8, "depth": 1, "context": 16, "sample_bytes": 2},
            "global_batch_size": 64,
        },
        ["learning_rate", "prompt", "temperature"],
    ),
}

PROGRAMS: tuple[Program, ...] = (
    # The constructor
    _plain("replicator.Replicator(bad)", modes=("eager", "cold")),
    _plain("replicator.Replicator([bad, 'CPU:1'])", modes=("eager", "cold")),
    _plain("replicator.Replicator([['CPU:0', bad], 'CPU:1'])", modes=("eager", "cold")),
    *(
        _plain(f"replicator.Replicator(['CPU:0', 'CPU:1'], {name}=bad)")
        for name in (
            *(
                "check",
                "variables",
                "algorithm",
                "fusion",
                "factors",
                "kernels",
                "build",
            ),
            "calibration",
            "strategy",
        )
    ),
    # The door for programs of one device
    _plain("replicator.AutoDist(bad)"),
    _plain("replicator.AutoDist(['CPU:0', 'CPU:1'], bad)"),
    _plain("replicator.AutoDist(['CPU:0', 'CPU:1'], build=bad)"),
    _plain("replicator.AutoDist(['CPU:0', 'CPU:1'], local_statistics=bad)"),
    *(
        _plain(f"autodist.{call}", modes=("eager",))
        for call in (
            "function(bad)",
            "function(tf.identity, loss=bad)",
            "function(tf.identity, input_signature=bad)",
            "function(lambda x: x)(bad)",
            "function(lambda x, y: x)(tf.ones([3]), bad)",
            "keras_model(bad)",
        )
    ),
    *(
        _plain(f"single(lambda x: {call})", modes=("eager",))
        for call in (
            "autodist.create_distributed_session(bad)",
            "autodist.create_distributed_session(loss=bad)",
            "autodist.create_distributed_session().run(bad)",
            "autodist.create_distributed_session().run(x, bad)",
            "autodist.create_distributed_session().run(x, {x: bad})",
            "autodist.create_distributed_session().run(x, {bad: [1.0]})",
            "autodist.create_distributed_session().make_callable(bad)",
            "autodist.session_creator(bad).create_session()",
            "autodist.session_creator(scaffold=bad).create_session()",
            "autodist.session_creator(checkpoint_dir=bad).create_session()",
        )
    ),
    # Variables in parts
    *(
        Program(line, ("eager",), plain=line)
        for line in (
            "whole.assign(bad)",
            "whole.assign_add(bad)",
            "whole.scatter_nd_update(bad, [[1.0, 2.0]])",
            "whole.scatter_nd_update([[0]], bad)",
            "whole.sparse_read(bad)",
            "tf.gather(whole, bad)",
            "tf.nn.embedding_lookup(whole, bad)",
        )
    ),
    _plain(
        "replicator.Replicator(['CPU:0'], strategy={'.*': replicator.strategy."
        "Partitioned(bad)})",
    ),
    _plain(
        "replicator.Replicator(['CPU:0'], calibration=written(bad))",
        *("calibrations", ("eager",)),
    ),
    _plain(
        "by_environment(bad) and replicator.Replicator(['CPU:0'])",
        *("calibrations", ("eager",)),
    ),
    # Strategies
    *(
        _plain(f"replicator.strategy.{made}", modes=("eager",))
        for made in (
            *("PS(bad)", "PS(sync=bad)", "PSLoadBalancing(staleness=bad)"),
            *("AllReduce(bad)", "AllReduce(all_reduce_spec=bad)"),
            *("AllReduce(compressor=bad)", "RandomAxisPartitionAR(seed=bad)"),
            *("Partitioned(bad)", "Partitioned(parts=bad)"),
            *("Auto(bad)", "Auto(rows=bad)", "tune(bad, trials=1)"),
            *("tune(print, trials=bad)", "tune(lambda chosen: bad, best=1)"),
            *("Rules({'x': bad})", "Strategy(replicas=[bad])", "Strategy([bad])"),
            *("PSSynchronizer(bad)", "AllReduceSynchronizer(group=bad)"),
            *("Strategy.load(bad)", "Strategy().save(bad)"),
            "Strategy.from_bytes(bad)",
            *("Strategy.from_json(bad)",),
            "Node(bad, replicator.strategy.AllReduceSynchronizer())",
            "Node('v', bad)",
        )
    ),
    # Several hosts
    _plain("replicator.connect(bad, timeout=0.01)"),
    _plain("replicator.connect(['localhost:1'], timeout=0.01, client=bad)"),
    *(
        _plain(
            f"replicator.connect(['localhost:1'], **{{'timeout': 0.01, '{name}': bad}})"
        )
        for name in ("timeout", "heartbeat")
    ),
    _plain("replicator.connect(['localhost:1'], timeout=0.01, optional=bad)"),
    _plain("replicator.ResourceSpec(bad)"),
    # Building and running
    _plain("repl.run(bad)"),
    _plain("repl.stages(bad).__enter__()"),
    _plain("repl.build(bad).plan"),
    _plain("repl.run(lambda: bad)"),
    _plain("repl.run(lambda: [bad] if repl.replica_id else [1.0])"),
    _plain("repl.run(lambda e: 1.0, bad)"),
    _plain("repl.run(lambda e: e, lambda: bad)"),
    _plain("repl.run(lambda e: e, lambda ctx: bad)"),
    _plain("repl.run(lambda e: e, lambda ctx: bad if ctx.replica_id else 1.0)"),
    _plain("repl.run(lambda e: e, lambda: lambda: bad)"),
    _plain("repl.run(lambda e: e, lambda: bad, input_mode='per_worker')"),
    _plain("repl.run(bad, lambda: 1.0)"),
    _plain("repl.run(lambda: 1.0, None, bad)"),
    _plain("repl.run(lambda e: e, lambda: 1.0, input_mode=bad)"),
    _plain("repl.run(lambda: 1.0, steps_per_call=bad)"),
    _plain("repl.run(lambda *e: 1.0, args=bad)"),
    _plain("repl.run(lambda e: e, args=(bad,))"),
    _plain("repl.run(lambda e: e, args=({'a': [bad, 1.0]},))"),
    _plain("repl.run(lambda e: e, args=(replicator.PerReplica(bad, 1.0),))"),
    _plain("repl.build(lambda e: e, args=(1.0,))(bad)"),
    _plain("repl.build(lambda e: e, args=(bad,)).plan"),
    _plain("repl.run(lambda e: 1.0, (bad, 1.0))"),
    _plain("repl.run(lambda x, y: 1.0, bad)"),
    _plain("repl.run(lambda x, y: 1.0, lambda: bad)"),
    _plain("repl.run(lambda e: 1.0, bad, input_mode='global_batch')"),
    _plain("repl.run(lambda e: e, lambda: bad, input_mode='global_batch')"),
    _plain("repl.run(lambda e: e, lambda: 1.0, remainder=bad)"),
    _plain("repl.run(lambda e: 1.0, bad, remainder='pad')"),
    _plain("repl.initialize(bad)"),
    _plain("repl.build(lambda: 1.0).initialize(bad)"),
    _plain("repl.build(lambda e: e, lambda: tf.data.Dataset.range(8)).initialize(bad)"),
    _step("repl.run(bad, None)"),
    _step("repl.build(lambda: bad)()"),
    _step("repl.logical_device(bad).__enter__()"),
    _plain("repl.group(bad)"),
    _plain("repl.group([0, bad])"),
    _plain("repl.groups(bad)"),
    _plain("repl.groups([[0], bad])"),
    _plain("repl.groups([[0], [bad]])"),
    _plain("replicator.InputContext(0, 2, 0, 2).per_replica_batch_size(bad)"),
    _plain("replicator.InputContext(0, bad, 0, 2).per_replica_batch_size(8)"),
    _plain("replicator.InputContext(0, 2, 0, 2, bad, 2).per_replica_batch_size(8)"),
    _plain("replicator.InputContext(0, 2, 0, 2, 0, bad).per_replica_batch_size(8)"),
    # Plans
    _plain("replicator.plan.Plan.from_json(bad)", modes=("eager",)),
    _plain("looked_at(replicator.plan.Plan.from_json(bad))", "plans", ("eager",)),
    _plain("replicator.plan.Plan.from_json(bad).print(nowhere)", "plans", ("eager",)),
    _plain("plan.print(bad)", modes=("eager",)),
    _plain("plan.plot(bad)", modes=("eager",)),
    # Primitives
    _step("repl.all_reduce(bad)", _TWICE),
    _step("repl.all_reduce([x, bad])", "[x + x, each(lambda t: t + t, bad)]"),
    _step("repl.all_reduce(x, bad)"),
    _step("repl.all_reduce(bad, 'mean')"),
    _step("repl.all_reduce(bad, 'max')"),
    _step("repl.all_reduce(bad, 'argmax')"),
    _step("repl.all_reduce(x, weight=bad)"),
    _plain("list(repl.epoch(lambda e: e, bad))"),
    _plain("repl.select(replicator.PerReplica(1.0, 2.0), bad)"),
    _step("repl.all_reduce(x, 'mean', weight=bad)"),
    _step("repl.all_reduce(x, group=bad)"),
    _step("repl.all_reduce(x, algorithm=bad)"),
    _step("repl.all_reduce(x, compressor=bad)"),
    _step("repl.all_reduce(bad, compressor='bf16')"),
    _step("repl.all_reduce([x, bad], 'mean', compressor='int8')"),
    _step("repl.all_reduce(bad, compressor='topk(ratio=0.5)')"),
    _step("repl.all_reduce(bad, compressor='ef(powersgd(rank=1))')"),
    _step("repl.all_reduce(x, bad, compressor='bf16')"),
    _step("repl.all_reduce(x, 'mean', weight=bad, compressor='bf16')"),
    _step("repl.all_reduce(bad if repl.replica_id else x)"),
    _step("repl.all_reduce(x, bad if repl.replica_id else 'sum')"),
    _step("repl.broadcast(bad)", _SAME),
    _step("repl.broadcast(x, bad)"),
    _step("repl.broadcast(x, group=bad)"),
    _step("repl.all_gather(bad)"),
    _step("repl.all_gather(x, bad)"),
    _step("repl.all_gather(bad, 0)"),
    _step("repl.reduce(bad)"),
    _step("repl.reduce(x, bad)"),
    _step("repl.reduce(x, op=bad)"),
    _step("repl.gather(bad)"),
    _step("repl.gather(x, bad)"),
    _step("repl.gather(x, axis=bad)"),
    _step("repl.scatter(bad)"),
    _step("repl.scatter(x, bad)"),
    _step("repl.scatter(x, axis=bad)"),
    _step("repl.scatter(bad, axis=0)"),
    _step("repl.reduce_scatter(bad)"),
    _step("repl.reduce_scatter(x, bad)"),
    _step("repl.reduce_scatter(x, axis=bad)"),
    _step("repl.all_to_all(bad, 0, 0)"),
    _step("repl.all_to_all(x, bad, 0)"),
    _step("repl.all_to_all(x, 0, bad)"),
    _step("repl.all_to_all(x, 0, 0, splits=bad)"),
    _step("repl.shift(bad)", _SAME),
    _step("repl.shift(x, bad)"),
    _step("repl.permute(bad, [(0, 1), (1, 0)])", _SAME),
    _step("repl.permute(x, bad)"),
    _step("repl.permute(x, [bad])"),
    _step("repl.permute(x, [(0, bad)])"),
    _step("repl.send(bad, 1) if repl.replica_id == 0 else repl.recv(x, 0)"),
    _step("repl.send(x, bad) if repl.replica_id == 0 else repl.recv(x, 0)"),
    _step("repl.send(x, 1, bad) if repl.replica_id == 0 else repl.recv(x, 0, bad)"),
    _step("repl.send(x, 1) if repl.replica_id == 0 else repl.recv(bad, 0)"),
    _step("repl.send(x, 1) if repl.replica_id == 0 else repl.recv(x, bad)"),
    _step("repl.barrier(bad)"),
    _step("repl.all_sum(bad)", _TWICE),
    _step("repl.all_max(bad)"),
    _step("repl.all_min(x, bad)"),
    _step("repl.map_reduce(bad, [1.0, 2.0])"),
    _step("repl.map_reduce(lambda t: t, bad)"),
    _step("repl.map_reduce(lambda t: bad, [1.0, 2.0])"),
    _step("repl.map_reduce(lambda t: t, [1.0, 2.0], bad)"),
    _step("repl.map_gather(bad, [1.0, 2.0])"),
    _step("repl.map_gather([bad, bad], [1.0, 2.0])"),
    _step("repl.map_gather(lambda t: t, bad)"),
    _step("repl.map_gather(lambda t: bad, [1.0, 2.0])"),
    _step("repl.linked(bad)"),
    _step("pair(repl.broadcast_object(bad))"),
    _step("pair(repl.broadcast_object(1, bad))"),
    _step("pair(repl.broadcast_object(1, group=bad))"),
    _step("pair(repl.all_gather_object(bad))"),
    _step("pair(repl.all_gather_object(1, bad))"),
    _step("repl.group([0, 1]).index(bad)"),
    # Optimizers
    _plain("repl.wrap_optimizer(bad)"),
    _plain("repl.keras_model(bad)"),
    _plain("repl.keras_model(tf.keras.Sequential(), local_statistics=bad)"),
    _plain("repl.wrap_optimizer(tf.keras.optimizers.SGD(0.1), bad)"),
    _plain("repl.wrap_optimizer(tf.keras.optimizers.SGD(0.1), accumulation_steps=bad)"),
    _plain("repl.wrap_optimizer(tf.keras.optimizers.SGD(0.1), compressor=bad)"),
    _plain("replicator.compressors.parse(bad)"),
    _plain("replicator.compressors.text(bad)"),
    _plain("replicator.compressors.TopK(bad)"),
    _plain("replicator.compressors.PowerSGD(bad)"),
    _plain("replicator.compressors.PowerSGD(warm_start=bad)"),
    _plain("replicator.compressors.PowerSGD(start_step=bad)"),
    _plain("replicator.compressors.ErrorFeedback(bad)"),
    _plain("replicator.compressors.Kept(bad)"),
    *(
        _step(f"{family}.{call}", plain=f"plain_{family}.{call}" if plain else "")
        for family, call, plain in (
            ("keras", "apply_gradients(bad)", True),
            ("keras", "apply_gradients([bad])", True),
            ("keras", "apply_gradients([(bad, v)])", True),
            ("keras", "apply_gradients([(x, bad)])", True),
            ("keras", "apply(bad, [v])", True),
            ("keras", "apply([x], bad)", True),
            ("keras", "apply([x], [bad])", True),
            ("keras", "apply(bad)", True),
            ("keras", "apply([x], [v], weight=bad)", False),
            ("v1", "apply_gradients(bad)", True),
            ("v1", "apply_gradients([bad])", True),
            ("v1", "apply_gradients([(bad, v)])", True),
            ("v1", "apply_gradients([(x, bad)])", True),
            ("v1", "apply_gradients([(x, v)], bad)", True),
            ("v1", "apply_gradients([(x, v)], None, bad)", True),
            ("v1", "apply_gradients([(x, v)], weight=bad)", False),
            ("sonnet", "apply(bad, [v])", True),
            ("sonnet", "apply([bad], [v])", True),
            ("sonnet", "apply([x], bad)", True),
            ("sonnet", "apply([x], [bad])", True),
            ("sonnet", "apply([x], [v], weight=bad)", False),
        )
    ),
    # Variables
    _step("v.assign(bad)", plain="plain_v.assign(bad)"),
    _step("v.assign_add(bad)", plain="plain_v.assign_add(bad)"),
    _step("n.assign_sub(bad)", plain="plain_n.assign_sub(bad)"),
    _step("v.scatter_update(bad)", plain="plain_v.scatter_update(bad)"),
    _step("v[bad]", plain="plain_v[bad]"),
    _step("v + bad", plain="plain_v + bad"),
    _step("v.sparse_read(bad)", plain="plain_v.sparse_read(bad)"),
    _step("tf.Variable(bad)", plain="tf.Variable(bad)"),
    _plain("made(repl, bad)"),
    # Programs
    _command("main('replicator.plan', bad)"),
    _command("main('replicator.plan', 'tests.bad_inputs.cases:good', '--json=' + bad)"),
    _command("main('replicator.plan', 'tests.bad_inputs.cases:good', '--plot=' + bad)"),
    _command("main('replicator.plan', 'tests.bad_inputs.cases:' + bad)"),
    _command("main('replicator.plan', '--' + bad)"),
    _command("main('replicator.plan', 'tests.bad_inputs.cases:good', bad)"),
    *(
        _command(f"main('replicator.calibrate', '--{flag}=' + bad, {least})")
        for flag in ("devices", "replicas", "kibibytes", "rounds", "output")
        for least in [
            ", ".join(
                repr(f"--{name}={value}")
                for name, value in (
                    ("devices", "CPU:0,CPU:1"),
                    ("replicas", "2"),
                    ("kibibytes", "1"),
                    ("rounds", "1"),
                )
                if name != flag
            )
        ]
    ),
    _command("main('replicator.calibrate', bad)"),
    *(
        _command(f"main('examples/{file}.py', {first}'--{flag}=' + bad)")
        for file, flags in (
            (
                "digits",
                (
                    *("devices", "epochs", "global_batch_size", "learning_rate"),
                    *("optimizer", "seed", "output_dir", "resume"),
                ),
            ),
            (
                "torch_style",
                (
                    "devices",
                    "epochs",
                    "batch_size",
                    "learning_rate",
                    "momentum",
                    "seed",
                ),
            ),
            (
                "global_batch_norm",
                (
                    *("devices", "epochs", "global_batch_size", "learning_rate"),
                    *("offset", "seed"),
                ),
            ),
        )
        for flag in flags
        for first in [
            ("'--output_dir=' + folder, " if file == "digits" else "")
            + ("" if flag == "epochs" else "'--epochs=1', ")
        ]
    ),
    *(
        _command(f"main('examples/{file}.py', '--epochs=1', bad)")
        for file in ("torch_style", "global_batch_norm")
    ),
    _command("main('examples/digits.py', '--output_dir=' + folder, '--epochs=1', bad)"),
    *(
        _command(f"main('examples/{file}.py', {given}, '--{flag}=' + bad)")
        for file, (small, others) in _EXAMPLES.items()
        for flag in (*small, *others, "devices", "seed", "output_dir", "resume")
        for given in [
            ", ".join(
                ["'--output_dir=' + folder"]
                + [repr(f"--{name}={small[name]}") for name in small if name != flag]
            )
        ]
    ),
)
