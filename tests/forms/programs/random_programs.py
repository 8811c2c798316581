# SPDX-License-Identifier: Apache-2.0
"""From an integer to a program of whole batches: a function with variables.

A program is 2 to 8 random computations, each on what was made before, then a loss, its
gradients, and an update of the weights. The number tells the dtypes, the batches, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tests.forms.programs import (
    arithmetic,
    derivatives,
    doors,
    flows,
    inputs,
    lookups,
    losses,
    moving,
    numbered,
    pairs,
    rarely,
    training,
    values,
    writes,
)

ROOMS = (arithmetic, moving, lookups, losses, flows, derivatives, writes)
WEIGHTS = (5, 4, 3, 3, 2.5, 1.5, 1.5)  # how often a computation is of each

NEWER = 4000  # smaller numbers tell the programs that they told when they failed
ROWS, OFTEN = (*pairs.MAKERS, *numbered.MAKERS), 0.4


class Program:
    """A random program.

    Attributes:
        seed: What tells it.
        steps: The numbers of its computations; leave out some for a smaller program.
        makers: What each makes.
        has_training: Whether the weights are trained.
        made: What made the values that the last trace returned.
    """

    one_device: Any = staticmethod(doors.one_device)

    def __init__(
        self,
        seed: int,
        steps: Sequence[int] | None = None,
        has_training: bool = True,
        length: int | None = None,
    ) -> None:
        rng = np.random.default_rng([seed, 0])
        # Each program has a liking for some kind of computation.
        weights = np.array(WEIGHTS) * rng.uniform(0.3, 2, len(ROOMS))
        self.seed, self.has_training = seed, has_training
        count = length or self.usual_length(rng)
        rooms = rng.choice(len(ROOMS), count, p=weights / weights.sum())

        def of(options):
            return options[int(rng.integers(len(options)))]

        self.makers: list[values.Maker] = [of(ROOMS[k].MAKERS) for k in rooms]
        rarely_ = np.random.default_rng([seed, 5])
        for k in np.flatnonzero(rarely_.random(count) < 0.15):
            self.makers[k] = rarely.MAKERS[int(rarely_.integers(len(rarely.MAKERS)))]
        newer = np.random.default_rng([seed, 6])
        for k in np.flatnonzero(newer.random(count) < OFTEN * (seed >= NEWER)):
            self.makers[k] = ROWS[int(newer.integers(len(ROWS)))]
        self.length, self.made = length, list[str]()
        self.steps = list(range(count)) if steps is None else list(steps)

    def usual_length(self, rng: np.random.Generator) -> int:
        """Returns how many computations there are if no one says so."""
        return int(rng.integers(2, 9))

    def variables(self) -> dict[str, tf.Variable]:
        return inputs.variables(self.seed)

    @property
    def signature(self) -> list[tf.TensorSpec]:
        return inputs.signature(self.seed)

    def batches(self) -> list[list[np.ndarray]]:
        return inputs.batches(self.seed)

    def step(self, variables: dict[str, tf.Variable], *arguments: Any) -> Any:
        """Computes and trains on one batch; returns what was computed."""
        with tf.GradientTape() as tape:
            builder, loss = self.compute(variables, *arguments)
        result: dict[str, Any] = {"loss": loss}
        if self.has_training:
            result["norms"] = training.train(self.seed, tape, loss, variables)
        result["values"] = [v.tensor for v in builder.values if v.step >= 0]
        return result

    def compute(
        self, variables: dict[str, tf.Variable], *arguments: Any
    ) -> tuple[values.Builder, tf.Tensor]:
        """Computes on one batch; returns what was computed, and a loss."""
        given = dict(zip(inputs.NAMES, arguments, strict=True))
        kind = inputs.kind(self.seed)
        builder = values.Builder(self.seed, kind, given, variables)
        for k, (name, made) in enumerate(inputs.values_given(self.seed, given)):
            builder.begin(k - 20)
            builder.add(made, name)
        for k in self.steps:
            builder.begin(k)
            builder.add(self.makers[k](builder), self.makers[k].__name__)
        own = [v for v in builder.values if v.step >= 0]
        self.made = [v.maker for v in own]
        terms = [self._mean(k, v.tensor) for k, v in enumerate(own[-4:])]
        return builder, tf.add_n(terms or [tf.zeros([], builder.dtype)])

    def _mean(self, k: int, a: tf.Tensor) -> tf.Tensor:
        fold = (tf.reduce_mean, tf.reduce_sum)[(self.seed + k) % 5 == 0]
        return values.finite(fold(tf.tanh(a)))
