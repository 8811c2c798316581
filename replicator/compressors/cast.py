# SPDX-License-Identifier: Apache-2.0
"""Casts: tensors are sent as 16-bit floats.

Without error feedback this is an all_reduce of 16-bit floats, which sums in float32 and
rounds the sum once more. With error feedback nothing may be lost: tensors needed only
by a variable's owner are gathered there and summed in float32; tensors needed by all
replicas are summed in slices, one per replica, and each replica keeps the rounding
error of its sum.
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
    """Sends tensors as 16-bit floats.

    Attributes:
        rows: The 16-bit dtype.
    """

    rows: ClassVar[tf.DType]

    def reduce(self, tensors: Sequence[tf.Tensor], link: Link) -> Sums:
        """Sums tensors; see the module's docstring."""
        if not link.keeps_rest:
            small = [tf.cast(tensor, self.rows) for tensor in tensors]
            return Sums(_as(tensors, link.sum(small)), _as(tensors, small))
        small = [slices.narrow(tensor, self.rows) for tensor in tensors]
        sent = _as(tensors, small)
        totals = list(sent)  # all entries are replaced below
        owned = [
            k for k, policy in enumerate(link.policies) if policy.owner is not None
        ]
        common = [k for k in range(len(tensors)) if k not in owned]
        if owned:
            gathered = link.of(owned).gather([small[k] for k in owned])
            for k, stacked in zip(owned, gathered, strict=True):
                totals[k] = tf.reduce_sum(tf.cast(stacked, tensors[k].dtype), 0)
        if common:
            slice_results = slices.add_up([small[k] for k in common], link.of(common))
            for k, total, error in zip(common, *slice_results, strict=True):
                totals[k] = tf.cast(total, tensors[k].dtype)
                sent[k] -= tf.cast(error, tensors[k].dtype)
        return Sums(totals, sent)


def _as(tensors: Sequence[tf.Tensor], small: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Casts each small tensor to the dtype of the corresponding tensor."""
    return [tf.cast(x, like.dtype) for x, like in zip(small, tensors, strict=True)]


@dataclasses.dataclass(frozen=True)
class BF16(Cast):
    """Sends tensors as bfloat16: half the bytes of float32, and its range.

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
    """Sends tensors as float16: half the bytes of float32, 8 times as precise as BF16.

    Its range is 6e-8 to 65504: smaller numbers become 0; larger ones become infinite,
    or 65504 with error feedback, which sends the rest later.

    Example:
        >>> from replicator import compressors
        >>> def step_fn():
        ...     return repl.all_reduce(tf.constant(1.001), compressor="fp16")
        >>> repl.run(step_fn)[0].numpy()
        np.float32(2.0019531)
    """

    rows: ClassVar[tf.DType] = tf.float16
