"""Has CPUs compute the same by other ops, where TensorFlow's kernels are slow.

Runs once all replicas are built and what they communicate is in place. Each rule says
where it pays, by measurement, and what takes the op's place; numbers differ by rounding
alone. Ops inside conditionals, loops and functions are replaced like all others: what
calls such a function is given a changed copy of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

from replicator import _tf
from replicator.graph import convolutions, inline, products
from replicator.graph.control_flow import KINDS

_DTYPES = (tf.float32, tf.float64)


@dataclasses.dataclass(frozen=True)
class Rule:
    """What can take the place of ops of one type.

    Attributes:
        pays: Whether the op, on a CPU, is better replaced.
        make: Adds what computes the same; returns the op's one result.
    """

    pays: Callable[[tf.Operation], bool]
    make: Callable[[tf.Operation], tf.Tensor]


RULES = {
    "MatMul": Rule(products.pays, products.turned),
    "Conv2DBackpropInput": Rule(convolutions.pays_by_input, convolutions.by_input),
    "Conv2DBackpropFilter": Rule(convolutions.pays_by_filter, convolutions.by_filter),
}


def replace(replicas: Sequence[Sequence[tf.Operation]]) -> int:
    """Replaces the ops of a step that are slow on CPUs.

    Args:
        replicas: `replicas[r]` are the ops of replica r's sub-graph.

    Returns:
        The number of ops.
    """
    # What replicas communicate in was merged, and is an op of all of them.
    return _replace(dict.fromkeys(op for ops in replicas for op in ops))


def _replace(ops: Iterable[tf.Operation]) -> int:
    replaced = 0
    for op in ops:
        if _pays(op):
            _replace_one(op)
            replaced += 1
        elif op.type in KINDS:
            replaced += _replace_inside(op)
    return replaced


def _pays(op: tf.Operation) -> bool:
    rule = RULES.get(op.type)
    return (
        rule is not None
        and op.outputs[0].dtype in _DTYPES
        and tf.DeviceSpec.from_string(op.device).device_type == "CPU"
        and rule.pays(op)
    )


def _replace_one(op: tf.Operation) -> None:
    with (
        tf.control_dependencies(None),
        tf.control_dependencies(op.control_inputs),
        tf.device(None),
        tf.device(op.device),
    ):
        result = RULES[op.type].make(op)
    _tf.replace(op.outputs[0], result)
    _tf.move_control_outputs(op, result.op)


def _replace_inside(op: tf.Operation) -> int:
    """Gives a conditional, a loop or a call changed copies of what it calls."""
    replaced = 0
    for attribute, position in _tf.functions_called(op):
        body, outputs = _tf.function_body(op, attribute, position)
        if not _any_pays(body.get_operations()):
            continue
        new = _tf.new_function_graph("kernels")
        arguments = [_tf.add_input(new, tensor, tensor.shape) for tensor in body.inputs]
        with new.as_default():
            copy = inline.copy(body, outputs, arguments, "body")
            replaced += _replace(copy.ops)
        name = _tf.finish_function(new, copy.results, copy.must_run)
        _tf.set_function(op, attribute, position, name)
    return replaced


def _any_pays(ops: Iterable[tf.Operation]) -> bool:
    """Whether a rule pays for one of these ops, or for one in what they call."""
    return any(
        _pays(op) or (op.type in KINDS and any(_any_pays(body) for body in _bodies(op)))
        for op in ops
    )


def _bodies(op: tf.Operation) -> list[list[tf.Operation]]:
    called = _tf.functions_called(op)
    return [_tf.function_body(op, *place)[0].get_operations() for place in called]
