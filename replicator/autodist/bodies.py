# SPDX-License-Identifier: Apache-2.0
"""Copies of the functions that ops call: branches, bodies of loops, functions.

Ops in a function say with which others they have to be on one device, by name: one
function that all replicas call would bring all of them to one device. So a copy says
nothing of that, and what is in it is where the op is that calls it. One copy serves all
replicas, unless random numbers are drawn in it, which are to differ.
"""

from __future__ import annotations

import tensorflow as tf

from replicator import _tf
from replicator.autodist import stamping
from replicator.autodist.flows import draws
from replicator.graph.passes import random


class Bodies:
    """The copies that are called in one graph.

    Args:
        kind: The type of the devices that replicas are on, "GPU" say.
    """

    def __init__(self, kind: str | None) -> None:
        self._kind = kind
        self._made: dict[tuple[str, int, int], str] = {}

    def copy(self, op: tf.Operation, name: str, r: int) -> str:
        """Returns the copy of a function, for the default graph.

        Args:
            op: Calls it, in the original.
            name: The function's.
            r: The replica whose copy of the op will call the copy.
        """
        found = _tf.function_called(op, name)
        if found is None or _tf.compiled(op, name):
            return name
        body, results = found
        if not any(map(draws, body.get_operations())):
            r = 0
        outer = tf.compat.v1.get_default_graph()
        key = (name, r, id(outer))
        if key not in self._made:
            self._made[key] = self._copied(body, results, r)
        return self._made[key]

    def _copied(self, body: tf.Graph, results: list[tf.Tensor], r: int) -> str:
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
        with inside.as_default():
            places = stamp.press(
                inside,
                "",
                lambda tensor: own[id(tensor)],
                self._placed,
                {},
                lambda op, name: self.copy(op, name, r),
            )
            random.check([list(places.values())], [r])
            outputs = [
                own[id(t)] if id(t) in own else places[t.op].outputs[t.value_index]
                for t in results
            ]
        must_run = [places[op] for op in body.control_outputs]
        return _tf.finish_function(inside, outputs, must_run)

    def _placed(self, op: tf.Operation) -> str:
        kind = tf.DeviceSpec.from_string(op.device).device_type
        return "" if kind in (None, self._kind) else op.device
