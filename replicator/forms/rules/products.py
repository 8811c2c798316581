# SPDX-License-Identifier: Apache-2.0
"""Products of matrices and tensors, each written as an equation of its axes.

Convolutions, layers of recurrent networks and other ops that treat each example alone
are in a table. What cuDNN's layers save for their gradients is of their own rows, and
nothing else can read it: the gradient takes it as it is.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replicator.forms.equations import by_axes
from replicator.forms.forms import REPLICATED, Fact, Partial, Sharded
from replicator.forms.rule import (
    LOCAL,
    OpPlan,
    is_partial,
    of_sums,
    refused,
    replicated,
    rule,
)
from replicator.forms.rules.normalization import Saved
from replicator.forms.sizes import elements, fitting


@rule("MatMul SparseMatMul BatchMatMul BatchMatMulV2 BatchMatMulV3")
def matmul(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """The rule of products of matrices, whose first axes broadcast."""
    is_batch = op.type.startswith("Batch")
    turned = ("adj_x", "adj_y") if is_batch else ("transpose_a", "transpose_b")
    left = "kn" if op.get_attr(turned[0]) else "nk"
    right = "mk" if op.get_attr(turned[1]) else "km"
    return contraction(op, facts, f"...{left},...{right}->...nm")


@rule("Einsum")
def einsum(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """The rule of Einsum."""
    return contraction(op, facts, op.get_attr("equation").decode().replace(" ", ""))


@rule("BiasAdd BiasAddV1")
def bias(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """The rule of BiasAdd, which is no product, but has its axes."""
    image = _image(op)
    return by_axes(op, facts, f"{image},c->{image}")


@rule("BiasAddGrad")
def bias_gradient(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """The rule of BiasAddGrad, a sum over all axes but the channels."""
    return contraction(op, facts, f"{_image(op)}->c")


def _image(op: tf.Operation) -> str:
    is_first = op.type != "BiasAddV1" and op.get_attr("data_format") == b"NCHW"
    return "nc..." if is_first else "...c"


def contraction(op: tf.Operation, facts: list[Fact], equation: str) -> OpPlan | None:
    """Returns the plan of an op that is linear in each of its inputs."""
    if any(isinstance(fact.form, Sharded) for fact in facts):
        return by_axes(op, facts, equation)
    partial = [k for k, fact in enumerate(facts) if is_partial(fact)]
    return of_sums(op, facts, partial) if len(partial) == 1 else None


# How ops use each input and make each output, given a batch:
#   b  the batch is axis 0        e  it is, or there is one row for all examples
#   a  the batch is axis 1        s  the shape of a batch
#   +  a sum over the batch       .  the same for all examples
#   k  what a layer of cuDNN saves for its gradient
_USES = {
    "b.>b": """
        Conv Conv2D Conv3D DepthwiseConv2dNative Dilation2D ResizeArea ResizeBicubic
        ResizeBilinear ResizeNearestNeighbor ResizeNearestNeighborGrad
    """,
    "s.b>b": """
        Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput
    """,
    "b.b>b": "Conv2DBackpropInputV2 Conv3DBackpropInput Dilation2DBackpropInput",
    "b.b>+": """
        Conv2DBackpropFilter Conv2DBackpropFilterV2 Conv3DBackpropFilter
        Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter
        Dilation2DBackpropFilter
    """,
    "b>+": "L2Loss",
    "b>b": """
        AvgPool AvgPool3D DepthToSpace ExtractImagePatches ExtractVolumePatches LRN
        MaxPool MaxPool3D SpaceToDepth
    """,
    "b..>b": "MaxPoolV2",
    "bbb>b": """
        LRNGrad MaxPool3DGrad MaxPool3DGradGrad MaxPoolGrad MaxPoolGradGrad
        MaxPoolGradGradWithArgmax MaxPoolGradWithArgmax
    """,
    "bbb..>b": "MaxPoolGradGradV2 MaxPoolGradV2",
    "sb>b": "AvgPool3DGrad AvgPoolGrad",
    "b>bb": "MaxPoolWithArgmax",
    "bb>b": "DrawBoundingBoxes InTopK ResizeBicubicGrad ResizeBilinearGrad",
    "bb.>b": "DrawBoundingBoxesV2 InTopKV2",
    "b...>b": "ScaleAndTranslate",
    "bb..>b": "ScaleAndTranslateGrad",
    "be.>b": "ImageProjectiveTransformV2",
    "be..>b": "ImageProjectiveTransformV3",
    ".bb.>b": "CropAndResize",
    "bbb.>+": "CropAndResizeGradImage",
    "b.bb>b": "CropAndResizeGradBoxes",
    "bb....>bbbb": "CombinedNonMaxSuppression GRUBlockCell",
    "bb....bbbb>bbbb": "GRUBlockCellGrad",
    "bbb.....>bbbbbbb": "LSTMBlockCell",
    "bbb.....bbbbbbbb>bb+++": "LSTMBlockCellGrad",
    "bb>bb": "SparseSoftmaxCrossEntropyWithLogits",
    "ee>bb": "SoftmaxCrossEntropyWithLogits",
    ".abb.....>aaaaaaa": "BlockLSTM BlockLSTMV2",
    ".abb.....aaaaaaaaa>abb+++++": "BlockLSTMGrad BlockLSTMGradV2",
    "aaa.>aaak": "CudnnRNN",
    "aaa.>aaakk": "CudnnRNNV2",
    "aaa.b>aaakk": "CudnnRNNV3",
    "aaa.aaaaaak>aaa+": "CudnnRNNBackprop",
    "aaa.aaaaaakk>aaa+": "CudnnRNNBackpropV2",
    "aaa.baaaaaakk>aaa+": "CudnnRNNBackpropV3",
}
_BATCHED = {name: uses for uses, names in _USES.items() for name in names.split()}
_AXES = {"b": 0, "e": 0, "a": 1}


@rule(" ".join(_BATCHED))
def batched(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """The rule of ops that treat each example alone."""
    if not _is_alone(op):
        return None
    uses = _BATCHED[op.type]
    return _cudnn(op, facts, uses) if "k" in uses else _of_examples(op, facts, uses)


def _is_alone(op: tf.Operation) -> bool:
    """Whether an op's attributes let it treat each example alone."""
    if "Argmax" in op.type:
        return not op.get_attr("include_batch_in_index")
    if op.type.startswith("Cudnn"):  # both passes would have to draw the same dropout
        return not op.get_attr("dropout")
    return op.type != "Conv" or op.get_attr("batch_dims") == 1


