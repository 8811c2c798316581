# SPDX-License-Identifier: Apache-2.0
"""Trains one language model under five strategies, and compares what they cost.

    python examples/strategies.py --devices=CPU:0,CPU:1 --steps=200

The data is the text of Python's standard library: the model is given the words before
each, and learns which comes next. Its program says nothing of strategies; all that
differs is what Replicator is given. Printed is a table of

    step      the median time of a step
    held      what variables and optimizer slots take on each device
    sent      what travels in a step, as its plan has it: of sparse gradients the rows,
              of dense layers' no more than the factors that they are products of; "or
              more" where sizes depend on the words
    loss      the mean over the last tenth of the steps

Strategies without a compressor reach the same loss, but for rounding.
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
WORDS_BEFORE = 8  # what the model is given
UNITS = 128

FLAGS = flags.FLAGS
support.define_flags(seed="Of the initial weights and the order of examples.")
flags.DEFINE_list("strategies", list(STRATEGIES), "Which of them to compare.")
flags.DEFINE_integer(
    "steps", 200, "Of training, under each strategy.", 2, support.MOST_STEPS
)
support.define_count("batch_size", 64, "Examples per step, on all replicas together.")
flags.DEFINE_integer("vocabulary", 5000, "How many words are told apart.", 2, 100_000)
flags.DEFINE_integer("columns", 64, "Numbers that a word is embedded in.", 1, 4096)
support.define_positive("learning_rate", 1e-3, "Adam's learning rate.")


# --- The data -------------------------------------------------------------------------


@functools.cache
def load_words(vocabulary: int, limit: int = 200_000) -> np.ndarray:
    """Returns the words of the standard library, each as its rank by frequency.

    Args:
        vocabulary: How many words there are; the last stands for all that are rarer.
        limit: How many words of text to take, at most.

    Raises:
        support.UsageError: This Python was installed without its source.
    """
    found: list[str] = []
    for path in support.library_files():
        found += re.findall(r"\w+|[^\w\s]", support.library_text(path))
        if len(found) >= limit:
            break
    counted = collections.Counter(found[:limit]).most_common(vocabulary - 1)
    ranks = {word: rank for rank, (word, _) in enumerate(counted)}
    rare = vocabulary - 1
    return np.array([ranks.get(word, rare) for word in found[:limit]], np.int32)


def input_fn(ctx: replicator.InputContext) -> tf.data.Dataset:
    """Returns a replica's share of all examples, over and over.

    Each is some words, and the one behind them. The order depends on the seed alone.
    """
    words = load_words(FLAGS.vocabulary)
    windows = np.lib.stride_tricks.sliding_window_view(words, WORDS_BEFORE + 1)
    order = np.random.default_rng(FLAGS.seed).permutation(len(windows))
    own = windows[order[ctx.replica_id :: ctx.num_replicas]]
    size = ctx.per_replica_batch_size(FLAGS.batch_size)
    examples = tf.data.Dataset.from_tensor_slices((own[:, :-1], own[:, -1]))
    return examples.repeat().batch(size, drop_remainder=True).prefetch(2)


# --- The program, which says nothing of strategies ------------------------------------


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
        repl: Runs them.
        model: What is trained.
        optimizer: Updates it.
    """

    repl: replicator.Replicator
    model: keras.Model
    optimizer: Any

    @classmethod
    def make(cls, repl: replicator.Replicator) -> Trainer:
        """Returns one whose variables are where the Replicator's strategy says."""
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


# --- What is measured -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Measured:
    """What training under a strategy came to.

    Attributes:
        step: Median time of a step, in seconds; the first, which builds, is left out.
        held: Bytes of variables and slots, by device.
        sent: Bytes that travel in a step, as its plan says.
        unknown: How many communications there are whose size it does not know.
        loss: The mean of the last tenth of the steps.
    """

    step: float
    held: Mapping[str, int]
    sent: int
    unknown: int
    loss: float


def held(variables: Iterable[Any]) -> dict[str, int]:
    """Returns how many bytes of variables each device holds."""
    found: dict[Any, tuple[str, int]] = {}
    for variable in variables:
        value = variable.value if isinstance(variable, keras.Variable) else variable
        for part in getattr(value, "parts", ()) or (value,):
            for one in getattr(part, "components", (part,)):
                nbytes = one.shape.num_elements() * one.dtype.size
                found[id(one)] = (one.device, nbytes)
    totals: dict[str, int] = collections.Counter()
    for device, nbytes in found.values():
        totals[device] += nbytes
    return dict(totals)


def measure(name: str) -> Measured:
    """Trains under a strategy; returns what that came to."""
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
    """Returns a number of bytes as it is shown."""
    return f"{nbytes / 2**20:.2f} MiB"


def table(found: Mapping[str, Measured]) -> rich.table.Table:
    """Returns the table of all strategies."""
    made = rich.table.Table(title="The same program under each strategy")
    made.add_column("strategy")
    devices = [f"held, {device}" for device in FLAGS.devices]
    for heading in ("step", *devices, "sent", "loss"):
        made.add_column(heading, justify="right")
    for name, one in found.items():
        made.add_row(
            name,
            f"{one.step * 1e3:.1f} ms",
            *(size(nbytes) for nbytes in one.held.values()),
            size(one.sent) + (" or more" if one.unknown else ""),
            f"{one.loss:.4f}",
        )
    return made


# --- The program as a command ---------------------------------------------------------


def check_flags() -> None:
    """Raises support.UsageError if flags do not fit together."""
    unknown = [name for name in FLAGS.strategies if name not in STRATEGIES]
    if unknown or not FLAGS.strategies:
        raise support.UsageError(
            f"--strategies={','.join(FLAGS.strategies)}: there are "
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
        found = {name: measure(name) for name in dict.fromkeys(FLAGS.strategies)}
    except KeyboardInterrupt:
        raise support.Interrupted(signal.SIGINT, "Interrupted.") from None
    console = rich.console.Console()
    rich.console.Console(width=max(120, console.width)).print(table(found))


if __name__ == "__main__":
    support.start(main)
