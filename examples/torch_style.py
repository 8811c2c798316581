# SPDX-License-Identifier: Apache-2.0
"""The programs of a tutorial on torch.distributed, line by line, on several replicas.

    python examples/torch_style.py --devices=CPU:0,CPU:1,CPU:2

There, one process per rank runs `main(rank, world_size)`; here, `Replicator.run` calls
it once per replica and builds one graph of it. Each line that communicates has its
torch counterpart beside it. Four programs:

1. rank 0 sends a tensor to rank 1;
2. all ranks of a world of 3 sum up a tensor;
3. rank 0 sends its initial weights to its siblings, which have drawn others;
4. each rank trains a LeNet on its own portion of scikit-learn's digits. The gradients
   are summed by hand, so that all ranks make the same update: synchronous SGD.

Each program's numbers are checked: the last one's against plain TensorFlow on one
device, which takes the portions of all ranks in each step. A wrong number ends the
program with status 1.

Source: A. Das, "Deep Learning at scale: The 'torch.distributed' API", 2018.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import support

import numpy as np
import tensorflow as tf
from absl import flags
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import replicator

WORLD = 3  # the tutorial's, for its all-reduce

FLAGS = flags.FLAGS
support.define_flags(
    devices=["CPU:0", "CPU:1", "CPU:2"],
    epochs=10,
    seed="Seed of the weights and of the order of the images.",
)
support.define_count("batch_size", 16, "Images per step and rank.")
support.define_positive("learning_rate", 0.05, "The learning rate of SGD.")
support.define_between("momentum", 0.85, "The momentum of SGD.", 0.0, 1.0)


class WrongNumber(Exception):
    """A program computed a wrong result."""


def check(
    what: str, found: Sequence[Any], expected: Sequence[Any], tolerance: float = 0.0
) -> None:
    """Raises WrongNumber unless all arrays are as expected; prints that they are."""
    pairs = zip(found, expected, strict=True)
    error = np.max([np.max(np.abs(np.subtract(f, e))) for f, e in pairs])
    if not error <= tolerance:
        raise WrongNumber(f"{what}: off by {error:.1e}")
    print(f"  checked: {what}" + (f", to {error:.1e}" if tolerance else ""))


# --- 1. Point to point ---------------------------------------------------------------


def point_to_point(devices: Sequence[str]) -> None:
    """Sends a tensor from rank 0 to rank 1."""
    repl = replicator.Replicator(devices[:2])

    def main() -> tf.Tensor:
        rank = repl.replica_id  # dist.get_rank()
        if rank == 0:
            x = tf.constant([1.0, -1.0])
            repl.send(x, 1)  # dist.send(x, dst=1)
            say("  rank 0 has sent", x)
            return x
        z = tf.constant([0.0, 0.0])  # the shape and dtype to receive
        z = repl.recv(z, 0)  # dist.recv(z, src=0)
        say("  rank 1 has received", z)
        return z

    check("both ranks have it", repl.run(main), ([1.0, -1.0], [1.0, -1.0]))


# --- 2. All-reduce in a world of 3 ---------------------------------------------------


def all_reduce(devices: Sequence[str]) -> None:
    """Sums up a tensor over three ranks."""
    repl = replicator.Replicator(devices[:WORLD])

    def main() -> tf.Tensor:
        rank = repl.replica_id
        if rank == 0:
            x = tf.constant([1.0])
        elif rank == 1:
            x = tf.constant([2.0])
        elif rank == 2:
            x = tf.constant([-3.0])
        x = repl.all_reduce(x, "sum")  # dist.all_reduce(x, op=dist.reduce_op.SUM)
        say(f"  rank {rank} has", x)
        return x

    check("1 + 2 - 3 is 0 on all ranks", repl.run(main), ([0.0], [0.0], [0.0]))


# --- 3. Initial weights --------------------------------------------------------------


class LeNet:
    """Two convolutions and two dense layers, from images [n, 8, 8, 1] to logits.

    Under `Replicator.context()`, each rank has parameters of its own: the library never
    makes ON_READ variables equal.
    """

    SHAPES = ((3, 3, 1, 8), (3, 3, 8, 16), (64, 32), (32,), (32, 10), (10,))

    def __init__(self) -> None:
        self.parameters = [
            tf.Variable(
                tf.zeros(shape),
                trainable=True,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )
            for shape in self.SHAPES
        ]

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        """Returns the logits, float32 [n, 10]."""
        conv_1, conv_2, dense_1, bias_1, dense_2, bias_2 = self.parameters
        # Smooth, as in the first LeNet: the kinks of relu and max pooling would let
        # rounding differences from the single device grow from step to step.
        x = tf.nn.avg_pool2d(tf.tanh(_convolve(images, conv_1)), 2, 2, "SAME")
        x = tf.nn.avg_pool2d(tf.tanh(_convolve(x, conv_2)), 2, 2, "SAME")
        x = tf.reshape(x, [-1, dense_1.shape[0]])
        x = tf.tanh(x @ dense_1 + bias_1)
        return x @ dense_2 + bias_2

    def randomize(self, seed: int, rank: int) -> None:
        """Draws weights that differ by rank; biases stay zero."""
        for k, param in enumerate(self.parameters):
            *inputs, _ = param.shape
            if inputs:
                deviation = math.sqrt(2 / math.prod(inputs))
                pair = [seed, 100 * rank + k]
                param.assign(deviation * tf.random.stateless_normal(param.shape, pair))


def _convolve(images: tf.Tensor, kernel: tf.Variable) -> tf.Tensor:
    return tf.nn.conv2d(images, kernel, strides=1, padding="SAME")


def sync_initial_weights(
    repl: replicator.Replicator, model: LeNet, rank: int, world_size: int
) -> None:
    """Gives all ranks the weights of rank 0."""
    for param in model.parameters:
        if rank == 0:
            for sibling in range(1, world_size):
                repl.send(param, sibling)  # dist.send(param.data, dst=sibling)
        else:
            param.assign(repl.recv(param, 0))  # dist.recv(param.data, src=0)


def initial_weights(repl: replicator.Replicator, model: LeNet, seed: int) -> None:
    """Lets the ranks draw weights, and replaces them by rank 0's."""

    def draw() -> list[tf.Tensor]:
        model.randomize(seed, repl.replica_id)
        return [param.read_value() for param in model.parameters]

    def main() -> list[tf.Tensor]:
        rank, world_size = repl.replica_id, repl.num_replicas
        sync_initial_weights(repl, model, rank, world_size)
        return [param.read_value() for param in model.parameters]

    initial = repl.run(draw)
    kernel = initial[0]
    if any(np.array_equal(kernel[0], other) for other in kernel[1:]):
        raise WrongNumber("the ranks drew the same weights")
    sent = [by_rank[0] for by_rank in initial]
    for rank, received in enumerate(ranks(repl.run(main))):
        check(f"rank {rank} has the weights that rank 0 drew", received, sent)


