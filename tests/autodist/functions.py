# SPDX-License-Identifier: Apache-2.0
"""Programs of functions, in the ways in which replicas run them.

A program is one function under the decorator `program`. It makes variables, and returns
a function of whole batches and the variables:

    @program([X[:5]], [X[:2]])
    def a_count():
        n = tf.Variable(0)
        return lambda x: n.assign_add(tf.shape(x)[0]), [n]

What plain TensorFlow returns, call by call, and leaves in the variables is what all
replicas must. A way is a door, a number of replicas and a strategy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from replicator import strategy
from replicator.forms import engine
from tests.autodist.programs import examples

X = examples(12, 3)
Make = Callable[..., tuple[Callable[..., Any], Sequence[Any]]]
PARTS = strategy.PartitionedPS()


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of a function.

    Attributes:
        make: Makes variables; returns the function, and the variables.
        calls: The positional arguments of each call.
        strategies: Those that run it, with 2 and 3 replicas in turn.
        is_eager: Whether one device calls it without tf.function.
        doors: What runs it, functions and others in turn: names of DOORS.
    """

    make: Make
    calls: Sequence[Sequence[Any]]
    strategies: Sequence[Any]
    is_eager: bool
    doors: Sequence[str]

    def run(self, door: Callable[[Make], Any]) -> Any:
        """Returns what the calls return by a door, and the variables behind them."""
        function, variables = door(self.make)
        results = [function(*call) for call in self.calls]
        found = tf.nest.flatten([*results, *variables], expand_composites=True)
        return list(map(np.asarray, found))

    def one_device(self) -> Any:
        """Returns what plain TensorFlow returns."""
        wrap = (lambda f: f) if self.is_eager else tf.function
        return self.run(lambda make: (wrap((made := make())[0]), made[1]))

    def ways(self) -> list[tuple[str, int, Any]]:
        """Returns the doors, numbers of replicas and strategies that run it."""
        pairs = zip(self.doors, self.strategies, strict=True)
        return [(door, 2 + k % 2, plan) for k, (door, plan) in enumerate(pairs)]

    def specs(self) -> list[tf.TensorSpec]:
        """Returns specs of the arguments, of any number of rows."""
        arrays = map(np.asarray, self.calls[0])
        return [tf.TensorSpec([None, *x.shape[1:]], x.dtype) for x in arrays]


def _has_rows(arguments: Sequence[Any]) -> bool:
    """Whether all of some arguments are arrays with rows."""
    kinds = [isinstance(x, np.ndarray) and x.ndim for x in arguments]
    return bool(kinds) and all(kinds)


def _by_function(program: Program, make: Make, replicas: int, plan: Any) -> Any:
    """Runs a function by AutoDist."""
    autodist = replicator.AutoDist([f"CPU:{k}" for k in range(replicas)], plan)
    with autodist.scope():
        function, variables = make()
    return autodist.function(function), variables


def _on_a_tape(program: Program, make: Make, **how: Any) -> Any:
    """Runs a function by AutoDist under a tape, which changes nothing."""
    run, variables = _by_function(program, make, **how)

    def call(*arguments: Any) -> Any:
        with tf.GradientTape():
            return run(*arguments)

    return call, variables


def _inside(program: Program, make: Make, **how: Any) -> Any:
    """Runs a function by AutoDist in a function, where sizes are unknown."""
    run, variables = _by_function(program, make, **how)
    return tf.function(run, input_signature=program.specs()), variables


def _by_engine(program: Program, make: Make, replicas: int, plan: Any) -> Any:
    """Runs a function by the engine of whole batches, which cuts all of them."""
    own = {"variables" if isinstance(plan, str) else "strategy": plan}
    repl = replicator.Replicator([f"CPU:{k}" for k in range(replicas)], **own)
    with repl.context():
        function, variables = make()
    run = engine.WholeBatchFunction(function, repl, program.specs(), empty=True)
    return run, variables


DOORS: dict[str, Callable[..., Any]] = {
    "function": _by_function,
    "tape": _on_a_tape,
    "inside": _inside,
    "engine": _by_engine,
}
_PLANS = ("mirrored", PARTS, "sharded", strategy.PS(), "mirrored")
PROGRAMS: dict[str, Program] = {}


def program(
    *calls: Sequence[Any],
    cases: Mapping[str, Any] | None = None,
    strategies: Sequence[Any] = (),
    is_eager: bool = False,
) -> Callable[[Make], Make]:
    """Adds a program to the catalogue.

    Args:
        *calls: The positional arguments of each call.
        cases: What it is given, by names: a program for each.
        strategies: Those that run it; by default two, each program's in turn.
        is_eager: Whether one device calls it without tf.function.
    """

    def register(make: Make) -> Make:
        for name, case in (cases or {"": None}).items():
            n, title = len(PROGRAMS), f"{make.__name__}, {name}".strip(", ")
            plans = strategies or [_PLANS[(n + k) % len(_PLANS)] for k in (0, 1)]
            own = functools.partial(make, case) if cases else make
            assert title not in PROGRAMS, title
            others = ("engine", "inside", "tape") if _has_rows(calls[0]) else ("tape",)
            doors = ("function", others[n % len(others)])[: len(plans)]
            PROGRAMS[title] = Program(own, calls, plans, is_eager, doors)
        return make

    return register


def batches(*sizes: int) -> list[list[np.ndarray]]:
    """Returns batches of x."""
    return [[X[:n]] for n in sizes]


def descend(tape: tf.GradientTape, loss: Any, *variables: Any) -> None:
    """Subtracts a tenth of the gradients."""
    for v, slope in zip(variables, tape.gradient(loss, variables), strict=True):
        if slope is not None:
            v.assign_sub(0.1 * tf.convert_to_tensor(slope))
