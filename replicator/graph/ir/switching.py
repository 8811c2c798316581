# SPDX-License-Identifier: Apache-2.0
"""TensorFlow 1 control flow: conditionals and loops made of many ops.

In programs that disable TensorFlow 2 behavior, tf.cond and tf.while_loop add Switch,
Merge, Enter, Exit and NextIteration ops among all others. What follows a Switch runs on
one side of it only, and so does whatever depends on that, by data or control. What
follows an Enter runs once per turn; no op outside the loop can wait for it, nor can it
wait for ops outside. So passes that add control dependencies do so through this module:

- what comes after a conditional waits for a Merge, which runs on either side;
- what comes after a loop waits for its Exits, and the next turn for the effects of one;
- a loop's Enters wait for what comes before it.

Relies on the ops' inputs rather than on what TensorFlow's Python code records about
control flow, which copies and gradients lack.

Source: Yu et al. 2018, Dynamic control flow in large-scale machine learning,
arXiv:1805.01772, sections 3 and 4, on dead values and frames.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import tensorflow as tf

from replicator import _tf
from replicator.graph.ir.kinds import ENTERS, EXITS, MERGES, NEXT, SWITCHES, SWITCHING


@dataclasses.dataclass(frozen=True)
class Side:
    """One side of a conditional.

    Attributes:
        decider: The op that computes the predicate.
        index: Which of its outputs that is.
        branch: 1 where the predicate holds, else 0.
    """

    decider: tf.Operation
    index: int
    branch: int


@dataclasses.dataclass(frozen=True)
class Loop:
    """The turns of a loop.

    Attributes:
        name: The name of the loop's frame.
    """

    name: bytes


# The control flow around an op, outermost first; in a loop, it is followed by the side
# of the loop's condition on which the turn continues.
Path: TypeAlias = tuple[Side | Loop, ...]


class Flow:
    """Which ops of a step are in TensorFlow 1 control flow, and how to order them.

    Args:
        ops: All ops of the step, on one level of the graph.
    """

    def __init__(self, ops: Sequence[tf.Operation] = ()) -> None:
        self._paths: dict[tf.Operation, Path] = {}
        self._members: dict[Loop, list[tf.Operation]] = {}  # by their outermost loop
        self._parts: dict[tuple[Loop, str], list[tf.Operation]] = {}
        self._before: dict[tf.Operation, list[tf.Operation]] = {}
        self._known: dict[tf.Operation, dict[Path, list[tf.Operation]]] = {}
        if not any(op.type in ("Switch", "Enter") for op in ops):
            return
        paths = _in_full(_find_paths(ops))
        for op, path in paths.items():
            if path:
                self._paths[op] = path
            loops = _loops(path)
            if loops:
                self._members.setdefault(loops[0], []).append(op)
            if op.type in EXITS:  # outside the loop, but one of its parts
                loops = _loops(paths[op.inputs[0].op])
            if loops:
                kind = op.type.removeprefix("Ref")
                self._parts.setdefault((loops[-1], kind), []).append(op)

    def __bool__(self) -> bool:
        """Whether there is any such control flow."""
        return bool(self._paths)

    def __contains__(self, op: tf.Operation) -> bool:
        """Whether an op may not run, or may run several times, in one step."""
        return op in self._paths

    def path(self, op: tf.Operation) -> Path:
        """Returns the control flow around an op; empty if it runs once per step."""
        return self._paths.get(op, ())

    # --- Waiting ----------------------------------------------------------------------

    def let_wait(self, op: tf.Operation, before: Iterable[tf.Operation]) -> None:
        """Makes an op wait for others, whatever sides and turns they are in.

        Args:
            op: The op that waits; if the others are outside its loop, the loop waits.
            before: Ops that do not themselves wait for `op`.
        """
        if not self._paths:
            _tf.add_control_inputs(op, list(before))
            return
        path = self.path(op)
        for source in before:
            shared = _shared(self.path(source), path)
            loops = _loops(path[len(shared) :])
            for target in self._parts[loops[0], "Enter"] if loops else [op]:
                _tf.add_control_inputs(target, self._after(source, shared))
            if path:
                self._before.setdefault(op, []).append(source)
                self._known.pop(op, None)

    def after(self, ops: Iterable[tf.Operation]) -> list[tf.Operation]:
        """Returns ops that run once others have run, or are certain not to run.

        Args:
            ops: Ops that run whenever their sides are taken.
        """
        if not self._paths:
            return list(ops)
        by_path: dict[Path, dict[tf.Operation, None]] = {(): {}}
        otherwise: dict[Path, list[tf.Operation]] = {}
        for op in ops:
            by_path.setdefault(self.path(op), {})[op] = None
            otherwise.setdefault(self.path(op), []).extend(self._before.get(op, ()))
        while path := max(by_path, key=len):
            ended = self._leave(list(by_path.pop(path)), path, otherwise.get(path, ()))
            by_path.setdefault(path[:-1], {}).update(dict.fromkeys(ended))
            otherwise.setdefault(path[:-1], []).extend(otherwise.pop(path, ()))
        return list(by_path[()])

    def _after(self, op: tf.Operation, inside: Path) -> list[tf.Operation]:
        """Like `after` for one op, up to a prefix of its path, not to the top level."""
        path = self.path(op)
        if len(path) <= len(inside):
            return [op]
        cached = self._known.setdefault(op, {})
        if inside not in cached:
            around = path[: len(inside) + 1]
            before = self._after(op, around)
            cached[inside] = self._leave(before, around, self._before.get(op, ()))
        return cached[inside]

    def _leave(
        self, ops: Sequence[tf.Operation], path: Path, before: Iterable[tf.Operation]
    ) -> list[tf.Operation]:
        """Returns what runs after ops of one path, outside the path's last element.

        Args:
            ops: The ops.
            path: Their path.
            before: What they wait for; it is waited for even if the ops do not run.
        """
        *around, place = path
        outside = tuple(around)
        if isinstance(place, Loop):
            for end in self._parts[place, "LoopCond"]:
                _tf.add_control_inputs(end, [op for op in ops if op is not end])
            return self._parts[place, "Exit"]
        if place.decider.type != "LoopCond":
            otherwise = [
                end
                for op in before
                for end in self._after(op, _shared(self.path(op), outside))
            ]
            switch, sides, merge = _either_way(place, ops, otherwise)
            self._enter(outside, switch, merge)
            for branch, end in enumerate(sides):
                self._enter((*outside, dataclasses.replace(place, branch=branch)), end)
            return [merge]
        if place.branch == 1:
            for end in self._parts[_loops(path)[-1], "NextIteration"]:
                _tf.add_control_inputs(end, [op for op in ops if op is not end])
        return []  # the loop's Exits, which come next, wait for all turns

    def _enter(self, path: Path, *ops: tf.Operation) -> None:
        """Records the control flow around ops that were added."""
        loops = _loops(path)
        for op in ops if path else ():
            self._paths[op] = path
            if loops:
                self._members[loops[0]].append(op)

    # --- Loops as units ---------------------------------------------------------------

    def unit(self, op: tf.Operation) -> tf.Operation:
        """Returns the op that represents an op's outermost loop, or the op itself."""
        loops = _loops(self._paths[op]) if op in self._paths else []
        return self._parts[loops[0], "LoopCond"][0] if loops else op

    def members(self, unit: tf.Operation) -> list[tf.Operation]:
        """Returns all ops that `unit` represents."""
        loops = _loops(self._paths[unit]) if unit in self._paths else []
        return self._members[loops[0]] if loops else [unit]

    # --- Values -----------------------------------------------------------------------

    def handle(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns a resource handle as it is outside the control flow."""
        while self._paths and tensor.op.type in SWITCHING:
            tensor = tensor.op.inputs[0]
        return tensor

    def deciders(self, op: tf.Operation) -> list[tf.Tensor] | None:
        """Returns the predicates that determine which input a Merge returns.

        None for other ops, and where the turns of a loop begin.
        """
        if op.type != "Merge" or not self._paths:
            return None
        predicates: dict[Side | Loop, tf.Tensor] = {}
        for tensor in op.inputs:
            if tensor.op.type in NEXT or tensor.op.type in ENTERS:
                return None
            for place in _behind(tensor, self._paths):
                if place in self.path(op):
                    continue
                if isinstance(place, Loop) or place.decider.type == "LoopCond":
                    return None
                predicates[place] = place.decider.outputs[place.index]
        return list({id(tensor): tensor for tensor in predicates.values()}.values())


NONE = Flow()


def _either_way(
    side: Side, ops: Sequence[tf.Operation], others: Sequence[tf.Operation]
) -> tuple[tf.Operation, list[tf.Operation], tf.Operation]:
    """Adds an op that runs after `ops` if a side is taken, and else after `others`.

    Returns:
        A Switch, the ops that wait on its two sides, and the Merge of these.
    """
    predicate = side.decider.outputs[side.index]
    with (
        tf.control_dependencies(None),
        tf.device(None),
        tf.device(side.decider.device),
        _tf.in_loop_of(side.decider),
    ):
        switch = tf.raw_ops.Switch(data=predicate, pred=predicate)
        ends = [
            tf.raw_ops.Identity(input=end)
            for end in (switch.output_false, switch.output_true)
        ]
        for branch, end in enumerate(ends):
            before = ops if branch == side.branch else others
            _tf.add_control_inputs(end.op, list(before))
        merge = tf.raw_ops.Merge(inputs=ends).output
    return switch.output_true.op, [end.op for end in ends], merge.op


def _loops(path: Path) -> list[Loop]:
    return [place for place in path if isinstance(place, Loop)]


def _shared(one: Path, other: Path) -> Path:
    """Returns the common prefix of two paths."""
    pairs = zip(one, other, strict=False)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
    return tuple(place for place, _ in same)


def _find_paths(ops: Sequence[tf.Operation]) -> dict[tf.Operation, Path]:
    """Finds the control flow around ops, in linear time."""
    inside = set(ops)
    paths: dict[tf.Operation, Path] = {}
    stack = [(op, False) for op in reversed(ops)]
    while stack:
        op, ready = stack.pop()
        if op in paths:
            continue
        if ready:
            paths[op] = _path(op, paths)
            continue
        stack.append((op, True))
        sources = [*(tensor.op for tensor in _inputs(op)), *op.control_inputs]
        stack += [(s, False) for s in sources if s in inside and s not in paths]
    return paths


def _inputs(op: tf.Operation) -> list[tf.Tensor]:
    """Returns an op's inputs, except those from the previous turn."""
    inputs = list(op.inputs)
    if op.type in MERGES:
        return [tensor for tensor in inputs if tensor.op.type not in NEXT]
    return inputs


def _path(op: tf.Operation, paths: Mapping[tf.Operation, Path]) -> Path:
    """Returns the control flow around an op, from that of the ops it waits for."""
    input_paths = [_behind(tensor, paths) for tensor in _inputs(op)]
    if op.type in MERGES:
        return tuple(
            x for x in input_paths[0] if all(x in other for other in input_paths)
        )
    path: Path = ()
    for other in [
        *input_paths,
        *(paths.get(source, ()) for source in op.control_inputs),
    ]:
        if set(path) <= set(other):
            path = other
        else:
            path += tuple(place for place in other if place not in path)
    if op.type in ENTERS:
        return (*path, Loop(op.get_attr("frame_name")))
    if op.type in EXITS:
        return path[: path.index(_loops(path)[-1])]
    return path


def _behind(tensor: tf.Tensor, paths: Mapping[tf.Operation, Path]) -> Path:
    """Returns the control flow around whatever waits for a tensor."""
    path = paths.get(tensor.op, ())
    if tensor.op.type not in SWITCHES:
        return path
    predicate = tensor.op.inputs[1]
    while predicate.op.type == "Identity":
        predicate = predicate.op.inputs[0]
    return (*path, Side(predicate.op, predicate.value_index, tensor.value_index))


def _in_full(paths: Mapping[tf.Operation, Path]) -> dict[tf.Operation, Path]:
    """Completes paths so that each loop comes after all the control flow around it.

    A loop's inputs may come from outside the control flow around it.
    """
    full: dict[Loop, Path] = {}
    for path in paths.values():
        for k, place in enumerate(path):
            if isinstance(place, Loop) and len(full.get(place, ())) <= k:
                full[place] = path[: k + 1]
    full_paths = {}
    for op, path in paths.items():
        loops = _loops(path)
        if loops:
            inside = path[path.index(loops[-1]) + 1 :]
            path = (*full[loops[-1]], *inside)
        full_paths[op] = path
    return full_paths
