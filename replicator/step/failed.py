# SPDX-License-Identifier: Apache-2.0
"""What failed in a step that ran, in our words where it was an assertion of ours.

TensorFlow tells of an assertion behind a list of the places in which its op was built,
most of them in this library. Where a step is called eagerly, what the assertion says is
all that the error says; where a tf.function of the user's calls the step, or a session
runs it, it is the end of TensorFlow's message.
"""

from __future__ import annotations

import re

import tensorflow as tf

_ASSERTED = re.compile(r"assertion failed: \[(.*)\]")
_NUMBERS = re.compile(r"-?\d*( -?\d+)*")
_ESCAPED = re.compile(r"\\(['\"\\])")  # as TensorFlow writes quotes in strings
_FIX = "Fix: "


def in_short(error: tf.errors.OpError) -> tf.errors.OpError:
    """Returns an error of the same class with our message, or the same error.

    Args:
        error: What the step raised while it ran.
    """
    found = _ASSERTED.search(error.message)
    pieces = found[1].split("] [") if found is not None else []
    if not pieces or not pieces[-1].startswith(_FIX):
        return error
    return type(error)(error.node_def, error.op, composed(pieces))


def composed(pieces: list[str]) -> str:
    """Returns the message that an assertion's pieces are: a problem, lines, the fix.

    Pieces of numbers, which are shapes, go behind the text before them.
    """
    problem, *rest, fix = [_ESCAPED.sub(r"\1", piece) for piece in pieces]
    text = problem
    for piece in rest:
        numbers = _NUMBERS.fullmatch(piece)
        text += f" [{', '.join(piece.split())}]" if numbers else f"\n  {piece}"
    return f"{text}\n{fix}"
