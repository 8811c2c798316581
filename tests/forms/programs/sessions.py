# SPDX-License-Identifier: Apache-2.0
"""Random programs as graphs, which sessions run, with optimizers of TensorFlow 1.

Either what a program computes and trains, or a call of it as a function: then its
writes are run, too.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from tests.autodist import helpers, programs
from tests.forms.programs import inputs, rarely, writes
from tests.forms.programs.random_programs import Program

v1 = tf.compat.v1
WRITE = (*writes.MAKERS, rarely.ringed)

# How replicas are made, by turns.
SETTINGS: list[dict[str, Any]] = [
    {"strategy": "mirrored"},
    {"strategy": "mirrored", "build": "clone"},
    *({"strategy": make} for k, make in programs.BUILDERS.items() if k != "columns"),
    {"strategy": lambda: {"w|u": replicator.strategy.Partitioned(axis=1)}},
]
OPTIMIZERS: list[Any] = [
    lambda: v1.train.GradientDescentOptimizer(0.1),
    lambda: v1.train.MomentumOptimizer(0.1, 0.9),
    lambda: v1.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
    lambda: v1.train.AdamOptimizer(0.1, epsilon=0.1),
    lambda: v1.train.AdagradOptimizer(0.1, initial_accumulator_value=0.3),
    lambda: v1.train.RMSPropOptimizer(0.05, momentum=0.5, epsilon=0.1),
    lambda: v1.train.FtrlOptimizer(0.1, initial_accumulator_value=0.3),
]


def one_device(step: Any, make: Any, signature: Any, num_replicas: int = 1) -> Any:
    """Runs it in a session of TensorFlow."""
    return _door(step, make, signature, None)


class GraphProgram(Program):
    """A random program whose step returns what is fetched by turns."""

    one_device = staticmethod(one_device)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        rng = np.random.default_rng([self.seed, 4])
        self.is_called = bool(rng.random() < 0.3)
        self.has_iterator = not self.is_called and bool(rng.random() < 0.4)
        self.turn = int(rng.integers(4))
        self.is_clipped = bool(rng.random() < 0.3)
        self.optimizer = OPTIMIZERS[int(rng.integers(len(OPTIMIZERS)))]
        if not self.is_called:  # nothing in a graph orders writes and reads
            own = [k for k in self.steps if self.makers[k] not in WRITE]
            self.steps = own

    def usual_length(self, rng: np.random.Generator) -> int:
        return 1 + self.seed % 4

    def step(self, variables: dict[str, tf.Variable], *arguments: Any) -> Any:
        """Returns the fetches of each run; variables of optimizers are added."""
        if self.is_called:
            called = tf.function(super().step, autograph=False)
            return [called(variables, *arguments)]
        if self.has_iterator:
            arguments = (*self._elements(), *arguments[5:])
        builder, loss = self.compute(variables, *arguments)
        values = [v.tensor for v in builder.values if v.step >= 0]
        optimizer = self.optimizer()
        own = [variables[name] for name in inputs.WEIGHTS]
        pairs = [
            (slope, v)
            for slope, v in optimizer.compute_gradients(loss, own)
            if slope is not None
        ]
        slopes = [slope for slope, _ in pairs]
        if self.is_clipped and pairs:
            clipped, _ = tf.clip_by_global_norm(slopes, 0.5)
            pairs = [(new, v) for new, (_, v) in zip(clipped, pairs, strict=True)]
        rows = [s for s in slopes if isinstance(s, tf.IndexedSlices)]
        dense = [s for s in slopes if not isinstance(s, tf.IndexedSlices)]
        if not pairs:
            return [[loss, values]]
        # One device does not say whether what is fetched reads before the update.
        with tf.control_dependencies([loss, *values]):
            train = optimizer.apply_gradients(
                pairs, v1.train.get_or_create_global_step()
            )
        variables |= {f"slot{k}": v for k, v in enumerate(optimizer.variables())}
        others = ([loss, *dense[:1]], values[-1:], [*dense[:2], *rows], [train, values])
        return [{"loss": loss, "train": train}, others[self.turn]]

    def _elements(self) -> Any:
        batch = [a.astype(a.dtype) for a in self.batches()[0][:5]]
        data = tf.data.Dataset.from_tensor_slices(tuple(batch))
        data = data.batch(max(len(batch[0]) * 2 // 3, 1)).repeat()
        iterator = v1.data.make_initializable_iterator(data)
        v1.add_to_collection(v1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
        return iterator.get_next()


class _Variable:
    """A variable of a session's graph."""

    def __init__(self, session: v1.Session, variable: tf.Variable) -> None:
        self._session, self._variable = session, variable

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        return np.asarray(self._session.run(self._variable))


def _door(step: Any, make: Any, signature: Any, autodist: Any) -> Any:
    graph = tf.Graph()
    scope = autodist.scope() if autodist else contextlib.nullcontext()
    with graph.as_default(), scope:
        variables = make()
        fed = [v1.placeholder(s.dtype, s.shape) for s in signature]
        turns = [turn for turn in step(variables, *fed) if turn]
        begin = (
            autodist.create_distributed_session if autodist else helpers.plain_session
        )
        session = begin()

    def of_batch(*batch: Any) -> Any:
        feeds = {one: a.numpy() for one, a in zip(fed, batch, strict=True)}
        return [session.run(turn, feeds) for turn in turns]

    return {name: _Variable(session, v) for name, v in variables.items()}, of_batch


def of_setting(k: int) -> Any:
    """Returns what runs it in a session of all replicas, made so."""

    def door(step: Any, make: Any, signature: Any, num_replicas: int) -> Any:
        options = dict(SETTINGS[k % len(SETTINGS)])
        strategy = options.pop("strategy")
        strategy = strategy() if callable(strategy) else strategy
        devices = [f"CPU:{r}" for r in range(num_replicas)]
        autodist = replicator.AutoDist(devices, strategy, **options)
        return _door(step, make, signature, autodist)

    return door
