# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers as one op: cuDNN's, and those of blocks of an LSTM.

What cuDNN's ops save for their gradient is of their own rows, and nothing else can read
it: the gradient takes it as it is.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replicator.forms.forms import Fact
from replicator.forms.rule import OpPlan, refused, replicated, rule
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
    if "k" in inputs and facts[inputs.index("k")].numbers != saved:
        raise refused(
            op,
            f"{op.name} ({op.type}) is the gradient of a layer of cuDNN, of which the "
            "state comes from elsewhere, or is of other rows.",
            "let the layer not use cuDNN, as Keras' use_cudnn=False does.",
        )
    return OpPlan(its.needs, makes)
