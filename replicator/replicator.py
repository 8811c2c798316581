# SPDX-License-Identifier: Apache-2.0
"""class Replicator: the user's entry point. It holds the settings and delegates."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

from replicator import devices, methods, optimizers, running
from replicator.cluster import peers
from replicator.costs import rates, rehearsal
from replicator.graph.order.effects import Ledger
from replicator.hosts import between, likeness
from replicator.hosts.asynchronous import clock, membership
from replicator.interop import distribute
from replicator.keras import model as keras_model
from replicator.options import Options
from replicator.options import check as check_option
from replicator.stages import Stages
from replicator.step import building, known, registry
from replicator.step.step_arguments import INPUT_MODES
from replicator.strategy import choosing
from replicator.strategy.description import Strategy
from replicator.strategy.facts import resources_of
from replicator.variables import locks
from replicator.variables.creation import VariableFactory
from replicator.variables.default_placement import VARIABLES
from replicator.world import World

_LOCAL_PREFIX = "/job:localhost/replica:0/task:0/device:"  # devices of this process


class Replicator(running.Running, methods.InStep):
    """Runs a training step written for one device on many, in one TensorFlow graph.

    Source: the interface of TF-Replicator (Buchlovsky et al. 2019, arXiv:1902.00465).

    Example:
        >>> repl = replicator.Replicator(["CPU:0", "CPU:1"])
        >>> with repl.context():
        ...     model = tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False)])
        ...     optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.1))
        >>> def input_fn(ctx):  # called once per replica
        ...     return tf.ones([8, 4]), tf.ones([8, 1])
        >>> def step_fn(batch):  # called once per replica, when the step is built
        ...     x, y = batch
        ...     with tf.GradientTape() as tape:
        ...         loss = tf.reduce_mean((model(x) - y) ** 2)
        ...     v = model.trainable_variables
        ...     optimizer.apply_gradients(zip(tape.gradient(loss, v), v))
        ...     return repl.all_reduce(loss, "mean")
        >>> losses = [repl.run(step_fn, input_fn) for _ in range(9)]
        >>> float(losses[8]) < float(losses[0])  # one value per replica, here equal
        True

    Args:
        devices: One device per replica, e.g. ["GPU:0", "GPU:1"] or ["CPU:0", "CPU:1"],
            with or without job and task; or a list of devices per replica. None: all
            accelerators, else the CPU. Logical CPU devices are created if TensorFlow
            has not started yet.
        check: Whether integers, booleans and strings that a step assigns to mirrored
            variables are compared in each step, even where they are equal by
            construction. If False, integers and booleans are compared only where they
            may differ.
        variables: Where variables live. "mirrored": each replica holds all variables.
            "sharded": each variable and its optimizer slots are held, and updated, by
            one replica; variables that a step uses in a way that needs a component on
            each replica (in a function with jit_compile=True) become mirrored, and its
            plan says so. "auto": sharded if all devices are CPUs of one process, else
            mirrored.
        algorithm: The algorithm of all_reduce, unless a call names one. "hub": one
            device reduces and sends out the result; "shuffled": each device does so
            with one slice; "tree": neighbours combine, then pairs of neighbours;
            "ring": slices travel from each device to the next; "nccl": NVIDIA's
            library, among whole GPUs of one host. None: the cheapest for each call.
            Each algorithm gives every replica the same bits, but the bits differ
            between algorithms: hub and shuffled add in replica order. On several hosts
            with several replicas each, every host reduces its own first, and the
            algorithm is the one used between hosts.
        fusion: Whether small tensors that are reduced together are sent together.
        factors: Whether sums of matrix products may send the factors instead.
        kernels: Whether products of few rows with a large transposed matrix, for which
            TensorFlow's CPU kernels are slow, are computed the other way around.
        build: "trace": step_fn is called once per replica. "clone": only for replica 0;
            the others are copies, built in a fraction of the time. Python then runs
            once, as in a tf.function, and cannot ask which replica it builds: what
            differs comes from the inputs, and groups, messages and objects are refused.
        strategy: The placement of each variable and how its gradient travels: a builder
            of `replicator.strategy`, a dictionary of builders by patterns of variables'
            paths, a Strategy, or the path of a saved one. Variables on which it does
            not decide follow `variables`. None: all variables do.
        calibration: A file written by `python -m replicator.calibrate`, with the costs
            measured on this machine. None: the file that the environment variable
            REPLICATOR_CALIBRATION names, if any, else costs measured elsewhere.
        input_mode: The `input_mode` of `run`, `build` and `epoch` where they are not
            given another: "per_replica", "per_worker" or "global_batch".

    Raises:
        DeviceError: A device does not exist, or is named twice.
        ArgumentError: An option has an invalid value, or the calibration cannot be
            read.
        StrategyError: The strategy is not a strategy, or cannot be loaded.
    """

    def __init__(
        self,
        devices: Sequence[str | Sequence[str]] | None = None,
        *,
        check: bool = False,
        variables: str = "auto",
        algorithm: str | None = None,
        fusion: bool = True,
        factors: bool = True,
        kernels: bool = True,
        build: str = "trace",
        strategy: Any = None,
        calibration: str | os.PathLike[str] | None = None,
        input_mode: str = "per_replica",
    ) -> None:
        check_option("Replicator", "input_mode", input_mode, INPUT_MODES)
        check_option("Replicator", "variables", variables, VARIABLES)
        self._input_mode = input_mode
        facts = peers.process_group()
        processes = None if facts is None else peers.Peers(facts)
        with peers.telling(processes):
            distribute.refuse_strategy("the constructor")
            options = Options(
                check=check,
                variables=variables,
                algorithm=algorithm,
                fusion=fusion,
                factors=factors,
                kernels=kernels,
                build=build,
                calibration=rates.load(calibration),
            )
            self._devices = _resolve(devices)
            world = _world([names[0] for names in self._devices], processes)
            strategy = rehearsal.strategy(strategy)
            builder = None if strategy is None else choosing.as_builder(strategy)
            if processes is not None:
                options = between.checked(
                    processes, self._devices, options, repr(builder)
                )
            options = likeness.checked(world.devices, options, processes)
        lock = locks.StepLock()
        self._resources = resources_of(world, options.calibration)
        chooser, member = None, membership.member()
        if builder is not None and member is None:
            chooser = choosing.StrategyChooser(builder, self._resources, world)
        self._settings = known.Settings(
            world=world,
            options=options,
            factory=VariableFactory(
                world,
                lock,
                options.variables,
                processes,
                chooser,
                None if member is None else member.store,
            ),
            ledger=Ledger(),
            lock=lock,
            peers=processes,
            chooser=chooser,
            clock=None if member is None else member.clock(clock.staleness(builder)),
        )
        self._steps = registry.Steps(self._settings, self._keep_plan)

    def _with(self, **settings: Any) -> Replicator:
        """Returns this Replicator with other settings for the steps that it builds."""
        other = copy.copy(self)
        other._settings = dataclasses.replace(self._settings, **settings)
        other._steps = registry.Steps(other._settings, self._keep_plan)
        return other

    def __repr__(self) -> str:
        names = [name.removeprefix(_LOCAL_PREFIX) for name in self.devices]
        return f"Replicator({names}, variables={self._settings.options.variables!r})"

    # --- Replicas ---------------------------------------------------------------------

    @property
    def devices(self) -> tuple[str, ...]:
        """The full name of each replica's first device.

        Example:
            >>> repl.devices[1]
            '/job:localhost/replica:0/task:0/device:CPU:1'
        """
        return tuple(names[0] for names in self._devices)

    @contextlib.contextmanager
    def stages(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Records the graphs of the steps that are built in this block.

        Each step has a folder with its graph after each stage: "0-original" is what
        step_fn builds for one device, "1-after-partition" has variables in parts,
        "2-after-in-graph" has all replicas, with placeholders for their communication,
        and "3-transformed" has real ops in place of these. Each graph is recorded as a
        folder for TensorBoard, whose graph dashboard shows every op, by device or by
        scope. Of a step that was built before, nothing is recorded; a warning says so.

        Example:
            >>> with repl.stages("stages"):
            ...     _ = repl.run(lambda: repl.all_reduce(1.0))
            >>> print(*sorted(p.name for p in pathlib.Path("stages").glob("*/*")))
            0-original 1-after-partition 2-after-in-graph 3-transformed

        Args:
            path: A folder, created if it does not exist.

        Raises:
            ArgumentError: The folder cannot be created.
        """
        stages = Stages(path)
        self._settings.stages.append(stages)
        try:
            yield
            stages.warn_of_missing()
        finally:
            self._settings.stages.remove(stages)

    @property
    def strategy(self) -> Strategy:
        """The strategy in force: how each trained variable is kept equal.

        It describes the variables that exist now, as they are now.

        Example:
            >>> with repl.context():
            ...     v = tf.Variable([1.0, 2.0], name="v")
            >>> repl.strategy.node("v").shape
            (2,)
        """
        trained = self._settings.factory.trained()
        return choosing.in_force(trained, self._resources, self._settings.chooser)

    # --- Variables and optimizers -----------------------------------------------------

    @methods.in_own_steps
    def context(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which new variables get one component per replica.

        Create models, optimizers, metrics and random generators in it. Variables
        created inside a step_fn are always replicated.

        Example:
            >>> with repl.context():
            ...     v = tf.Variable(1.0)
            >>> for component in v.components: print(component.device)
            /job:localhost/replica:0/task:0/device:CPU:0
            /job:localhost/replica:0/task:0/device:CPU:1

        Raises:
            ContextError: Called under a strategy of tf.distribute with replicas.
        """
        distribute.refuse_strategy("context")
        return building.replicated_variables(self._settings.factory)

    @methods.in_own_steps
    def wrap_optimizer(
        self,
        optimizer: Any,
        op: str = "mean",
        accumulation_steps: int = 1,
        compressor: Any = None,
    ) -> Any:
        """Returns an optimizer that combines gradients over the replicas.

        It is an instance of the optimizer's class, with its config and checkpoints. Its
        `apply` and `apply_gradients` also take `weight`, the weight of this replica's
        gradients in the mean, e.g. its number of examples.

        Example:
            >>> with repl.context():
            ...     v = tf.Variable(1.0)
            ...     optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.5))
            >>> def step_fn():  # the gradients are 1 and 2, their mean is 1.5
            ...     gradient = tf.constant(repl.replica_id + 1.0)
            ...     optimizer.apply_gradients([(gradient, v)])
            >>> _ = repl.run(step_fn)
            >>> float(v)
            0.25

        Args:
            optimizer: An optimizer of Keras 3, legacy Keras (tf_keras),
                tf.compat.v1.train or Sonnet 2, created under `context()`.
            op: How gradients are combined over the replicas, "mean" or "sum".
            accumulation_steps: The number of steps per update, which applies their
                mean.
            compressor: Compresses gradients in transit, of variables for which a
                strategy does not say: a Compressor, or its text, such as "bf16" or
                "ef(powersgd(rank=4))"; see `replicator.compressors`. Sparse gradients
                are cast at most. The optimizer's checkpoints hold the state that
                compressors keep between steps. None: gradients are sent as they are.

        Raises:
            ContextError: The optimizer holds variables created outside `context()`.
            ArgumentError: `optimizer` is none of these or is already wrapped, or an
                option is unknown.
        """
        return optimizers.wrap_optimizer(
            optimizer,
            self._settings.world,
            op,
            accumulation_steps,
            self.context,
            compressor=compressor,
        )

    @methods.in_own_steps
    def keras_model(self, model: Any, *, local_statistics: bool = False) -> Any:
        """Makes a Keras 3 model's fit, evaluate and predict run on the replicas.

        The model is changed in place, and keeps its class, config and files. Its own
        train_step, test_step and predict_step run as written for one device: each batch
        is the global batch, whose examples are divided among the replicas.

        Example:
            >>> with repl.context():
            ...     model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
            ...     model.compile(optimizer="sgd", loss="mse")
            >>> _ = repl.keras_model(model)
            >>> x, y = tf.ones([9, 4]), tf.ones([9, 1])
            >>> history = model.fit(x, y, batch_size=4, epochs=2, verbose=0).history
            >>> history["loss"][1] < history["loss"][0]
            True

        Args:
            model: A model created under `context()`, and compiled there, before or
                after.
            local_statistics: Whether each replica normalizes batches by the statistics
                of its own rows, which communicates nothing.

        Returns:
            The model.

        Raises:
            ContextError: The model or its optimizer was created outside the context.
            ArgumentError: `model` is not a Keras 3 model, or makes the functions that
                fit calls itself; or `local_statistics` is not a Boolean.
        """
        return keras_model.replicate(self, model, local_statistics)


def _resolve(
    names: Sequence[str | Sequence[str]] | None,
) -> tuple[tuple[str, ...], ...]:
    """Resolves device names; a function, because the class has a property `devices`."""
    return devices.resolve(names)


def _world(names: Sequence[str], processes: peers.Peers | None) -> World:
    """Returns the world of these devices, of which this process may build a part."""
    if processes is None:
        return World.single_process(names)
    return World.divided(devices.processes(names), processes.process, names)
