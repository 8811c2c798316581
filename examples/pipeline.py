# SPDX-License-Identifier: Apache-2.0
"""Trains a network whose layers are on different devices, as a pipeline.

    python examples/pipeline.py --devices=CPU:0,CPU:1 --micro_batches=4

Each device has one stage of the network: some of its layers, with their optimizer's
state. A batch is cut into micro-batches, so that a stage can work on one of them while
the next stage works on the one before it. All of them go forward, then all go backward,
their gradients are summed, and one update follows (GPipe, Huang et al. 2019,
arXiv:1811.06965). There are two ways to write this, and --mode chooses:

    messages  each stage is a replica of its own, and passes its output on by
              `repl.send` and `repl.recv`, whose gradients return automatically
    devices   one replica has all the devices: stages are placed by
              `repl.logical_device`, and the backward pass is written out

With --pipelines=2 there are two such pipelines, on half of the devices each, which
train on different examples. The losses are those of one device (--devices=CPU:0),
except for rounding.

The data are the 1,797 images of scikit-learn's `load_digits`. The output folder gets

    checkpoints/  the last three: layers, optimizer, step and history. They may be
                  resumed on any number of stages
    history.json  the loss of every step and the test accuracy after every epoch
    summaries/    the same for TensorBoard: tensorboard --logdir runs/pipeline
    curves.png    the same as a picture
    plan.png      the replicas of a training step as lanes, and who sends what to whom
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import support

import numpy as np
import tensorflow as tf
from absl import flags
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import replicator
from replicator import strategy

WIDTHS = (128, 128, 128, 10)  # of the layers: as many stages at most
TEST_SHARE = 0.2  # of the images: 360

FLAGS = flags.FLAGS
support.define_flags("runs/pipeline", epochs=20)
flags.DEFINE_enum(
    "mode",
    "messages",
    ["messages", "devices"],
    "Whether stages are replicas, or devices of one.",
)
support.define_count("micro_batches", 4, "Micro-batches per batch of a pipeline.")
support.define_count("pipelines", 1, "Number of identical pipelines.")
support.define_count("global_batch_size", 64, "Images per step.")
support.define_positive("learning_rate", 1e-3, "Adam's learning rate.")


# --- The network and its stages -------------------------------------------------------


class OnDevices(strategy.Builder):
    """Places stage k's variables, and their optimizer's state, on device k alone."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = devices

    def nodes(
        self,
        variables: Iterable[strategy.VariableFacts],
        resources: strategy.Resources,
    ) -> Iterator[strategy.Node]:
        """Yields each variable's placement; its path begins with "stage_k"."""
        for variable in variables:
            stage = int(variable.path.split("/")[0].removeprefix("stage_"))
            where = strategy.PSSynchronizer(self._devices[stage])
            yield strategy.Node(variable.path, where)


def make_stages(count: int, size: int) -> list[tf.keras.Sequential]:
    """Returns the stages of a network from rows of `size` numbers to 10 logits."""
    stages, layers = [], tf.keras.layers
    for k, widths in enumerate(np.array_split(WIDTHS, count)):
        stage = tf.keras.Sequential([layers.Input((size,))], name=f"stage_{k}")
        for width in map(int, widths):
            activation = None if width == WIDTHS[-1] else "relu"
            stage.add(layers.Dense(width, activation))
            size = width
        stages.append(stage)
    return stages


# --- Stages on replicas ---------------------------------------------------------------


