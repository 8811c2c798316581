# SPDX-License-Identifier: Apache-2.0
"""Calls a traced step like any other function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator._tf.tapes import stop_recording


def prepare_call(function: Any, only_cpus: bool = False) -> Callable[[], Any]:
    """Returns a function that runs a ConcreteFunction without arguments eagerly.

    No tape records the call.

    Args:
        function: A ConcreteFunction.
        only_cpus: Whether all of its ops run on CPUs; makes no difference here.

    Returns:
        A function that returns the flat results, in a list.
    """

    def call() -> list[tf.Tensor]:
        with stop_recording():
            return [leaf for leaf in _flat(function()) if leaf is not None]

    return call


def with_less_optimizing(config: Any, only_cpus: bool) -> Any:
    """Returns a ConfigProto unchanged.

    Args:
        config: A ConfigProto.
        only_cpus: Whether all of the replicas are on CPUs; makes no difference here.
    """
    return config


def pack_results(function: Any, flat: Sequence[tf.Tensor]) -> Any:
    """Packs flat results into the structure that the traced function returned."""
    structure, remaining = function.structured_outputs, iter(flat)
    leaves = [None if leaf is None else next(remaining) for leaf in _flat(structure)]
    return tf.nest.pack_sequence_as(structure, leaves, expand_composites=True)


def _flat(structure: Any) -> list[Any]:
    return tf.nest.flatten(structure, expand_composites=True)
