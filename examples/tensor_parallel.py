# SPDX-License-Identifier: Apache-2.0
"""Trains a transformer whose matrices are divided among the replicas.

    python examples/tensor_parallel.py --devices=CPU:0,CPU:1

All replicas see the same examples, and each computes a part of every layer, with its
part of the weights (Megatron-LM, Shoeybi et al. 2019, arXiv:1909.08053):

    attention  each replica has some of the heads
    MLP        each has some columns of the first matrix, and the corresponding rows of
               the second, so that nothing is sent between the two

The activations between attention and MLP are divided, too, by tokens: an all_gather
before each makes them whole, and a reduce_scatter after it sums the partial results and
divides the sum (Korthikanti et al. 2022, arXiv:2205.05198). With --nosequence_parallel
all replicas hold all tokens, and an all_reduce sums the partial results. The losses are
those of one device (--devices=CPU:0), except for rounding.

The data are the 1,797 images of scikit-learn's `load_digits`, as sequences of 16
patches. The output folder gets

    checkpoints/  the last three: weights, optimizer, step and history
    history.json  the loss of every step and the test accuracy after every epoch
    summaries/    the same for TensorBoard: tensorboard --logdir runs/tensor_parallel
    curves.png    the same as a picture
    plan.png      what the replicas of a training step send to one another
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import support

import numpy as np
import tensorflow as tf
from absl import flags
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import replicator
from replicator import strategy

TEST_SHARE = 0.2  # of the images: 360
TOKENS, PATCH, CLASSES = 16, 4, 10
WIDTH, HEADS, HIDDEN, BLOCKS = 64, 8, 256, 2

FLAGS = flags.FLAGS
support.define_flags("runs/tensor_parallel", epochs=20)
flags.DEFINE_bool("sequence_parallel", True, "Divide tokens between layers, too.")
support.define_count("batch_size", 64, "Images per step, the same on all replicas.")
support.define_positive("learning_rate", 2e-3, "Adam's learning rate.")


class PartsOnReplicas(strategy.Builder):
    """Places the variable "name/part_r" on replica r alone, and mirrors all others."""

    def nodes(
        self,
        variables: Iterable[strategy.VariableFacts],
        resources: strategy.Resources,
    ) -> Iterator[strategy.Node]:
        """Yields each variable's placement."""
        for variable in variables:
            _, is_part, number = variable.path.partition("/part_")
            how: Any = strategy.AllReduceSynchronizer()
            if is_part:
                how = strategy.PSSynchronizer(resources.devices[int(number)])
            yield strategy.Node(variable.path, how)


# --- The transformer ------------------------------------------------------------------


