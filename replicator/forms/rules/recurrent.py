# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers as one op: cuDNN's, and those of blocks of an LSTM.

What cuDNN's ops save for their gradient is of their own rows, and nothing else can read
it: the gradient takes it as it is. If it comes from elsewhere, out of a list, say, the
forward op runs once more.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replicator.forms.forms import Fact
from replicator.forms.rule import UNUSED, OpPlan, replicated, rule
from replicator.forms.rules.normalization import Saved
from replicator.forms.rules.products import of_examples

# How an op uses each input and makes each output, as in products.py. The batch of a is
# axis 0 unless time_major; k: what is kept for the gradient.
_CUDNN = {
    "CudnnRNN": "aaa.>aaak",
    "CudnnRNNV2": "aaa.>aaakk",
    "CudnnRNNV3": "aaa.b>aaakk",
    "CudnnRNNBackprop": "aaa.aaaaaak>aaa+",
    "CudnnRNNBackpropV2": "aaa.aaaaaakk>aaa+",
    "CudnnRNNBackpropV3": "aaa.baaaaaakk>aaa+",
}
_BLOCKS = {
    **dict.fromkeys(("BlockLSTM", "BlockLSTMV2"), ".abb.....>aaaaaaa"),
    **dict.fromkeys(
        ("BlockLSTMGrad", "BlockLSTMGradV2"), ".abb.....aaaaaaaaa>abb+++++"
    ),
}


@rule(" ".join(_BLOCKS))
def blocks(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """The rule of BlockLSTM, whose inputs are time-major."""
    return of_examples(op, facts, _BLOCKS[op.type])


@rule(" ".join(_CUDNN))
def cudnn(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """The rule of cuDNN's recurrent layers and of their gradients.

    With dropout, which both would have to draw equally, replica 0 computes them for
    all.
    """
    if op.get_attr("dropout"):
        return None
    uses = _CUDNN[op.type]
    if op.type.endswith("V3") and not op.get_attr("time_major"):
        uses = uses.replace("a", "b")
    its = of_examples(op, facts, uses) or replicated(op)
    inputs, _, outputs = uses.partition(">")
    saved = Saved("own", its.makes[0].form)
    makes = [
        Fact(fact.form, saved if use == "k" else None)
        for fact, use in zip(its.makes, outputs, strict=True)
    ]
    if "k" not in inputs or facts[inputs.index("k")].numbers == saved:
        return OpPlan(its.needs, makes)
    needs = zip(its.needs, inputs, strict=True)
    return OpPlan([UNUSED if k == "k" else need for need, k in needs], makes, _again)


def _again(replica: Any, op: tf.Operation, inputs: list[Any]) -> list[tf.Tensor]:
    """Runs the forward op once more, for what it saves."""
    name = op.type.replace("Backprop", "")
    kernel, count = getattr(tf.raw_ops, name), 5 if name.endswith("V3") else 4
    names = list(kernel.__signature__.parameters)
    given = dict(zip(names[:count], inputs, strict=False))
    options = {
        one: op.get_attr(one)
        for one in names[count:]
        if one not in ("name", "is_training")
    }
    for one in ("rnn_mode", "input_mode", "direction"):
        options[one] = options[one].decode()
    saved = kernel(**given, **options, is_training=True)[3:]
    return replica.stamp(op, [*inputs[: -len(saved)], *saved])
