# SPDX-License-Identifier: Apache-2.0
"""Trains a transformer on the source text of Python's own standard library.

    python examples/language_model.py --devices=CPU:0,CPU:1 --steps=2000

The model sees the bytes before each byte, and learns which comes next. The text is that
of the single-file modules; every tenth of them is held out, and the perplexity on these
is measured ten times in a run: the number of equally likely bytes from which the model
would have to guess the next one. Training does not depend on the number of replicas,
except for rounding.

The output folder gets

    checkpoints/  the last three: model, optimizer, step and history
    history.json  the loss of every step, in nats per byte, and the perplexities
    summaries/    the same for TensorBoard: tensorboard --logdir runs/language_model
    curves.png    the same as a picture
    sample.txt    the model's continuation of --prompt

Ctrl-C, SIGTERM and SIGHUP stop it after the current step and leave a checkpoint.
--resume continues from there, and reaches the losses of an uninterrupted run.

Source: Vaswani et al. 2017, Attention is all you need, arXiv:1706.03762; with
normalization before each sublayer, and no encoder.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import support  # before TensorFlow, whose environment it sets

import keras
import numpy as np
import tensorflow as tf
from absl import flags
from keras import layers

import replicator

HEADS = 4
BYTES = 256
HELD_OUT = 10  # every tenth file
HELD_OUT_WINDOWS = 512  # windows per evaluation

FLAGS = flags.FLAGS
support.define_flags("runs/language_model", steps=2000)  # and --devices, --resume
support.define_count(
    "global_batch_size", 32, "Windows of text per step, on all replicas."
)
support.define_positive("learning_rate", 3e-3, "AdamW's peak learning rate.")
flags.DEFINE_integer("context", 96, "Bytes in a window of text.", 2, 4096)
flags.DEFINE_integer("width", 96, "Length of the vector for a byte.", 4, 4096)
flags.DEFINE_integer("depth", 3, "Blocks, each of attention and an MLP.", 1, 64)
flags.DEFINE_string("prompt", "class ", "What the sample begins with.")
flags.DEFINE_integer("sample_bytes", 500, "Bytes in the sample.", 0, 100_000)
support.define_between(
    "temperature",
    0.7,
    "Of sampling; the lower, the likelier the bytes drawn.",
    0.01,
    10.0,
)
flags.register_validator(
    "width",
    lambda width: width % HEADS == 0,
    f"must be a multiple of the {HEADS} heads",
)
flags.register_validator("prompt", bool, "must not be empty")


# --- The data -------------------------------------------------------------------------


def windows(texts: Sequence[str], context: int) -> np.ndarray:
    """Returns texts, joined and cut: uint8 [n, context + 1].

    The last byte of a window is the first of the next one: all but the first byte are
    predicted.
    """
    joined = np.frombuffer("\n".join(texts).encode(), np.uint8)
    count = max(0, (len(joined) - 1) // context)
    starts = np.arange(count)[:, np.newaxis] * context
    return joined[starts + np.arange(context + 1)]


@functools.cache
def load_windows(context: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the windows for training, and those of held-out files."""
    texts = [support.library_text(path) for path in support.library_files()]
    held_out = windows(texts[::HELD_OUT], context)
    del texts[::HELD_OUT]
    step = max(1, len(held_out) // HELD_OUT_WINDOWS)  # spread over all held-out files
    return windows(texts, context), held_out[::step][:HELD_OUT_WINDOWS]


# --- The model ------------------------------------------------------------------------


class Positions(layers.Layer):
    """Adds a learned position embedding to each place of a sequence."""

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Creates the variable, [places, columns]."""
        self.places = self.add_weight(
            shape=input_shape[1:], initializer="random_normal", name="places"
        )

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Returns the sums, in the inputs' shape."""
        return inputs + self.places


def make_model(context: int, width: int, depth: int) -> keras.Model:
    """Returns a model from bytes [n, context] to logits of the next [n, context, 256].

    Args:
        context: The number of bytes in a window; each sees those before it.
        width: The size of a byte's embedding.
        depth: The number of blocks.
    """
    inputs = layers.Input((context,), dtype="int32")
    x = Positions()(layers.Embedding(BYTES, width)(inputs))
    for _ in range(depth):
        attention = layers.MultiHeadAttention(HEADS, width // HEADS)
        y = layers.LayerNormalization(epsilon=1e-5)(x)
        x = layers.Add()([x, attention(y, y, use_causal_mask=True)])
        y = layers.LayerNormalization(epsilon=1e-5)(x)
        y = layers.Dense(width)(layers.Dense(4 * width, "gelu")(y))
        x = layers.Add()([x, y])
    x = layers.LayerNormalization(epsilon=1e-5)(x)
    return keras.Model(inputs, layers.Dense(BYTES)(x))


def make_optimizer(learning_rate: float, steps: int) -> keras.optimizers.Optimizer:
    """Returns AdamW with a warm-up over a tenth of the steps, then decay."""
    warmup = max(1, steps // 10)
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, max(1, steps - warmup), warmup_target=learning_rate, warmup_steps=warmup
    )
    return keras.optimizers.AdamW(rate, weight_decay=0.01, global_clipnorm=1.0)


def losses_of(model: keras.Model, batch: tf.Tensor, training: bool) -> tf.Tensor:
    """Returns the mean loss of each window, [n], in nats per byte."""
    batch = tf.cast(batch, tf.int32)
    logits = model(batch[:, :-1], training=training)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch[:, 1:], logits)
    return tf.reduce_mean(losses, axis=1)


def make_steps(
    repl: replicator.Replicator,
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the step_fns for training and for evaluation, over the same variables."""

    def train_step(batch: tuple[tf.Tensor]) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses_of(model, batch[0], training=True))
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return repl.all_reduce(loss, "mean")

    def eval_step(batch: tuple[tf.Tensor, tf.Tensor]) -> Any:
        held_out, weights = batch
        losses = losses_of(model, held_out, training=False)
        sums = tf.reduce_sum(weights * losses), tf.reduce_sum(weights)
        return repl.all_reduce(sums, "sum")

    return train_step, eval_step


def perplexity(eval_step: Any, steps: int) -> float:
    """Returns the perplexity of the held-out windows, per byte."""
    eval_step.initialize()  # from the first window
    sums = [eval_step() for _ in range(steps)]
    loss = sum(float(loss[0]) for loss, _ in sums)
    with np.errstate(over="ignore"):  # if the training diverged
        return float(np.exp(loss / sum(float(count[0]) for _, count in sums)))


# --- A sample -------------------------------------------------------------------------


def continued(
    model: keras.Model, prompt: str, length: int, temperature: float, seed: int
) -> str:
    """Returns the prompt with a continuation that the model samples byte by byte.

    Args:
        model: From windows to logits.
        prompt: The start of the text.
        length: How many bytes to sample.
        temperature: The divisor of the logits.
        seed: The seed of the samples.
    """
    _, context = model.input_shape
    random = np.random.default_rng(seed)

    @tf.function
    def logits_at(window: tf.Tensor, place: tf.Tensor) -> tf.Tensor:
        return model(window[tf.newaxis], training=False)[0, place]

    text = list(os.fsencode(prompt))
    for _ in range(length):
        recent = text[-context:]
        # The padding after the last byte is not seen, as attention is causal.
        window = tf.constant(recent + [0] * (context - len(recent)), tf.int32)
        logits = logits_at(window, tf.constant(len(recent) - 1)).numpy() / temperature
        text.append(int(np.argmax(logits + random.gumbel(size=BYTES))))
    return bytes(text).decode(errors="replace")


# --- The program ----------------------------------------------------------------------


def main() -> str:
    """Trains as the flags say; returns the last line to print."""
    repl = replicator.Replicator(FLAGS.devices)
    output_dir = support.output_folder()
    train, held_out = load_windows(FLAGS.context)
    batch_size, steps = FLAGS.global_batch_size, FLAGS.steps
    support.check_batch_size(
        "global_batch_size", repl.num_replicas, len(train), "windows of text"
    )
    keras.utils.set_random_seed(FLAGS.seed)
    with repl.context():
        model = make_model(FLAGS.context, FLAGS.width, FLAGS.depth)
        optimizer = repl.wrap_optimizer(make_optimizer(FLAGS.learning_rate, steps))
        optimizer.build(model.trainable_variables)
    decisive = ("steps", "global_batch_size", "learning_rate", "seed")
    run = support.Run(
        output_dir,
        support.settings(*decisive, "context", "width", "depth"),
        {"model": model, "optimizer": optimizer},
        steps=steps,
        resume=FLAGS.resume,
        panels=[
            support.Panel(["loss"], "training loss, nats per byte"),
            support.Panel(["perplexity"], "perplexity of files held out", log=True),
        ],
    )
    train_fn, eval_fn = make_steps(repl, model, optimizer)
    train_step = repl.build(
        train_fn, support.shuffled_input((train,), batch_size, FLAGS.seed, run.step)
    )
    eval_step = repl.build(eval_fn, support.single_pass_input((held_out,), batch_size))
    every = max(1, steps // 10)
    for step in run.steps():
        run.log(loss=float(train_step()[0]))
        if step % every == 0 or step == steps:
            value = perplexity(eval_step, math.ceil(len(held_out) / batch_size))
            run.log(perplexity=value)
            run.save()  # a printed result is never lost
            run.tell(
                f"step {step:{len(str(steps))}}/{steps}"
                f"  loss {run.history.last('loss', every):.4f}  perplexity {value:.3f}"
            )
    sample = continued(
        model, FLAGS.prompt, FLAGS.sample_bytes, FLAGS.temperature, FLAGS.seed
    )
    (output_dir / "sample.txt").write_text(sample, "utf-8")
    print(f"\n{sample}\n")
    value = run.history.last("perplexity")
    return f"Perplexity {value:.3f} per byte. Results are in {output_dir}."


if __name__ == "__main__":
    support.start(main)
