# SPDX-License-Identifier: Apache-2.0
"""Keras' fit on all hosts, by the launcher; a host is killed in its first life.

`python -m tests.between.fitting MOMENT HOST FOLDER` is the program; MOMENT is batch,
save or never. launched.py describes its output.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from typing import Any

import keras

import replicator
from tests.between.launched import say
from tests.keras import worlds

EPOCHS, BATCHES = 5, 6
KILLED_IN = 2  # an epoch
_LATE = {"batch": 0.02, "save": 0.06}  # maximum seconds after the moment


def _kill() -> None:
    say("fault", time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)


def _fit(cluster: Any, folder: str, now: Any) -> None:
    """Trains, from the newest checkpoint on; reports events to `now`."""
    repl = replicator.Replicator(cluster.devices)
    keras.utils.set_random_seed(1)
    with repl.context():
        model = worlds.classifier(optimizer=keras.optimizers.Adam(0.02))
    repl.keras_model(model)
    checkpoint = cluster.checkpoint(folder, model=model)
    say("begun", checkpoint.step)

    class Saves(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == BATCHES // 2:
                now("batch", self.epoch)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            say("loss", epoch, float(logs["loss"]).hex())
            now("save", epoch)
            checkpoint.step = epoch + 1
            checkpoint.save()

    size = 8 * BATCHES - 3
    x, y = worlds.numbers(0, size, 8), worlds.labels(0, size)
    model.fit(
        *(x, y, 8, EPOCHS),
        shuffle=False,
        verbose=0,
        callbacks=[Saves()],
        initial_epoch=checkpoint.step,
    )


def main(moment: str, which: str, folder: str) -> None:
    """Trains."""
    cluster = replicator.connect(timeout=120)
    failing = (cluster.host_id, os.environ["REPLICATOR_RESTARTS"]) == (int(which), "0")

    def now(which_moment: str, epoch: int) -> None:
        if failing and (which_moment, epoch) == (moment, KILLED_IN):
            threading.Timer(random.uniform(0, _LATE[moment]), _kill).start()

    _fit(cluster, folder, now)


if __name__ == "__main__":
    main(*sys.argv[1:])
