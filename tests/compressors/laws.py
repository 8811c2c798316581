# SPDX-License-Identifier: Apache-2.0
"""A training with given gradients, and the invariants of error feedback.

It uses SGD of rate 1 from zeros, so that the variables are, except for the sign, the
sum of all received gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from tests import helpers

# A matrix, a convolution's kernel and a bias: PowerSGD treats them differently.
SHAPES = ((20, 12), (3, 2, 4, 10), (12,))


@dataclasses.dataclass(frozen=True)
class Given:
    """Each replica's gradients in each step.

    Attributes:
        gradients: `gradients[k]` [steps, replicas, ...] are those of variable k.
        weights: [steps, replicas]; None: equal weights.
        steps_per_update: How many steps are accumulated.
    """

    gradients: tuple[np.ndarray, ...]
    weights: np.ndarray | None = None
    steps_per_update: int = 1

    @classmethod
    def random(
        cls,
        steps: int,
        replicas: int,
        seed: int = 0,
        weighted: bool = False,
        shapes: Sequence[Sequence[int]] = SHAPES,
        **options: Any,
    ) -> Given:
        """Returns random gradients, and weights of which some are 0."""
        rng = np.random.default_rng(seed)
        gradients = tuple(
            rng.standard_normal([steps, replicas, *shape]).astype("f")
            for shape in shapes
        )
        weights = rng.integers(0, 4, [steps, replicas]).astype("f")
        weights[:, 0] += 1
        return cls(gradients, weights if weighted else None, **options)

    def sums(self) -> list[np.ndarray]:
        """Returns, by NumPy, the sum over all updates of the means, uncompressed."""
        results = []
        for gradient in self.gradients:
            total = np.zeros(gradient.shape[2:])
            for begin in range(0, len(gradient), self.steps_per_update):
                part = slice(begin, begin + self.steps_per_update)
                weights = np.ones(gradient[part].shape[:2])
                if self.weights is not None:
                    weights = self.weights[part].astype("d")
                total += np.tensordot(weights, gradient[part], 2) / weights.sum()
            results.append(total)
        return results

    def elements(self, replica_id: int) -> tf.data.Dataset:
        """Returns a replica's gradients, and weights, of all steps."""
        own_gradients = tuple(gradients[:, replica_id] for gradients in self.gradients)
        weights = np.ones(own_gradients[0].shape[:1], "f")
        if self.weights is not None:
            weights = self.weights[:, replica_id]
        return helpers.untuned(
            tf.data.Dataset.from_tensor_slices((own_gradients, weights))
        )


@dataclasses.dataclass
class Training:
    """A model, its optimizer and the step that trains it."""

    repl: replicator.Replicator
    given: Given
    compressor: Any
    make: Callable[[], Any] = lambda: tf.keras.optimizers.SGD(1.0)

    def __post_init__(self) -> None:
        with self.repl.context():
            self.variables = [
                tf.Variable(tf.zeros(gradient.shape[2:]))
                for gradient in self.given.gradients
            ]
            self.optimizer = self.repl.wrap_optimizer(
                self.make(),
                accumulation_steps=self.given.steps_per_update,
                compressor=self.compressor,
            )

    def step_fn(self, element: Any) -> None:
        """Applies the replica's gradients."""
        gradients, weight = element
        options = {} if self.given.weights is None else {"weight": weight}
        self.optimizer.apply(list(gradients), self.variables, **options)

    def input_fn(self, ctx: replicator.InputContext) -> tf.data.Dataset:
        """Returns the replica's gradients."""
        return self.given.elements(ctx.replica_id)

    def run(self) -> None:
        """Runs all steps; checks after each that the replicas' variables are equal."""
        for number in range(len(self.given.gradients[0])):
            elements = [
                (
                    tuple(
                        tf.constant(gradient[number, r])
                        for gradient in self.given.gradients
                    ),
                    tf.constant(
                        1.0
                        if self.given.weights is None
                        else self.given.weights[number, r]
                    ),
                )
                for r in range(self.repl.num_replicas)
            ]
            alone = len(elements) == 1  # a PerReplica of one tuple is that tuple
            element = elements[0] if alone else replicator.PerReplica(*elements)
            self.repl.run(self.step_fn, args=[element])
            helpers.assert_replicas_equal(self.variables)

    @property
    def memory(self) -> dict[str, Any]:
        """The compressors' state, by name."""
        memory = self.optimizer._replicator_combiner.compression.memory
        return {v.name.split("/")[-1].split(":")[0]: v for v in memory.variables}

    def owed(self, k: int) -> np.ndarray:
        """Returns the sum of all replicas' residuals of the k-th gradient."""
        residual = self.memory.get(f"residual_{k}")
        if residual is None:
            return np.zeros(self.variables[k].shape)
        return residual.read_value().numpy().astype("d").sum(0)

    def received(self, k: int) -> np.ndarray:
        """Returns the sum of the received values over all updates."""
        return -self.variables[k].numpy()

    def assert_nothing_lost(self, tolerance: float = 1e-6) -> None:
        """Asserts that received values and residuals add up to the given ones."""
        for k, expected in enumerate(self.given.sums()):
            actual = self.received(k) + self.owed(k)
            error = np.abs(actual - expected).max()
            assert error <= tolerance * np.abs(expected).max(), (k, error)


