# SPDX-License-Identifier: Apache-2.0
"""Trains a policy on trajectories that actors, in separate processes, play meanwhile.

    python examples/learner.py --environment=CartPole-v1 --actors=2

Actors (examples/actors.py) play one of gymnasium's environments and send trajectories,
which replicas of the learner take from a queue, a batch in each step, by an ordinary
`tf.data.Dataset` that is dealt to them. Actors use weights of a few steps ago; V-trace
corrects for the difference (IMPALA, Espeholt et al. 2018, arXiv:1802.01561). The output
folder gets

    checkpoints/  the last three: network, optimizer, step and history
    history.json  the mean return of the last 100 episodes, the loss, the entropy of the
                  policy, and by how many steps actors were behind
    summaries/    the same for TensorBoard: tensorboard --logdir runs/learner
    curves.png    the same as a picture

An actor that dies is reported and restarted; after --restarts of them the run ends with
an error. However the learner ends, no actor remains. The training data depend on the
actors' speed, so no two runs are alike; --resume continues with the weights.
"""

from __future__ import annotations

import collections
import functools
from typing import Any

import support

import actors
import gymnasium
import numpy as np
import tensorflow as tf
from absl import flags

import replicator

UNITS = (64, 64)  # of the network's layers
VALUE_COST, ENTROPY_COST = 0.5, 0.01  # their weights in the loss
LARGEST_NORM = 1.0  # of all gradients together
RECENT = 100  # episodes in the mean return

FLAGS = flags.FLAGS
support.define_flags(
    "runs/learner",
    steps=3000,
    seed="Seed of the initial weights, actions and episodes.",
)
flags.DEFINE_string("environment", "CartPole-v1", "A gymnasium environment.")
flags.DEFINE_integer("actors", 2, "Processes that play.", 1, 1000)
support.define_count("restarts", 3, "How many dead actors to restart.", 0)
support.define_count("batch_size", 16, "Trajectories per step, on all replicas.")
flags.DEFINE_integer("unroll", 20, "Steps in a trajectory.", 1, 10_000)
support.define_count(
    "publish_every", 1, "Steps between updates of the actors' weights."
)
support.define_between("discount", 0.99, "Discount factor per step.", 0.0, 1.0)
support.define_positive("learning_rate", 2e-3, "Adam's learning rate.")


# --- V-trace --------------------------------------------------------------------------


