# SPDX-License-Identifier: Apache-2.0
"""JAX: pmap and shard_map on host CPU devices, beside one device with the whole batch.

Run by `python -m benchmarks.peers`, in an environment with JAX. All contenders share
one process, whose devices share a pool of one thread per core. Weights and slots are
donated, so that they are updated in place.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import networks, timing
from benchmarks.peers import nets
from benchmarks.peers.ratios import SINGLE

NAME = "JAX"
REPLICAS = 2
AXIS = "replica"

State = tuple[Any, Any]  # weights and momenta


def initial_weights(network: nets.Network) -> Any:
    """Returns the initial weights of all contenders."""
    rng = np.random.default_rng(1)

    def matrix(rows: int, columns: int, gain: float = 2.0) -> np.ndarray:
        return rng.standard_normal((rows, columns), np.float32) * np.float32(
            np.sqrt(gain / rows)
        )

    def bias(columns: int) -> np.ndarray:
        return np.zeros(columns, np.float32)

    if isinstance(network, networks.LanguageModel):
        n = network.units
        return {
            "embedding": matrix(network.characters, n),
            "lstm": [
                (matrix(n, 4 * n, 1.0), matrix(n, 4 * n, 1.0), bias(4 * n))
                for _ in range(network.layers)
            ],
            "logits": (matrix(n, network.characters, 1.0), bias(network.characters)),
        }
    pairs = zip(network.sizes, network.sizes[1:], strict=False)
    return [(matrix(rows, columns), bias(columns)) for rows, columns in pairs]


def perceptron(weights: Sequence[Any], x: jax.Array) -> jax.Array:
    """Returns logits [batch, classes] of examples [batch, inputs]."""
    *hidden, (matrix, bias) = weights
    for own_matrix, own_bias in hidden:
        x = jax.nn.relu(x @ own_matrix + own_bias)
    return x @ matrix + bias


def language_model(weights: Any, text: jax.Array) -> jax.Array:
    """Returns logits [batch, length, characters] of text [batch, length]."""
    x = weights["embedding"][text].swapaxes(0, 1)  # [length, batch, units]
    for inward, recurrent, bias in weights["lstm"]:

        def cell(
            state: Any, x: jax.Array, recurrent: jax.Array = recurrent
        ) -> tuple[Any, jax.Array]:
            h, c = state
            i, f, g, o = jnp.split(x + h @ recurrent, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        # Zeros derived from x, so that shard_map knows that they differ among replicas.
        zeros = jnp.zeros_like(x[0])
        x = lax.scan(cell, (zeros, zeros), x @ inward + bias)[1]
    matrix, bias = weights["logits"]
    return x.swapaxes(0, 1) @ matrix + bias


def loss_of(network: nets.Network, weights: Any, batch: networks.Batch) -> jax.Array:
    """Returns the mean loss of a batch."""
    examples, labels = batch
    recurrent = isinstance(network, networks.LanguageModel)
    logits = (language_model if recurrent else perceptron)(weights, examples)
    log_probabilities = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probabilities, labels[..., None], -1).mean()


def update(state: State, gradients: Any) -> State:
    """Returns weights and momenta after a step of SGD."""
    weights, momenta = state
    momenta = jax.tree.map(
        lambda m, g: networks.MOMENTUM * m - networks.LEARNING_RATE * g,
        momenta,
        gradients,
    )
    return jax.tree.map(jnp.add, weights, momenta), momenta


Parallel = Callable[[State, networks.Batch], tuple[State, jax.Array]]


def one_device(network: nets.Network) -> Parallel:
    """The whole batch on one device, by jit."""

    def step(state: State, batch: networks.Batch) -> tuple[State, jax.Array]:
        loss, gradients = jax.value_and_grad(functools.partial(loss_of, network))(
            state[0], batch
        )
        return update(state, gradients), loss

    return jax.jit(step, donate_argnums=0)


def by_pmap(network: nets.Network) -> Parallel:
    """A part of the batch on each device, by pmap."""

    def step(state: State, batch: networks.Batch) -> tuple[State, jax.Array]:
        loss, gradients = jax.value_and_grad(functools.partial(loss_of, network))(
            state[0], batch
        )
        return update(state, lax.pmean(gradients, AXIS)), lax.pmean(loss, AXIS)

    return jax.pmap(step, AXIS, donate_argnums=0)


def by_shard_map(network: nets.Network) -> Parallel:
    """A part of the batch on each device, by shard_map under jit."""
    mirrored, sharded = PartitionSpec(), PartitionSpec(AXIS)

    def step(state: State, batch: networks.Batch) -> tuple[State, jax.Array]:
        # The weights are the same everywhere, so the gradients of the mean are, too:
        # shard_map reduces them where it transposes that.
        loss, gradients = jax.value_and_grad(
            lambda weights: lax.pmean(loss_of(network, weights, batch), AXIS)
        )(state[0])
        return update(state, gradients), loss

    mapped = jax.shard_map(
        step,
        mesh=_mesh(),
        in_specs=(mirrored, sharded),
        out_specs=(mirrored, mirrored),
    )
    return jax.jit(mapped, donate_argnums=0)


def _mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((REPLICAS,), (AXIS,))


@contextlib.contextmanager
def runs(workload: nets.Workload) -> Iterator[dict[str, timing.Run]]:
    """Yields all contenders, by name."""
    network = workload.network
    weights = initial_weights(network)
    state = (weights, jax.tree.map(np.zeros_like, weights))
    global_batch = workload.parts(1)[0]
    stacked = tuple(
        np.stack(part) for part in zip(*workload.parts(REPLICAS), strict=True)
    )
    everywhere = NamedSharding(_mesh(), PartitionSpec())
    sharding = NamedSharding(_mesh(), PartitionSpec(AXIS))
    replicated = jax.tree.map(lambda leaf: np.stack([leaf] * REPLICAS), state)
    yield {
        SINGLE: _run(
            one_device(network), jax.device_put(state), jax.device_put(global_batch)
        ),
        "pmap": _run(
            by_pmap(network),
            jax.device_put(replicated, sharding),
            jax.device_put(stacked, sharding),
        ),
        "shard_map": _run(
            by_shard_map(network),
            jax.device_put(state, everywhere),
            jax.device_put(global_batch, sharding),
        ),
    }


def _run(step: Parallel, state: State, batch: networks.Batch) -> timing.Run:
    """Returns a run of steps, each of which waits until its results are complete."""

    def call() -> float:
        nonlocal state
        state, loss = step(state, batch)
        jax.block_until_ready((state, loss))
        return np.asarray(loss).flat[0]

    return timing.in_turn(call)
