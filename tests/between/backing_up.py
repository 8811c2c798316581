# SPDX-License-Identifier: Apache-2.0
"""A program with Keras that is refused on several hosts."""

from __future__ import annotations

from typing import Any

import keras

import replicator
from tests.keras import worlds


def backs_up(cluster: Any) -> str:
    """Returns the error of a fit with BackupAndRestore."""
    repl = replicator.Replicator(cluster.devices)
    keras.utils.set_random_seed(1)
    with repl.context():
        model = worlds.classifier()
    repl.keras_model(model)
    backup = keras.callbacks.BackupAndRestore("nowhere")
    x, y = worlds.numbers(0, 8, 8), worlds.labels(0, 8)
    for callbacks in ([backup], backup, keras.callbacks.CallbackList([backup])):
        try:
            model.fit(x, y, verbose=0, callbacks=callbacks)
        except replicator.ContextError as error:
            message = str(error)
        else:
            return "it was not refused"
    model.fit(x, y, 8, 1, 0, [])  # nothing has been changed
    return message
