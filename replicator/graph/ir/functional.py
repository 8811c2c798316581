# SPDX-License-Identifier: Apache-2.0
"""Conditionals and loops are ops that call functions, as TensorFlow 2 builds them.

A program that disables TensorFlow 2's behavior gets TensorFlow 1's control flow outside
of tf.functions: Switch, Merge, Enter and others among all ops, which no pass knows. So
`control_flow` turns on that of TensorFlow 2 wherever Replicator or the user builds a
step; TensorFlow 1's control flow from elsewhere is refused.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence

import tensorflow as tf

from replicator import errors
from replicator.graph.ir import placeholder

_RAW = frozenset(
    "Switch Merge Enter Exit NextIteration "
    "RefSwitch RefMerge RefEnter RefExit RefNextIteration".split()
)
_FIX = (
    "call tf.compat.v1.enable_control_flow_v2() before building it; call what was made "
    "elsewhere in a tf.function, or in the input pipeline."
)


class _Blocks:
    """The blocks of `control_flow` in all threads: TensorFlow has a switch per process.

    Attributes:
        lock: Held while the switch changes.
        count: The number of open blocks.
        was_on: Whether the switch was on before the first of them.
    """

    lock = threading.Lock()
    count = 0
    was_on = True


@contextlib.contextmanager
def control_flow() -> Iterator[None]:
    """Turns on the control flow of TensorFlow 2 in this block.

    Blocks may be nested, and overlap in several threads: it stays on until the last of
    them ends, even for other code that runs meanwhile.
    """
    with _Blocks.lock:
        if not _Blocks.count:
            # In a function, TensorFlow would answer that it is on, as it is there.
            with tf.Graph().as_default():
                _Blocks.was_on = tf.compat.v1.control_flow_v2_enabled()
        _Blocks.count += 1
        tf.compat.v1.enable_control_flow_v2()
    try:
        yield
    finally:
        with _Blocks.lock:
            _Blocks.count -= 1
            if not _Blocks.count and not _Blocks.was_on:
                tf.compat.v1.disable_control_flow_v2()


def refuse_raw(ops: Iterable[tf.Operation], fix: str = _FIX) -> None:
    """Refuses control flow of TensorFlow 1 among ops.

    Args:
        ops: The ops.
        fix: What to do about it.

    Raises:
        UnsupportedError: There is some.
    """
    raw = [op for op in ops if op.type in _RAW]
    if raw:
        raise errors.UnsupportedError(
            f"{raw[0].type} {raw[0].name} belongs to a conditional or a loop of "
            "TensorFlow 1; on replicas, there can only be those of TensorFlow 2 (If, "
            "Case, While).",
            _sites(raw),
            fix,
        )


def _sites(ops: Sequence[tf.Operation]) -> list[str] | None:
    """Returns the line of ops; imported ops have none, but their users may."""
    queue, visited = [*ops], set(ops)
    for op in queue:
        call = placeholder.read(op)
        line = errors.line_of(op) if call is None else call.line
        if line != errors.UNKNOWN:
            return [f"at {line}" if op in ops else f"imported, and used at {line}"]
        for user in (user for tensor in op.outputs for user in tensor.consumers()):
            if user not in visited:
                queue.append(user)
                visited.add(user)
    return None  # the line that is running
