# SPDX-License-Identifier: Apache-2.0
"""Fetching a variable's op or handle is as in plain TensorFlow, or refused by name."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests.autodist import helpers

v1 = tf.compat.v1
START = np.array([[2.0], [3.0]], np.float32)
STRATEGIES = ["mirrored", "PS", "PartitionedPS"]


def _session(strategy: str | None, use_resource: bool | None) -> tuple[Any, Any]:
    """Returns a variable "w" and a session, of plain TensorFlow if strategy is None."""
    autodist = None
    if strategy is not None:
        made = getattr(replicator.strategy, strategy, lambda: strategy)
        autodist = helpers.make(2, made())
    with tf.Graph().as_default(), _scope(autodist):
        x = v1.placeholder(tf.float32, [None, 2], "x")
        w = v1.get_variable("w", initializer=START, use_resource=use_resource)
        loss = tf.reduce_mean(x @ w)
        v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        made_session = autodist.create_distributed_session if autodist else v1.Session
        session = made_session()
        session.run(v1.global_variables_initializer())
    return w, session


def _scope(autodist: Any) -> Any:
    return contextlib.nullcontext() if autodist is None else autodist.scope()


@pytest.mark.parametrize("use_resource", [True, False])
@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_ops_of_variables_give_nothing(strategy: Any, use_resource: bool) -> None:
    w, session = _session(strategy, use_resource)
    value, *nothing = session.run([w, w.op, "w"])
    np.testing.assert_array_equal(value, START)
    assert nothing == [None, None]


@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_names_of_reference_variables_give_their_values(strategy: Any) -> None:
    w, session = _session(strategy, use_resource=False)
    for value in session.run(["w:0", w.name, w]):
        np.testing.assert_array_equal(value, START)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("by_name", [True, False])
def test_handles_of_resource_variables_are_refused(
    strategy: str, by_name: bool
) -> None:
    w, session = _session(strategy, use_resource=True)
    with pytest.raises(
        replicator.ArgumentError,
        match=r"(?s)cannot fetch w:0: it is the handle of variable w,.*created at .*"
        r"test_handles.py.*fetched at .*test_handles.py.*Fix: fetch the variable its",
    ):
        session.run({"handle": "w:0" if by_name else w.handle})


@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_what_names_are_depends_on_the_default_of_tensorflow_1(strategy: Any) -> None:
    enabled = v1.resource_variables_enabled()
    v1.disable_resource_variables()
    try:
        _, session = _session(strategy, use_resource=None)
    finally:
        if enabled:
            v1.enable_resource_variables()
    np.testing.assert_array_equal(session.run("w:0"), START)
