# SPDX-License-Identifier: Apache-2.0
"""Random models, optimizers and matching strategies, drawn by Hypothesis."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

from replicator import strategy
from replicator.variables import synchronizer

LOOKUPS = ("layer", "gather", "embedding_lookup")
TOKENS = 3  # per example
EXAMPLES = 2  # per replica


@dataclasses.dataclass(frozen=True)
class Model:
    """Layers with small sizes, and smooth, so that rounding stays small.

    Attributes:
        rows: The number of rows of the embedding table.
        widths: The widths of the layers; the first is the table's.
        lookup: How rows are read, one of LOOKUPS.
        tied: Whether the logits are products with the table's rows, so that its
            gradient is dense; requires a last width equal to the first.
        seeded: Whether initializers draw, or all values are given.
    """

    rows: int
    widths: tuple[int, ...]
    lookup: str
    tied: bool
    seeded: bool

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the variables, by their paths."""
        by_path = {"table/embeddings": (self.rows, self.widths[0])}
        for k, (inputs, outputs) in enumerate(itertools.pairwise(self.widths)):
            by_path[f"dense{k}/kernel"] = (inputs, outputs)
            by_path[f"dense{k}/bias"] = (outputs,)
        return {**by_path, "temperature": ()}

    def initializers(self) -> dict[str, Any]:
        """Returns initializers by path; each call of one draws the same values."""
        if self.seeded:
            random_normal = keras.initializers.RandomNormal
            return {
                path: random_normal(0.5, 0.5, seed=k)
                for k, path in enumerate(self.shapes)
            }
        random = np.random.default_rng(self.rows)
        values = {
            path: np.float32(random.normal(0.5, 0.5, shape))
            for path, shape in self.shapes.items()
        }
        return {path: _given(value) for path, value in values.items()}

    def tokens(self, replicas: int) -> np.ndarray:
        """Returns examples for some replicas, the same in each call."""
        random = np.random.default_rng(self.rows + 1)
        return random.integers(0, self.rows, (EXAMPLES * replicas, TOKENS), np.int32)


def _given(value: np.ndarray) -> Callable[..., tf.Tensor]:
    return lambda shape, dtype=None: tf.constant(value, dtype)


class Layers:
    """A model with its variables.

    Args:
        model: The sizes.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        starts = model.initializers()
        self._table = keras.layers.Embedding(
            model.rows, model.widths[0], starts["table/embeddings"], name="table"
        )
        self._table.build()
        self._dense = []
        for k, (inputs, outputs) in enumerate(itertools.pairwise(model.widths)):
            layer = keras.layers.Dense(
                outputs,
                "tanh",
                kernel_initializer=starts[f"dense{k}/kernel"],
                bias_initializer=starts[f"dense{k}/bias"],
                name=f"dense{k}",
            )
            layer.build((None, inputs))
            self._dense.append(layer)
        self._temperature = tf.Variable(0.7, name="temperature")
        variables = [
            v for layer in (self._table, *self._dense) for v in layer.variables
        ]
        self.variables = [*(v.value for v in variables), self._temperature]

    def loss(self, tokens: tf.Tensor) -> tf.Tensor:
        """Returns the mean loss of some examples."""
        table = self.variables[0]
        lookups: dict[str, Callable[[], tf.Tensor]] = {
            "layer": lambda: self._table(tokens),
            "gather": lambda: tf.gather(table, tokens),
            "embedding_lookup": lambda: tf.nn.embedding_lookup(table, tokens),
        }
        x = tf.reduce_mean(lookups[self._model.lookup](), axis=1)
        for layer in self._dense:
            x = layer(x)
        if self._model.tied:
            x = tf.matmul(x, table, transpose_b=True)
        return tf.reduce_mean(tf.sin(x * self._temperature + 1.0))


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Draws a model."""
    widths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    tied = draw(st.booleans())
    widths = [*widths, widths[0]] if tied else widths
    lookup = draw(st.sampled_from(LOOKUPS))
    return Model(
        draw(st.integers(2, 9)), tuple(widths), lookup, tied, draw(st.booleans())
    )


# Optimizers that divide by a root add enough to it that rounding stays small.
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: keras.optimizers.SGD(0.3),
    "momentum": lambda: keras.optimizers.SGD(0.2, momentum=0.9),
    "Nesterov": lambda: keras.optimizers.SGD(0.2, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.1, epsilon=1e-2),
    "AMSGrad": lambda: keras.optimizers.Adam(0.1, epsilon=1e-2, amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.05, epsilon=1e-2),
    "Adam, clipnorm": lambda: keras.optimizers.Adam(0.1, epsilon=1e-2, clipnorm=0.05),
    "global clipnorm": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.1),
    "clipvalue": lambda: keras.optimizers.SGD(0.5, clipvalue=0.02),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.05, epsilon=1e-2),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.2),
    "Nadam": lambda: keras.optimizers.Nadam(0.1, epsilon=1e-2),
    "averaged": lambda: keras.optimizers.SGD(0.3, use_ema=True),
    "v1 Adagrad": lambda: tf.compat.v1.train.AdagradOptimizer(0.2),
    "v1 momentum": lambda: tf.compat.v1.train.MomentumOptimizer(0.2, 0.9),
}