def _cudnn(op: tf.Operation, facts: list[Fact], uses: str) -> OpPlan:
    """Returns the plan of a recurrent layer of cuDNN, or of its gradient.

    Raises:
        UnsupportedError: It is the gradient, and what is saved is of other rows.
    """
    if op.type.endswith("V3") and not op.get_attr("time_major"):
        uses = uses.replace("a", "b")
    its = _of_examples(op, facts, uses) or replicated(op)
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


def _of_examples(op: tf.Operation, facts: list[Fact], uses: str) -> OpPlan | None:
    """Returns the plan of an op that treats each example alone; None: none is sharded.

    Args:
        op: The op.
        facts: What is known of its inputs.
        uses: How it uses each input and makes each output; scalars are always the same.
    """
    inputs, _, outputs = uses.partition(">")
    shards = [
        fact.form
        for fact, use in zip(facts, inputs, strict=True)
        if isinstance(fact.form, Sharded) and fact.form.axis == _AXES.get(use)
    ]
    if not shards:
        return None
    forms: dict[str, Any] = {use: shards[0].at(axis) for use, axis in _AXES.items()}
    forms |= {"+": Partial(), "s": LOCAL}

    def form_of(tensor: tf.Tensor, use: str) -> Any:
        is_scalar = use in _AXES and tensor.shape.rank == 0
        return REPLICATED if is_scalar else forms.get(use, REPLICATED)

    needs = list(map(form_of, op.inputs, inputs))
    for k, (tensor, use) in enumerate(zip(op.inputs, inputs, strict=True)):
        if use in _AXES and tensor.shape[_AXES[use] :][:1] == [1]:
            if use != "e":
                return None
            needs[k] = REPLICATED
        if use == "s" and fitting(elements(tensor, facts[k]), forms["b"]) is not LOCAL:
            return None
    return OpPlan(needs, list(map(Fact, map(form_of, op.outputs, outputs))))
