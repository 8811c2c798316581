# SPDX-License-Identifier: Apache-2.0
"""Error feedback: what is not sent now is sent later.

Each replica keeps what its compressor did not send, the residual, and adds it to what
it is to send in the next step. So the sum over all steps of what was sent, plus what
the replicas still owe, is the sum of what was to be sent.

Sources: Seide et al. 2014, 1-bit stochastic gradient descent; Karimireddy et al. 2019,
Error feedback fixes SignSGD (arXiv:1901.09847).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import tensorflow as tf

from replicator.compressors import checks
from replicator.compressors.base import Compressor, Sums
from replicator.compressors.link import Link


@dataclasses.dataclass(frozen=True)
class ErrorFeedback(Compressor):
    """Adds what a compressor has not sent to what it sends next.

    What is kept is in units of the sum or the mean that is made: it stays right where
    replicas weigh more or less from step to step. A step in which a replica has
    infinities, or no numbers, or in which compressing makes such of large ones, leaves
    what is owed as it was.

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
        compressor: What it is the feedback of.
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
        """Adds up tensors, and what is owed of them."""
        residuals = [link.residual(k, tensor) for k, tensor in enumerate(tensors)]
        owed = [link.scaled(residual.read()) for residual in residuals]
        wanted = [tensor + rest for tensor, rest in zip(tensors, owed, strict=True)]
        if link.size == 1:
            made = Sums(wanted, wanted)
        else:
            made = self.compressor.reduce(wanted, link.feeding_back())
        rests = [want - sent for want, sent in zip(wanted, made.sent, strict=True)]
        # What is finite may be too large for its sum with the rest, or for products.
        finite = tf.stack([tf.reduce_all(tf.math.is_finite(rest)) for rest in rests])
        is_spoilt = link.is_spoilt | ~tf.reduce_all(finite)
        for residual, before, rest in zip(residuals, owed, rests, strict=True):
            residual.write(link.unscaled(tf.where(is_spoilt, before, rest)))
        return made
