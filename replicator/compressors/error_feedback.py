# SPDX-License-Identifier: Apache-2.0
"""Error feedback: what is not sent in one step is sent later.

Each replica keeps what its compressor did not send, the residual, and adds it to what
it sends in the next step. So what was sent in all steps, plus the replicas' residuals,
adds up to what was to be sent.

Sources: Seide et al. 2014, 1-bit stochastic gradient descent; Karimireddy et al. 2019,
Error feedback fixes SignSGD (arXiv:1901.09847).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import tensorflow as tf

from replicator.compressors import checks
from replicator.compressors.base import Compressor, Sums, checked
from replicator.compressors.link import Link


@dataclasses.dataclass(frozen=True)
class ErrorFeedback(Compressor):
    """Adds what a compressor did not send to what it sends next.

    Residuals are in units of the resulting sum or mean, so they stay right when
    replicas' weights change from step to step. A step leaves the residuals unchanged if
    a replica has inf or NaN, or if compression overflows.

    Example:
        >>> from replicator import compressors
        >>> with repl.context():
        ...     w = tf.Variable([0.0, 0.0])
        ...     optimizer = repl.wrap_optimizer(
        ...         tf.keras.optimizers.SGD(1.0), compressor="ef(topk(ratio=0.5))"
        ...     )
        >>> def step_fn():
        ...     optimizer.apply([tf.constant([-2.0, -3.0])], [w])
        >>> for _ in range(2):
        ...     _ = repl.run(step_fn)
        ...     print(w.numpy())
        [0. 3.]
        [4. 3.]

    Attributes:
        compressor: The compressor whose errors are fed back.
    """

    compressor: Compressor

    owes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.compressor, Compressor) and not self.compressor.owes:
            return
        raise checks.bad(
            "ErrorFeedback",
            "compressor",
            self.compressor,
            "a Compressor without error feedback of its own, as in "
            'ErrorFeedback(PowerSGD(rank=4)), or in the text "ef(powersgd(rank=4))"',
        )

    def reduce(self, tensors: Sequence[tf.Tensor], link: Link) -> Sums:
        """Sums tensors plus their residuals."""
        residuals = [link.residual(k, tensor) for k, tensor in enumerate(tensors)]
        fed_back = [link.scaled(residual.read()) for residual in residuals]
        targets = [
            tensor + error for tensor, error in zip(tensors, fed_back, strict=True)
        ]
        if link.size == 1:
            sums = Sums(targets, targets)
        else:
            result = self.compressor.reduce(
                targets, dataclasses.replace(link, keeps_rest=True)
            )
            sums = checked(self.compressor, targets, result)
        errors = [
            target - sent for target, sent in zip(targets, sums.sent, strict=True)
        ]
        # Finite tensors may overflow in the sum with the residual, or in products.
        finite = tf.stack([tf.reduce_all(tf.math.is_finite(error)) for error in errors])
        is_spoilt = link.is_spoilt | ~tf.reduce_all(finite)
        for residual, old, new in zip(residuals, fed_back, errors, strict=True):
            residual.write(link.unscaled(tf.where(is_spoilt, old, new)))
        return sums
