"""Products of few rows with a large transposed matrix, on CPUs.

Such is each dense layer's gradient by its inputs, dy W^T. TensorFlow's CPU kernel first
packs the transposed matrix, element by element, whatever the number of rows; dividing a
batch among replicas leaves that as it is, for each of them. (W dy^T)^T is the same
product without it.

Measured with 2 cores, TensorFlow 2.21, as how many times faster it is: W 512 x 512, 16
to 128 rows: 1.4 to 2.4; 2048 x 2048, 16 to 512 rows: 6 to 1.7; 512 x 512 with 512
rows: 0.7; 256 x 256: 0.8 to 0.9; 256 x 1024 with 32 rows: 2.3. So it takes a large
matrix, and few rows beside it. A recurrent network has such in each turn of a loop.
"""

from __future__ import annotations

import tensorflow as tf

_LARGE = 512 * 512  # elements of the matrix
_FEW = 4  # its shorter side has to be so many times the number of rows


def pays(op: tf.Operation) -> bool:
    """Whether a MatMul multiplies few rows by a large transposed matrix."""
    if op.get_attr("transpose_a") or not op.get_attr("transpose_b"):
        return False
    rows, matrix = (tensor.shape for tensor in op.inputs)
    if rows[0] is None or not matrix.is_fully_defined():
        return False
    return matrix.num_elements() >= _LARGE and _FEW * rows[0] <= min(matrix)


def turned(op: tf.Operation) -> tf.Tensor:
    """Makes such a product the other way around."""
    rows, matrix = op.inputs
    return tf.transpose(tf.linalg.matmul(matrix, rows, transpose_b=True))
