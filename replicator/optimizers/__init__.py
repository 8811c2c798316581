# SPDX-License-Identifier: Apache-2.0
"""wrap_optimizer, and an adapter for each family of optimizers."""

from replicator.optimizers.wrap import wrap_optimizer

__all__ = ["wrap_optimizer"]
