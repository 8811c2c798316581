# SPDX-License-Identifier: Apache-2.0
"""Any model under any strategy trains as on one device in plain Keras."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests import helpers
from tests.strategy import drawn_programs

STEPS = 3
MODES = ("eager", "function", "session")
QUIET = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.generate],  # an example takes a second, so shrinking is off
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A model, and how it is trained.

    Attributes:
        model: The model.
        replicas: The number of replicas.
        strategy: The Replicator's strategy.
        optimizer: One of OPTIMIZERS.
        mode: One of MODES.
    """

    model: drawn_programs.Model
    replicas: int
    strategy: Any
    optimizer: str
    mode: str


@st.composite
def programs(draw: st.DrawFn, kind: str) -> Program:
    """Draws a program whose strategy is a builder, rules, or one node per variable."""
    # Hypothesis' first example takes the first option of each.
    model, replicas = draw(drawn_programs.models()), draw(st.sampled_from([2, 3, 1]))
    drawn = {
        **drawn_programs.BUILDERS,
        "rules": drawn_programs.rules(model),
        "nodes": drawn_programs.given_nodes(model, replicas),
    }
    chosen = draw(drawn[kind])
    optimizer = draw(st.sampled_from(sorted(drawn_programs.OPTIMIZERS)))
    return Program(model, replicas, chosen, optimizer, draw(st.sampled_from(MODES)))


def train_step(layers: Any, optimizer: Any, tokens: tf.Tensor, plain: bool) -> Any:
    """Takes a step; returns the loss before it.

    Args:
        layers: The model.
        optimizer: Its optimizer.
        tokens: The examples.
        plain: Whether this is plain TensorFlow and Keras.
    """
    with tf.GradientTape() as tape:
        loss = layers.loss(tokens)
    gradients = tape.gradient(loss, layers.variables)
    if plain:
        gradients = [
            helpers.each_row_once(g) if isinstance(g, tf.IndexedSlices) else g
            for g in gradients
        ]
    optimizer.apply_gradients(zip(gradients, layers.variables, strict=True))
    return loss


def on_one_device(program: Program) -> list[Any]:
    """Trains on the examples of all replicas together, without Replicator.

    Returns:
        The losses of all steps, and the variables after them.
    """
    layers = drawn_programs.Layers(program.model)
    optimizer = drawn_programs.OPTIMIZERS[program.optimizer]()
    tokens = tf.constant(program.model.tokens(program.replicas))
    losses = [train_step(layers, optimizer, tokens, True) for _ in range(STEPS)]
    return [np.stack(losses), *(v.numpy() for v in layers.variables)]


def on_replicas(program: Program) -> list[Any]:
    """Trains on replicas, under the strategy; returns the same."""
    parts = np.split(program.model.tokens(program.replicas), program.replicas)
    repl = helpers.make(program.replicas, strategy=program.strategy)

    def make() -> tuple[Any, Any]:
        with repl.context():
            layers = drawn_programs.Layers(program.model)
            optimizer = drawn_programs.OPTIMIZERS[program.optimizer]()
            wrapped = repl.wrap_optimizer(optimizer)

        def step_fn() -> Any:
            tokens = tf.gather(tf.stack(parts), repl.replica_id)
            return repl.all_reduce(train_step(layers, wrapped, tokens, False), "mean")

        return layers, step_fn

    if program.mode == "session":
        with tf.Graph().as_default():
            layers, step_fn = make()
            loss = repl.run(step_fn)[0]
            with helpers.monitored_session() as session:
                losses = [session.run(loss) for _ in range(STEPS)]
                return [np.stack(losses), *session.run(layers.variables)]
    layers, step_fn = make()
    call = repl.build(step_fn)
    if program.mode == "function":
        call = tf.function(lambda: repl.run(step_fn))
    losses = [call()[0] for _ in range(STEPS)]
    helpers.assert_replicas_equal(
        v for v in layers.variables if not getattr(v, "parts", ())
    )
    return [np.stack(losses), *(v.numpy() for v in layers.variables)]


def check(program: Program) -> None:
    """Asserts that a program computes one device's results."""
    expected, actual = on_one_device(program), on_replicas(program)
    for path, one, other in zip(
        ["loss", *program.model.shapes], expected, actual, strict=True
    ):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5, err_msg=path)


KINDS = ("rules", "nodes", *drawn_programs.BUILDERS)


@pytest.mark.battery(5)
@pytest.mark.parametrize("kind", KINDS)
def test_a_random_program_equals_one_device(kind: str) -> None:
    @settings(max_examples=2, **QUIET)
    @given(programs(kind))
    def law(program: Program) -> None:
        check(program)

    law()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_random_programs_equal_one_device(kind: str) -> None:
    @settings(max_examples=25, **QUIET)
    @given(programs(kind))
    def law(program: Program) -> None:
        check(program)

    law()
