# SPDX-License-Identifier: Apache-2.0
"""Shortens the error messages of a step that ran.

TensorFlow reports a failed op after a list of all places where the op was built, most
of them in this library. If a step is called eagerly, an assertion of this library is
reported by its own message only, and any other op by TensorFlow's message, the replica
and the user's line. If a user's tf.function calls the step, or a session runs it, the
error is TensorFlow's.
"""

from __future__ import annotations

import re

import tensorflow as tf

from replicator import errors
from replicator._tf import frames as tf_frames

_ASSERTED = re.compile(r"assertion failed: \[(.*)\]")
_NUMBERS = re.compile(r"-?\d*( -?\d+)*")
_ESCAPED = re.compile(r"\\(['\"\\])")  # how TensorFlow writes quotes in strings
_FIX = "Fix: "
# Errors of what a step computes. Those of hosts and runtimes are left as they are.
_OF_STEPS = (
    *(tf.errors.InvalidArgumentError, tf.errors.FailedPreconditionError),
    *(tf.errors.NotFoundError, tf.errors.ResourceExhaustedError),
    tf.errors.UnimplementedError,
)
_BEGINS = "Graph execution error:\n\n"
_NODE = re.compile(r"Detected at node (\S+) defined at \(most recent call last\):\n")
_FRAME = re.compile(r'  File "(.*)", line (\d+), in (.*)\n(?:    .*\n)*\n?')
_UNAVAILABLE = "<stack traces unavailable>\n"  # if several ops failed, for all but one
_REPLICA = re.compile(r"(?:^|/)replica_(\d+)/")
_ROOT = re.compile(r"^  \(\d+\) ([A-Z_]+): +", re.MULTILINE)
_ROOTS = re.compile(r"\d+ root error\(s\) found\.\n")
_NODES = re.compile(r"\n\t \[\[.*\]\](?=\n|$| \[Op:)")
_END = re.compile(
    r"(\n\d+ successful operations\.\n\d+ derived errors ignored\.)? \[Op:\w+\]$"
)


def shorten(error: tf.errors.OpError) -> tf.errors.OpError:
    """Returns an error of the same class with a short message, or the same error.

    Args:
        error: The error that the running step raised.
    """
    match = _ASSERTED.search(error.message)
    pieces = match[1].split("] [") if match is not None else []
    if pieces and pieces[-1].startswith(_FIX):
        return type(error)(error.node_def, error.op, composed(pieces))
    message = _message(error.message) if type(error) in _OF_STEPS else None
    return error if message is None else type(error)(error.node_def, error.op, message)


def _message(message: str) -> str | None:
    """Returns TensorFlow's message and where it arose; None if it has another form."""
    if not message.startswith(_BEGINS):
        return None
    sites, end = [], len(_BEGINS)
    while (node := _NODE.match(message, end)) is not None:
        frames, end = [], node.end()
        if message.startswith(_UNAVAILABLE, end):
            end += len(_UNAVAILABLE)
        while (frame := _FRAME.match(message, end)) is not None:
            frames.append((frame[1], int(frame[2]), frame[3]))
            end = frame.end()
        replica = _REPLICA.search(node[1])
        name = node[1]
        if replica is not None:
            name = f"replica {replica[1]}: {name[replica.end() :]}"
        users = tf_frames.users_of(frames)
        sites.append(f"{name} at {errors.innermost(users)}" if users else name)
    reason = _END.sub("", _NODES.sub("", message[end:])).strip()
    if not sites or not reason:
        return None
    roots = _ROOTS.match(reason)
    if roots is not None:
        _, *pairs = _ROOT.split(reason[roots.end() :])
        codes, texts = pairs[::2], [text.strip() for text in pairs[1::2]]
        root_errors = zip(codes, texts, strict=True)
        reason = "\n".join(dict.fromkeys(t for c, t in root_errors if c != "CANCELLED"))
    return errors.compose(reason, list(dict.fromkeys(sites))) if reason else None


def composed(pieces: list[str]) -> str:
    """Returns the message that an assertion's pieces form: a problem, lines, the fix.

    Pieces of numbers, which are shapes, are appended to the text before them.
    """
    problem, *details, fix = [_ESCAPED.sub(r"\1", piece) for piece in pieces]
    text = problem
    for piece in details:
        numbers = _NUMBERS.fullmatch(piece)
        text += f" [{', '.join(piece.split())}]" if numbers else f"\n  {piece}"
    return f"{text}\n{fix}"
