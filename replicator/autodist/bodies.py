# SPDX-License-Identifier: Apache-2.0
"""Copies of the functions that ops call: branches, bodies of loops, functions.

Ops in a function say with which others they have to be on one device, by name: one
function that all replicas call would bring all of them to one device. So a copy says
nothing of that, and what is in it is where the op is that calls it; but for what uses a
variable that one replica owns, which is where that is. One copy serves all replicas,
unless random numbers are drawn in it, which are to differ.
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
    """The copies that are called in one graph.

    Args:
        kind: The type of the devices that replicas are on, "GPU" say.
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
        """Returns the copy of a function, for the default graph.

        Args:
            op: Calls it, in the original.
            name: The function's.
            r: The replica whose copy of the op will call the copy.
            placed: Returns where a variable is of which a tensor is the handle, "" if
                that is up to who uses it.
        """
        found = _tf.function_called(op, name)
        if found is None or _tf.compiled(op, name):
            return name
        body, results = found
        if not any(map(draws, body.get_operations())):
            r = 0
        outer = tf.compat.v1.get_default_graph()
        given = [placed(tensor) for tensor in uses.arguments(op)]
        key = (name, r, id(outer), tuple(given))
        if key not in self._made:
            places = {
                id(tensor): place
                for tensor, place in zip(body.inputs, given, strict=False)
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
        given = {id(tensor) for tensor in body.inputs}
        stamp = stamping.Stamp(
            body, [op for op in ops if not any(id(t) in given for t in op.outputs)]
        )
        inside = _tf.new_function_graph("autodist")
        arguments = [_tf.add_input(inside, t, t.shape) for t in body.inputs]
        own = {
            id(tensor): new for tensor, new in zip(body.inputs, arguments, strict=True)
        }

        def placed(tensor: tf.Tensor) -> str:
            return places.get(id(uses.passed_on(tensor)), "")

        with inside.as_default():
            made = stamp.press(
                inside,
                "",
                lambda tensor: own[id(tensor)],
                lambda op: self._placed(op, placed),
                {},
                lambda op, name: self.copy(op, name, r, placed),
            )
            random.check([list(made.values())], [r])
            outputs = [
                own[id(t)] if id(t) in own else stamping.of(made, t) for t in results
            ]
        must_run = [made[op] for op in body.control_outputs]
        return _tf.finish_function(inside, outputs, must_run)

    def _placed(self, op: tf.Operation, placed: Callable[[tf.Tensor], str]) -> str:
        if not kind_of(op).calls:
            for _, tensor in resource_inputs(op):
                if placed(tensor):
                    return placed(tensor)
        kind = tf.DeviceSpec.from_string(op.device).device_type
        return "" if kind in (None, self._kind) else op.device
