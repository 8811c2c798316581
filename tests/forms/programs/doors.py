# SPDX-License-Identifier: Apache-2.0
"""How a program runs on replicas: by the engine, with options of Replicator."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

import replicator
from replicator.forms.engine import WholeBatchFunction


def engine(step: Any, make: Any, signature: Any, count: int, **options: Any) -> Any:
    """Returns the variables, and the function of a batch, on so many replicas."""
    repl = replicator.Replicator([f"CPU:{k}" for k in range(count)], **options)
    with repl.context():
        variables = make()

    @tf.autograph.experimental.do_not_convert
    def of_batch(*batch: Any) -> Any:
        return step(variables, *batch)

    return variables, WholeBatchFunction(of_batch, repl, signature)


sharded = functools.partial(engine, variables="sharded")
mirrored = functools.partial(engine, variables="mirrored")
