# SPDX-License-Identifier: Apache-2.0
"""What runs a program: one device, or the engine on replicas with some options.

Each takes a step, a function that makes its variables, a signature and a number of
replicas, and returns the variables and a function of a batch.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

import replicator
from replicator.forms.engine import WholeBatchFunction


def one_device(step: Any, make: Any, signature: Any, num_replicas: int = 1) -> Any:
    """Runs it by TensorFlow alone."""
    variables = make()

    def of_batch(*batch: Any) -> Any:
        return step(variables, *batch)

    return variables, tf.function(of_batch, signature, autograph=False)


def engine(
    step: Any,
    make: Any,
    signature: Any,
    num_replicas: int,
    is_cut: bool = True,
    **options: Any,
) -> Any:
    """Runs it on replicas.

    Args:
        step: A function of variables and a batch.
        make: Makes the variables.
        signature: Of the batch.
        num_replicas: The number of replicas.
        is_cut: Whether replicas may be given no examples.
        **options: Of Replicator.
    """
    devices = [f"CPU:{k}" for k in range(num_replicas)]
    repl = replicator.Replicator(devices, **options)
    with repl.context():
        variables = make()

    @tf.autograph.experimental.do_not_convert
    def of_batch(*batch: Any) -> Any:
        return step(variables, *batch)

    return variables, WholeBatchFunction(of_batch, repl, signature, empty=is_cut)


copies = functools.partial(engine, build="clone")
sharded = functools.partial(engine, variables="sharded")
few_are_whole = functools.partial(engine, is_cut=False)
