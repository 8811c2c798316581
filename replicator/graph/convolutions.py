"""Gradients of convolutions, made by convolutions, on CPUs.

TensorFlow's CPU kernels for the two gradients of a convolution write out all patches of
an image, image by image; that for the convolution itself reads them where they are.
With strides of 1 both gradients are convolutions: that by the input, of dy with the
filter turned by half a circle; that by the filter, of x with dy as the filter, where
channels and examples have changed places.

Measured with 2 cores, TensorFlow 2.21, as how many times faster it is, by the input and
by the filter. 32 examples: 32 x 32 x 16, 16 filters of 3 x 3: 2.3 and 1.7; 16 x 16 x
32: 1.4 and 2.1; 8 x 8 x 64: 1.6 and 1.3; 14 x 14 x 32, 64 filters of 5 x 5: 1.2 and
1.3. 8 examples: 56 x 56 x 64: 1.2 and 1.1; 7 x 7 x 512: 1.8 and 1.0; 16 channels, 256
filters: 0.7 and 0.9. Few input channels: 0.5 by the input. 112 x 112: 0.8 by the
filter; 1 or 4 examples: 0.2 and 0.9. Filters of 1 x 1: 1.0 to 1.3 and 0.6 to 0.8.
"""

from __future__ import annotations

import tensorflow as tf

_CHANNELS = 16  # at least, in what is made
_WIDER = 4  # at most so many times as many channels in what it is made of
_PIXELS = 64 * 64  # at most, where all of dy is one filter
_EXAMPLES = 8  # at least, there


def pays_by_input(op: tf.Operation) -> bool:
    """Whether a Conv2DBackpropInput is better made by a convolution."""
    filters = op.inputs[1].shape
    if not (_is_plain(op) and _is_wide(filters)):
        return False
    return _CHANNELS <= filters[2] and filters[3] <= _WIDER * filters[2]


def by_input(op: tf.Operation) -> tf.Tensor:
    """Makes the gradient of a convolution by its input.

    Returns:
        [examples, height, width, input channels].
    """
    _, filters, dy = op.inputs
    around = [
        (size - 1 - before, size - 1 - after)
        for size, (before, after) in zip(filters.shape, _padding(op), strict=False)
    ]
    turned = tf.transpose(tf.reverse(filters, [0, 1]), [0, 1, 3, 2])
    return tf.nn.conv2d(dy, turned, 1, [(0, 0), *around, (0, 0)])


def pays_by_filter(op: tf.Operation) -> bool:
    """Whether a Conv2DBackpropFilter is better made by a convolution."""
    x, _, dy = (tensor.shape for tensor in op.inputs)
    if not (_is_plain(op) and _is_wide(op.outputs[0].shape)):
        return False
    if not (x.is_fully_defined() and dy.is_fully_defined()):
        return False
    pixels = dy[1] * dy[2]
    return x[0] >= _EXAMPLES and dy[3] >= _CHANNELS and pixels <= _PIXELS


def by_filter(op: tf.Operation) -> tf.Tensor:
    """Makes the gradient of a convolution by its filter.

    Returns:
        [filter height, filter width, input channels, filters].
    """
    x, _, dy = op.inputs
    made = tf.nn.conv2d(
        tf.transpose(x, [3, 1, 2, 0]),  # the channels as examples,
        tf.transpose(dy, [1, 2, 0, 3]),  # the examples as channels
        1,
        [(0, 0), *_padding(op), (0, 0)],
    )
    return tf.transpose(made, [1, 2, 0, 3])


def _is_plain(op: tf.Operation) -> bool:
    """Whether the filter was applied at each pixel, with channels last."""
    ones = [1, 1, 1, 1]
    return (
        op.get_attr("data_format") == b"NHWC"
        and op.get_attr("strides") == ones
        and op.get_attr("dilations") == ones
    )


def _is_wide(filters: tf.TensorShape) -> bool:
    """Whether a filter covers several pixels."""
    return filters.is_fully_defined() and filters[0] * filters[1] > 1


def _padding(op: tf.Operation) -> list[tuple[int, int]]:
    """Returns how many rows, and columns, the convolution put before and after."""
    kind = op.get_attr("padding")
    if kind == b"EXPLICIT":
        given = op.get_attr("explicit_paddings")
        return [(given[2], given[3]), (given[4], given[5])]
    if kind == b"VALID":
        return [(0, 0), (0, 0)]
    filters = op.outputs[0].shape if _makes_filters(op) else op.inputs[1].shape
    return [((size - 1) // 2, size // 2) for size in filters[:2]]


def _makes_filters(op: tf.Operation) -> bool:
    return op.type == "Conv2DBackpropFilter"
