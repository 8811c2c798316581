# SPDX-License-Identifier: Apache-2.0
"""Keeps the variable scopes of TensorFlow 1 consistent during a build."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from replicator import context


@contextlib.contextmanager
def kept_caching_device() -> Iterator[None]:
    """Restores the variable scope's caching device after an exception in tf.map_fn.

    TensorFlow sets one there and does not reset it; v1 optimizers would fail from then
    on.
    """
    scope = tf.compat.v1.get_variable_scope()
    before = scope.caching_device
    try:
        yield
    finally:
        if scope.caching_device is not before:
            scope.set_caching_device(before)


@contextlib.contextmanager
def shared_variables(build: context.Build, replica_id: int) -> Iterator[None]:
    """Lets tf.compat.v1.get_variable find variables of replica 0 or earlier attempts.

    Those that it does not find by name (slots, for example, whose names are made
    unique) are found by the variable factory, by their place in the code.
    """
    first = replica_id == 0 and not build.knowledge
    if build.graph.building_function or first:
        yield
        return
    v1 = tf.compat.v1
    scope = v1.get_variable_scope()
    with v1.variable_scope(scope, reuse=v1.AUTO_REUSE, auxiliary_name_scope=False):
        yield
