# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers as one op: cuDNN's, and those of blocks of an LSTM.

What cuDNN's ops save for their gradient is of their own rows, and nothing else can read
it: the gradient takes it as it is. If it comes from elsewhere, out of a list, say, the
forward op runs once more.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replicator.forms.forms import REPLICATED, Fact, Form, Partial, Sharded
from replicator.forms.rule import AS_IS, UNUSED, Need, OpPlan, rules_of
from replicator.forms.rules.normalization import Saved

# How an op uses each input and makes each output: a: the batch is axis 1, or axis 0
# unless time_major; b: it is axis 0; s: what is saved; ".": the same for all; "+": a
# sum.
_CUDNN = {
    "CudnnRNN": "aaa.>aaas",
    "CudnnRNNV2": "aaa.>aaass",
    "CudnnRNNV3": "aaa.b>aaass",
    "CudnnRNNBackprop": "aaa.aaaaaas>aaa+",
    "CudnnRNNBackpropV2": "aaa.aaaaaass>aaa+",
    "CudnnRNNBackpropV3": "aaa.baaaaaass>aaa+",
}
_BLOCKS = {
    **dict.fromkeys(("BlockLSTM", "BlockLSTMV2"), ".abb.....>aaaaaaa"),
    **dict.fromkeys(
        ("BlockLSTMGrad", "BlockLSTMGradV2"), ".abb.....aaaaaaaaa>abb+++++"
    ),
}


def blocks(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """The rule of BlockLSTM, whose inputs are time-major."""
    form = facts[1].form
    if not isinstance(form, Sharded) or form.axis != 1:
        return None
    inputs, _, outputs = _BLOCKS[op.type].partition(">")
    return OpPlan(_needs(op, inputs, form), _makes(op, outputs, form))


def cudnn(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """The rule of cuDNN's recurrent layers and of their gradients.

    With dropout, which both would have to draw equally, replica 0 computes them for
    all.
    """
    if op.get_attr("dropout"):
        return None
    inputs, _, outputs = _CUDNN[op.type].partition(">")
    have, form = facts[0].form, None
    if isinstance(have, Sharded) and have.axis == _batch_axis(op):
        form = have
    makes = _makes(op, outputs, form)
    if "s" in inputs and facts[inputs.index("s")].numbers != _saved(form):
        needs = _needs(op, inputs.replace("s", "u"), form)
        return OpPlan(needs, makes, build=_again)
    return OpPlan(_needs(op, inputs, form), makes)


def _saved(form: Sharded | None) -> Saved:
    """Who saves what for the gradient: each replica of its own rows, or of all."""
    return Saved("native", REPLICATED) if form is None else Saved("own", form)


def _batch_axis(op: tf.Operation) -> int:
    is_old = not op.type.endswith("V3")
    return 1 if is_old or op.get_attr("time_major") else 0


def _needs(op: tf.Operation, uses: str, form: Sharded | None) -> list[Need]:
    needs: list[Need] = []
    for tensor, use in zip(op.inputs, uses, strict=True):
        need: Need = {"s": AS_IS, "u": UNUSED}.get(use, REPLICATED)
        if form is not None and use in "ab" and tensor.shape.rank != 0:
            need = form.at(0) if use == "b" else form
        needs.append(need)
    return needs


def _makes(op: tf.Operation, uses: str, form: Sharded | None) -> list[Fact]:
    makes = []
    for tensor, use in zip(op.outputs, uses, strict=True):
        made: Form = REPLICATED
        if form is not None and tensor.shape.rank != 0:
            forms: dict[str, Form] = {"a": form, "b": form.at(0), "+": Partial()}
            made = forms.get(use, REPLICATED)
        makes.append(Fact(made, _saved(form) if use == "s" else None))
    return makes


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


RULES = {
    **rules_of(" ".join(_CUDNN), cudnn),
    **rules_of(" ".join(_BLOCKS), blocks),
}
