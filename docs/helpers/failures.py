# SPDX-License-Identifier: Apache-2.0
"""What an error of a running step says, without the places in the graph around it."""

from __future__ import annotations

import re

import tensorflow as tf


def said(error: tf.errors.OpError) -> str:
    """Returns the text of the op that failed, a line for each part of an assertion.

    Args:
        error: What a step raised while it ran.
    """
    assertion = re.search(r"assertion failed: \[(.*)\]", error.message)
    if assertion is not None:
        return "\n".join(assertion[1].split("] ["))
    failed = re.search(r"INVALID_ARGUMENT: +(.*)", error.message)
    return error.message if failed is None else failed[1].strip()
