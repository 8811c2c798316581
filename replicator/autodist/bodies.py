# SPDX-License-Identifier: Apache-2.0
"""Copies the functions that ops call: branches, loop bodies and other functions.

Ops in a function carry colocation constraints by name, so a single function called by
all replicas would pull all of them to one device. The copies have no such constraints
and run where their caller is, except ops on a variable that one replica owns, which run
at the owner. One copy serves all replicas unless it draws random numbers, which must
differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tensorflow as tf

from replicator import _tf
from replicator.autodist import stamping, uses
from replicator.autodist.flows import draws
from replicator.graph.ir.kinds import kind_of, resource_inputs
from replicator.graph.passes import random


class Bodies:
    """The function copies that one graph calls.

    Args:
        kind: The device type of the replicas, e.g. "GPU".
    """

    def __init__(self, kind: str | None) -> None:
        self._kind = kind
        self._made: dict[tuple[str, int, int, tuple[str, ...]], str] = {}

    def copy(
        self,
        op: tf.Operation,
        name: str,
        r: int,
        placed: Callable[[tf.Tensor], str],
    ) -> str:
        """Returns the name of a function's copy for the default graph.

        Args:
            op: The op that calls it, in the original.
            name: The function's name.
            r: The replica whose copy of the op will call the copy.
            placed: Returns the device of the variable behind a handle, or "" to follow
                the op that uses it.
        """
        function = _tf.function_called(op, name)
        if function is None or _tf.compiled(op, name):
            return name
        body, results = function
        if not any(map(draws, body.get_operations())):
            r = 0
        outer = tf.compat.v1.get_default_graph()
        argument_devices = [placed(tensor) for tensor in uses.arguments(op)]
        key = (name, r, id(outer), tuple(argument_devices))
        if key not in self._made:
            places = {
                id(tensor): place
                for tensor, place in zip(body.inputs, argument_devices, strict=False)
                if place
            }
            self._made[key] = self._copied(body, results, r, places)
        return self._made[key]

    def _copied(
        self,
        body: tf.Graph,
        results: list[tf.Tensor],
        r: int,
        places: Mapping[int, str],
    ) -> str:
        ops = body.get_operations()
        argument_ids = {id(tensor) for tensor in body.inputs}
        stamp = stamping.Stamp(
            body,
            [op for op in ops if not any(id(t) in argument_ids for t in op.outputs)],
        )
        inside = _tf.new_function_graph("autodist")
        arguments = [_tf.add_input(inside, t, t.shape) for t in body.inputs]
        copied_arguments = {
            id(tensor): argument
            for tensor, argument in zip(body.inputs, arguments, strict=True)
        }

        def placed(tensor: tf.Tensor) -> str:
            return places.get(id(uses.passed_on(tensor)), "")

        with inside.as_default():
            copies = stamp.press(
                inside,
                "",
                lambda tensor: copied_arguments[id(tensor)],
                lambda op: self._placed(op, placed),
                {},
                lambda op, name: self.copy(op, name, r, placed),
            )
            random.check([list(copies.values())], [r])
            outputs = [
                copied_arguments[id(t)]
                if id(t) in copied_arguments
                else stamping.of(copies, t)
                for t in results
            ]
        must_run = [copies[op] for op in body.control_outputs]
        return _tf.finish_function(inside, outputs, must_run)

    def _placed(self, op: tf.Operation, placed: Callable[[tf.Tensor], str]) -> str:
        if not kind_of(op).calls:
            for _, tensor in resource_inputs(op):
                if placed(tensor):
                    return placed(tensor)
        kind = tf.DeviceSpec.from_string(op.device).device_type
        return "" if kind in (None, self._kind) else op.device
