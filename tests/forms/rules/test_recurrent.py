# SPDX-License-Identifier: Apache-2.0
"""Rules of recurrent layers as one op."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import errors
from replicator.forms.forms import REPLICATED, Fact, Layout, Partial, Sharded
from replicator.forms.propagate import GraphPlan, Scope
from tests.forms.laws import Inputs, Sample

raw = tf.raw_ops
VECTOR, BIAS = np.full([2], 0.3, np.float32), np.full([8], 0.1, np.float32)
WEIGHTS = np.full([5, 8], 0.2, np.float32)


def block(v: Inputs) -> dict[str, Any]:
    """Returns the inputs of a layer of 2 units, of 4 steps of 3 numbers."""
    return {
        **{"seq_len_max": np.int64(4), "x": tf.transpose(v("x", 4, 3), [1, 0, 2])},
        **{"cs_prev": v("x", 2), "h_prev": v("y", 2), "w": WEIGHTS, "b": BIAS},
        **dict.fromkeys(("wci", "wcf", "wco"), VECTOR),
    }


def gradient(name: str) -> Sample:
    """Returns a sample of the gradient op of a layer."""

    def make(v: Inputs) -> Any:
        made = getattr(raw, name.replace("Grad", ""))(**block(v), use_peephole=True)
        grads = {"cs_grad": tf.sin(made.cs), "h_grad": tf.cos(made.h)}
        given = {**block(v), **made._asdict(), **grads}
        return getattr(raw, name)(**given, use_peephole=True)

    return Sample(name, make, grads=False)


def layer(name: str) -> Sample:
    kernel = getattr(raw, name)
    return Sample(name, lambda v: kernel(**block(v), use_peephole=True), grads=False)


SAMPLES = [
    *map(layer, ("BlockLSTM", "BlockLSTMV2")),
    *map(gradient, ("BlockLSTMGrad", "BlockLSTMGradV2")),
]


def plans_of(step: Any, specs: Any, facts: Any) -> dict[str, Any]:
    """Returns the plans of the ops of a function, and of those that it calls."""
    graph = tf.function(step).get_concrete_function(*specs).graph
    plan = GraphPlan(graph.inputs, facts)
    Scope().extend(plan, [t.op for t in graph.outputs])
    return {op.type: its for op, its in _every(plan)}


def _every(plan: GraphPlan) -> Any:
    for op, its in plan.plans.items():
        yield op, its
        for body in its.bodies:
            yield from _every(body)


def alone(run: Any) -> Any:
    return run()


def in_a_branch(run: Any) -> Any:
    return tf.cond(tf.random.uniform([]) > 0.5, run, lambda: [0.0, 0.0, 0.0])


def in_a_loop(run: Any) -> Any:
    found = tf.while_loop(
        lambda k, *_: k < 3, lambda k, *_: (k + 1, run()[0]), [0, 0.0]
    )
    return found[1], 0.0, 0.0


def planned(time_major: bool, mode: str, around: Any = alone) -> dict[str, Any]:
    """Returns the plans of a layer of cuDNN as Keras builds it, and of its gradient."""
    axis = int(time_major)
    shapes = [[7, 3], [1, 4], []]
    for shape in shapes[:2]:
        shape.insert(axis, None)

    def step(x: tf.Tensor, h: tf.Tensor, lengths: tf.Tensor) -> Any:
        options = {"time_major": time_major, "rnn_mode": mode}
        c = h if mode == "lstm" else 0.0
        given = {"input": x, "input_h": h, "input_c": c, "sequence_lengths": lengths}
        params = tf.ones([144])

        def run() -> Any:
            made = raw.CudnnRNNV3(**given, params=params, **options)[:3]
            return made if around is alone else list(map(tf.reduce_sum, made))

        made = around(run)
        return made, tf.gradients(made[0], [x, h, params])

    specs = [tf.TensorSpec(shapes[0]), tf.TensorSpec(shapes[1])]
    specs.append(tf.TensorSpec([None], tf.int32))
    layout = Layout("batch")
    forms = [Sharded(axis, layout), Sharded(axis, layout), Sharded(0, layout)]
    return plans_of(step, specs, list(map(Fact, forms)))


@pytest.mark.parametrize("mode", ["lstm", "gru"])
@pytest.mark.parametrize("time_major", [False, True])
def test_layers_of_cudnn_are_sharded(time_major: bool, mode: str) -> None:
    plans, axis = planned(time_major, mode), int(time_major)
    forward, backward = plans["CudnnRNNV3"], plans["CudnnRNNBackpropV3"]
    made = [fact.form for fact in forward.makes[:2]]
    assert [form.axis for form in made] == [axis, axis]
    assert isinstance(forward.makes[2].form, Sharded) == (mode == "lstm")
    assert backward.needs[-2:] == [REPLICATED] * 2 and backward.build is None
    assert backward.makes[0].form == made[0]
    assert backward.makes[3].form == Partial()


@pytest.mark.parametrize("around", [in_a_branch, in_a_loop])
def test_what_is_saved_keeps_its_form_in_branches_and_lists(around: Any) -> None:
    backward = planned(True, "lstm", around)["CudnnRNNBackpropV3"]
    assert isinstance(backward.makes[0].form, Sharded)


def test_what_comes_from_elsewhere_is_refused() -> None:
    def step(x: tf.Tensor, saved: tf.Tensor, host: tf.Tensor) -> Any:
        h = x[:, :1]
        given = {"input": x, "input_h": h, "input_c": h, "params": tf.ones([144])}
        outputs = {"output": x, "output_h": h, "output_c": h}
        outputs |= {f"{name}_backprop": one for name, one in outputs.items()}
        lengths = tf.fill(tf.shape(x)[:1], 7)
        own = {"reserve_space": saved, "host_reserved": host}
        made = raw.CudnnRNNBackpropV3(
            **given, **outputs, **own, sequence_lengths=lengths, time_major=False
        )
        return list(made)

    specs = [
        tf.TensorSpec([None, 7, 4]),
        tf.TensorSpec(None),
        tf.TensorSpec(None, tf.int8),
    ]
    facts = [Fact(Sharded(0, Layout("batch"))), Fact(), Fact()]
    with pytest.raises(errors.UnsupportedError, match="comes from elsewhere") as raised:
        plans_of(step, specs, facts)
    assert "use_cudnn=False" in str(raised.value)
