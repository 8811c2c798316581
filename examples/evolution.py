# SPDX-License-Identifier: Apache-2.0
"""Trains a policy by evolution strategies: replicas send returns, and no gradients.

    python examples/evolution.py --environment=CartPole-v1 --devices=CPU:0,CPU:1

Each generation tries many policies in pairs: one with noise added to the parameters,
one with the same noise subtracted. Better ones pull the parameters towards their noise
(Salimans et al. 2017, arXiv:1703.03864). As all replicas draw all noise from the same
seed, a replica needs only the returns of the others to compute the update by itself:
one number per episode is sent, by `repl.all_gather`, however large the policy is. The
update is equal on all replicas by construction, which the library proves, so a plain
optimizer is enough.

Episodes are those of gymnasium's environments, played within the step by
`tf.numpy_function`. Results depend on the seed, not on the number of replicas. The
output folder gets

    checkpoints/  the last three: parameters, optimizer, generation and history
    history.json  the mean return of each generation, and at intervals of the policy
    summaries/    the same for TensorBoard: tensorboard --logdir runs/evolution
    curves.png    the same as a picture
"""

from __future__ import annotations

import dataclasses
from typing import Any

import support

import gymnasium
import numpy as np
import tensorflow as tf
from absl import flags

import replicator

HIDDEN = 16  # units of the policy
JUDGED = 16  # episodes that evaluate the policy itself

FLAGS = flags.FLAGS
support.define_flags(
    "runs/evolution", steps=60, seed="Seed of parameters, noise and episodes."
)
flags.DEFINE_string("environment", "CartPole-v1", "A gymnasium environment.")
flags.DEFINE_integer(
    "pairs", 32, "Pairs of opposite policies per generation.", 1, 10**6
)
support.define_count("judge_every", 5, "Generations between evaluations of the policy.")
support.define_positive("noise", 0.1, "Standard deviation of the noise.")
support.define_positive("learning_rate", 0.05, "Adam's learning rate.")


