# SPDX-License-Identifier: Apache-2.0
"""Rules for loops that run until the longest sequence of a replica ends.

Replicas then make different numbers of iterations, and one device as many as the
replica with the longest sequence. Results agree only if iterations past the end of a
sequence leave its rows as they are, or put zeros where a list has not been written yet.
So the effect of such an iteration on a variable is inferred: selections by the lengths
that also end the loop are understood, everything else is unknown.
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
    """What a tensor is in an iteration past the end of all of a replica's sequences."""

    KEPT = "what the variable was before"
    ZEROS = "zeros, or false"
    TRUE = "true"
    UNKNOWN = "anything"


_NEGATED = {_After.TRUE: _After.ZEROS, _After.ZEROS: _After.TRUE}


class Loop:
    """A loop of either version of TensorFlow's control flow.

    Args:
        test: Whether there is another iteration.
        starts: The initial tensor of each variable.
        variables: Each variable's tensors inside the test and the body.
        results: The tensor of each variable after an iteration.
        is_same: Whether a tensor outside or in the test is the same on all replicas.
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
            tensor.ref(): k for k, tensors in enumerate(variables) for tensor in tensors
        }
        self._end = self._find_end(test)

    def is_constant(self, k: int) -> bool:
        """Whether no iteration changes a variable."""
        return self._number(self._results[k]) == k

    def keeps(self, k: int) -> bool:
        """Whether iterations of other replicas alone leave a variable's rows as is.

        Args:
            k: The variable's number; if selected by the lengths, its rows align with
                them.
        """
        return self._end is not None and self._after(self._results[k], k) is _After.KEPT

    # --- What tensors are -------------------------------------------------------------

    def _passed(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the tensor that a tensor is passed on from."""
        while tensor.ref() not in self._numbers and tensor.op.type in _PASSED:
            tensor = tensor.op.inputs[0]
        return tensor

    def _number(self, tensor: tf.Tensor) -> int | None:
        """Returns the number of the variable that a tensor is, or None."""
        return self._numbers.get(self._passed(tensor).ref())

    def _outside(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns a tensor's source, outside the loop if no iteration changes it."""
        tensor = self._passed(tensor)
        k = self._numbers.get(tensor.ref())
        if k is None or not self.is_constant(k):
            return tensor
        return self._passed(self._starts[k])

    def _place(self, tensor: tf.Tensor) -> Hashable:
        """Returns a key equal for tensors that are the same in each iteration."""
        tensor = self._outside(tensor)
        number = self._numbers.get(tensor.ref())
        return (tensor.op, tensor.value_index) if number is None else number

    # --- The end ----------------------------------------------------------------------

    def _find_end(self, test: tf.Tensor) -> tuple[Hashable, Hashable, bool] | None:
        """Returns the iteration counter, the lengths, and whether it may pass these."""
        differing = [part for part in self._tests(test) if not self._is_same(part)]
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
        """Returns all conditions of another iteration."""
        test = self._passed(test)
        if test.op.type != "LogicalAnd":
            return [test]
        return [part for tensor in test.op.inputs for part in self._tests(tensor)]

    def _longest(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns the lengths whose maximum a tensor is, within bounds; None if none.

        The bounds are the same on all replicas: where one ends a replica's loop before
        its longest sequence, no other replica makes more iterations.
        """
        op = self._outside(tensor).op
        if op.type == "Max" and _reduces_all(op) and op.inputs[0].dtype.is_integer:
            return op.inputs[0]
        if op.type in ("Maximum", "Minimum"):
            differing = [operand for operand in op.inputs if not self._is_same(operand)]
            if len(differing) == 1:
                return self._longest(differing[0])
        return None

    def _counts(self, k: int) -> bool:
        """Whether each iteration increases a variable."""
        op = self._passed(self._results[k]).op
        if op.type not in ("Add", "AddV2") or not op.outputs[0].dtype.is_integer:
            return False
        steps = [tf.get_static_value(t) for t in op.inputs if self._number(t) != k]
        return len(steps) == 1 and steps[0] is not None and bool(np.all(steps[0] > 0))

    # --- Turns after it ---------------------------------------------------------------

    def _after(self, tensor: tf.Tensor, k: int) -> _After:
        """Returns what a tensor is past the end of all sequences."""
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
            operand_after = self._after(op.inputs[0], k)
            if op.type == "LogicalNot":
                return _NEGATED.get(operand_after, _After.UNKNOWN)
            return operand_after if operand_after is not _After.KEPT else _After.UNKNOWN
        if op.type in ("Select", "SelectV2"):
            test, *branches = op.inputs
            branch = {_After.TRUE: 0, _After.ZEROS: 1}.get(self._after(test, k))
            return (
                _After.UNKNOWN if branch is None else self._after(branches[branch], k)
            )
        if op.type in ("Add", "AddV2"):
            term, other_term = (self._after(operand, k) for operand in op.inputs)
            term, other_term = (
                (other_term, term) if term is _After.ZEROS else (term, other_term)
            )
            return term if other_term is _After.ZEROS else _After.UNKNOWN
        return _After.UNKNOWN

    def _of_comparison(self, op: tf.Operation) -> _After:
        """Returns what a comparison of the counter with the lengths is past the end."""
        smaller, larger, or_equal = _compared(op) or (None, None, False)
        if smaller is None or self._end is None:
            return _After.UNKNOWN
        counter, lengths, passes = self._end
        pair = self._place(smaller), self._place(larger)
        if pair == (counter, lengths):  # count < lengths, or count <= lengths
            return _After.ZEROS if passes or not or_equal else _After.UNKNOWN
        if pair == (lengths, counter):
            return _After.TRUE if passes or or_equal else _After.UNKNOWN
        return _After.UNKNOWN

    def _written(self, op: tf.Operation, k: int) -> _After:
        """Returns what a list is after a write past the end.

        Elements never written are zeros, so zeros written by the counter change
        nothing.
        """
        before, index, item = (op.inputs[n] for n in _WRITES[op.type])
        assert self._end is not None, "it is asked where the loop ends so"
        is_next = self._number(before) == k and self._number(index) == self._end[0]
        unwritten = self._passed(self._starts[k]).op.type in _UNWRITTEN
        if is_next and unwritten and self._after(item, k) is _After.ZEROS:
            return _After.KEPT
        return _After.UNKNOWN


def of_switch(switch: tf.Operation, is_same: IsSame) -> tuple[Loop, int] | None:
    """Returns the TensorFlow 1 loop that a Switch ends, and its variable's number."""
    test = switch.inputs[1]
    switches = [
        loop_switch
        for loop_switch in test.consumers()
        if loop_switch.type in ("Switch", "RefSwitch")
        and loop_switch.inputs[0].op.type in MERGES
    ]
    if switch not in switches:
        return None
    starts, variables, results = [], [], []
    for loop_switch in switches:
        merge = loop_switch.inputs[0].op
        entering = [tensor for tensor in merge.inputs if tensor.op.type in ENTERS]
        passed_on = [tensor.op for tensor in merge.inputs if tensor.op.type in NEXT]
        if not (entering and passed_on):
            return None
        starts += entering
        variables.append((merge.outputs[0], loop_switch.outputs[1]))
        results.append(passed_on[0].inputs[0])
    return Loop(test, starts, variables, results, is_same), switches.index(switch)


def _compared(op: tf.Operation) -> tuple[tf.Tensor, tf.Tensor, bool] | None:
    """Returns (smaller, larger, whether they may be equal) of a comparison."""
    if op.type not in tables.COMPARISONS or not op.inputs[0].dtype.is_integer:
        return None
    smaller, larger = op.inputs
    if op.type.startswith("Greater"):
        smaller, larger = larger, smaller
    return smaller, larger, op.type.endswith("Equal")


def _reduces_all(op: tf.Operation) -> bool:
    """Whether a reduction covers all axes."""
    axes = tf.get_static_value(op.inputs[1])
    return axes is not None and op.inputs[0].shape.rank == np.size(axes)