class Transformer:
    """A transformer of which each replica computes a part, on the same examples.

    Args:
        repl: The replicas, which divide the heads; at most one per head.
        seed: The seed of the initial weights, the same for any number of replicas.
        sequence_parallel: Whether activations between the matrices are divided by
            tokens.

    Attributes:
        variables: All variables, by name.
    """

    def __init__(
        self, repl: replicator.Replicator, seed: int, sequence_parallel: bool = True
    ) -> None:
        self._repl, self._sequence_parallel = repl, sequence_parallel
        self._random = np.random.default_rng(seed)
        self.variables: dict[str, tf.Variable] = {}
        with repl.context():
            self._add("embedding", [PATCH, WIDTH], PATCH)
            self._add("positions", [TOKENS, WIDTH], WIDTH)
            for block in map("block_{}".format, range(BLOCKS)):
                for norm in ("norm_1", "norm_2"):
                    self._add(f"{block}/{norm}/scale", [WIDTH])
                    self._add(f"{block}/{norm}/offset", [WIDTH])
                self._add(f"{block}/qkv", [WIDTH, 3, HEADS, WIDTH // HEADS], WIDTH, 2)
                self._add(f"{block}/out", [HEADS, WIDTH // HEADS, WIDTH], WIDTH, 0)
                self._add(f"{block}/up", [WIDTH, HIDDEN], WIDTH, 1)
                self._add(f"{block}/down", [HIDDEN, WIDTH], HIDDEN, 0)
            self._add("logits", [WIDTH, CLASSES], WIDTH)

    def _add(
        self, name: str, shape: list[int], fan_in: int = 0, axis: int | None = None
    ) -> None:
        """Makes a variable that all replicas have, or one in parts along an axis.

        Args:
            name: Its name; that of part r ends in "/part_r".
            shape: The shape of the whole variable.
            fan_in: The number of inputs per output; 0 for scales and offsets.
            axis: The axis along which it is divided.
        """
        full_value = np.full(shape, float(name.endswith("scale")), np.float32)
        if fan_in:
            full_value = self._random.normal(0, fan_in**-0.5, shape).astype(np.float32)
        if axis is None:
            self.variables[name] = tf.Variable(full_value, name=name)
            return
        for r, value in enumerate(np.split(full_value, self._repl.num_replicas, axis)):
            part = f"{name}/part_{r}"
            self.variables[part] = tf.Variable(value, name=part)

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        """Returns the logits, [n, 10], on every replica, of images [n, 16, 4]."""
        repl = self._repl
        hidden = images @ self.variables["embedding"] + self.variables["positions"]
        if self._sequence_parallel:
            hidden = tf.split(hidden, repl.num_replicas, axis=1)[repl.replica_id]
        for block in map("block_{}".format, range(BLOCKS)):
            tokens = self._enter(self._norm(f"{block}/norm_1", hidden))
            hidden += self._leave(self._attention(block, tokens))
            tokens = self._enter(self._norm(f"{block}/norm_2", hidden))
            hidden += self._leave(self._mlp(block, tokens))
        pooled = tf.reduce_mean(hidden, axis=1)
        if self._sequence_parallel:
            pooled = repl.all_reduce(pooled, "mean")
        return pooled @ self.variables["logits"]

    def _own(self, name: str) -> tf.Variable:
        """Returns the replica's own part of a variable."""
        return self.variables[f"{name}/part_{self._repl.replica_id}"]

    def _norm(self, name: str, x: tf.Tensor) -> tf.Tensor:
        """Normalizes each token."""
        mean, variance = tf.nn.moments(x, axes=[-1], keepdims=True)
        scale, offset = (self.variables[f"{name}/{v}"] for v in ("scale", "offset"))
        return tf.nn.batch_normalization(x, mean, variance, offset, scale, 1e-3)

    def _attention(self, block: str, x: tf.Tensor) -> tf.Tensor:
        """Returns the contribution of the replica's own heads to all tokens."""
        q, k, v = tf.unstack(tf.einsum("ntw,wchd->cnhtd", x, self._own(f"{block}/qkv")))
        scores = tf.matmul(q, k, transpose_b=True) * (WIDTH // HEADS) ** -0.5
        heads = tf.matmul(tf.nn.softmax(scores), v)
        return tf.einsum("nhtd,hdw->ntw", heads, self._own(f"{block}/out"))

    def _mlp(self, block: str, x: tf.Tensor) -> tf.Tensor:
        """Returns the contribution of the replica's own hidden units to all tokens."""
        units = tf.nn.gelu(tf.tensordot(x, self._own(f"{block}/up"), 1))
        return tf.tensordot(units, self._own(f"{block}/down"), 1)

    def _enter(self, x: tf.Tensor) -> tf.Tensor:
        """Returns all tokens, gathering them if the replica has only some."""
        if self._sequence_parallel:
            x = self._repl.all_gather(x, axis=1)
            # Replicas may gather any number of rows each; here, the sum is known.
            x = tf.ensure_shape(x, [x.shape[0], TOKENS, WIDTH])
        return x

    def _leave(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the sum over the replicas, of all tokens or of the replica's own."""
        if self._sequence_parallel:
            return self._repl.reduce_scatter(x, axis=1)
        return self._repl.all_reduce(x)


# --- Its steps ------------------------------------------------------------------------


class Training:
    """Replicas, transformer and steps.

    Args:
        devices: One for each replica.
        seed: The seed of the initial weights.
        learning_rate: Adam's.
        sequence_parallel: As for Transformer.
    """

    def __init__(
        self,
        devices: list[str],
        seed: int = 1,
        learning_rate: float = 2e-3,
        sequence_parallel: bool = True,
    ) -> None:
        self.repl = replicator.Replicator(devices, strategy=PartsOnReplicas())
        self.model = Transformer(self.repl, seed, sequence_parallel)
        with self.repl.context():
            adam = tf.keras.optimizers.Adam(learning_rate)
            # A replica's gradients are its contribution to those of mirrored weights,
            # and the complete gradients of its own parts.
            self.optimizer = self.repl.wrap_optimizer(adam, op="sum")
            self.optimizer.build(list(self.model.variables.values()))

    def train_step(self, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """Trains on a batch, which all replicas have; returns its loss."""
        variables = list(self.model.variables.values())
        with tf.GradientTape() as tape:
            logits = self.model(images)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
            # The differentiated value is the sum of all replicas' losses.
            share = loss / self.repl.num_replicas
        zero = tf.UnconnectedGradients.ZERO  # other replicas' parts have no gradient
        gradients = tape.gradient(share, variables, unconnected_gradients=zero)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    def eval_step(
        self, images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor
    ) -> tf.Tensor:
        """Returns how many images of a batch the model classifies correctly."""
        right = tf.argmax(self.model(images), axis=-1) == labels
        return tf.reduce_sum(weights * tf.cast(right, tf.float32))


def load_examples() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns patches, float32 [n, 16, 4], and labels; to train with, and to test."""
    images, labels = load_digits(return_X_y=True)
    rows = (images / 16).astype(np.float32).reshape(-1, 4, 2, 4, 2)
    patches = rows.swapaxes(2, 3).reshape(-1, TOKENS, PATCH)
    parts = train_test_split(
        *(patches, labels.astype(np.int64)),
        test_size=TEST_SHARE,
        stratify=labels,
        random_state=0,
    )
    return parts[0::2], parts[1::2]


def for_all(input_fn: support.InputFn) -> support.InputFn:
    """Returns an input_fn that gives every replica the input of a single one."""
    return lambda ctx: input_fn(replicator.InputContext(0, 1, 0, 1))


def main() -> str:
    """Trains as the flags say; returns the last line to print."""
    replicas = len(FLAGS.devices)
    if HEADS % replicas:
        raise support.UsageError(
            f"--devices: {HEADS} heads cannot be divided evenly among {replicas}"
        )
    train, test = load_examples()
    batch_size = FLAGS.batch_size
    support.check_batch_size("batch_size", 1, len(train[0]))
    output_dir = support.output_folder()
    training = Training(
        FLAGS.devices, FLAGS.seed, FLAGS.learning_rate, FLAGS.sequence_parallel
    )
    steps_per_epoch = len(train[0]) // batch_size
    decisive = support.settings("batch_size", "learning_rate", "seed")
    run = support.Run(
        output_dir,
        {**decisive, "number_of_devices": replicas},
        {"weights": training.model.variables, "optimizer": training.optimizer},
        steps=FLAGS.epochs * steps_per_epoch,
        steps_per_epoch=steps_per_epoch,
        resume=FLAGS.resume,
        panels=support.LOSS_AND_ACCURACY,
    )
    batches = support.shuffled_input(train, batch_size, FLAGS.seed, run.step)
    train_step = training.repl.build(training.train_step, for_all(batches))
    pass_over_test = support.single_pass_input(test, batch_size)
    eval_step = training.repl.build(training.eval_step, for_all(pass_over_test))
    train_step.plan.plot(output_dir / "plan.png")

    test_accuracy = support.share_of_right(eval_step, len(test[0]), batch_size)
    accuracy = run.train(train_step, test_accuracy)
    return f"Test accuracy {accuracy:.4f}. Results are in {output_dir}."


if __name__ == "__main__":
    support.start(main)
