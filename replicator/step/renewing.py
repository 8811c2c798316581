# SPDX-License-Identifier: Apache-2.0
"""Rebuilds a step when names that step_fn reads refer to something else."""

from __future__ import annotations

from typing import Any

from absl import logging

from replicator import errors
from replicator.step import names_read
from replicator.step.state import State, StepFunction

MANY_BUILDS = 5  # builds of the same code at which a warning is logged, once


def renew(step_fn: Any, function: StepFunction, state: State) -> None:
    """Drops the traces of a step if what step_fn reads by name has changed.

    Warns of the first change. A number or text that goes on changing is probably
    counted or chosen at each call: after some builds, the step keeps its last value.

    Args:
        step_fn: The user's function.
        function: What is kept for it.
        state: The state of the step.
    """
    assert state.names is not None
    changes = state.names.changes()
    is_first = not function.renewals
    for change in changes:
        function.renewals[change.name] += 1
        if change.plain and function.renewals[change.name] > MANY_BUILDS:
            function.fixed.add(change.name)
            _warn(
                step_fn,
                change,
                f"as at {MANY_BUILDS} calls before: the step goes on with the value "
                "that it was built with last",
            )
    if all(change.name in function.fixed for change in changes):
        state.names = names_read.Names(step_fn, function.fixed)
        return
    if is_first:
        _warn(step_fn, changes[0], "the step is built again, which takes long")
    state.names = None
    state.trace_again()


def _warn(step_fn: Any, change: names_read.Change, outcome: str) -> None:
    fix = "To use several in turn, pass each by a functools.partial of step_fn."
    if change.plain:
        fix = "What changes often belongs in args=(...), which are fed at each call."
    logging.warning(
        "The step_fn at %s reads `%s`, which %s; %s. %s",
        errors.definition(step_fn) or errors.user_line(),
        change.name,
        change.description,
        outcome,
        fix,
    )
