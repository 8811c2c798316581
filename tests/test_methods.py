# SPDX-License-Identifier: Apache-2.0
"""Replicator's methods for steps: the primitives, refused in another one's step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import replicator
from replicator import ContextError, methods
from replicator.interop import tf_replicator
from replicator.primitives import base, table
from replicator.step import objects
from tests import helpers

FILES = (base, objects, tf_replicator)


def _function(name: str) -> Callable[..., Any]:
    """Returns the function of a primitive that a method wraps."""
    method = vars(methods.InStep)[name]
    function: Callable[..., Any] = inspect.unwrap(method)
    return function


METHODS = [
    name
    for name, method in vars(methods.InStep).items()
    if inspect.isfunction(method) and _function(name).__module__ != methods.__name__
]


def test_every_primitive_is_a_method() -> None:
    assert set(table.PRIMITIVES) <= set(METHODS)
    assert len(METHODS) > len(table.PRIMITIVES)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_says_what_its_function_does(name: str) -> None:
    method, function = getattr(replicator.Replicator, name), _function(name)
    assert function.__name__ == name and method.__doc__ == function.__doc__
    own_parameters = list(inspect.signature(method).parameters.values())
    assert own_parameters[0].name == "self"
    assert own_parameters[1:] == list(inspect.signature(function).parameters.values())


CALLS: dict[str, Callable[[replicator.Replicator], Any]] = {
    "all_reduce": lambda repl: repl.all_reduce(1.0),
    "barrier": lambda repl: repl.barrier(),
    "replica_id": lambda repl: repl.replica_id,
    "weight": lambda repl: repl.weight,
    "logical_device": lambda repl: repl.logical_device(0),
    "linked": lambda repl: repl.linked(tf.constant(1.0)),
    "group": lambda repl: repl.group([0]),
    "context": lambda repl: repl.context(),
}


@pytest.mark.parametrize("name", CALLS)
def test_anothers_methods_are_refused_in_a_step(name: str) -> None:
    repl, other = helpers.make(2), helpers.make(2)

    def step_fn() -> None:
        CALLS[name](other)

    with pytest.raises(
        ContextError,
        match=rf"(?s)^{name} of the Replicator on .*was called on replica 0 in a step "
        r"of another.*at tests.*test_methods\.py.*Fix: ",
    ):
        repl.run(step_fn)
    repl.run(lambda: CALLS[name](repl) is None)


@pytest.mark.parametrize(
    "name", ["all_reduce", "barrier", "replica_id", "weight", "logical_device"]
)
def test_outside_of_steps_they_are_refused(name: str) -> None:
    with pytest.raises(ContextError, match=rf"(?s){name} .*outside a step.*Fix: "):
        CALLS[name](helpers.make(2))