def ranks(columns: Sequence[Sequence[Any]]) -> list[list[np.ndarray]]:
    """Returns each rank's values from several PerReplicas."""
    return [
        [value.numpy() for value in values] for values in zip(*columns, strict=True)
    ]


# --- 4. Synchronous SGD --------------------------------------------------------------


class SGD:
    """torch.optim.SGD: each rank steps by itself, with its own momentum."""

    def __init__(self, model: LeNet, lr: float, momentum: float) -> None:
        self.lr, self.momentum = lr, momentum
        self.parameters = model.parameters
        self.velocities = [
            tf.Variable(
                tf.zeros(param.shape),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )
            for param in self.parameters
        ]

    def step(self, gradients: Sequence[tf.Tensor]) -> None:
        """Updates the parameters of the calling rank."""
        for param, velocity, gradient in zip(
            self.parameters, self.velocities, gradients, strict=True
        ):
            velocity.assign(self.momentum * velocity + gradient)
            param.assign_sub(self.lr * velocity)


def sync_gradients(
    repl: replicator.Replicator, gradients: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Sums up the gradients of all ranks."""
    # for param in model.parameters(): dist.all_reduce(param.grad.data, op=SUM)
    return [repl.all_reduce(gradient, "sum") for gradient in gradients]


def nll_loss(output: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    """Returns the mean negative log likelihood of logits [n, 10], digits [n]."""
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=target, logits=output)
    )


@dataclasses.dataclass(frozen=True)
class Portions:
    """Each rank's own part of the training images, all of one size.

    Attributes:
        images: `images[rank]` is float32 [n, 8, 8, 1], from 0 to 1.
        targets: `targets[rank]` is int64 [n].
        test_images: All test images.
        test_targets: Their digits.
    """

    images: np.ndarray
    targets: np.ndarray
    test_images: np.ndarray
    test_targets: np.ndarray


def load_portions(world_size: int, seed: int) -> Portions:
    """Returns the digits, with the training set split among the ranks."""
    digits = load_digits()
    images = (digits.images[..., np.newaxis] / 16).astype(np.float32)
    targets = digits.target.astype(np.int64)
    images, test_images, targets, test_targets = train_test_split(
        images, targets, test_size=0.2, stratify=targets, random_state=seed
    )
    size = len(images) // world_size
    portion = (world_size, size)
    return Portions(
        images[: world_size * size].reshape(*portion, 8, 8, 1),
        targets[: world_size * size].reshape(portion),
        test_images,
        test_targets,
    )


def train(
    repl: replicator.Replicator,
    model: LeNet,
    optimizer: SGD,
    portions: Portions,
    batch_size: int,
    epochs: int,
) -> list[float]:
    """Trains on all ranks; returns the loss of each step, summed over the ranks."""

    def train_loader(ctx: replicator.InputContext) -> tf.data.Dataset:
        rank = ctx.pipeline_id
        arrays = portions.images[rank], portions.targets[rank]
        data = tf.data.Dataset.from_tensor_slices(arrays)
        return data.batch(batch_size, drop_remainder=True).repeat(epochs)

    def main(batch: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        data, target = batch
        with tf.GradientTape() as tape:
            output = model(data)  # output = model(data)
            loss = nll_loss(output, target)  # loss = F.nll_loss(output, target)
        gradients = tape.gradient(loss, model.parameters)  # loss.backward()
        gradients = sync_gradients(repl, gradients)  # sync_gradients(model, ...)
        optimizer.step(gradients)  # optimizer.step()
        return loss

    step = repl.build(main, train_loader)
    steps = epochs * (portions.images.shape[1] // batch_size)
    return [float(sum(step())) for _ in range(steps)]


def train_on_one_device(
    model: LeNet,
    weights: Sequence[np.ndarray],
    portions: Portions,
    batch_size: int,
    epochs: int,
    optimizer: tf.keras.optimizers.Optimizer,
) -> list[float]:
    """Does the same in plain TensorFlow, each step on the batches of all ranks.

    Args:
        model: A model made outside of any context.
        weights: The initial weights.
        portions: The data of all ranks.
        batch_size: Per rank.
        epochs: How often to go through the portions.
        optimizer: Makes the updates.
    """
    for param, value in zip(model.parameters, weights, strict=True):
        param.assign(value)
    optimizer.build(model.parameters)

    @tf.function
    def step(data: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            # The sum of the means over the ranks' batches, which are of one size.
            loss = len(portions.images) * nll_loss(model(data), target)
        gradients = tape.gradient(loss, model.parameters)
        optimizer.apply_gradients(zip(gradients, model.parameters, strict=True))
        return loss

    losses = []
    for _ in range(epochs):
        for k in range(portions.images.shape[1] // batch_size):
            rows = slice(k * batch_size, (k + 1) * batch_size)
            data, target = portions.images[:, rows], portions.targets[:, rows]
            losses.append(float(step(np.concatenate(data), np.concatenate(target))))
    return losses


def synchronous_sgd(
    repl: replicator.Replicator, model: LeNet, portions: Portions
) -> None:
    """Trains from rank 0's weights on, on all ranks and on one device."""
    rate, momentum = FLAGS.learning_rate, FLAGS.momentum
    weights = [param.numpy() for param in model.parameters]
    with repl.context():
        optimizer = SGD(model, lr=rate, momentum=momentum)
    run = portions, FLAGS.batch_size, FLAGS.epochs
    losses = train(repl, model, optimizer, *run)
    print(f"  the loss fell from {losses[0]:.4f} to {losses[-1]:.4f}")

    def parameters() -> list[tf.Tensor]:
        return [param.read_value() for param in model.parameters]

    first, *others = ranks(repl.run(parameters))
    for other in others:
        check("the ranks have stayed in step, bit for bit", other, first)
    alone = LeNet()
    plain = tf.keras.optimizers.SGD(rate, momentum)
    expected = train_on_one_device(alone, weights, *run, plain)
    check("the losses are those of one device", losses, expected, 1e-4)
    check("and so are the weights", first, [p.numpy() for p in alone.parameters], 1e-4)
    guesses = np.argmax(alone(portions.test_images), axis=-1)
    right = float(np.mean(guesses == portions.test_targets))
    print(f"  test accuracy {right:.4f}")


# --- The program ---------------------------------------------------------------------


def say(*what: Any) -> None:
    """Prints when the step runs."""
    tf.print(*what, output_stream=sys.stdout)


def main() -> None:
    """Runs all programs as the flags say."""
    if len(FLAGS.devices) < WORLD:
        raise support.UsageError(
            f"--devices={','.join(FLAGS.devices)}: the tutorial's world has {WORLD} "
            "ranks"
        )
    # The checks are closer than TF32, which GPUs multiply with by default.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    repl = replicator.Replicator(FLAGS.devices)
    portions = load_portions(repl.num_replicas, FLAGS.seed)
    if FLAGS.batch_size > portions.images.shape[1]:
        raise support.UsageError(
            f"--batch_size={FLAGS.batch_size} is more than the "
            f"{portions.images.shape[1]} training images of each rank"
        )
    with repl.context():
        model = LeNet()
    programs: dict[str, Callable[[], None]] = {
        "Point to point": lambda: point_to_point(FLAGS.devices),
        "All-reduce": lambda: all_reduce(FLAGS.devices),
        "Initial weights": lambda: initial_weights(repl, model, FLAGS.seed),
        "Synchronous SGD": lambda: synchronous_sgd(repl, model, portions),
    }
    for name, program in programs.items():
        print(name, flush=True)
        try:
            program()
        except WrongNumber as error:
            sys.exit(support.explain(error, 1))


if __name__ == "__main__":
    support.start(main)
