# SPDX-License-Identifier: Apache-2.0
"""The steps of a Replicator, looked up by their functions."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import logging

from replicator import errors
from replicator.inputs import checks, positions
from replicator.report import plan as plans
from replicator.step import cache, epochs, known, stages, step_arguments
from replicator.step.requests import Request
from replicator.step.state import MANY_BUILDS, State, StepFunction
from replicator.step.steps import Step, runs_here
from replicator.variables import python_calls


class Steps:
    """The steps of a Replicator, by their functions, while these are alive.

    Attributes:
        inputs: The positions of their inputs.
    """

    def __init__(
        self, settings: known.Settings, keep_plan: Callable[[plans.Plan], None]
    ) -> None:
        self._settings = settings
        self._keep_plan = keep_plan
        self._functions: cache.Table[StepFunction] = cache.Table()
        self._states: weakref.WeakSet[State] = weakref.WeakSet()
        self._builds = (
            cache.FunctionCounts()
        )  # how many step_fns there were of each code
        self._lock = threading.RLock()  # guards the fields above, held briefly
        self._has_warned_of_whole = False
        self.inputs = positions.Positions(settings.peers)

    def run(self, request: Request) -> Any:
        """Runs a step, by a fast path if it has been traced."""
        _, state = self._find(request)
        if state.prepared and runs_here():
            python_calls.refuse_step()
            call_args = request.arguments_of(
                request.args, self._settings.world.num_local
            )
            with self._settings.lock:  # also held by code that drops the trace
                prepared = state.prepared.get(call_args.key)
                if prepared is not None and state.is_current():
                    stages.ran(self._settings.stages, request.step_fn)
                    return prepared(call_args.leaves)
        return self.get(request)()

    def get(self, request: Request) -> Step:
        """Returns the step for these arguments: an existing one, else a new one.

        A step with values among its arguments is not kept, nor are the values.
        """
        function, state = self._find(request)
        by_function = not request.by_value and not request.args
        with self._lock:
            step: Step | None = state.step() if by_function else None
            if step is None:
                if state not in self._states:
                    step_arguments.check_takes(request, len(request.args))
                    self._states.add(state)
                    self._warn_of_new_functions(function, request)
                    self._warn_of_whole(request)
                step = Step(self._settings, request, self._keep_plan, function, state)
                if by_function:
                    state.step = weakref.ref(step)
            return step

    def epoch(self, request: Request) -> epochs.Epoch:
        """Returns one pass over the inputs of a step, which has not begun."""
        is_divided = self._settings.clock is None  # otherwise, among programs as well
        step_arguments.check(request)
        length = epochs.length_of(request, self._settings.world.num_replicas)
        _, state = self._find(request)
        return epochs.Epoch(self.get(request), state, length if is_divided else None)

    def initialize(self, session: tf.compat.v1.Session | None) -> None:
        """Restarts the inputs of all steps."""
        step_arguments.check_session(session)
        with self._lock:
            states = list(self._states)
        for state in states:
            state.initialize(session)

    def _find(self, request: Request) -> tuple[StepFunction, State]:
        """Returns what is kept for a step, creating it if there is nothing."""
        step_arguments.check(request)
        function = self._functions.get(request.step_fn, StepFunction)
        options = (
            request.input_mode,
            request.steps_per_call,
            request.remainder,
            request.by_value,
        )
        state = function.states.get(
            request.source, lambda: State(self._settings.lock, self.inputs), *options
        )
        return function, state

    def _warn_of_new_functions(self, function: StepFunction, request: Request) -> None:
        """Warns once about each line that creates a new function for every call."""
        name, changed, counts = "input_fn", request.source, function.builds
        if function.fresh:
            function.fresh = False
            name, changed, counts = "step_fn", request.step_fn, self._builds
        if isinstance(changed, checks.DATASETS):
            function.datasets += 1
            if function.datasets == MANY_BUILDS:
                logging.warning(
                    "The Dataset at %s has been a new object %d times. Each time, the "
                    "step is built again, which takes long, and the inputs start over. "
                    "Create the Dataset once, outside the loop.",
                    errors.user_line(),
                    MANY_BUILDS,
                )
        elif counts.count(changed) == MANY_BUILDS:
            logging.warning(
                "The %s at %s has been a new function %d times. Each time, the step is "
                "built again, which takes long, and its inputs start over. Create the "
                "function once, outside the loop.",
                name,
                cache.line_of(changed),
                MANY_BUILDS,
            )

    def _warn_of_whole(self, request: Request) -> None:
        """Warns once if every replica gets the whole of an array."""
        count = self._settings.world.num_local
        if self._has_warned_of_whole or count == 1 or not request.by_value:
            return
        if not request.arguments_of((), count).is_whole:
            return
        self._has_warned_of_whole = True
        logging.warning(
            "The inputs at %s are tensors or arrays: each of the %d replicas is given "
            "all of them, as the element that an input_fn would return. With "
            'input_mode="global_batch" they are split over the replicas; args=(...) '
            "says that they are meant for all.",
            errors.user_line(),
            count,
        )