def vtrace(
    log_ratios: tf.Tensor,
    discounts: tf.Tensor,
    rewards: tf.Tensor,
    values: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the value targets, and the advantages of the actions.

    Section 4.1 of the paper, with both thresholds 1.

    Args:
        log_ratios: The log of the actions' probabilities for the learner relative to
            the actor, [n, T].
        discounts: The discount of what follows each step, [n, T].
        rewards: The reward of each step, [n, T].
        values: The learner's value before each step, and after the last one, [n, T +
            1].

    Returns:
        Targets of the values before each step, and advantages, [n, T] both.
    """
    ratios = tf.minimum(1.0, tf.exp(log_ratios))
    now, later = values[:, :-1], values[:, 1:]
    differences = tf.unstack(ratios * (rewards + discounts * later - now), axis=1)
    traces = tf.unstack(discounts * ratios, axis=1)
    correction = tf.zeros_like(values[:, 0])
    corrections = []
    for difference, trace in zip(differences[::-1], traces[::-1], strict=True):
        correction = difference + trace * correction
        corrections.append(correction)
    targets = now + tf.stack(corrections[::-1], axis=1)
    after = tf.concat([targets[:, 1:], values[:, -1:]], axis=1)
    return targets, ratios * (rewards + discounts * after - now)


# --- The learner ----------------------------------------------------------------------


class Learner:
    """A network, and the step that trains it on a batch of trajectories.

    Args:
        repl: The Replicator.
        inputs: The size of an observation.
        actions: The number of actions.
        learning_rate: Adam's.
        seed: The seed of the initial weights.
    """

    def __init__(
        self,
        repl: replicator.Replicator,
        inputs: int,
        actions: int,
        learning_rate: float,
        seed: int,
    ) -> None:
        self._repl = repl
        tf.keras.utils.set_random_seed(seed)
        dense = functools.partial(tf.keras.layers.Dense, activation="tanh")
        with repl.context():
            observations = hidden = tf.keras.layers.Input((inputs,))
            for units in UNITS:
                hidden = dense(units)(hidden)
            logits = dense(actions, activation=None, kernel_initializer="zeros")(hidden)
            value = dense(1, activation=None)(hidden)
            self.network = tf.keras.Model(observations, [logits, value])
            adam = tf.keras.optimizers.Adam(learning_rate, global_clipnorm=LARGEST_NORM)
            self.optimizer = repl.wrap_optimizer(adam)
            self.optimizer.build(self.network.trainable_variables)

    def policy(self) -> list[np.ndarray]:
        """Returns the weights that actors need: all but the value head's."""
        return self.network.get_weights()[:-2]

    def step(self, batch: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Trains on trajectories, shaped by Player.unroll; returns numbers to log."""
        variables = self.network.trainable_variables
        with tf.GradientTape() as tape:
            loss, entropy = self._loss(batch)
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        logs = {
            "loss": loss,
            "entropy": entropy,
            "version": tf.reduce_mean(batch["version"]),
        }
        return self._repl.all_reduce(logs, "mean")

    def _loss(self, batch: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the loss, and the mean entropy of the policy."""
        observations = batch["observations"]
        flat = tf.reshape(observations, [-1, int(np.prod(observations.shape[2:]))])
        logits, values = self.network(flat)
        logits = tf.reshape(logits, [-1, observations.shape[1], logits.shape[-1]])[
            :, :-1
        ]
        values = tf.reshape(values, [-1, observations.shape[1]])
        likely, was_likely = (
            -tf.nn.sparse_softmax_cross_entropy_with_logits(batch["actions"], x)
            for x in (logits, batch["logits"])
        )
        targets, advantages = map(
            tf.stop_gradient,
            vtrace(likely - was_likely, batch["discounts"], batch["rewards"], values),
        )
        logs = tf.nn.log_softmax(logits)
        entropy = -tf.reduce_mean(tf.reduce_sum(tf.exp(logs) * logs, axis=-1))
        policy_loss = -tf.reduce_mean(likely * advantages)
        value_loss = tf.reduce_mean(tf.square(targets - values[:, :-1])) / 2
        loss = policy_loss + VALUE_COST * value_loss - ENTROPY_COST * entropy
        return loss, entropy


# --- The program ----------------------------------------------------------------------


def sizes(environment: str) -> tuple[tuple[int, ...], int]:
    """Returns the shape of observations and the number of actions; or UsageError."""
    try:
        with gymnasium.make(environment) as instance:
            observations, actions = instance.observation_space, instance.action_space
    except (gymnasium.error.Error, ImportError) as error:
        raise support.UsageError(f"--environment={environment}: {error}") from error
    if not isinstance(observations, gymnasium.spaces.Box) or not isinstance(
        actions, gymnasium.spaces.Discrete
    ):
        raise support.UsageError(
            f"--environment={environment} has observations {observations} and actions "
            f"{actions}; expected a Box of observations and Discrete actions"
        )
    return observations.shape, int(actions.n)


def dataset(
    players: actors.Actors, shape: tuple[int, ...], num_actions: int, num_replicas: int
) -> tf.data.Dataset:
    """Returns the batches for the replicas, of trajectories as they arrive."""
    unroll = FLAGS.unroll
    context = replicator.InputContext(0, num_replicas, 0, num_replicas)
    each = context.per_replica_batch_size(FLAGS.batch_size)
    signature = {
        "observations": tf.TensorSpec([unroll + 1, *shape]),
        "actions": tf.TensorSpec([unroll], tf.int32),
        "logits": tf.TensorSpec([unroll, num_actions]),
        "rewards": tf.TensorSpec([unroll]),
        "discounts": tf.TensorSpec([unroll]),
        "version": tf.TensorSpec([]),
    }
    trajectories = tf.data.Dataset.from_generator(
        players.trajectories, output_signature=signature
    )
    return trajectories.batch(each, drop_remainder=True)


def train(
    run: support.Run, learner: Learner, players: actors.Actors, step_fn: Any
) -> None:
    """Runs the steps of a run."""
    recent: collections.deque[float] = collections.deque(maxlen=RECENT)
    for step in run.steps():
        try:
            logs = {name: float(value[0]) for name, value in step_fn().items()}
        except tf.errors.OutOfRangeError:
            raise ChildProcessError(players.failure) from None
        if step % FLAGS.publish_every == 0:
            players.publish(step, learner.policy())
        recent.extend(players.returns())
        if recent:
            logs["mean_return"] = float(np.mean(recent))
        run.log(steps_behind=step - 1 - logs.pop("version"), **logs)
        if step % max(1, FLAGS.steps // 20) == 0:
            frames = step * FLAGS.batch_size * FLAGS.unroll
            shown = f"{logs['mean_return']:.1f}" if recent else "not known yet"
            run.tell(
                f"step {step}/{FLAGS.steps}  {frames:,} frames  mean return {shown}"
            )


def main() -> str:
    """Trains as the flags say; returns the last line to print."""
    shape, num_actions = sizes(FLAGS.environment)
    repl = replicator.Replicator(FLAGS.devices)
    game = actors.Game(FLAGS.environment, FLAGS.unroll, FLAGS.discount, FLAGS.seed)
    players = actors.Actors(
        FLAGS.actors, game, FLAGS.restarts, 2 * FLAGS.batch_size, support.warn
    )
    data = dataset(players, shape, num_actions, repl.num_replicas)
    output_dir = support.output_folder()
    learner = Learner(
        repl, int(np.prod(shape)), num_actions, FLAGS.learning_rate, FLAGS.seed
    )
    run = support.Run(
        output_dir,
        support.settings(
            "environment", "batch_size", "unroll", "discount", "learning_rate"
        ),
        {"network": learner.network, "optimizer": learner.optimizer},
        steps=FLAGS.steps,
        resume=FLAGS.resume,
        panels=[
            support.Panel(["mean_return"], f"mean return of {RECENT} episodes"),
            support.Panel(["entropy"], "entropy of the policy"),
            support.Panel(["steps_behind"], "steps that actors are behind"),
        ],
    )
    players.start(run.step, learner.policy())
    try:
        train(run, learner, players, repl.build(learner.step, data))
    finally:
        players.close()
    best = run.history.last("mean_return")
    return f"The mean return is {best:.1f}. Results are in {output_dir}."


if __name__ == "__main__":
    support.start(main)
