# SPDX-License-Identifier: Apache-2.0
"""Products of matrices and tensors, each written as an equation of its axes.

Whichever axis is sharded, the equation says the rest. "nk,km->nm": if n is sharded, the
result is; if k is, each replica computes a summand of the result; m is tensor
parallelism. Convolutions and other ops that treat each example alone are in a table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator.forms.forms import REPLICATED, Fact, Form, Partial, Sharded
from replicator.forms.rule import LOCAL, OpPlan, is_partial, of_sums, plan, rule
from replicator.forms.sizes import elements, fitting
from replicator.graph.ir import shapes

_NAMES = "abcdefghijklmnop"
_UNKNOWN = 64  # elements of an axis of unknown length, where costs are compared


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
    is_sum = any(map(is_partial, facts))
    return None if is_sum else contraction(op, facts, f"{image},c->{image}")


@rule("BiasAddGrad")
def bias_gradient(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """The rule of BiasAddGrad, a sum over all axes but the channels."""
    return contraction(op, facts, f"{_image(op)}->c")


def _image(op: tf.Operation) -> str:
    is_first = op.type != "BiasAddV1" and op.get_attr("data_format") == b"NCHW"
    return "nc..." if is_first else "...c"


def _spelled(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Returns the terms of an equation with a name for each axis of an ellipsis."""
    left, _, output = equation.partition("->")
    terms = left.split(",")
    free = [name for name in _NAMES + _NAMES.upper() if name not in left]
    spread = [
        rank - len(term.replace("...", "")) if "..." in term else 0
        for term, rank in zip(terms, ranks, strict=True)
    ]
    dots = "".join(free[: max(spread)])
    terms = [
        term.replace("...", dots[len(dots) - count :])
        for term, count in zip(terms, spread, strict=True)
    ]
    return terms, output.replace("...", dots)


def contraction(op: tf.Operation, facts: list[Fact], equation: str) -> OpPlan | None:
    """Returns the plan of a product, but not of diagonals.

    Of several sharded axes, that one is kept which leaves least to be gathered.

    Args:
        op: The op.
        facts: What is known of its inputs.
        equation: The names of each input's axes, and of the output's.
    """
    shards = [k for k, fact in enumerate(facts) if isinstance(fact.form, Sharded)]
    if not shards:
        partial = [k for k, fact in enumerate(facts) if is_partial(fact)]
        return of_sums(op, facts, partial) if len(partial) == 1 else None
    ranks = [t.shape.rank for t in op.inputs]
    if None in ranks:
        return None
    terms, output = _spelled(equation, ranks)
    if any(len(set(term)) < len(term) for term in (*terms, output)):
        return None
    found = [_kept(op, facts, terms, output, k) for k in shards]
    best = min((one for one in found if one), key=lambda one: one[0], default=None)
    return best and best[1]


def _kept(
    op: tf.Operation, facts: list[Fact], terms: Sequence[str], output: str, k: int
) -> tuple[Any, OpPlan] | None:
    """Returns the plan that keeps the k-th input's axis sharded, after its cost."""
    form = facts[k].form
    assert isinstance(form, Sharded)
    name = terms[k][form.axis]
    if shapes.size(op.inputs[k], form.axis) == 1:
        return None  # it broadcasts
    needs: list[Form] = []
    for tensor, names in zip(op.inputs, terms, strict=True):
        has_axis = name in names and shapes.size(tensor, names.index(name)) != 1
        needs.append(form.at(names.index(name)) if has_axis else REPLICATED)
    is_kept = name in output
    made = form.at(output.index(name)) if is_kept else Partial()
    moved = sum(
        _moved(tensor, fact.form, need)
        for tensor, fact, need in zip(op.inputs, facts, needs, strict=True)
    )
    return (moved, not is_kept, k), plan(op, needs, made)


def _moved(tensor: tf.Tensor, have: Form, need: Form) -> int:
    """About how many elements a conversion moves."""
    if have in (REPLICATED, need):
        return 0
    if tensor.shape.rank is None:
        return _UNKNOWN
    return math.prod(size or _UNKNOWN for size in tensor.shape.as_list())


# How ops use each input and make each output, given a batch:
#   b  the batch is axis 0        e  it is, or there is one row for all examples
#   a  the batch is axis 1        s  the shape of a batch
#   +  a sum over the batch       .  the same for all examples
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
}
_BATCHED = {name: uses for uses, names in _USES.items() for name in names.split()}


_AXES = {"b": 0, "e": 0, "a": 1}


@rule(" ".join(_BATCHED))
def batched(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """The rule of convolutions, pooling, and others that treat each example alone."""
    return of_examples(op, facts, _BATCHED[op.type]) if _is_alone(op) else None


def of_examples(op: tf.Operation, facts: list[Fact], uses: str) -> OpPlan | None:
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


def _is_alone(op: tf.Operation) -> bool:
    """Whether an op's attributes let it treat each example alone."""
    if "Argmax" in op.type:
        return not op.get_attr("include_batch_in_index")
    return op.type != "Conv" or op.get_attr("batch_dims") == 1
