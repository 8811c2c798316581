# SPDX-License-Identifier: Apache-2.0
"""Loads the step of `module:make` for programs; failures become one-line errors."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from replicator import command_line, errors
from replicator._tf import frames as tf_frames
from replicator.command_line import BadInput
from replicator.replicator import Replicator
from replicator.step.steps import Step

# The beginnings of the lines in which TensorFlow lists where ops were created.
_OF_STACKS = ("  File ", "Graph execution error", "Detected at node", "<stack traces")

_ROOTS = re.compile(r"\d+ root error\(s\) found\.\n +\(0\) [A-Z_]+: +")
_TRACEBACK = "\nTraceback (most recent call last):\n"
_FRAME = re.compile(r'  File "(.*)", line (\d+), in (.*)\n')
_MOST_TEXT = 700  # characters, so that the raising line, which follows, is not cut off


def load_step(name: str, arguments: Sequence[str] = ()) -> Step:
    """Calls make(), and returns its step, which need not have been built.

    Args:
        name: "module:make", where make() returns (repl, step_fn), (repl, step_fn,
            input_fn), or what repl.build returned. The working directory is searched
            for the module, too.
        arguments: The module's own command-line flags.

    Raises:
        BadInput: There is no such function, it fails, or it returns anything else.
    """
    with _command_line(name, arguments):
        result = attempt(f"{name}()", maker(name, arguments))
    return result if isinstance(result, Step) else _step_of(name, result)


def _step_of(name: str, result: Any) -> Step:
    """Builds the step of the functions that a make() returned."""
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise BadInput(
            f"{name}() returned {errors.type_of(result)}; expected a tuple (repl, "
            "step_fn) or (repl, step_fn, input_fn), or what repl.build returned"
        )
    repl, *functions = result
    if not isinstance(repl, Replicator):
        raise BadInput(
            f"{name}() returned {errors.type_of(repl)} first; expected a Replicator"
        )
    if not callable(functions[0]):
        raise BadInput(
            f"{name}() returned {errors.type_of(functions[0])} second; expected the "
            "step_fn"
        )
    return attempt(f"the step of {name}", lambda: repl.build(*functions))


@contextlib.contextmanager
def _command_line(name: str, arguments: Sequence[str]) -> Iterator[None]:
    """In this block, sys.argv holds the module's arguments instead of the program's."""
    saved, sys.argv = sys.argv, [name.partition(":")[0], *arguments]
    try:
        yield
    finally:
        sys.argv = saved


def maker(name: str, arguments: Sequence[str] = ()) -> Callable[[], Any]:
    """Returns the function named by "module:make", once its module's flags are set.

    Args:
        name: See `load_step`.
        arguments: See `load_step`.

    Raises:
        BadInput: There is no such function.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise BadInput(f"{name!r} is not of the form module:make")
    if os.sep in module_name or module_name.endswith(".py"):
        raise BadInput(
            f"{module_name} is a file; in {name!r}, name a module as import does, and "
            "run this in its folder"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = attempt(module_name, lambda: importlib.import_module(module_name))
    if arguments:
        attempt(
            f"the flags of {module_name}",
            lambda: command_line.parse_of_module(module_name, arguments),
        )
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise BadInput(f"module {module_name} has no {attribute}")
        target = getattr(target, part)
    if not callable(target):
        raise BadInput(f"{name} is {errors.type_of(target)}; expected a function")
    return target


def attempt(action: str, function: Callable[[], Any]) -> Any:
    """Calls a function, and turns what it raises into a one-line BadInput.

    Args:
        action: What is tried: the beginning of the line.
        function: May raise anything, as it may run the user's code.

    Raises:
        BadInput: It failed.
    """
    try:
        return function()
    except BadInput:
        raise
    except Exception as error:
        text = f"{action}: {type(error).__name__}: {_text(error)}"
        line = _line(error)
        if not isinstance(error, errors.ReplicatorError) and line != errors.UNKNOWN:
            text = f"{errors.one_line(text, _MOST_TEXT)} (raised at {line})"
        raise BadInput(text) from error


def _line(error: Exception) -> str:
    """Returns the program's line that raised, or that called what raised.

    Lines in packages count only if there are no others. If TensorFlow called Python,
    the lines are in the text of its error.
    """
    traceback = _message(error).partition(_TRACEBACK)[2].partition(_TRACEBACK)[0]
    frames_in_text = [
        (file, int(line), name) for file, line, name in _FRAME.findall(traceback)
    ]
    frames = tf_frames.users_of(frames_in_text) or tf_frames.user_frames(error)
    return errors.innermost(
        [f for f in frames if not tf_frames.is_installed(f[0])] or frames
    )


def _text(error: Exception) -> str:
    """Returns the text of an error; without stack traces if a step raised it."""
    if not isinstance(error, tf.errors.OpError):
        return str(error)
    text = _ROOTS.sub("", _message(error).partition(_TRACEBACK)[0])
    lines = [
        line
        for line in text.splitlines()
        if line.strip() and not line.startswith(_OF_STACKS)
    ]
    return " ".join(lines)


def _message(error: Exception) -> str:
    """Returns TensorFlow's message for an error in a step; "" for other errors."""
    return str(error.message) if isinstance(error, tf.errors.OpError) else ""
