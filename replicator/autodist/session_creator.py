# SPDX-License-Identifier: Apache-2.0
"""Makes the sessions of TensorFlow 1's MonitoredSession run on all replicas."""

from __future__ import annotations

import os
from typing import Any, NoReturn

import tensorflow as tf

from replicator import errors


class SessionCreator(tf.compat.v1.train.SessionCreator):
    """Creates distributed sessions for a MonitoredSession.

    `AutoDist.session_creator` returns it.

    Args:
        autodist: The AutoDist in whose scope the graph is built.
        config: A ConfigProto for the session, or None.
        scaffold: What else is initialized and saved, as for a ChiefSessionCreator.
        checkpoint_dir: Where the newest checkpoint is restored from, if there is one.

    Raises:
        ArgumentError: An argument is of another kind.
    """

    def __init__(
        self,
        autodist: Any,
        config: Any = None,
        scaffold: tf.compat.v1.train.Scaffold | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(scaffold, tf.compat.v1.train.Scaffold | None):
            _refuse("scaffold", scaffold, "a tf.compat.v1.train.Scaffold")
        if not isinstance(checkpoint_dir, str | os.PathLike | None):
            _refuse("checkpoint_dir", checkpoint_dir, "the path of a directory")
        self._autodist, self._config = autodist, config
        self._scaffold = tf.compat.v1.train.Scaffold() if scaffold is None else scaffold
        self._directory = None if checkpoint_dir is None else os.fspath(checkpoint_dir)

    def create_session(self) -> Any:
        """Returns a distributed session whose variables have values.

        Example:
            >>> autodist = replicator.AutoDist(["CPU:0", "CPU:1"])
            >>> with tf.Graph().as_default(), autodist.scope():
            ...     w = tf.Variable(3.0)
            ...     session = autodist.session_creator().create_session()
            >>> float(session.run(w))
            3.0
        """
        scaffold = self._scaffold
        scaffold.finalize()
        session = self._autodist.create_distributed_session(self._config)
        newest = self._directory and tf.train.latest_checkpoint(self._directory)
        if newest:
            scaffold.saver.restore(session, newest)
        else:
            session.run(scaffold.init_op, scaffold.init_feed_dict)
            if scaffold.init_fn is not None:
                scaffold.init_fn(session)
        session.run(scaffold.local_init_op)
        return session


def _refuse(name: str, value: Any, wanted: str) -> NoReturn:
    raise errors.ArgumentError(
        f"session_creator was given {name}={errors.shown(value)}.",
        fix=f"pass {wanted}, or nothing.",
    )