# --- Strategies that fit a model ------------------------------------------------------

CHUNKS = st.integers(1, 3)
SPECS = st.sampled_from(synchronizer.SPECS)
BUILDERS: dict[str, st.SearchStrategy[strategy.Builder]] = {
    "PS": st.builds(strategy.PS, st.booleans()),
    "PSLoadBalancing": st.builds(strategy.PSLoadBalancing, st.booleans()),
    "PartitionedPS": st.builds(strategy.PartitionedPS, st.booleans()),
    "UnevenPartitionedPS": st.builds(strategy.UnevenPartitionedPS, st.booleans()),
    "AllReduce": st.builds(strategy.AllReduce, CHUNKS, SPECS),
    "PartitionedAR": st.builds(strategy.PartitionedAR, CHUNKS, SPECS),
    "RandomAxisPartitionAR": st.builds(
        strategy.RandomAxisPartitionAR, CHUNKS, st.integers(0, 99), SPECS
    ),
    "Parallax": st.builds(strategy.Parallax, CHUNKS, all_reduce_spec=SPECS),
    "Sharded": st.just(strategy.Sharded()),
    "Mirrored": st.just(strategy.Mirrored()),
    "Auto": st.builds(strategy.Auto, st.integers(0, 2), st.sampled_from([0.01, 1.0])),
}
ANY_BUILDER = st.one_of(*BUILDERS.values())
IN_PARTS = st.builds(
    strategy.Partitioned, st.sampled_from([0, -1]), st.none() | st.integers(1, 4)
)


@st.composite
def rules(draw: st.DrawFn, model: Model) -> dict[str, strategy.Builder]:
    """Draws rules, none of which comes after a more general one."""
    patterns = {"^table": ANY_BUILDER | IN_PARTS}
    if any(path.startswith("dense") for path in model.shapes):
        patterns |= {"kernel$": ANY_BUILDER | IN_PARTS, "dense0": ANY_BUILDER}
        patterns |= {"dense.*bias": ANY_BUILDER | IN_PARTS}
    chosen = draw(st.lists(st.sampled_from(sorted(patterns)), min_size=1, unique=True))
    drawn_rules = {pattern: draw(patterns[pattern]) for pattern in chosen}
    if draw(st.booleans()):
        drawn_rules[".*"] = draw(ANY_BUILDER)
    hidden = dict(strategy.Rules(drawn_rules).hidden(list(model.shapes)))
    return {
        pattern: rule for pattern, rule in drawn_rules.items() if pattern not in hidden
    }


@st.composite
def synchronizers(draw: st.DrawFn, replicas: int) -> Any:
    """Draws the synchronizer of a variable or a part; servers may be no replica's."""
    if draw(st.booleans()):
        return strategy.AllReduceSynchronizer(draw(SPECS), "", draw(st.integers(0, 2)))
    device = f"CPU:{draw(st.integers(0, replicas))}"
    return strategy.PSSynchronizer(device, draw(st.booleans()))


@st.composite
def nodes(draw: st.DrawFn, path: str, shape: Any, replicas: int) -> strategy.Node:
    """Draws the node of a variable: whole, or in any parts along any axis."""
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    if not axes or draw(st.booleans()):
        return strategy.Node(path, draw(synchronizers(replicas)))
    axis = draw(st.sampled_from(axes))
    places = st.lists(st.integers(1, shape[axis] - 1), min_size=1, unique=True)
    cuts = [0, *sorted(draw(places)), shape[axis]]
    sizes = [after - before for before, after in itertools.pairwise(cuts)]
    hows = [draw(synchronizers(replicas)) for _ in sizes]
    return strategy.Node.in_parts(path, axis, sizes, hows)


@st.composite
def given_nodes(draw: st.DrawFn, model: Model, replicas: int) -> strategy.Strategy:
    """Draws a node for each of some variables, saved and loaded."""
    drawn_nodes = [
        draw(nodes(*path_and_shape, replicas))
        for path_and_shape in model.shapes.items()
    ]
    indices = draw(st.sets(st.integers(0, len(drawn_nodes) - 1), min_size=1))
    built = strategy.Strategy(tuple(drawn_nodes[k] for k in sorted(indices)))
    form = draw(st.sampled_from(["bytes", "text", "json"]))
    return getattr(strategy.Strategy, f"from_{form}")(getattr(built, f"to_{form}")())
