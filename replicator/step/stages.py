# SPDX-License-Identifier: Apache-2.0
"""Records the graph of a step for `Replicator.stages` while the step is built."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator._tf import ops as tf_ops
from replicator.graph.ir import walk
from replicator.graph.ir.kinds import has_effect
from replicator.inputs import checks
from replicator.stages import Recorder, Stages
from replicator.step import outputs
from replicator.step.known import Attempt, Checked, Inputs


def line_of(step_fn: Callable[..., Any]) -> str:
    """Returns the line that defines a step_fn, or its name where no line is known."""
    return errors.definition(step_fn) or checks.name_of(step_fn)


def ran(recorders: Iterable[Stages], step_fn: Callable[..., Any]) -> None:
    """Tells recorders that a step is run, which may have been built before."""
    for recorder in recorders:
        recorder.ran(line_of(step_fn))


def begin(attempt: Attempt) -> list[Recorder]:
    """Returns the recorders of a build, if there are any."""
    name, line = checks.name_of(attempt.step_fn), line_of(attempt.step_fn)
    return [recorder.begin(name, line) for recorder in attempt.settings.stages]


def that_run(
    attempt: Attempt, inputs: Inputs, checked: Checked, returned: Sequence[Any]
) -> set[tf.Operation]:
    """Returns those ops of a finished step that will run."""
    ops = attempt.build.graph.get_operations()[inputs.end :]
    step_ops = {op for op in ops if not tf_ops.is_abandoned(op)}
    roots = outputs.ops_of(returned)
    roots += [op for op in step_ops - checked.initializers if has_effect(op)]
    return walk.upstream(roots, among=step_ops)
