# SPDX-License-Identifier: Apache-2.0
"""Rules of convolutions, pooling, images and cells, which treat each example alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tests.forms.laws import SUM, Inputs, Sample, forward, op, v
from tests.forms.rules.products import constant

raw = tf.raw_ops
IMAGE, FILTER, DEPTH = (6, 6, 2), constant(3, 3, 2, 2), constant(3, 3, 2, 1)
VOLUME, KERNEL = (4, 4, 4, 2), constant(2, 2, 2, 2, 3)
ONES = {"strides": [1, 1, 1, 1], "padding": "SAME"}
ONES_3D = {"strides": [1, 1, 1, 1, 1], "padding": "SAME"}
POOL = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
POOL_3D = {"ksize": [1, 2, 2, 2, 1], "strides": [1, 2, 2, 2, 1], "padding": "VALID"}
DILATED = {**ONES, "rates": [1, 1, 1, 1]}


def image(v: Inputs) -> tf.Tensor:
    return v("x", *IMAGE)


def smaller(v: Inputs) -> tf.Tensor:
    return v("y", 3, 3, 2)


def volume(v: Inputs) -> tf.Tensor:
    return v("x", *VOLUME)


def gradient_of(form: str, name: str, *inputs: Any, **more: Any) -> Sample:
    """Returns a sample of a gradient op of images, of which no gradient is checked."""
    op = getattr(raw, name)
    names = list(op.__signature__.parameters)

    def make(v: Inputs) -> Any:
        given = dict(zip(names, [one(v) for one in inputs], strict=False))
        return op(**given, **more)

    return Sample(name, make, form, grads=False)


def pooled(v: Inputs) -> tf.Tensor:
    return raw.MaxPool(input=image(v), **POOL)


def pooled_3d(v: Inputs) -> tf.Tensor:
    return raw.MaxPool3D(input=volume(v), **POOL_3D)


def argmax(v: Inputs) -> tf.Tensor:
    return raw.MaxPoolWithArgmax(input=image(v), **POOL)[1]


def sizes(value: Callable[[Inputs], tf.Tensor]) -> Callable[[Inputs], tf.Tensor]:
    return lambda v: tf.shape(value(v))


def fixed(value: Any) -> Callable[[Inputs], Any]:
    return lambda v: value


S, WINDOW = "sharded", {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1]}
LISTS = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
CONVOLUTIONS = [
    Sample("Conv2D", lambda v: raw.Conv2D(input=image(v), filter=FILTER, **ONES)),
    forward("Conv", input=image, filter=FILTER, strides=[1, 1, 1, 1], padding="SAME"),
    Sample("Conv3D", lambda v: raw.Conv3D(input=volume(v), filter=KERNEL, **ONES_3D)),
    op("DepthwiseConv2dNative", input=image, filter=DEPTH, **ONES),
    op("Dilation2D", input=image, filter=FILTER[..., 0], **DILATED),
    gradient_of(S, "Conv2DBackpropInput", sizes(image), fixed(FILTER), image, **ONES),
    gradient_of(SUM, "Conv2DBackpropFilter", image, fixed(FILTER.shape), image, **ONES),
    gradient_of(
        S,
        "DepthwiseConv2dNativeBackpropInput",
        sizes(image),
        fixed(DEPTH),
        image,
        **ONES,
    ),
    gradient_of(
        SUM,
        "DepthwiseConv2dNativeBackpropFilter",
        image,
        fixed(DEPTH.shape),
        image,
        **ONES,
    ),
    gradient_of(
        S, "Dilation2DBackpropInput", image, fixed(FILTER[..., 0]), image, **DILATED
    ),
    gradient_of(
        SUM, "Dilation2DBackpropFilter", image, fixed(FILTER[..., 0]), image, **DILATED
    ),
    gradient_of(S, "MaxPoolGrad", image, pooled, smaller, **POOL),
    gradient_of(S, "MaxPoolGradGrad", image, pooled, image, **POOL),
    gradient_of(S, "MaxPoolGradV2", image, pooled, smaller, **LISTS),
    gradient_of(S, "MaxPoolGradGradV2", image, pooled, image, **LISTS),
    gradient_of(S, "MaxPoolGradWithArgmax", image, smaller, argmax, **POOL),
    gradient_of(S, "MaxPool3DGrad", volume, pooled_3d, pooled_3d, **POOL_3D),
    gradient_of(S, "MaxPool3DGradGrad", volume, pooled_3d, volume, **POOL_3D),
    gradient_of(S, "AvgPoolGrad", sizes(image), smaller, **POOL),
    gradient_of(S, "AvgPool3DGrad", sizes(volume), pooled_3d, **POOL_3D),
    Sample("MaxPool", lambda v: raw.MaxPool(input=image(v), **POOL)),
    Sample("MaxPoolV2", lambda v: raw.MaxPoolV2(input=image(v), **LISTS)),
    op("MaxPoolWithArgmax", input=image, **POOL),
    Sample("AvgPool", lambda v: raw.AvgPool(value=image(v), **POOL)),
    Sample("MaxPool3D", lambda v: raw.MaxPool3D(input=volume(v), **POOL_3D)),
    Sample("AvgPool3D", lambda v: raw.AvgPool3D(input=volume(v), **POOL_3D)),
    Sample("LRN", lambda v: raw.LRN(input=image(v))),
    gradient_of(
        S, "LRNGrad", image, lambda v: v("y", *IMAGE), lambda v: v("p", *IMAGE)
    ),
    Sample("SpaceToDepth", lambda v: raw.SpaceToDepth(input=image(v), block_size=2)),
    op("DepthToSpace", input=v("x", 2, 2, 4), block_size=2),
    op(
        "ExtractImagePatches",
        images=image,
        ksizes=[1, 2, 2, 1],
        strides=[1, 2, 2, 1],
        rates=[1, 1, 1, 1],
        padding="VALID",
    ),
    op(
        "ExtractVolumePatches",
        input=volume,
        ksizes=[1, 2, 2, 2, 1],
        strides=[1, 2, 2, 2, 1],
        padding="VALID",
    ),
]

BOXES = (2, 4)


def resized(name: str, **more: Any) -> Sample:
    kernel = getattr(raw, name)
    return Sample(name, lambda v: kernel(images=image(v), size=[4, 5], **more))


def boxes(v: Inputs) -> tf.Tensor:
    return tf.concat([v("p", 2, 2) * 0.4, v("q", 2, 2) * 0.5 + 0.5], 2)


def crop(v: Inputs) -> dict[str, Any]:
    return {"boxes": boxes(v)[:, 0], "box_ind": v("b")}


FIXED_IMAGES = constant(2, *IMAGE)
IMAGES = [
    *map(
        resized, "ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor".split()
    ),
    gradient_of(S, "ResizeBilinearGrad", smaller, image),
    gradient_of(S, "ResizeBicubicGrad", smaller, image),
    gradient_of(S, "ResizeNearestNeighborGrad", smaller, fixed([6, 6])),
    gradient_of(
        S,
        "ScaleAndTranslate",
        image,
        fixed([4, 4]),
        fixed([1.0, 2.0]),
        fixed([0.5, 0.0]),
    ),
    gradient_of(
        S, "ScaleAndTranslateGrad", smaller, image, fixed([1.0, 2.0]), fixed([0.5, 0.0])
    ),
    forward(
        "ImageProjectiveTransformV2",
        images=image,
        transforms=lambda v: v("p", 8) * 0.3,
        output_shape=[4, 4],
        interpolation="BILINEAR",
    ),
    forward(
        "ImageProjectiveTransformV3",
        images=image,
        transforms=[[1.0, 0.1, 0, 0.2, 1, 0, 0, 0]],
        output_shape=[4, 4],
        fill_value=0.5,
        interpolation="BILINEAR",
    ),
    forward("DrawBoundingBoxes", images=v("p", 6, 6, 3), boxes=boxes),
    forward(
        "DrawBoundingBoxesV2", images=v("p", 6, 6, 3), boxes=boxes, colors=[[1.0, 0, 0]]
    ),
    op(
        "CropAndResize",
        image=FIXED_IMAGES,
        boxes=lambda v: boxes(v)[:, 0],
        box_ind=lambda v: v("i") % 2,
        crop_size=[3, 3],
    ),
    op(
        "CropAndResizeGradImage",
        SUM,
        grads=smaller,
        boxes=lambda v: boxes(v)[:, 0],
        box_ind=lambda v: v("i") % 2,
        image_size=[2, 6, 6, 2],
        T=tf.float32,
    ),
    op(
        "CropAndResizeGradBoxes",
        grads=smaller,
        image=FIXED_IMAGES,
        boxes=lambda v: boxes(v)[:, 0],
        box_ind=lambda v: v("i") % 2,
    ),
    op(
        "CombinedNonMaxSuppression",
        boxes=lambda v: boxes(v)[:, :, tf.newaxis],
        scores=v("p", 2, 3),
        max_output_size_per_class=2,
        max_total_size=3,
        iou_threshold=0.5,
        score_threshold=0.2,
    ),
]


def cell(v: Inputs, names: str) -> list[Any]:
    return [v(name, 2) for name in names]


def lstm(v: Inputs) -> dict[str, Any]:
    w, vector = constant(5, 8), np.ones(2, np.float32) / 3
    return {
        **{"x": v.x, "cs_prev": v("x", 2), "h_prev": v("y", 2), "w": w * 0 + 0.3},
        **{"wci": vector, "wcf": vector, "wco": vector, "b": np.zeros(8, np.float32)},
    }


def gru(v: Inputs) -> dict[str, Any]:
    return {
        **{"x": v.x, "h_prev": v("y", 2), "w_ru": np.full([5, 4], 0.3, "f")},
        **{
            "w_c": np.full([5, 2], 0.2, "f"),
            "b_ru": np.zeros(4, "f"),
            "b_c": np.ones(2, "f"),
        },
    }


def lstm_gradient(v: Inputs) -> Any:
    names = ("i", "cs", "f", "o", "ci", "co")
    made = raw.LSTMBlockCell(**lstm(v), use_peephole=True)
    saved = {name: getattr(made, name) for name in names}
    grads = {"cs_grad": v("p", 2), "h_grad": v("q", 2)}
    return raw.LSTMBlockCellGrad(**lstm(v), **saved, **grads, use_peephole=True)


def gru_gradient(v: Inputs) -> Any:
    made = raw.GRUBlockCell(**gru(v))
    saved = {name: getattr(made, name) for name in ("r", "u", "c")}
    return raw.GRUBlockCellGrad(**gru(v), **saved, d_h=v("p", 2))


def labels(v: Inputs) -> tf.Tensor:
    return v("i") % 3


CELLS = [
    Sample(
        "LSTMBlockCell",
        lambda v: raw.LSTMBlockCell(**lstm(v), use_peephole=True),
        grads=False,
    ),
    Sample("LSTMBlockCellGrad", lstm_gradient, grads=False),
    Sample("GRUBlockCell", lambda v: raw.GRUBlockCell(**gru(v)), grads=False),
    Sample("GRUBlockCellGrad", gru_gradient, grads=False),
    Sample(
        "SparseSoftmaxCrossEntropyWithLogits",
        lambda v: raw.SparseSoftmaxCrossEntropyWithLogits(
            features=v.x, labels=labels(v)
        )[0],
    ),
    Sample(
        "SoftmaxCrossEntropyWithLogits",
        lambda v: raw.SoftmaxCrossEntropyWithLogits(
            features=v.x, labels=tf.nn.softmax(v.y)
        )[0],
    ),
    Sample(
        "SoftmaxCrossEntropyWithLogits",
        lambda v: raw.SoftmaxCrossEntropyWithLogits(
            features=v.x, labels=[[0.2, 0.3, 0.5]]
        )[0],
        grads=False,
    ),
    Sample("InTopK", lambda v: raw.InTopK(predictions=v.x, targets=labels(v), k=2)),
    Sample("InTopKV2", lambda v: raw.InTopKV2(predictions=v.x, targets=labels(v), k=2)),
]
SAMPLES = [*CONVOLUTIONS, *IMAGES, *CELLS]
