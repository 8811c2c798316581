# SPDX-License-Identifier: Apache-2.0
"""Loops that end with the longest of the sequences that a replica has.

Replicas make different numbers of turns then, and one device as many as the replica
with the longest sequence. Results are alike only if the turns after the end of a
sequence leave its rows as they are, or put zeros where nothing was written in a list
yet. So what a turn makes of a variable is computed for such a turn: what selects by
the lengths that also end the loop is known, and of all else nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import tensorflow as tf

from replicator.autodist import powers, tables
from replicator.graph.ir.kinds import ENTERS, MERGES, NEXT

_PASSED = ("Identity", "LoopCond", *ENTERS)
_RESHAPED = ("ExpandDims", "Reshape", "Squeeze", "BroadcastTo", "Tile")
_WRITES = {"TensorListSetItem": (0, 1, 2), "TensorArrayWriteV3": (3, 1, 2)}
_UNWRITTEN = ("TensorListReserve", "TensorArrayV3")

IsSame = Callable[[tf.Tensor], bool]


class _After(enum.Enum):
    """What a tensor is in a turn after the end of all of a replica's sequences."""

    KEPT = "what the variable was before"
    ZEROS = "zeros, or false"
    TRUE = "true"
    UNKNOWN = "anything"


_NEGATED = {_After.TRUE: _After.ZEROS, _After.ZEROS: _After.TRUE}


