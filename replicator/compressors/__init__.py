# SPDX-License-Identifier: Apache-2.0
"""Compressors: shrink gradients on their way between replicas."""

from replicator.compressors.base import Compressor, Sums
from replicator.compressors.cast import BF16, FP16
from replicator.compressors.error_feedback import ErrorFeedback
from replicator.compressors.int8 import Int8
from replicator.compressors.kept import Kept
from replicator.compressors.link import Link
from replicator.compressors.memory import Residual
from replicator.compressors.powersgd import PowerSGD
from replicator.compressors.specs import parse, text
from replicator.compressors.topk import TopK

__all__ = [
    "BF16",
    "FP16",
    "Compressor",
    "ErrorFeedback",
    "Int8",
    "Kept",
    "Link",
    "PowerSGD",
    "Residual",
    "Sums",
    "TopK",
    "parse",
    "text",
]