# --- Policies and episodes ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Task:
    """An environment, and its policies: perceptrons with one hidden layer.

    Attributes:
        environment: The environment's name.
        inputs: The size of an observation.
        outputs: The number of actions, or the size of an action.
        limit: The largest number in an action; None if actions are discrete.
    """

    environment: str
    inputs: int
    outputs: int
    limit: float | None

    @classmethod
    def of(cls, environment: str) -> Task:
        """Returns the task of an environment's name; UsageError if there is none."""
        try:
            instance = gymnasium.make(environment)
        except (gymnasium.error.Error, ImportError) as error:
            raise support.UsageError(f"--environment={environment}: {error}") from error
        observations, actions = instance.observation_space, instance.action_space
        instance.close()
        if isinstance(observations, gymnasium.spaces.Box):
            inputs = int(np.prod(observations.shape))
            if isinstance(actions, gymnasium.spaces.Discrete):
                return cls(environment, inputs, int(actions.n), None)
            if isinstance(actions, gymnasium.spaces.Box) and actions.is_bounded():
                outputs = int(np.prod(actions.shape))
                return cls(environment, inputs, outputs, float(actions.high.max()))
        raise support.UsageError(
            f"--environment={environment} has observations {observations} and actions "
            f"{actions}"
        )

    @property
    def size(self) -> int:
        """The number of parameters of a policy."""
        return (self.inputs + 1 + self.outputs) * HIDDEN + self.outputs

    def actions(self, policies: np.ndarray, seen: np.ndarray) -> list[Any]:
        """Returns each policy's action: rows of parameters, rows of observations."""
        ends = np.cumsum([self.inputs * HIDDEN, HIDDEN, HIDDEN * self.outputs])
        first, bias, second, last = np.split(policies, ends, axis=1)
        first = first.reshape(-1, self.inputs, HIDDEN)
        second = second.reshape(-1, HIDDEN, self.outputs)
        hidden = np.tanh(np.einsum("ni,nih->nh", seen, first) + bias)
        scores = np.einsum("nh,nho->no", hidden, second) + last
        if self.limit is None:
            return list(scores.argmax(axis=1))
        return list((self.limit * np.tanh(scores)).astype(np.float32))

    def play(self, policies: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """Returns the return of one episode of each policy, float32 [n].

        Args:
            policies: The parameters, float32 [n, size].
            seeds: The seeds of the episodes, [n].
        """
        games = [gymnasium.make(self.environment) for _ in seeds]
        pairs = zip(games, seeds, strict=True)
        observations = [np.ravel(game.reset(seed=int(seed))[0]) for game, seed in pairs]
        returns = np.zeros(len(games), np.float32)
        playing = np.arange(len(games))
        while playing.size:
            observed = np.stack([observations[n] for n in playing])
            actions = self.actions(policies[playing], observed)
            over = []
            for n, action in zip(playing, actions, strict=True):
                observation, reward, terminated, truncated, _ = games[n].step(action)
                observations[n] = np.ravel(observation)
                returns[n] += reward
                over.append(terminated or truncated)
            playing = playing[~np.array(over)]
        return returns


# --- The step -------------------------------------------------------------------------


class Evolution:
    """A policy, and the steps that improve and evaluate it.

    Args:
        repl: The replicas, which divide the pairs of policies.
        task: What is played.
        pairs: The number of antithetic pairs in a generation.
        noise: The standard deviation of the parameter noise.
        learning_rate: Adam's.
        seed: The seed of parameters, noise and episodes.
    """

    def __init__(
        self,
        repl: replicator.Replicator,
        task: Task,
        pairs: int,
        noise: float,
        learning_rate: float,
        seed: int,
    ) -> None:
        self._repl, self._task, self._pairs = repl, task, pairs
        self._noise, self._seed = noise, seed
        start = np.random.default_rng(seed).normal(0, 0.1, task.size)
        with repl.context():
            self.parameters = tf.Variable(start, dtype=tf.float32)
            self.optimizer = tf.keras.optimizers.Adam(learning_rate)
            self.optimizer.build([self.parameters])

    def step(self, generation: tf.Tensor) -> tf.Tensor:
        """Improves the policy by a generation; returns its mean return."""
        noise = tf.random.stateless_normal(
            [self._pairs, self._task.size], self._seeds(generation, 0)
        )
        scaled_noise = self._noise * self._own(noise)
        seeds = tf.random.stateless_uniform(
            [self._pairs], self._seeds(generation, 1), 0, 2**31 - 1, tf.int32
        )
        # Both policies of a pair play the same episode.
        returns = [
            self._play(self.parameters + sign * scaled_noise, self._own(seeds))
            for sign in (1.0, -1.0)
        ]
        both = self._repl.all_gather(tf.stack(returns), axis=1)  # all that is sent
        ranks = tf.reshape(centered_ranks(tf.reshape(both, [-1])), [2, -1])
        weights = (ranks[0] - ranks[1]) / (2 * self._pairs * self._noise)
        uphill = tf.linalg.matvec(noise, weights, transpose_a=True)
        self.optimizer.apply_gradients([(-uphill, self.parameters)])
        return tf.reduce_mean(both)

    def judge(self, generation: tf.Tensor) -> tf.Tensor:
        """Returns the mean return of the policy itself, without noise."""
        count = -(-JUDGED // self._repl.num_replicas)
        seeds = generation * 1000 + self._repl.replica_id * count + tf.range(count)
        same = tf.tile(self.parameters[tf.newaxis], [count, 1])
        returns = self._play(same, seeds)
        return tf.reduce_mean(self._repl.all_gather(returns, axis=0)[:JUDGED])

    def _seeds(self, generation: tf.Tensor, what: int) -> tf.Tensor:
        """Returns the seed for one kind of draw in a generation."""
        return tf.stack([tf.constant(self._seed), 2 * generation + what])

    def _own(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns the replica's share of rows for all pairs."""
        return tf.split(rows, self._repl.num_replicas)[self._repl.replica_id]

    def _play(self, policies: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
        """Returns the return of an episode of each policy."""
        returns = tf.numpy_function(self._task.play, [policies, seeds], tf.float32)
        return tf.ensure_shape(returns, seeds.shape)


def centered_ranks(x: tf.Tensor) -> tf.Tensor:
    """Returns the ranks of n numbers, from about -1/2 to 1/2; ties share one."""
    return tf.reduce_mean(tf.sign(x[:, tf.newaxis] - x), axis=1) / 2


def main() -> str:
    """Trains as the flags say; returns the last line to print."""
    task = Task.of(FLAGS.environment)
    repl = replicator.Replicator(FLAGS.devices)
    if FLAGS.pairs % repl.num_replicas:
        raise support.UsageError(
            f"--pairs={FLAGS.pairs} cannot be divided evenly among {repl.num_replicas}"
            " replicas"
        )
    decisive = support.settings(
        "environment", "pairs", "noise", "learning_rate", "seed", "judge_every"
    )
    output_dir = support.output_folder()
    evolution = Evolution(
        *(repl, task, FLAGS.pairs, FLAGS.noise, FLAGS.learning_rate, FLAGS.seed)
    )
    run = support.Run(
        output_dir,
        decisive,
        {"parameters": evolution.parameters, "optimizer": evolution.optimizer},
        steps=FLAGS.steps,
        resume=FLAGS.resume,
        panels=[support.Panel(["generation", "policy"], "mean return")],
    )
    step_fn = repl.build(evolution.step, args=(run.step,))
    judge_fn = repl.build(evolution.judge, args=(run.step,))
    for step in run.steps():
        run.log(generation=float(step_fn(step)))
        if step % FLAGS.judge_every == 0:
            run.log(policy=float(judge_fn(step)))
            run.tell(
                f"generation {step}/{FLAGS.steps}"
                f"  mean return {run.history.last('generation'):.1f}"
                f"  of the policy itself {run.history.last('policy'):.1f}"
            )
    sent = step_fn.plan.totals.per_step.nbytes
    return (
        f"The policy's mean return is {float(judge_fn(0)):.1f}. The replicas sent "
        f"{sent} bytes per generation. Results are in {output_dir}."
    )


if __name__ == "__main__":
    support.start(main)
