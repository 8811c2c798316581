# SPDX-License-Identifier: Apache-2.0
"""Python functions that a step calls while it runs: tf.py_function, numpy_function.

Each replica calls its own function, in a TensorFlow thread where no replica is being
built. There a variable behaves as outside a step, and a write would reach all of its
components, once per replica. The graph does not show such a write, so it is refused
when it happens; the step raises the error.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator._tf import python
from replicator.graph.ir import walk
from replicator.graph.ir.kinds import PYTHON

_ANY = threading.Event()  # set once a step calls Python; until then nobody need look


def note(replicas: Sequence[Iterable[tf.Operation]], count: int) -> None:
    """Marks the Python functions that a step's ops call, also inside functions.

    Args:
        replicas: `replicas[n]` are the ops of the n-th replica that is not a copy.
        count: The number of replicas, with copies.
    """
    for op in walk.at_any_depth(itertools.chain(*replicas)):
        if op.type in PYTHON:
            if python.mark_python_function(op, count, errors.line_of(op)):
                _ANY.set()


def refuse_write(variable: Any) -> None:
    """Raises ContextError if a Python function that a step calls writes a variable.

    Args:
        variable: The ReplicatedVariable that is about to be written outside a step.
    """
    replicas, line = python.python_call() or (0, "")
    if replicas < 2:
        return
    raise errors.ContextError(
        "a Python function that a step calls (tf.py_function or tf.numpy_function) "
        f"writes variable {variable.name}: each replica would write all of its "
        "components.",
        _sites(line),
        "return the value from the function, and assign it in the step itself.",
    )


def refuse_step() -> None:
    """Raises ContextError if a Python function that a step calls runs a step."""
    if not _ANY.is_set():
        return
    replicas, line = python.python_call() or (0, "")
    if replicas:
        raise errors.ContextError(
            "a step was run inside a step, by a Python function that it calls "
            "(tf.py_function or tf.numpy_function).",
            _sites(line),
            "run it outside, before or after the other.",
        )


def _sites(line: str) -> list[str]:
    """Returns the running line, if known, and the line that calls the function.

    The running line is unknown if autograph has converted the function: only the thread
    that built the step knows how its lines map to the user's.
    """
    running = errors.user_line()
    sites = [] if running == errors.UNKNOWN else [f"at {running}"]
    return [*sites, f"called by the step at {line}"]
