# SPDX-License-Identifier: Apache-2.0
"""What a program of the catalogue is: a step, its inputs, what it computes.

A program is one function in a file of this folder, under the decorator `program`. It
makes its variables and returns its step, and then runs in all ways of ways.py:

    @program(lambda count: [sum(range(1, count + 1))] * count)
    def a_sum(repl):
        return lambda x: repl.all_reduce(x)

Its step takes what differs between replicas from its inputs, by default `own`. One that
asks Python for it, as by repl.replica_id, has the tag ASKS.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import replicator

Step = Callable[..., Any]
Make = Callable[[replicator.Replicator], Step]

# Tags: what a program does that some ways refuse or do otherwise.
ASKS = "asks which replica it is"  # copies are not told
NO_SESSION = "cannot run in a session"  # AutoGraph, and Keras' own loops
ONE_PROCESS = "cannot be built by several processes"
OWN_STATE = "replicas' variables differ"  # such as generators'
SHAPES = "shapes change from step to step"  # they cannot be stacked
TAGS = (ASKS, NO_SESSION, ONE_PROCESS, OWN_STATE, SHAPES)


@dataclasses.dataclass(frozen=True)
class Program:
    """A step that computes the same in all ways of running it.

    Attributes:
        name: The name of the function that makes it.
        make: Makes the variables, and returns the step.
        expected: From the number of replicas, all replicas' results of the last step: a
            list where the step returns a tensor, and the step's structure of lists
            else. None: what the REFERENCE way computes.
        inputs: As for `Replicator.run`, of a step with a parameter.
        steps: The number of steps.
        replicas: The numbers of replicas with which it can run.
        tags: Of TAGS.
        close: The relative difference of floats that other orders of sums may make.
        first: Its first derivatives only, if it has second ones: several processes
            refuse them in control flow, and run this in its place.
    """

    name: str
    make: Make
    expected: Callable[[int], Any] | None
    inputs: Any
    steps: int = 1
    replicas: tuple[int, ...] = (1, 2, 3, 4)
    tags: tuple[str, ...] = ()
    close: float = 1e-5
    first: Program | None = None


PROGRAMS: dict[str, Program] = {}


def add(program: Program) -> None:
    """Adds a program to the catalogue."""
    assert program.name not in PROGRAMS, program.name
    assert set(program.tags) <= set(TAGS), program.tags
    PROGRAMS[program.name] = program


def own(ctx: replicator.InputContext) -> tf.Tensor:
    """Gives replica r the number r + 1."""
    return tf.constant(ctx.replica_id + 1.0)


def rows(ctx: replicator.InputContext) -> tf.Tensor:
    """Gives each replica a [2, 4] batch of its own."""
    values = np.random.default_rng(ctx.replica_id).standard_normal((2, 4))
    return tf.constant(values, tf.float32)


def program(
    expected: Callable[[int], Any] | None = None,
    *tags: str,
    inputs: Any = own,
    steps: int = 1,
    replicas: tuple[int, ...] = (1, 2, 3, 4),
    close: float = 1e-5,
    name: str = "",
) -> Callable[[Make], Make]:
    """Adds a program to the catalogue; see `Program`."""

    def register(make: Make) -> Make:
        title = name or make.__name__.strip("_")
        add(Program(title, make, expected, inputs, steps, replicas, tags, close))
        return make

    return register