class _Waits(Exception):
    """Raised where a replica needs what others have not sent yet."""


class SimulatedLink:
    """What a compressor communicates by, for replicas that run one after the other.

    Args:
        replica_id: The replica.
        rounds: What all replicas have sent so far, in order; theirs to share.
        size: How many replicas there are.
        kept: What is kept of earlier calls, by names.
    """

    def __init__(
        self,
        replica_id: int,
        rounds: list[dict[int, Any]],
        size: int,
        kept: dict[str, Any],
    ) -> None:
        self._replica_id, self._rounds, self._kept = replica_id, rounds, kept
        self.size, self._number, self.written = size, 0, []

    def sum(self, tensors: Sequence[tf.Tensor], of: Any = None) -> list[tf.Tensor]:
        columns = zip(*self._sent(list(tensors)), strict=True)
        return [tf.add_n(column) for column in columns]

    def gather(self, payloads: Sequence[Any]) -> list[Any]:
        return [
            tf.nest.map_structure(lambda *leaves: tf.stack(leaves), *column)
            for column in zip(*self._sent(list(payloads)), strict=True)
        ]

    def count(self) -> tf.Tensor:
        before = self.factor("count", lambda: tf.constant(0, tf.int64))
        self.write(before, before + 1)
        return before.read_value()

    def factor(self, k: Any, initial: Callable[[], tf.Tensor]) -> tf.Variable:
        return self._kept.setdefault(k, tf.Variable(initial()))

    def write(self, variable: tf.Variable, value: tf.Tensor) -> None:
        self.written.append((variable, value))

    def _sent(self, payload: Any) -> list[Any]:
        if self._number == len(self._rounds):
            self._rounds.append({})
        sent = self._rounds[self._number]
        self._number += 1
        sent[self._replica_id] = payload
        if len(sent) < self.size:
            raise _Waits
        return [sent[r] for r in range(self.size)]


def reduced(
    compressor: Any,
    own: Sequence[Sequence[np.ndarray]],
    kept: Sequence[dict[str, Any]] | None = None,
) -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
    """Returns what all replicas receive, and what each says that it sent.

    Args:
        compressor: The compressor.
        own: `own[r]` are replica r's tensors.
        kept: What replicas keep between calls.
    """
    kept = kept or [{} for _ in own]
    rounds: list[dict[int, Any]] = []
    done: dict[int, Any] = {}
    while len(done) < len(own):
        for r in set(range(len(own))) - set(done):
            link = SimulatedLink(r, rounds, len(own), kept[r])
            try:
                done[r] = compressor.reduce(list(map(tf.constant, own[r])), link), link
            except _Waits:
                continue
    for _, link in done.values():
        for variable, value in link.written:
            variable.assign(value)
    totals = [[one.numpy() for one in done[r][0].totals] for r in range(len(own))]
    for other in totals[1:]:
        for one, two in zip(totals[0], other, strict=True):
            assert one.tobytes() == two.tobytes()
    sent = [[one.numpy() for one in done[r][0].sent] for r in range(len(own))]
    return totals[0], sent
