# SPDX-License-Identifier: Apache-2.0
"""Casts: numbers travel as 16-bit floats.

Without error feedback that is an all_reduce of 16-bit floats, which adds them up in
float32 and rounds the sum once more. With it, nothing may get lost: what is for the
owner of a variable is gathered there, and added up in float32; what all replicas need
is added up in slices, one on each replica, which keeps what rounding takes of its sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import tensorflow as tf

from replicator.compressors import slices
from replicator.compressors.base import Compressor, Sums
from replicator.compressors.link import Link


class Cast(Compressor):
    """Numbers travel as 16-bit floats.

    Attributes:
        rows: As which.
    """

    rows: ClassVar[tf.DType]

    def reduce(self, tensors: Sequence[tf.Tensor], link: Link) -> Sums:
        """Adds up tensors; see the module's docstring."""
        if not link.keeps_rest:
            small = [tf.cast(tensor, self.rows) for tensor in tensors]
            return Sums(_as(tensors, link.sum(small)), _as(tensors, small))
        small = [slices.narrow(tensor, self.rows) for tensor in tensors]
        sent = _as(tensors, small)
        totals = list(sent)  # each takes the place of one of these
        owned = [k for k, one in enumerate(link.policies) if one.owner is not None]
        common = [k for k in range(len(tensors)) if k not in owned]
        if owned:
            gathered = link.of(owned).gather([small[k] for k in owned])
            for k, stacked in zip(owned, gathered, strict=True):
                totals[k] = tf.reduce_sum(tf.cast(stacked, tensors[k].dtype), 0)
        if common:
            made = slices.add_up([small[k] for k in common], link.of(common))
            for k, total, rest in zip(common, *made, strict=True):
                totals[k] = tf.cast(total, tensors[k].dtype)
                sent[k] -= tf.cast(rest, tensors[k].dtype)
        return Sums(totals, sent)


def _as(tensors: Sequence[tf.Tensor], small: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns small tensors in the dtypes of others."""
    return [tf.cast(x, like.dtype) for x, like in zip(small, tensors, strict=True)]


@dataclasses.dataclass(frozen=True)
class BF16(Cast):
    """Numbers travel as bfloat16: half the bytes of float32, and its range.

    Example:
        >>> from replicator import compressors
        >>> def step_fn():
        ...     return repl.all_reduce(tf.constant(1.001), compressor="bf16")
        >>> repl.run(step_fn)[0].numpy()
        np.float32(2.0)
    """

    rows: ClassVar[tf.DType] = tf.bfloat16


@dataclasses.dataclass(frozen=True)
class FP16(Cast):
    """Numbers travel as float16: half the bytes of float32, and 8 times as precise.

    Than bfloat16, within 6e-8 and 65504: what is smaller becomes 0; what is larger
    becomes infinite, or 65504 with error feedback, which sends the rest later.

    Example:
        >>> from replicator import compressors
        >>> def step_fn():
        ...     return repl.all_reduce(tf.constant(1.001), compressor="fp16")
        >>> repl.run(step_fn)[0].numpy()
        np.float32(2.0019531)
    """

    rows: ClassVar[tf.DType] = tf.float16
