"""What an error of a running step says, without the places in the graph around it."""

from __future__ import annotations

import re

import tensorflow as tf


def said(error: tf.errors.OpError) -> str:
    """Returns the text of the op that failed, a line for each part of an assertion.

    Args:
        error: What a step raised while it ran.
    """
    found = re.search(r"INVALID_ARGUMENT: +(.*)|assertion failed: .*", error.message)
    if found is None:
        return error.message
    text = (found[1] or found[0]).strip().removeprefix("assertion failed: ")
    return "\n".join(text.removeprefix("[").removesuffix("]").split("] ["))