class Messages:
    """The steps of one replica per stage; replica r has stage r % stages.

    Args:
        repl: One replica per stage of each pipeline.
        stages: The stages of the network.
        optimizer: Wrapped, with op="sum".
        micro_batches: The number of micro-batches per batch.
    """

    def __init__(
        self,
        repl: replicator.Replicator,
        stages: Sequence[tf.keras.Sequential],
        optimizer: Any,
        micro_batches: int,
    ) -> None:
        self._repl, self._stages, self._optimizer = repl, stages, optimizer
        self._micro_batches = micro_batches
        self._pipelines = repl.num_replicas // len(stages)

    def train_step(self, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """Trains on a batch; each replica runs its stage on all micro-batches."""
        variables = variables_of(self._stages)
        loss = tf.constant(0.0)  # and stays so, except on the last stage
        with tf.GradientTape() as tape:
            cuts = (tf.split(x, self._micro_batches) for x in (images, labels))
            for x, y in zip(*cuts, strict=True):
                logits = self._forward(x, tape)
                if logits is not None:
                    loss += mean_loss(y, logits) / self._micro_batches
            # The gradient of a sent value comes from its receiver.
            linked = self._repl.linked(loss / self._pipelines)
        zero = tf.UnconnectedGradients.ZERO  # other stages' variables have no gradient
        sources = [variable.value for variable in variables]  # TensorFlow's, not Keras'
        gradients = tape.gradient(linked, sources, unconnected_gradients=zero)
        self._optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return self._repl.all_reduce(loss, "sum") / self._pipelines

    def eval_step(
        self, images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor
    ) -> tf.Tensor:
        """Returns how many images of a batch all pipelines classify correctly."""
        logits = self._forward(images)
        right = tf.constant(0.0)
        if logits is not None:
            right = tf.reduce_sum(weights * correct(labels, logits))
        return self._repl.all_reduce(right, "sum")

    def _forward(
        self, images: tf.Tensor, tape: tf.GradientTape | None = None
    ) -> tf.Tensor | None:
        """Runs one stage on a micro-batch; the last one returns logits."""
        replica_id = self._repl.replica_id
        number = replica_id % len(self._stages)
        stage, hidden = self._stages[number], images
        if number > 0:
            like = tf.zeros([len(images), stage.input_shape[-1]])
            if tape is not None:
                tape.watch(like)  # so that its gradient is sent back
            hidden = self._repl.recv(like, replica_id - 1)
        hidden = stage(hidden)
        if number == len(self._stages) - 1:
            return hidden
        self._repl.send(hidden, replica_id + 1)
        return None


# --- Stages on the devices of one replica ---------------------------------------------


class Devices:
    """The steps of one replica per pipeline, which has a device for each stage.

    Args: as for Messages, with as many replicas as there are pipelines.
    """

    def __init__(
        self,
        repl: replicator.Replicator,
        stages: Sequence[tf.keras.Sequential],
        optimizer: Any,
        micro_batches: int,
    ) -> None:
        self._repl, self._stages, self._optimizer = repl, stages, optimizer
        self._micro_batches = micro_batches

    def train_step(self, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """Trains on a batch: all micro-batches forward, then all backward."""
        cuts = (tf.split(x, self._micro_batches) for x in (images, labels))
        passes = [self._forward(x, y) for x, y in zip(*cuts, strict=True)]
        gradients = [self._backward(tapes) for tapes in passes]
        summed: list[tuple[tf.Tensor, Any]] = []
        for k, stage in enumerate(self._stages):
            with self._repl.logical_device(k):
                stage_gradients = zip(
                    *(of_stages[k] for of_stages in gradients), strict=True
                )
                sums = map(tf.add_n, stage_gradients)
                summed += zip(sums, stage.trainable_variables, strict=True)
        self._optimizer.apply_gradients(summed)
        losses = [tapes[-1][2] for tapes in passes]
        return self._repl.all_reduce(tf.add_n(losses), "sum")

    def eval_step(
        self, images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor
    ) -> tf.Tensor:
        """Returns how many images of a batch all pipelines classify correctly."""
        hidden = images
        for k, stage in enumerate(self._stages):
            with self._repl.logical_device(k):
                hidden = stage(hidden)
        right = tf.reduce_sum(weights * correct(labels, hidden))
        return self._repl.all_reduce(right, "sum")

    def _forward(self, images: tf.Tensor, labels: tf.Tensor) -> list[Any]:
        """Passes a micro-batch through all stages.

        Returns:
            For each stage its tape, its input and its output; the last stage's output
            is its share of the loss.
        """
        tapes, hidden = [], images
        share = self._micro_batches * self._repl.num_replicas
        for k, stage in enumerate(self._stages):
            with self._repl.logical_device(k), tf.GradientTape() as tape:
                tape.watch(hidden)
                output = stage(hidden)
                if k == len(self._stages) - 1:
                    output = mean_loss(labels, output) / share
            tapes.append((tape, hidden, output))
            hidden = output
        return tapes

    def _backward(self, tapes: Sequence[Any]) -> list[list[tf.Tensor]]:
        """Returns the gradients of each stage's variables.

        One tape over all stages would do, except that `gradient` places its ops where
        it is called, not where the forward pass was.
        """
        gradients: list[list[tf.Tensor]] = []
        upstream = None  # the gradient of the stage's output
        for k, (tape, hidden, output) in reversed(list(enumerate(tapes))):
            sources = [self._stages[k].trainable_variables, hidden]
            with self._repl.logical_device(k):
                own_gradients, upstream = tape.gradient(output, sources, upstream)
            gradients.insert(0, own_gradients)
        return gradients


def variables_of(stages: Sequence[tf.keras.Sequential]) -> list[Any]:
    """Returns the variables of all stages, in the order of the layers."""
    return [v for stage in stages for v in stage.trainable_variables]


def mean_loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Returns the mean cross-entropy."""
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return tf.reduce_mean(losses)


def correct(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Returns 1 for each row whose largest logit is the label's, else 0."""
    return tf.cast(tf.argmax(logits, axis=-1) == labels, tf.float32)


# --- The program ----------------------------------------------------------------------


class Training:
    """Replicas, network and steps of either mode.

    Args:
        devices: Those of the first pipeline, then those of the next.
        mode: "messages" or "devices".
        pipelines: How many share the devices.
        micro_batches: The number of micro-batches per batch of a pipeline.
        learning_rate: Adam's.
        seed: The seed of the initial weights.
    """

    def __init__(
        self,
        devices: Sequence[str],
        mode: str = "messages",
        pipelines: int = 1,
        micro_batches: int = 1,
        learning_rate: float = 1e-3,
        seed: int = 1,
    ) -> None:
        count = len(devices) // pipelines  # of stages
        groups: Sequence[Any] = devices
        if mode == "devices":
            groups = [devices[k * count :][:count] for k in range(pipelines)]
        first = OnDevices(devices[:count])
        self.repl = replicator.Replicator(groups, strategy=first)
        self.replicas_per_pipeline = len(groups) // pipelines
        tf.keras.utils.set_random_seed(seed)
        with self.repl.context():
            self.stages = make_stages(count, size=64)
            adam = tf.keras.optimizers.Adam(learning_rate)
            self.optimizer = self.repl.wrap_optimizer(adam, op="sum")
            self.optimizer.build(variables_of(self.stages))
        make_steps: Callable[..., Any] = Messages if mode == "messages" else Devices
        steps = make_steps(self.repl, self.stages, self.optimizer, micro_batches)
        self.train_step, self.eval_step = steps.train_step, steps.eval_step

    def input(self, input_fn: support.InputFn) -> support.InputFn:
        """Returns an input_fn that gives all replicas of a pipeline the same batches.

        Args:
            input_fn: The input_fn for one replica per pipeline.
        """

        def of_pipeline(ctx: replicator.InputContext) -> tf.data.Dataset:
            pipelines = ctx.num_replicas // self.replicas_per_pipeline
            pipeline = ctx.replica_id // self.replicas_per_pipeline
            return input_fn(
                replicator.InputContext(pipeline, pipelines, pipeline, pipelines)
            )

        return of_pipeline


def load_examples() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns images, float32 [n, 64] within 0 to 1, and labels; to train, to test."""
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int64)
    parts = train_test_split(
        *(images, labels), test_size=TEST_SHARE, stratify=labels, random_state=0
    )
    return parts[0::2], parts[1::2]


def check_flags(examples: int) -> None:
    """Raises an error if the flags do not fit together."""
    stages, rest = divmod(len(FLAGS.devices), FLAGS.pipelines)
    if rest or not 1 <= stages <= len(WIDTHS):
        raise support.UsageError(
            f"--pipelines={FLAGS.pipelines} on {len(FLAGS.devices)} devices: each must "
            f"have the same number of them, from 1 to {len(WIDTHS)}"
        )
    shares = FLAGS.pipelines * FLAGS.micro_batches
    if FLAGS.global_batch_size % shares:
        raise support.UsageError(
            f"--global_batch_size={FLAGS.global_batch_size} cannot be cut into "
            f"{shares} micro-batches of one size"
        )
    support.check_batch_size("global_batch_size", FLAGS.pipelines, examples)


def main() -> str:
    """Trains as the flags say; returns the last line to print."""
    train, test = load_examples()
    check_flags(len(train[0]))
    output_dir = support.output_folder()
    training = Training(
        *(FLAGS.devices, FLAGS.mode, FLAGS.pipelines, FLAGS.micro_batches),
        *(FLAGS.learning_rate, FLAGS.seed),
    )
    batch_size = FLAGS.global_batch_size
    steps_per_epoch = len(train[0]) // batch_size
    layers = [layer for stage in training.stages for layer in stage.layers]
    run = support.Run(
        output_dir,
        support.settings("global_batch_size", "learning_rate", "seed"),
        {"layers": layers, "optimizer": training.optimizer},
        steps=FLAGS.epochs * steps_per_epoch,
        steps_per_epoch=steps_per_epoch,
        resume=FLAGS.resume,
        panels=support.LOSS_AND_ACCURACY,
    )
    repl = training.repl
    batches = support.shuffled_input(train, batch_size, FLAGS.seed, run.step)
    train_step = repl.build(training.train_step, training.input(batches))
    pass_over_test = support.single_pass_input(test, batch_size)
    eval_step = repl.build(training.eval_step, training.input(pass_over_test))
    train_step.plan.plot(output_dir / "plan.png")

    test_accuracy = support.share_of_right(eval_step, len(test[0]), batch_size)
    accuracy = run.train(train_step, test_accuracy)
    return f"Test accuracy {accuracy:.4f}. Results are in {output_dir}."


if __name__ == "__main__":
    support.start(main)
