# SPDX-License-Identifier: Apache-2.0
"""Trains one language model under five strategies, and compares their costs.

    python examples/strategies.py --devices=CPU:0,CPU:1 --steps=200

The data is the text of Python's standard library: the model sees the words before each
word, and learns which comes next. The program itself does not mention strategies; only
the Replicator's argument differs. It prints a table of

    step      the median time of a step
    held      the bytes of variables and optimizer slots on each device
    sent      the bytes sent in a step, according to its plan: only the rows of sparse
              gradients, at most the factors of dense layers' gradients; "or more" where
              sizes depend on the words
    loss      the mean over the last tenth of the steps

Strategies without a compressor reach the same loss, except for rounding.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import support  # before TensorFlow, whose environment it sets

import keras
import numpy as np
import rich.console
import rich.table
import tensorflow as tf
from absl import flags
from tqdm import tqdm

import replicator
from replicator import strategy

STRATEGIES: Mapping[str, Callable[[], strategy.Builder]] = {
    "mirrored": strategy.Mirrored,
    "ps": strategy.PSLoadBalancing,
    "partitioned": strategy.PartitionedPS,
    "parallax": strategy.Parallax,
    "bf16": lambda: strategy.AllReduce(compressor="bf16"),
}
WORDS_BEFORE = 8  # the model's input
UNITS = 128

FLAGS = flags.FLAGS
support.define_flags(seed="Seed of the initial weights and the order of examples.")
flags.DEFINE_list("strategies", list(STRATEGIES), "Which strategies to compare.")
flags.DEFINE_integer(
    "steps", 200, "Training steps under each strategy.", 2, support.MOST_STEPS
)
support.define_count("batch_size", 64, "Examples per step, on all replicas together.")
flags.DEFINE_integer("vocabulary", 5000, "Number of distinct words.", 2, 100_000)
flags.DEFINE_integer("columns", 64, "Length of a word's embedding.", 1, 4096)
support.define_positive("learning_rate", 1e-3, "Adam's learning rate.")


# --- The data -------------------------------------------------------------------------


@functools.cache
def load_words(vocabulary: int, limit: int = 200_000) -> np.ndarray:
    """Returns the words of the standard library, each as its rank by frequency.

    Args:
        vocabulary: The number of distinct words; the last stands for all rarer ones.
        limit: The maximum number of words of text.

    Raises:
        support.UsageError: This Python was installed without its source.
    """
    words: list[str] = []
    for path in support.library_files():
        words += re.findall(r"\w+|[^\w\s]", support.library_text(path))
        if len(words) >= limit:
            break
    counted = collections.Counter(words[:limit]).most_common(vocabulary - 1)
    ranks = {word: rank for rank, (word, _) in enumerate(counted)}
    rare = vocabulary - 1
    return np.array([ranks.get(word, rare) for word in words[:limit]], np.int32)


def input_fn(ctx: replicator.InputContext) -> tf.data.Dataset:
    """Returns a replica's share of all examples, repeated endlessly.

    Each is some words, and the word after them. The order depends on the seed alone.
    """
    words = load_words(FLAGS.vocabulary)
    windows = np.lib.stride_tricks.sliding_window_view(words, WORDS_BEFORE + 1)
    order = np.random.default_rng(FLAGS.seed).permutation(len(windows))
    own_windows = windows[order[ctx.replica_id :: ctx.num_replicas]]
    size = ctx.per_replica_batch_size(FLAGS.batch_size)
    examples = tf.data.Dataset.from_tensor_slices(
        (own_windows[:, :-1], own_windows[:, -1])
    )
    return examples.repeat().batch(size, drop_remainder=True).prefetch(2)


# --- The program, independent of strategies -------------------------------------------


def make_model() -> keras.Model:
    """Returns a model from words to logits of the next one."""
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((WORDS_BEFORE,), dtype="int32"),
            layers.Embedding(FLAGS.vocabulary, FLAGS.columns, name="embedding"),
            layers.Flatten(),
            layers.Dense(UNITS, "relu", name="hidden"),
            layers.Dense(FLAGS.vocabulary, name="logits"),
        ]
    )


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A model and its optimizer on the replicas.

    Attributes:
        repl: The Replicator.
        model: The model.
        optimizer: The wrapped optimizer.
    """

    repl: replicator.Replicator
    model: keras.Model
    optimizer: Any

    @classmethod
    def make(cls, repl: replicator.Replicator) -> Trainer:
        """Returns a trainer whose variables are placed by the Replicator's strategy."""
        keras.utils.set_random_seed(FLAGS.seed)
        with repl.context():
            model = make_model()
            optimizer = keras.optimizers.Adam(FLAGS.learning_rate)
            return cls(repl, model, repl.wrap_optimizer(optimizer))

    def step_fn(self, words: tf.Tensor, following: tf.Tensor) -> tf.Tensor:
        """Takes a step on a replica's own examples; returns the mean loss of all."""
        with tf.GradientTape() as tape:
            logits = self.model(words, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(following, logits)
            loss = tf.reduce_mean(losses)
        variables = self.model.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return self.repl.all_reduce(loss, "mean")


# --- Measurements ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Measured:
    """The cost and the result of training under a strategy.

    Attributes:
        step: Median time of a step, in seconds, without the first, which builds.
        held: Bytes of variables and slots, by device.
        sent: Bytes sent in a step, according to its plan.
        unknown: The number of communications whose size the plan does not know.
        loss: The mean of the last tenth of the steps.
    """

    step: float
    held: Mapping[str, int]
    sent: int
    unknown: int
    loss: float


def held(variables: Iterable[Any]) -> dict[str, int]:
    """Returns how many bytes of variables each device holds."""
    components: dict[Any, tuple[str, int]] = {}
    for variable in variables:
        value = variable.value if isinstance(variable, keras.Variable) else variable
        for part in getattr(value, "parts", ()) or (value,):
            for component in getattr(part, "components", (part,)):
                nbytes = component.shape.num_elements() * component.dtype.size
                components[id(component)] = (component.device, nbytes)
    totals: dict[str, int] = collections.Counter()
    for device, nbytes in components.values():
        totals[device] += nbytes
    return dict(totals)


def measure(name: str) -> Measured:
    """Trains under a strategy; returns its cost and result."""
    repl = replicator.Replicator(FLAGS.devices, strategy=STRATEGIES[name]())
    trainer = Trainer.make(repl)
    step = repl.build(trainer.step_fn, input_fn)
    times, losses = [], []
    with tqdm(total=FLAGS.steps, unit="step", desc=name) as progress:
        for _ in range(FLAGS.steps):
            start = time.perf_counter()
            losses.append(float(step()[0]))
            times.append(time.perf_counter() - start)
            progress.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)
            progress.update()
    total = step.plan.totals.per_step
    by_device = held([*trainer.model.variables, *trainer.optimizer.variables])
    return Measured(
        statistics.median(times[1:]),
        {device: by_device.get(device, 0) for device in repl.devices},
        total.nbytes,
        total.unknown,
        float(np.mean(losses[-max(1, FLAGS.steps // 10) :])),
    )


def size(nbytes: int) -> str:
    """Returns a number of bytes in a readable unit."""
    return f"{nbytes / 2**20:.2f} MiB"


def table(found: Mapping[str, Measured]) -> rich.table.Table:
    """Returns the table of all strategies."""
    result = rich.table.Table(title="The same program under each strategy")
    result.add_column("strategy")
    devices = [f"held, {device}" for device in FLAGS.devices]
    for heading in ("step", *devices, "sent", "loss"):
        result.add_column(heading, justify="right")
    for name, measurement in found.items():
        result.add_row(
            name,
            f"{measurement.step * 1e3:.1f} ms",
            *(size(nbytes) for nbytes in measurement.held.values()),
            size(measurement.sent) + (" or more" if measurement.unknown else ""),
            f"{measurement.loss:.4f}",
        )
    return result


# --- The program as a command ---------------------------------------------------------


def check_flags() -> None:
    """Raises support.UsageError if flags do not fit together."""
    unknown = [name for name in FLAGS.strategies if name not in STRATEGIES]
    if unknown or not FLAGS.strategies:
        raise support.UsageError(
            f"--strategies={','.join(FLAGS.strategies)}: expected some of "
            f"{', '.join(STRATEGIES)}"
        )
    if FLAGS.batch_size % max(1, len(FLAGS.devices)):
        raise support.UsageError(
            f"--batch_size={FLAGS.batch_size} does not divide evenly by "
            f"{len(FLAGS.devices)} replicas"
        )


def main() -> None:
    """Trains under each strategy, and prints the table."""
    check_flags()
    load_words(FLAGS.vocabulary)
    try:
        measurements = {name: measure(name) for name in dict.fromkeys(FLAGS.strategies)}
    except KeyboardInterrupt:
        raise support.Interrupted(signal.SIGINT, "Interrupted.") from None
    console = rich.console.Console()
    rich.console.Console(width=max(120, console.width)).print(table(measurements))


if __name__ == "__main__":
    support.start(main)