class Loop:
    """A loop, of whichever version of TensorFlow's control flow.

    Args:
        test: Whether there is another turn.
        starts: What each variable is before the first turn.
        variables: Each, as the test and the turn are given it.
        results: What a turn makes of each.
        is_same: Says of what is outside or in the test whether all replicas have it.
    """

    def __init__(
        self,
        test: tf.Tensor,
        starts: Sequence[tf.Tensor],
        variables: Sequence[Sequence[tf.Tensor]],
        results: Sequence[tf.Tensor],
        is_same: IsSame,
    ) -> None:
        self._starts, self._results, self._is_same = starts, results, is_same
        self._numbers = {
            tensor.ref(): k for k, own in enumerate(variables) for tensor in own
        }
        self._end = self._find_end(test)

    def is_constant(self, k: int) -> bool:
        """Whether no turn changes a variable."""
        return self._number(self._results[k]) == k

    def keeps(self, k: int) -> bool:
        """Whether turns that other replicas make would leave a variable's rows alone.

        Args:
            k: Which variable; its rows are aligned with the lengths, if selected by.
        """
        return self._end is not None and self._after(self._results[k], k) is _After.KEPT

    # --- What tensors are -------------------------------------------------------------

    def _passed(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns what a tensor is the same as."""
        while tensor.ref() not in self._numbers and tensor.op.type in _PASSED:
            tensor = tensor.op.inputs[0]
        return tensor

    def _number(self, tensor: tf.Tensor) -> int | None:
        """Returns which variable a tensor is."""
        return self._numbers.get(self._passed(tensor).ref())

    def _outside(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns what a tensor is the same as; outside, if no turn changes it."""
        tensor = self._passed(tensor)
        k = self._numbers.get(tensor.ref())
        if k is None or not self.is_constant(k):
            return tensor
        return self._passed(self._starts[k])

    def _place(self, tensor: tf.Tensor) -> Hashable:
        """Returns what is equal for tensors that are the same in each turn."""
        tensor = self._outside(tensor)
        number = self._numbers.get(tensor.ref())
        return (tensor.op, tensor.value_index) if number is None else number

    # --- The end ----------------------------------------------------------------------

    def _find_end(self, test: tf.Tensor) -> tuple[Hashable, Hashable, bool] | None:
        """Returns what counts turns, the lengths, and whether it passes these."""
        differing = [one for one in self._tests(test) if not self._is_same(one)]
        if len(differing) != 1:
            return None
        op, is_any = differing[0].op, False
        if op.type == "Any" and _reduces_all(op):
            op, is_any = self._passed(op.inputs[0]).op, True
        compared = _compared(op)
        if compared is None:
            return None
        turn, bound, or_equal = compared
        counter, lengths = self._number(turn), bound if is_any else self._longest(bound)
        if counter is None or lengths is None or not self._counts(counter):
            return None
        return counter, self._place(lengths), or_equal

    def _tests(self, test: tf.Tensor) -> list[tf.Tensor]:
        """Returns all that has to hold for another turn."""
        test = self._passed(test)
        if test.op.type != "LogicalAnd":
            return [test]
        return [one for tensor in test.op.inputs for one in self._tests(tensor)]

    def _longest(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns the lengths of which a tensor is the longest, within bounds.

        The bounds are the same on all replicas: where one ends a replica's loop before
        its longest sequence, no other has more turns.
        """
        op = self._outside(tensor).op
        if op.type == "Max" and _reduces_all(op) and op.inputs[0].dtype.is_integer:
            return op.inputs[0]
        if op.type in ("Maximum", "Minimum"):
            differing = [one for one in op.inputs if not self._is_same(one)]
            if len(differing) == 1:
                return self._longest(differing[0])
        return None

    def _counts(self, k: int) -> bool:
        """Whether each turn makes a variable greater."""
        op = self._passed(self._results[k]).op
        if op.type not in ("Add", "AddV2") or not op.outputs[0].dtype.is_integer:
            return False
        steps = [tf.get_static_value(t) for t in op.inputs if self._number(t) != k]
        return len(steps) == 1 and steps[0] is not None and bool(np.all(steps[0] > 0))

    # --- Turns after it ---------------------------------------------------------------

    def _after(self, tensor: tf.Tensor, k: int) -> _After:
        """Returns what a tensor is once the sequences have ended."""
        if self._number(tensor) == k:
            return _After.KEPT
        tensor = self._outside(tensor)
        if powers.is_zero(tensor):
            return _After.ZEROS
        op = tensor.op
        if op.type in _WRITES:
            return self._written(op, k)
        if op.type in tables.COMPARISONS:
            return self._of_comparison(op)
        if op.type in ("LogicalNot", *_RESHAPED):
            found = self._after(op.inputs[0], k)
            if op.type == "LogicalNot":
                return _NEGATED.get(found, _After.UNKNOWN)
            return found if found is not _After.KEPT else _After.UNKNOWN
        if op.type in ("Select", "SelectV2"):
            test, *branches = op.inputs
            chosen = {_After.TRUE: 0, _After.ZEROS: 1}.get(self._after(test, k))
            return (
                _After.UNKNOWN if chosen is None else self._after(branches[chosen], k)
            )
        if op.type in ("Add", "AddV2"):
            one, two = (self._after(operand, k) for operand in op.inputs)
            one, two = (two, one) if one is _After.ZEROS else (one, two)
            return one if two is _After.ZEROS else _After.UNKNOWN
        return _After.UNKNOWN

    def _of_comparison(self, op: tf.Operation) -> _After:
        """Returns what a comparison of the count with the lengths is."""
        one, two, or_equal = _compared(op) or (None, None, False)
        if one is None or self._end is None:
            return _After.UNKNOWN
        counter, lengths, passes = self._end
        pair = self._place(one), self._place(two)
        if pair == (counter, lengths):  # count < lengths, or count <= lengths
            return _After.ZEROS if passes or not or_equal else _After.UNKNOWN
        if pair == (lengths, counter):
            return _After.TRUE if passes or or_equal else _After.UNKNOWN
        return _After.UNKNOWN

    def _written(self, op: tf.Operation, k: int) -> _After:
        """Returns what a list is to which something is written.

        What was never written is zeros, also where an element is written by count.
        """
        before, index, item = (op.inputs[n] for n in _WRITES[op.type])
        assert self._end is not None, "it is asked where the loop ends so"
        is_next = self._number(before) == k and self._number(index) == self._end[0]
        unwritten = self._passed(self._starts[k]).op.type in _UNWRITTEN
        if is_next and unwritten and self._after(item, k) is _After.ZEROS:
            return _After.KEPT
        return _After.UNKNOWN


def of_switch(switch: tf.Operation, is_same: IsSame) -> tuple[Loop, int] | None:
    """Returns the loop of TensorFlow 1 that a Switch ends, and of which variable."""
    test = switch.inputs[1]
    switches = [
        one
        for one in test.consumers()
        if one.type in ("Switch", "RefSwitch") and one.inputs[0].op.type in MERGES
    ]
    if switch not in switches:
        return None
    starts, variables, results = [], [], []
    for one in switches:
        merge = one.inputs[0].op
        entering = [tensor for tensor in merge.inputs if tensor.op.type in ENTERS]
        passed_on = [tensor.op for tensor in merge.inputs if tensor.op.type in NEXT]
        if not (entering and passed_on):
            return None
        starts += entering
        variables.append((merge.outputs[0], one.outputs[1]))
        results.append(passed_on[0].inputs[0])
    return Loop(test, starts, variables, results, is_same), switches.index(switch)


def _compared(op: tf.Operation) -> tuple[tf.Tensor, tf.Tensor, bool] | None:
    """Returns what is less than what, and whether it may be equal."""
    if op.type not in tables.COMPARISONS or not op.inputs[0].dtype.is_integer:
        return None
    one, two = op.inputs
    if op.type.startswith("Greater"):
        one, two = two, one
    return one, two, op.type.endswith("Equal")


def _reduces_all(op: tf.Operation) -> bool:
    """Whether a reduction is of a whole vector."""
    axes = tf.get_static_value(op.inputs[1])
    return axes is not None and op.inputs[0].shape.rank == np.size(axes)
