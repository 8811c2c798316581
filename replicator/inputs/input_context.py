# SPDX-License-Identifier: Apache-2.0
"""InputContext: tells an input_fn which pipeline it builds."""

from __future__ import annotations

import dataclasses

from replicator import arguments, errors


@dataclasses.dataclass(frozen=True)
class InputContext:
    """Tells an input_fn with a parameter which pipeline it builds.

    Example:
        >>> def input_fn(ctx):
        ...     dataset = tf.data.Dataset.range(8)
        ...     own = dataset.shard(ctx.num_pipelines, ctx.pipeline_id)
        ...     return own.batch(ctx.per_replica_batch_size(4))
        >>> for batch in repl.run(lambda batch: batch, input_fn): print(batch)
        tf.Tensor([0 2], shape=(2,), dtype=int64)
        tf.Tensor([1 3], shape=(2,), dtype=int64)

    Attributes:
        replica_id: The replica that the pipeline feeds; 0 if it feeds all of them.
        num_replicas: The number of replicas.
        pipeline_id: The index of this pipeline, 0 <= pipeline_id < num_pipelines.
        num_pipelines: The number of pipelines: one per replica, or one per worker.
        host_id: The host of that replica, 0 <= host_id < num_hosts.
        num_hosts: The number of hosts with replicas.
    """

    replica_id: int
    num_replicas: int
    pipeline_id: int
    num_pipelines: int
    host_id: int = 0
    num_hosts: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            minimum = 1 if field.name.startswith("num_") else 0
            value = getattr(self, field.name)
            if not arguments.is_whole(value, minimum):
                raise errors.ArgumentError(
                    f"InputContext has {field.name}={errors.repr_of(value)}.",
                    fix=f"{field.name} is a Python int, {minimum} or more.",
                )

    def per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the number of examples of a global batch that one replica gets.

        Example:
            >>> ctx = replicator.InputContext(
            ...     replica_id=0, num_replicas=2, pipeline_id=0, num_pipelines=2
            ... )
            >>> ctx.per_replica_batch_size(64)
            32

        Args:
            global_batch_size: Examples per step, on all replicas together.

        Raises:
            InputError: It is not a positive multiple of the number of replicas.
        """
        whole = arguments.as_whole(global_batch_size)
        if whole is None or abs(whole) > arguments.LARGEST:
            raise errors.InputError(
                f"a global batch cannot have {errors.repr_of(global_batch_size)} "
                "examples.",
                fix="global_batch_size is a positive int.",
            )
        size, remainder = divmod(whole, self.num_replicas)
        if remainder or size < 1:
            multiple = max(size, 1) * self.num_replicas
            raise errors.InputError(
                f"a global batch of {whole} examples cannot be divided evenly among "
                f"{self.num_replicas} replicas.",
                fix=f"use a multiple of {self.num_replicas}, e.g. {multiple} or "
                f"{multiple + self.num_replicas}.",
            )
        return size
